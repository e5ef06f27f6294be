"""A few layers of `make fuzz`, which runs thousands."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fuzz
from pairmix import ops
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
