import pickle
from functools import partial

import pytest
import torch

import oracle
from pairmix import SPMLinear
from pairmix.nn import init

BLOCKS = ["general", "rotation"]


def rounding_of(layer):
    """How far from orthogonal its stages may be, and the two diagonals as if they were one more."""
    return oracle.rounding_of_rotations(layer.stages + 1, layer.d_in.dtype)


@pytest.mark.parametrize("name", init.INITS)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("n", [1, 2, 31, 64])
def test_square_layers_start_orthogonal(name, block, n):
    layer = SPMLinear(n, n, block=block, init=name, dtype=torch.float64)
    matrix = layer.to_dense()
    allowed = 2 * rounding_of(layer) + n * torch.finfo(torch.float64).eps
    assert (matrix @ matrix.T - torch.eye(n)).abs().max() <= allowed


@pytest.mark.parametrize("name", init.INITS)
@pytest.mark.parametrize(("in_features", "out_features"), [(512, 512), (512, 300), (300, 512), (512, 7), (7, 512)])
def test_variance_is_kept(name, in_features, out_features):
    torch.manual_seed(0)
    layer = SPMLinear(in_features, out_features, init=name)
    # the mean over outputs of their variance for x of unit variance, exactly
    variance = layer.to_dense().double().square().sum() / out_features
    assert abs(variance - 1) <= 2 * rounding_of(layer)


def test_every_folded_output_has_the_same_variance():
    layer = SPMLinear(512, 7, init="identity")
    variances = layer.to_dense().double().square().sum(1)
    assert (variances - 1).abs().max() <= 2 * rounding_of(layer)


def test_hadamard_has_equal_magnitudes():
    layer = SPMLinear(16, 16, init="hadamard")
    matrix = layer.to_dense()
    assert (matrix.abs() - 0.25).abs().max() <= rounding_of(layer)
    assert (matrix < 0).any()


def test_near_identity_is_near():
    angles = torch.empty(100, 100)
    assert abs(init.near_identity_(angles).std() - 0.02) < 0.002
    assert abs(init.near_identity_(angles, std=0.2).std() - 0.2) < 0.02


def test_random_rotations_cover_the_circle():
    angles = init.random_rotation_(torch.empty(10_000))
    assert abs(angles.cos().mean()) < 0.05
    assert angles.min() < -3.1
    assert angles.max() > 3.1


def test_both_blocks_start_as_the_same_matrix():
    layers = []
    for block in BLOCKS:
        torch.manual_seed(3)
        layers.append(SPMLinear(12, 12, block=block))
    general, rotation = layers
    oracle.assert_matches(general.to_dense(), oracle.dense_answer(rotation))


def test_a_function_of_ones_own():
    layer = SPMLinear(8, 8, block="rotation", init=partial(init.near_identity_, std=0.0))
    assert (layer.angles == 0).all()
    pickle.loads(pickle.dumps(layer)).reset_parameters()


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("n", [1, 2, 3, 100])
def test_defaults_are_finite_and_bias_starts_at_zero(block, n):
    layer = SPMLinear(n, n, block=block)
    assert all(parameter.isfinite().all() for parameter in layer.parameters())
    assert (layer.bias == 0).all()
    assert layer(torch.randn(3, n)).isfinite().all()
