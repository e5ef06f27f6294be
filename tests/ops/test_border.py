"""What the compiled kernels are handed that no ordinary model has: sizes, storages and numbers at the edge."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
import torch
from torch import nn

import oracle
from pairmix import Schedule, SPMLinear
from pairmix.functional import recurrence, spm
from pairmix.ops import Parameters, cpu

INF = float("inf")


def layer_arguments(n, stages, block, seed, dtype=torch.float32):
    """Parameters without zeros, so that nothing but the pairing decides what reaches what."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return (torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.5).to(dtype)

    blocks = numbers(stages, n // 2) if block == "rotation" else numbers(stages, 4, n // 2)
    scale = numbers(stages) if n % 2 else None
    return {"blocks": blocks, "d_in": numbers(n), "d_out": numbers(n), "bias": numbers(n), "residual_scale": scale}


def output_and_gradients(x, arguments, schedule, grad, impl):
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in arguments.items() if tensor is not None}
    x = x.clone().requires_grad_()
    y = spm(x, schedule=schedule, impl=impl, **leaves)
    gradients = torch.autograd.grad(y, [x, *leaves.values()], grad)
    return dict(zip(["output", "x", *leaves], (y.detach(), *gradients), strict=True))


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("block", ["general", "rotation"])
@pytest.mark.parametrize("stages", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 31, 33, 95, 127, 255])
def test_infinity_reaches_what_depends_on_it_and_nothing_else(n, stages, block, rows, target):
    for schedule in (make(n, stages) for make in (Schedule.butterfly, Schedule.random, Schedule.random_blocks)):
        arguments = layer_arguments(n, stages, block, seed=n)
        x, grad = (torch.ones(rows, n) for _ in range(2))
        x[0, n // 2] = INF
        expected = output_and_gradients(x, arguments, schedule, grad, "reference")["output"].isfinite()
        got = output_and_gradients(x, arguments, schedule, grad, "cpu")["output"].isfinite()
        assert got.equal(expected)
        x[0, n // 2], grad[0, 0] = 1, INF
        expected = output_and_gradients(x, arguments, schedule, grad, "reference")
        got = output_and_gradients(x, arguments, schedule, grad, "cpu")
        for name in expected:
            assert got[name].isfinite().equal(expected[name].isfinite()), name


def assert_right_where_the_reference_is(x, arguments, schedule, grad):
    """Within the bounds of the oracle; but what has no place in float32 may overflow or vanish, as in the reference."""
    case = oracle.Arguments(x, **arguments, schedule=schedule, out_features=schedule.n)
    answers = oracle.answers(case, grad)
    expected, got = (output_and_gradients(x, arguments, schedule, grad, impl) for impl in ("reference", "cpu"))
    compared = 0
    for name, answer in answers.items():
        limits = torch.finfo(torch.float32)
        allowed = answer.roundings * (limits.eps * answer.magnitude).clamp_min(limits.smallest_normal)
        is_right = (expected[name].double() - answer.value).abs() <= allowed
        compared += bool(is_right.any())
        oracle.assert_within(torch.where(is_right, got[name].double(), answer.value), answer.value, allowed, name)
    assert compared >= 3, "the reference is hardly ever right"


@pytest.mark.parametrize("block", ["general", "rotation"])
@pytest.mark.parametrize("n", [4, 7, 64])
@pytest.mark.parametrize("large", [1e25, 1e-25])
def test_diagonals_neither_overflow_nor_vanish_in_the_coefficients(large, n, block, target):
    """The products of diagonals and coefficients have no place in float32; what they do to x has."""
    schedule = Schedule.butterfly(n)
    arguments = layer_arguments(n, schedule.stages, block, seed=n)
    arguments["d_in"] *= large
    arguments["d_out"] /= large
    if block == "general":
        arguments["blocks"][0] *= large
        arguments["blocks"][1] /= large
    assert_right_where_the_reference_is(torch.full((20, n), 1 / large), arguments, schedule, torch.ones(20, n))


def test_gradients_that_only_the_diagonals_keep_finite(target):
    schedule = Schedule.butterfly(8)
    arguments = layer_arguments(8, schedule.stages, "general", seed=0)
    arguments["d_in"] *= 2**-15
    assert_right_where_the_reference_is(torch.full((20, 8), 1e37), arguments, schedule, torch.full((20, 8), 100.0))


def test_gradients_of_x_are_added_up_once_for_each_map(target):
    """Also where those of the parameters have to be computed a second time."""
    schedule = Schedule.butterfly(8)
    arguments = layer_arguments(8, schedule.stages, "general", seed=0)
    arguments["d_in"] *= 2**-15
    del arguments["residual_scale"]
    x, grad = torch.full((20, 8), 1e37), torch.full((20, 8), 100.0)

    def gradient_of_x(maps):
        leaf = x.clone().requires_grad_()
        several = {name: torch.stack([value] * maps).requires_grad_() for name, value in arguments.items()}
        spm(leaf, schedule=schedule, maps=maps, impl="cpu", **several).backward(grad.repeat(1, maps))
        assert several["blocks"].grad.isfinite().all()
        return leaf.grad

    assert gradient_of_x(2).equal(2 * gradient_of_x(1))


def test_diagonals_at_the_edge_in_a_recurrence(target):
    n, schedule = 8, Schedule.butterfly(8)
    arguments = layer_arguments(n, 3, "general", seed=0)
    arguments["d_in"] *= 1e25
    arguments["blocks"][0] *= 1e25
    arguments["d_out"] *= 1e-25
    maps = {name: value[None] for name, value in arguments.items() if name != "bias" and value is not None}
    inputs = torch.zeros(6, n), torch.full((3, n), 1e-25)

    def states(impl, dtype=torch.float32):
        x, h = (tensor.to(dtype) for tensor in inputs)
        converted = {name: value.to(dtype) for name, value in maps.items()}
        return recurrence("tanh", x, h, None, schedule=schedule, impl=impl, **converted)[0]

    assert states("reference").isfinite().all()
    oracle.assert_agrees(states("cpu"), lambda dtype: states("reference", dtype))


def test_sizes_that_cannot_be_counted_or_had():
    schedule, blocks = Schedule.butterfly(4), torch.zeros(2, 4, 2)
    with pytest.raises(RuntimeError, match=r"shape \(1152921504606846976, 4\) has more bytes than can be counted"):
        spm(torch.zeros(1, 4).expand(2**60, 4), blocks, schedule)
    with pytest.raises(RuntimeError, match="out of memory: cannot allocate 281474976710656 bytes"):
        spm(torch.zeros(1, 4).expand(2**44, 4), blocks, schedule)
    x = torch.zeros(1, 4).requires_grad_()
    with pytest.raises(RuntimeError, match=r"out of memory|can be counted|overflow|too big|invalid"):
        spm(x.expand(2**31, 2**31, 4), blocks, schedule)


def test_a_gradient_that_cannot_be_counted():
    x, grad = (torch.zeros(1, 4).expand(2**60, 4) for _ in range(2))
    parameters = Parameters(torch.zeros(1, 2, 4, 2), None, None, None, None)
    schedule, needs = Schedule.butterfly(4).on(x.device), Parameters(*[False] * 5)
    with pytest.raises(RuntimeError, match="has more bytes than can be counted"):
        cpu.backward(grad, x, parameters, schedule, "general", True, needs)


@pytest.mark.parametrize("name", ["coeffs", "d_in", "d_out", "bias", "residual_scale"])
def test_a_parameter_whose_storage_was_freed(name):
    layer = SPMLinear(7, 7)
    getattr(layer, name).untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"has the shape \(.*\), but its storage was freed"):
        layer(torch.ones(2, 7))


def test_an_input_whose_storage_was_freed():
    x = torch.ones(2, 6)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"x has the shape \(2, 6\), but its storage was freed"):
        SPMLinear(6, 6)(x)


@pytest.mark.parametrize("name", ["coeffs", "d_in", "d_out", "bias", "residual_scale"])
def test_a_parameter_that_is_a_negated_view(name):
    layer, plain = (SPMLinear(7, 7, dtype=torch.float64) for _ in range(2))
    plain.load_state_dict(layer.state_dict())
    old = getattr(layer, name).detach()
    negated = torch._neg_view(-old)
    assert negated.is_neg()
    assert negated.is_contiguous()  # as those of complex numbers are not, so that they are copied anyway
    setattr(layer, name, nn.Parameter(negated))
    x = torch.randn(3, 7, dtype=torch.float64)
    assert layer(x).equal(plain(x))
    for each in (layer, plain):
        each(x).sin().sum().backward()
    for each, parameter in plain.named_parameters():
        assert getattr(layer, each).grad.equal(parameter.grad), each


@pytest.mark.parametrize("cell", ["tanh", "gru", "gru_reset_after", "lstm"])
def test_a_recurrence_of_no_steps(cell):
    maps = {"tanh": 1, "lstm": 4}.get(cell, 3)
    layer = SPMLinear(5, 5, bias=False, maps=maps)
    h = torch.ones(3, 5, requires_grad=True)
    c = torch.ones(3, 5, requires_grad=True) if cell == "lstm" else None
    gates = torch.zeros(0, maps * 5, requires_grad=True)
    states, _ = recurrence(cell, gates, h, c, batch_sizes=[], **layer.operator())
    assert states.shape == (0, 5)
    inputs = [gates, h, *layer.parameters()]
    for leaf, gradient in zip(inputs, torch.autograd.grad(states.sum(), inputs), strict=True):
        assert gradient.equal(torch.zeros_like(leaf))


def test_many_stages_are_planned_in_time_linear_in_them():
    """A million stages of width two: linear, some seconds; quadratic, minutes."""
    code = """
import torch
from pairmix import Schedule
from pairmix.functional import spm
schedule = Schedule.butterfly(2, 1_000_000)
angles = torch.zeros(schedule.stages, 1, requires_grad=True)
spm(torch.ones(3, 2), angles, schedule).sum().backward()
"""
    limited = lambda: resource.setrlimit(resource.RLIMIT_CPU, (90, 90))  # noqa: E731
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, preexec_fn=limited)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["blocks", "d_in", "d_out", "bias", "residual_scale"])
@pytest.mark.parametrize(("n", "block"), [(7, "general"), (7, "rotation"), (15, "general")])
def test_a_parameter_that_is_hardly_a_number(n, block, name, target):
    schedule = Schedule.butterfly(n)
    arguments = layer_arguments(n, schedule.stages, block, seed=n)
    x, grad = torch.ones(2, 20, n)
    arguments[name].view(-1)[0] = 1e-45
    assert_right_where_the_reference_is(x, arguments, schedule, grad)
    for number in (INF, float("nan")):
        arguments[name].view(-1)[0] = number
        expected, got = (output_and_gradients(x, arguments, schedule, grad, impl) for impl in ("reference", "cpu"))
        for each in expected:
            assert got[each].isfinite().equal(expected[each].isfinite()), (number, each)
