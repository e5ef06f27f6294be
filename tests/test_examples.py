"""Every script in examples/ runs, with dense and with SPM layers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def run(example, *options):
    command = [sys.executable, str(example), "--steps", "3", "--width", "32", *options]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def parameters(output):
    return int(re.search(r"^\w+: ([\d,]+) parameters$", output, re.MULTILINE)[1].replace(",", ""))


def test_there_are_examples():
    assert [example.name for example in EXAMPLES] == ["gpt.py", "gru.py", "mlp.py"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_the_change_is_the_layer(example):
    dense, spm = run(example, "--layer", "dense"), run(example, "--layer", "spm")
    for output in (dense, spm):
        assert re.search(r"^step +3  loss \d+\.\d{3}  .*\d s$", output, re.MULTILINE), output
    assert parameters(spm) < parameters(dense)


def test_a_text_of_ones_own(tmp_path):
    (tmp_path / "text.txt").write_text("abc" * 100)
    gpt = next(example for example in EXAMPLES if example.stem == "gpt")
    written = run(gpt, "--text", str(tmp_path / "text.txt")).splitlines()[-1]
    assert set(written) <= set("abc")
    assert len(written) == 32 + 100
