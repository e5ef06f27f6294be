import subprocess
import sys

import pytest
from typer.testing import CliRunner

from pairmix import cli, ops, results
from pairmix.ops import reference

run = CliRunner().invoke


def test_doctor_says_what_is_in_use(monkeypatch):
    missing = ops.Impl(reference.forward, reference.backward, lambda device: "it was not compiled")
    monkeypatch.setitem(ops.IMPLS, "absent", missing)
    result = run(cli.app, ["doctor"])
    assert result.exit_code == 0
    words = " ".join(result.output.split())
    for expected in ("torch 2.", "threads 1", "instruction set", 'impl "reference" available'):
        assert expected in words
    assert 'impl "absent" not available: it was not compiled' in words
    assert 'impl "cpu" available, built for' in words
    assert 'impl "auto" picks "cpu" for CPU tensors' in words


def test_demo_compares_trains_and_saves(tmp_path):
    result = run(cli.app, ["demo", "--out", str(tmp_path), "--steps", "400", "--width", "64"])
    assert result.exit_code == 0, result.output
    saved = results.load(tmp_path / "demo.json")
    dense, spm = saved["rows"]
    assert (dense["layer"], spm["layer"]) == ("dense", "SPM")
    assert spm["accuracy"] > dense["accuracy"]
    assert spm["parameters"] < dense["parameters"] == 64 * 65
    assert len(spm["losses"]) == 400
    assert spm["losses"][-1] < spm["losses"][0]
    assert f"{spm['accuracy']:.1%}" in result.output
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_bench_init(tmp_path):
    result = run(cli.app, ["bench", "init", "--out", str(tmp_path), "--steps", "2", "--width", "8"])
    assert result.exit_code == 0, result.output
    rows = results.load(tmp_path / "init.json")["rows"]
    assert len(rows) == 2 * 2 * 9 * 3
    assert {row["init"] for row in rows} >= {"identity", "hadamard", "random_rotation", "near_identity 0.05"}
    assert (tmp_path / "init.png").exists()


@pytest.mark.parametrize("arguments", [["demo", "--steps", "0"], ["demo", "--width", "x"], ["dance"]])
def test_bad_arguments(arguments):
    assert run(cli.app, arguments).exit_code == 2


def test_without_the_extras_it_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; from pairmix.__main__ import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert "needs typer: pip install 'pairmix[experiments]'" in result.stderr


def test_module_entry_point():
    result = subprocess.run([sys.executable, "-m", "pairmix", "doctor"], capture_output=True, text=True)
    assert result.returncode == 0
    assert "pairmix" in result.stdout
