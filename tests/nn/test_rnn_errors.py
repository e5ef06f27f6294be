"""What recurrent networks refuse, and what they say then."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from pairmix import SPMGRU, SPMLSTM, SPMRNN, Schedule
from plain_rnn import LENGTHS, B, H, I, T


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (SPMRNN, {"input_size": 0}, "input_size must be at least 1, got 0"),
        (SPMGRU, {"hidden_size": -2}, "hidden_size must be at least 1, got -2"),
        (SPMLSTM, {"num_layers": 0}, "num_layers must be at least 1, got 0"),
        (SPMRNN, {"nonlinearity": "cube"}, r"nonlinearity must be one of .*tanh.*relu.*linear.* got 'cube'"),
        (SPMGRU, {"dropout": 2, "num_layers": 2}, r"dropout must be .*0\.\.1, got 2"),
        (SPMGRU, {"dropout": -0.5, "num_layers": 2}, r"dropout must be .*0\.\.1, got -0.5"),
        (SPMLSTM, {"proj_size": 3}, "proj_size must be 0, got 3"),
        (SPMGRU, {"block": "cube"}, "block must be one of .* got 'cube'"),
        (SPMGRU, {"impl": "magic"}, "impl must be one of .* got 'magic'"),
        (SPMGRU, {"schedule": Schedule.butterfly(7)}, "the layer has the width 6, its schedule has 7"),
    ],
)
def test_bad_arguments(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(**{"input_size": I, "hidden_size": H, **arguments})


X, STATE = torch.zeros(T, B, I), torch.zeros(1, B, H)
PACKED = pack_sequence([torch.zeros(t, I) for t in LENGTHS], enforce_sorted=False)
BAD_CALLS = [
    (SPMGRU, (X[..., :4],), ValueError, r"expected an input of size 5, got 4: \(4, 3, 4\)"),
    (SPMGRU, (X[0, 0],), ValueError, r"2 or 3 dimensions, got 1: \(5,\)"),
    (SPMGRU, (X[None],), ValueError, r"2 or 3 dimensions, got 4: \(1, 4, 3, 5\)"),
    (SPMGRU, (X[:0],), ValueError, r"at least one step, got the shape \(0, 3, 5\)"),
    (SPMGRU, (X[:0, 0],), ValueError, r"at least one step, got the shape \(0, 5\)"),
    (SPMGRU, (X, STATE[0]), ValueError, r"an initial h of shape \(1, 3, 6\), got \(3, 6\)"),
    (SPMGRU, (X, STATE.expand(2, B, H)), ValueError, r"an initial h of shape \(1, 3, 6\), got \(2, 3, 6\)"),
    (SPMGRU, (X[:, 0], STATE), ValueError, r"an initial h of shape \(1, 6\), got \(1, 3, 6\)"),
    (SPMGRU, (PACKED, STATE[:, :2]), ValueError, r"an initial h of shape \(1, 3, 6\), got \(1, 2, 6\)"),
    (SPMRNN, (PACKED._replace(data=PACKED.data[:, :4]),), ValueError, r"packed data of shape \(\*, 5\), got \(7, 4\)"),
    (SPMLSTM, (X, (STATE, STATE[..., :5])), ValueError, r"an initial c of shape \(1, 3, 6\), got \(1, 3, 5\)"),
    (
        SPMLSTM,
        (X, (STATE, STATE, STATE)),
        ValueError,
        r"the initial states \(h, c\) as tensors, got \(Tensor, Tensor, Tensor\)",
    ),
    (SPMLSTM, (X, (STATE,)), ValueError, r"the initial states \(h, c\) as tensors, got \(Tensor\)"),
    (SPMLSTM, (X, STATE), ValueError, r"the initial states \(h, c\) as tensors, got \(Tensor\)"),
    (SPMGRU, (X, (STATE, STATE)), ValueError, r"the initial states \(h\) as tensors, got \(Tensor, Tensor\)"),
    (SPMGRU, (X, STATE.double()), TypeError, r"torch\.float64"),
    (SPMLSTM, (X, (STATE, STATE.double())), TypeError, r"torch\.float64"),
    (SPMGRU, (X.double(),), TypeError, r"x is torch\.float64"),
    (SPMGRU, (X.long(),), TypeError, r"got torch\.int64"),
]


@pytest.mark.parametrize(("kind", "arguments", "error", "message"), BAD_CALLS)
def test_bad_input(kind, arguments, error, message):
    with pytest.raises(error, match=message):
        kind(I, H)(*arguments)
    with pytest.raises((RuntimeError, ValueError, TypeError, IndexError, AttributeError)):  # torch refuses it too
        getattr(nn, kind.__name__.removeprefix("SPM"))(I, H)(*arguments)
