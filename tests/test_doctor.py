"""`pairmix doctor`, and what the library does without the extra `lab`."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import pairmix
from pairmix import doctor, ops
from pairmix.ops import reference

LIBRARY_NEEDS = ("torch", "numpy")
SOURCES = Path(pairmix.__file__).parents[1]


@pytest.fixture(scope="module")
def only_library(tmp_path_factory):
    """A folder of packages with torch, numpy and what they need themselves, and nothing else."""
    folder, wanted, linked = tmp_path_factory.mktemp("packages"), list(LIBRARY_NEEDS), set()
    while wanted:
        distribution = metadata.distribution(wanted.pop())
        if distribution.name not in linked:
            linked.add(distribution.name)
            wanted += required(distribution)
            for name in {file.parts[0] for file in distribution.files} - {".."}:
                if not (folder / name).exists():
                    (folder / name).symlink_to(distribution.locate_file(name))
    return folder


def required(distribution):
    needs = map(Requirement, distribution.requires or [])
    return [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]


def run(packages, code, *arguments):
    """Run Python code with these packages, as if they were all that is installed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), str(SOURCES)])}
    command = [sys.executable, "-S", "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


RUN_COMMAND = "from pairmix.__main__ import main; main()"


def said():
    return " ".join(doctor.report().split())


def test_doctor_says_what_is_in_use(monkeypatch):
    missing = ops.Impl("absent", reference.forward, reference.backward, lambda device: "it was not compiled")
    monkeypatch.setitem(ops.IMPLS, "absent", missing)
    for expected in ("torch 2.", "threads 1", "instruction set", 'impl "reference" available'):
        assert expected in said()
    assert 'impl "absent" not available: it was not compiled' in said()
    assert 'impl "cpu" available, built for' in said()
    assert 'impl "auto" picks "cpu" for CPU tensors' in said()


def test_doctor_as_a_module():
    result = subprocess.run([sys.executable, "-m", "pairmix", "doctor"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert 'impl "auto"' in result.stdout


def test_the_library_trains_without_the_lab(only_library):
    code = """
import torch, pairmix
layer = pairmix.SPMLinear(6, 5)
optimizer = torch.optim.Adam(layer.parameters())
layer(torch.randn(3, 6)).square().sum().backward()
optimizer.step()
"""
    result = run(only_library, code + RUN_COMMAND, "doctor")
    assert result.returncode == 0, result.stderr
    assert 'impl "auto"' in result.stdout


@pytest.mark.parametrize("arguments", [[], ["train", "teacher"], ["bench"], ["--help"]], ids=" ".join)
def test_without_the_lab_the_command_says_what_to_install(only_library, arguments):
    result = run(only_library, RUN_COMMAND, *arguments)
    assert result.returncode == 1
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith(" ".join(["pairmix", *arguments[:1]]) + " needs ")
    assert line.endswith("which comes with: pip install 'pairmix[lab]'")


def test_a_missing_module_of_our_own_is_not_hidden(only_library):
    result = run(only_library, "import sys; sys.modules['pairmix_lab.cli'] = None; " + RUN_COMMAND, "train")
    assert "ModuleNotFoundError" in result.stderr
    assert "pip install" not in result.stderr
