"""What attention refuses, and what it says then."""

import pytest
import torch
from torch import nn

from pairmix import Schedule
from pairmix.nn.attention import SPMMultiheadAttention
from plain_attention import HEADS, E, L, N


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embed_dim": 0}, "got embed_dim=0 and num_heads=3"),
        ({"num_heads": 0}, "got embed_dim=12 and num_heads=0"),
        ({"num_heads": 5}, "a multiple of num_heads, .* got embed_dim=12 and num_heads=5"),
        ({"dropout": 1.5}, r"dropout must be in 0\.\.1, got 1.5"),
        ({"kdim": 0}, "in_features must be at least 1, got 0"),
        ({"block": "cube"}, "block must be one of .* got 'cube'"),
        ({"schedule": Schedule.butterfly(E), "kdim": 20}, "the layer has the width 20, its schedule has 12"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        SPMMultiheadAttention(**{"embed_dim": E, "num_heads": HEADS, **arguments})


X = torch.zeros(L, N, E)
BAD_CALLS = [
    ((X[..., :6], X, X), {}, ValueError, r"query must have the shape \(length, batch, 12\), .* got \(5, 2, 6\)"),
    ((X, X[..., :6], X[..., :6]), {}, ValueError, r"key must have .* got \(5, 2, 6\)"),
    ((X, X, X[..., :6]), {}, ValueError, r"value must have .* got \(5, 2, 6\)"),
    ((X[0, 0], X, X), {}, ValueError, r"query must have .* got \(12,\)"),
    ((X, X[:, 0], X[:, 0]), {}, ValueError, r"of one batch, .* got \(5, 2, 12\), \(5, 12\) and \(5, 12\)"),
    ((X, X, X[:4]), {}, ValueError, r"of one length, got \(5, 2, 12\), \(5, 2, 12\) and \(4, 2, 12\)"),
    ((X, X[:, :1], X[:, :1]), {}, ValueError, r"of one batch, .* got \(5, 2, 12\), \(5, 1, 12\)"),
    ((X, X, X), {"attn_mask": X[0, :, :5] > 0}, ValueError, r"attn_mask must .* \(5, 5\) or \(6, 5, 5\), got \(2, 5\)"),
    ((X, X, X), {"attn_mask": X.new_zeros(5)}, ValueError, r"attn_mask must .* got \(5,\)"),
    ((X, X, X), {"attn_mask": X.new_zeros(2, 5, 5)}, ValueError, r"attn_mask must .* got \(2, 5, 5\)"),
    (
        (X, X, X),
        {"key_padding_mask": X.new_zeros(5, 2)},
        ValueError,
        r"key_padding_mask must .* \(2, 5\), got \(5, 2\)",
    ),
    ((X, X, X), {"key_padding_mask": X.new_zeros(5)}, ValueError, r"key_padding_mask must .* \(2, 5\), got \(5,\)"),
    ((X[:, 0],) * 3, {"key_padding_mask": X.new_zeros(1, 5)}, ValueError, r"key_padding_mask .* \(5,\), got \(1, 5\)"),
    ((X, X, X), {"attn_mask": X.new_zeros(5, 5).int()}, TypeError, r"attn_mask must be bool .* got torch.int32"),
    ((X, X, X), {"key_padding_mask": X.new_zeros(2, 5).int()}, TypeError, r"key_padding_mask .* got torch.int32"),
    ((X, X, X), {"is_causal": True}, RuntimeError, "is_causal=True is a hint about attn_mask"),
    ((X.double(),) * 3, {}, TypeError, r"x is torch\.float64"),
]


@pytest.mark.parametrize(("arguments", "options", "error", "message"), BAD_CALLS)
def test_bad_input(arguments, options, error, message):
    with pytest.raises(error, match=message):
        SPMMultiheadAttention(E, HEADS)(*arguments, **options)
    with pytest.raises((AssertionError, RuntimeError)):  # torch refuses it too
        nn.MultiheadAttention(E, HEADS)(*arguments, **options)


def test_nested_tensors_are_refused():
    x = torch.nested.nested_tensor([torch.zeros(2, E), torch.zeros(3, E)], layout=torch.jagged)
    with pytest.raises(ValueError, match="query is a nested tensor; pad it"):
        SPMMultiheadAttention(E, HEADS, batch_first=True)(x, x, x)
