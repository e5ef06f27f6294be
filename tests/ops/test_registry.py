"""Implementations are found by name and by device; registering one is all it takes to have it tested."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dense_impl
from pairmix import Schedule, ops
from pairmix.functional import spm
from pairmix.ops import Impl

ROOT = Path(__file__).parents[2]
CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def registered():
    """Register implementations for the time of a test."""
    before = dict(ops.IMPLS)
    yield ops.register
    for name in ops.IMPLS.keys() - before.keys():
        ops.unregister(name)
    assert before == ops.IMPLS


def dense(name="dense", **options):
    return Impl(name, dense_impl.forward, dense_impl.backward, **{"why_not": dense_impl.why_not, **options})


# Those that are quick; `python tests/dense_impl.py tests/ops tests/test_functional.py --impl dense` runs them all.
QUICK = "maps_of_one_input or leading or layouts or test_gradcheck or do_not_fit or bad_arguments"
SUITE = ["tests/ops/test_parity.py", "tests/ops/test_autograd.py", "tests/ops/test_recurrence.py"]


def test_a_registered_implementation_gets_the_suite():
    command = [sys.executable, "tests/dense_impl.py", *SUITE, "tests/test_functional.py", "--impl", "dense"]
    result = subprocess.run([*command, "-q", "-n", "0", "-k", QUICK], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) >= 90


def test_a_wrong_implementation_does_not_pass():
    code = """
import sys
import dense_impl, pytest
from pairmix import ops
forward = lambda *arguments: dense_impl.forward(*arguments) + 1e-4
ops.register(ops.Impl("dense", forward, dense_impl.backward, dense_impl.why_not))
sys.exit(pytest.main(["--impl", "dense", "-q", "-n", "0", "tests/ops/test_parity.py", "-k", "leading"]))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": "tests"}
    )
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout[-3000:]


def test_auto_chooses_by_device(registered):
    registered(dense("on meta", why_not=lambda device: None, preferred_on="meta"))
    assert ops.choose("auto", META).name == "on meta"
    assert ops.choose("auto", CPU).name == "cpu"
    assert ops.choose("auto", torch.device("cuda")).name == "reference"


def test_auto_falls_back_to_the_reference(registered):
    registered(dense("on meta", why_not=lambda device: "no driver", preferred_on="meta"))
    assert ops.choose("auto", META).name == "reference"
    with pytest.raises(RuntimeError, match="impl='on meta' cannot run here: no driver"):
        ops.choose("on meta", META)


def test_what_cannot_be_registered(registered):
    with pytest.raises(ValueError, match="an implementation called 'cpu' is registered already"):
        registered(dense("cpu"))
    with pytest.raises(ValueError, match="an implementation called 'auto' is registered already"):
        registered(dense("auto"))
    with pytest.raises(ValueError, match="'cpu' is preferred on 'cpu' already, so 'dense' cannot be"):
        registered(dense(preferred_on="cpu"))


def test_a_recurrence_runs_step_by_step_if_there_is_none(registered):
    registered(dense())
    rows, order = torch.zeros(2, 4), Schedule.butterfly(4).on(CPU).order
    maps = (torch.zeros(1, 2, 4, 2), torch.ones(1, 4), torch.ones(1, 4), None, None)
    with pytest.raises(NotImplementedError, match="impl='dense' does not compute recurrences"):
        torch.ops.pairmix.recurrence(rows, rows, rows, None, order, *maps, "general", "tanh", "dense")


def test_the_schedule_is_copied_to_a_device_once():
    schedule = Schedule.butterfly(24)
    assert schedule.on(CPU) is schedule.on(CPU)
    assert schedule.on(META) is schedule.on(META)
    assert schedule.on(META).order.device == META


def test_the_plan_is_made_once(monkeypatch):
    from pairmix.ops import cpu

    made = []
    plan = cpu._kernels.Plan
    monkeypatch.setattr(cpu._kernels, "Plan", lambda order: made.append(1) or plan(order))
    schedule = Schedule.butterfly(26, 3)  # of no other test
    for impl in ("auto", "cpu"):
        for x in (torch.ones(2, 26), torch.ones(26, 2).T):  # directly, and through the dispatcher
            spm(x, torch.zeros(3, 13), schedule, impl=impl)
            torch.compile(lambda x: spm(x, torch.zeros(3, 13), schedule), backend="eager")(x)
    assert len(made) == 1
