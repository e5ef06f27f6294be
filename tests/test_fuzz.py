"""A few layers of `make fuzz`, which runs thousands."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fuzz
from pairmix import _kernels, ops
from pairmix.ops import cpu


@pytest.mark.parametrize("seed", range(30))
def test_random_layers(seed, targets):
    assert fuzz.check(seed, targets) is None


def test_what_is_wrong_is_found_and_described(monkeypatch, targets):
    def a_little_off(*arguments):
        return cpu.forward(*arguments) * (1 + 1e-2)

    monkeypatch.setitem(ops.IMPLS, "cpu", dataclasses.replace(ops.IMPLS["cpu"], forward=a_little_off))
    monkeypatch.delitem(ops.DIRECT, "cpu")
    seed = next(seed for seed in range(100) if fuzz.random_layer(seed).arguments.x.numel())
    problem = fuzz.check(seed, targets)
    assert problem is not None
    assert problem.startswith(f"{targets[0]}: output[")
    assert str(fuzz.random_layer(seed).arguments.schedule) in problem
    assert torch.get_num_threads() == 1


def test_a_block_that_is_wrong_is_found_and_described(monkeypatch, targets):
    real, wrong = _kernels.feed_forward, []

    def a_little_off(*arguments):
        y = real(*arguments)
        if y is not None:
            wrong.append(y.mul_(1 + 1e-2))
        return y

    assert not any(fuzz.check_block(seed, targets[:1]) for seed in range(20))
    monkeypatch.setattr(_kernels, "feed_forward", a_little_off)
    problems = []
    for seed in range(20):
        wrong.clear()
        problem = fuzz.check_block(seed, targets[:1])
        # Of halves some are still as close as their parts, and without rows nothing is wrong.
        must_be_found = any(y.numel() and y.dtype in (torch.float32, torch.float64) for y in wrong)
        assert problem or not must_be_found, seed
        assert wrong or not problem, seed
        problems += [problem] * must_be_found
    assert len(problems) > 5
    assert all(problem.startswith(f"{targets[0]}: output is off by") for problem in problems)
    assert "(block: " in problems[0]
