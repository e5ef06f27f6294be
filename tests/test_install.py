"""Machines on which the kernels cannot be built."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_without_a_compiler_the_build_names_the_switch(tmp_path):
    cmake, make = shutil.which("cmake", path=str(Path(sys.executable).parent)), shutil.which("make")
    if cmake is None or make is None:
        pytest.skip("needs cmake and make")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/make").symlink_to(make)
    command = [cmake, "-S", ROOT, "-B", tmp_path / "build"]
    built = subprocess.run(command, env={"PATH": str(tmp_path / "bin")}, capture_output=True, text=True)
    assert built.returncode != 0
    message = " ".join(built.stderr.split())
    assert "no C++ compiler" in message
    assert "--config-settings=wheel.cmake=false" in message


def test_without_the_kernels_doctor_says_so():
    code = """
import sys
sys.modules["pairmix._kernels"] = None
sys.argv = ["pairmix", "doctor"]
from pairmix.__main__ import main
main()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = " ".join(result.stdout.split())
    assert 'impl "cpu" not available: pairmix was installed without its compiled kernels' in said, result.stderr
    assert "circular" not in said
    assert 'impl "auto" picks "reference"' in said
