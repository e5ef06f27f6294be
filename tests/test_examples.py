"""Every script in examples/ runs, with dense and with SPM layers."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example as a script, and gives what it prints."""

    def run(example, *options):
        monkeypatch.setattr(sys, "argv", [str(example), "--steps", "3", "--width", "32", *options])
        runpy.run_path(str(example), run_name="__main__")
        return capsys.readouterr().out

    return run


def parameters(output):
    return int(re.search(r"^\w+: ([\d,]+) parameters$", output, re.MULTILINE)[1].replace(",", ""))


def test_there_are_examples():
    assert [example.name for example in EXAMPLES] == ["gpt.py", "gru.py", "mlp.py"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_the_change_is_the_layer(example, run):
    dense, spm = run(example, "--layer", "dense"), run(example, "--layer", "spm")
    for output in (dense, spm):
        assert re.search(r"^step +3  loss \d+\.\d{3}  .*\d s$", output, re.MULTILINE), output
    assert parameters(spm) < parameters(dense)


def test_a_text_of_ones_own(tmp_path, run):
    (tmp_path / "text.txt").write_text("abc" * 100)
    gpt = next(example for example in EXAMPLES if example.stem == "gpt")
    written = run(gpt, "--text", str(tmp_path / "text.txt")).splitlines()[-1]
    assert set(written) <= set("abc")
    assert len(written) == 32 + 100
