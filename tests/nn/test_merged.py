"""Merged stages compute what the layer computes, with few operations."""

import pytest
import torch
from torch import nn

from pairmix import SPMGRU, Schedule, SPMLinear
from pairmix.nn import MergedStages, merge_stages_
from pairmix.nn.merged import cheapest_factors


def randomised(layer):
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.6)
    return layer


OPTIONS = [
    {},
    {"block": "rotation", "maps": 2},
    {"rank": 3},
    {"maps": 2, "rank": 2},
    {"bias": False},
    {"stages": 0},
    {"schedule": "random_blocks"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", [(256, 256), (192, 384), (384, 192), (300, 500), (9, 5)])
def test_the_map_is_the_same(sizes, options):
    layer = randomised(SPMLinear(*sizes, dtype=torch.float64, **options))
    x = torch.randn(2, 3, sizes[0], dtype=torch.float64)
    merged = MergedStages(layer)
    torch.testing.assert_close(merged(x), layer(x))
    torch.testing.assert_close(merged(x[0, 0]), layer(x[0, 0]))
    assert not list(merged.parameters())


@pytest.mark.parametrize("n", [128, 512, 768, 1000, 3072, 4096])
def test_factors_of_a_butterfly(n):
    schedule = Schedule.butterfly(n)
    factors = cheapest_factors(schedule)
    assert [factor.start for factor in factors] == [0, *(factor.stop for factor in factors[:-1])]
    assert factors[-1].stop == schedule.stages
    for start, stop, size, stride in factors:
        for first, second in schedule.pairs[start:stop]:
            assert (first // (size * stride) == second // (size * stride)).all()
            assert (first % stride == second % stride).all()
    assert len(factors) == 2
    assert sum(factor.size for factor in factors) < n / 3


def test_what_cannot_be_factored_is_dense():
    for layer in (SPMLinear(257, 257), SPMLinear(256, 256, schedule="random"), SPMLinear(1024, 10)):
        assert MergedStages(layer).dense is not None


def test_a_model():
    shared = randomised(SPMLinear(128, 128))
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.ReLU(), shared), "b": SPMGRU(8, 8), "c": nn.Linear(4, 4)})
    x = torch.randn(3, 128)
    before = model["a"](x)
    assert merge_stages_(model) == ["a.0", "a.2"]
    assert model["a"][0] is model["a"][2]
    torch.testing.assert_close(model["a"](x), before)
    model["b"](torch.randn(2, 3, 8))  # reads the parameters of its layers, which are still there


def test_errors():
    with pytest.raises(ValueError, match=r"use MergedStages\(layer\)"):
        merge_stages_(SPMLinear(4, 4))
    with pytest.raises(ValueError, match=r"expected an input of shape \(\*, 4\), got \(2, 5\)"):
        MergedStages(SPMLinear(4, 4))(torch.ones(2, 5))
