"""Pairs without a pattern: the compiled kernels compute two stages of them at once, along the rings that they make."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

import oracle
from kernels import running
from pairmix import Schedule
from pairmix.functional import spm
from pairmix.ops import cpu

ROWS = 37  # fill some tiles, and one of them in part


@pytest.fixture(autouse=True)
def small_caches():
    """The whole width of a narrow layer is then too much for a cache, and is walked along rings."""
    before = cpu.caches()
    cpu.use_caches(4 << 10, 4 << 10)
    yield
    cpu.use_caches(*before)


def of_stages(*schedules: Schedule) -> Schedule:
    pairs = np.concatenate([schedule.pairs for schedule in schedules])
    return Schedule.from_pairs(schedules[0].n, pairs.transpose(0, 2, 1))


def random_between_butterflies(n: int, stages: int) -> Schedule:
    """Groups with rings and without take turns."""
    butterfly, pairs = Schedule.butterfly(n, 3), Schedule.random(n, max(stages, 1))
    return of_stages(butterfly, pairs, butterfly, Schedule.random(n, 2, seed=1), butterfly)


SCHEDULES = {
    "random": Schedule.random,
    "the same pairs twice": lambda n, stages: of_stages(*[Schedule.random(n, 1)] * stages),
    "random between butterflies": random_between_butterflies,
}


def check(arguments: oracle.Arguments, targets, *, wanted=None, threads: int = 1) -> None:
    """Compare the output and the gradients that are wanted, all if nothing is said, with the definition."""
    a = arguments
    grad = torch.randn(*a.x.shape[:-1], a.out_features, generator=torch.Generator().manual_seed(1)).to(a.x.dtype)
    answers = oracle.answers(a, grad)
    for name, tensor in a.tensors.items():
        tensor.requires_grad_(wanted is None or name in wanted)
    leaves = {name: tensor for name, tensor in a.tensors.items() if tensor.requires_grad}
    options = {"d_in": a.d_in, "d_out": a.d_out, "bias": a.bias, "residual_scale": a.residual_scale}
    for target in targets:
        with running(target, threads):
            y = spm(a.x, a.blocks, a.schedule, **options, out_features=a.out_features, impl="cpu")
            gradients = torch.autograd.grad(y, list(leaves.values()), grad)
        for name, actual in {"output": y.detach(), **dict(zip(leaves, gradients, strict=True))}.items():
            oracle.assert_matches(actual, answers[name], f"{target}: {name}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block", ["general", "rotation"])
@pytest.mark.parametrize("n", [40, 41, 96, 127])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_output_and_gradients(kind, n, block, dtype, targets):
    for stages in (2, 3, 6):
        check(oracle.random_arguments(SCHEDULES[kind](n, stages), block, leading=(ROWS,), dtype=dtype), targets)


@pytest.mark.parametrize("wanted", ["x", "blocks", "d_in bias", "x d_out"])
@pytest.mark.parametrize("n", [40, 41])
def test_some_of_the_gradients(n, wanted, targets):
    for block, kind in product(("general", "rotation"), SCHEDULES):
        arguments = oracle.random_arguments(SCHEDULES[kind](n, 5), block, leading=(ROWS,))
        check(arguments, targets, wanted=wanted.split())


@pytest.mark.parametrize(("in_features", "out_features"), [(40, 13), (13, 41), (16, 64), (64, 16)])
def test_rectangular(in_features, out_features, targets):
    schedule = Schedule.random(max(in_features, out_features), 6)
    ends = {"in_features": in_features, "out_features": out_features}
    check(oracle.random_arguments(schedule, leading=(ROWS,), **ends), targets)


def test_wide_layers_in_usual_caches(targets):
    cpu.use_caches(32 << 10, 512 << 10)
    for n, stages in ((1000, 10), (4096, 12), (4097, 13)):
        arguments = oracle.random_arguments(Schedule.random(n, stages), leading=(150,), dtype=torch.float32)
        check(arguments, targets, threads=2)


def test_infinity_beside_the_padding(targets):
    """The coordinate that an odd width does not have stays zero: it brings no NaN to those that it meets later."""
    schedule = Schedule.random(41, 3)
    first, *later = schedule.residual.tolist()
    assert first not in later
    a = oracle.random_arguments(schedule, leading=(ROWS,))
    with torch.no_grad():
        a.x[3, first] = torch.inf
    options = {"d_in": a.d_in, "d_out": a.d_out, "residual_scale": a.residual_scale}
    with torch.no_grad():
        expected = spm(a.x, a.blocks, schedule, **options, impl="reference").isfinite()
        assert expected[3].sum() > 30
        for target in targets:
            with running(target):
                assert spm(a.x, a.blocks, schedule, **options, impl="cpu").isfinite().equal(expected), target
