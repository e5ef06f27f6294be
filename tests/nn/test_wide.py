"""Layers that mix more coordinates than they read and give: sums of mixers with pairings of their own."""

import pytest
import torch
from torch import nn

import oracle
from pairmix import Schedule, SPMLinear


@pytest.mark.parametrize("n", [1, 4, 7, 12])
@pytest.mark.parametrize("copies", [2, 3])
def test_mixers_side_by_side_are_a_sum(n, copies):
    if n % 2:
        n += 1  # at most one may be odd
    parts = [Schedule.butterfly(n, 3), *(Schedule.random(n, 3, seed=seed) for seed in range(1, copies))]
    layer = SPMLinear(n, n, width=copies * n, schedule=Schedule.side_by_side(parts))
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    total = torch.zeros(n, n, dtype=torch.float64)
    for number, part in enumerate(parts):
        one = SPMLinear(n, n, bias=False, schedule=part, dtype=torch.float64)
        mine, half = slice(number * n, (number + 1) * n), slice(number * n // 2, (number + 1) * n // 2)
        with torch.no_grad():
            one.coeffs.copy_(layer.coeffs[..., half])
            one.d_in.copy_(layer.d_in[mine])
            one.d_out.copy_(layer.d_out[mine])
        total += one.to_dense()
    answer = oracle.dense_answer(layer)
    oracle.assert_matches(layer.to_dense(), answer)
    oracle.assert_within(total, answer.value, 1e-12 * answer.magnitude, "the sum")


@pytest.mark.parametrize(("in_features", "out_features", "width"), [(3, 5, 16), (5, 3, 7), (1, 1, 9), (8, 8, 12)])
def test_any_width_above(in_features, out_features, width):
    layer, x = SPMLinear(in_features, out_features, width=width), torch.randn(4, in_features, requires_grad=True)
    grad = torch.randn(4, out_features)
    y = layer(x)
    y.backward(grad)
    answers = oracle.answers(oracle.of_layer(layer, x.detach()), grad)
    oracle.assert_matches(y.detach(), answers["output"])
    oracle.assert_matches(x.grad, answers["x"])
    oracle.assert_matches(layer.coeffs.grad, answers["blocks"])


def test_the_variance_is_kept():
    torch.manual_seed(0)
    layer = SPMLinear(256, 256, width=1024, init="hadamard")
    assert layer(torch.randn(100, 256)).detach().std() == pytest.approx(1, abs=0.1)


def test_schedules_that_do_not_fit():
    with pytest.raises(ValueError, match="as many stages of each"):
        Schedule.side_by_side([Schedule.butterfly(4), Schedule.butterfly(8)])
    with pytest.raises(ValueError, match="at most one odd width"):
        Schedule.side_by_side([Schedule.butterfly(5, 2), Schedule.butterfly(7, 2)])
    with pytest.raises(ValueError, match="at least one schedule, got none"):
        Schedule.side_by_side([])
    assert Schedule.side_by_side([Schedule.butterfly(5, 2), Schedule.butterfly(4, 2)]).n == 9


@pytest.mark.parametrize("gain", [0.5, 2, 0.0])
def test_gain_scales_the_start(gain):
    torch.manual_seed(0)
    layer = SPMLinear(16, 8, gain=gain)
    torch.manual_seed(0)
    plain = SPMLinear(16, 8)
    assert layer.d_out.equal(gain * plain.d_out)
    torch.testing.assert_close(layer.to_dense(), gain * plain.to_dense())
