"""A few layers of `make fuzz`, which runs thousands."""

from __future__ import annotations

import pytest
import torch

import fuzz
from pairmix.ops import cpu, library


@pytest.mark.parametrize("seed", range(30))
def test_random_layers(seed):
    assert fuzz.check(seed) is None


def test_what_is_wrong_is_found_and_described(monkeypatch):
    def a_little_off(*arguments):
        return cpu.forward(*arguments) * (1 + 1e-2)

    broken = library.Impl(a_little_off, cpu.backward, cpu.why_not)
    monkeypatch.setitem(library.IMPLS, "cpu", broken)
    seed = next(seed for seed in range(100) if fuzz.random_layer(seed).arguments.x.numel())
    problem = fuzz.check(seed)
    assert problem is not None
    assert ": output[" in problem
    assert str(fuzz.random_layer(seed).arguments.schedule) in problem
    assert torch.get_num_threads() == 1
