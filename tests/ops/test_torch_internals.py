"""torch without one of the private names that pairmix uses: everything still works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pairmix import SPMLinear
from pairmix.ops import torch_internals

ROOT = Path(__file__).parents[2]
# `python tests/hide.py NAME tests/ops tests/nn -n 0` runs all of them.
QUICK = (
    "saved or not_needed or negated or tracer or inference or batched_gradients or "
    "function_transforms and general-cpu and (hessian or ensemble or parameters)"
)
FORWARD_MODE = " or dual or forward_mode or function_transforms and general-cpu and jvp"


def test_this_torch_has_them_all():
    assert all(torch_internals._find(name) is not None for name in torch_internals.NAMES)
    x = torch.ones(2, 4)
    assert torch_internals.is_ordinary(x)
    assert SPMLinear(4, 4)(x).shape == (2, 4)


@pytest.mark.parametrize("name", torch_internals.NAMES)
def test_without(name):
    tests = QUICK + (FORWARD_MODE if name.endswith(("_current_level", "_transforms_active")) else "")
    command = [sys.executable, ROOT / "tests/hide.py", name, "tests/ops/test_autograd.py", "-q", "-n", "0", "-k", tests]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout[-3000:]
    assert re.search(r"\d\d passed", result.stdout)


def test_no_other_file_uses_private_names():
    for path in (ROOT / "src").rglob("*.py"):
        if path.name != "torch_internals.py":
            assert not re.search(r"torch\._|forward_ad\._", path.read_text()), path
