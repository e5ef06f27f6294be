"""What pyproject.toml and conftest.py say about all tests."""

import random
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from pairmix import _kernels

ROOT = Path(__file__).parents[1]


def run_pytest(*arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_files_of_one_name_in_several_folders():
    result = run_pytest("--collect-only", "tests/lab/report", "tests/nn", "src/pairmix", "README.md")
    assert result.returncode == 0, result.stdout
    for test in (
        "tests/lab/report/test_page.py::",
        "tests/nn/test_rnn.py::",
        "src/pairmix/schedule.py::",
        "README.md::",
    ):
        assert test in result.stdout


def test_a_target_that_is_not_there():
    result = run_pytest("--target", "sse9", "tests/test_oracle.py")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"--target must be one of {_kernels.targets()} on this machine, got 'sse9'" in result.stderr


def test_only_the_chosen_target():
    last = _kernels.targets()[-1]
    tests = f"{Path(__file__).relative_to(ROOT)}::test_the_target_is_in_use"
    result = run_pytest("-vv", "--target", last, tests)
    assert f"test_the_target_is_in_use[{last}] PASSED" in result.stdout, result.stdout
    assert "1 passed" in result.stdout


def test_the_target_is_in_use(target, targets, request):
    assert _kernels.target() == target
    assert target in targets
    assert request.config.getoption("--target") in (None, target)


@pytest.mark.parametrize("round_", [1, 2])
def test_random_numbers_are_those_of_any_other_test(round_):
    assert torch.rand(1).item() == torch.rand(1, generator=torch.Generator().manual_seed(0)).item()
    assert np.random.rand() == np.random.RandomState(0).rand()  # noqa: NPY002
    assert random.random() == random.Random(0).random()


@pytest.mark.parametrize("category", [UserWarning, FutureWarning, DeprecationWarning])
def test_only_warnings_about_torch_itself_are_ignored(category):
    for module in ("torch", "torch._library.utils", "torch.nn.modules.module"):
        warnings.warn_explicit("its own", category, f"{module}.py", 1, module)
    for module in ("pairmix.nn.rnn", "test_rnn", "torch_structured", "numpy"):
        with pytest.raises(category, match="ours"):
            warnings.warn_explicit("ours", category, f"{module}.py", 1, module)
