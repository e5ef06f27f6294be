import pytest
import torch
from torch import nn

from pairmix import SPMLinear
from pairmix_lab.experiments.layers import LAYERS, count_parameters, make_layer

WIDTHS = (1, 2, 7, 64, 100, 129)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("maps", [1, 3])
def test_maps_are_side_by_side(name, maps):
    layer = make_layer(name, 6, maps=maps)
    assert layer(torch.randn(2, 5, 6)).shape == (2, 5, maps * 6)


@pytest.mark.parametrize("maps", [1, 3])
@pytest.mark.parametrize("options", [{}, {"block": "rotation"}, {"stages": 1}, {"block": "rotation", "stages": 12}])
def test_low_rank_has_the_size_of_spm_rounded_up(maps, options):
    for n in WIDTHS:
        low_rank, spm = (count_parameters(make_layer(name, n, maps=maps, **options)) for name in ("lowrank", "spm"))
        assert 0 <= low_rank - spm < maps * 2 * n, n


@pytest.mark.parametrize("maps", [1, 3])
def test_dense_and_identity_have_the_size_of_a_matrix_and_its_bias(maps):
    for name in ("dense", "identity"):
        assert count_parameters(make_layer(name, 7, maps=maps)) == maps * 7 * 8


@pytest.mark.parametrize("maps", [1, 3])
def test_identity_starts_as_the_identity(maps):
    x = torch.randn(4, 7)
    layer = make_layer("identity", 7, maps=maps)
    assert layer(x).equal(x.repeat(1, maps))
    assert all(parameter.requires_grad for parameter in layer.parameters())


def test_low_rank_maps_are_of_low_rank_and_not_the_same():
    x = torch.eye(32)
    maps = make_layer("lowrank", 32, maps=2)
    first, second = (maps(x) - maps(torch.zeros(1, 32))).chunk(2, -1)
    assert torch.linalg.matrix_rank(first, rtol=1e-4) < 32
    assert not torch.allclose(first, second)


def test_spm_takes_the_options():
    layer = make_layer("spm", 8, maps=3, block="rotation", stages=2)
    assert isinstance(layer, SPMLinear)
    assert (layer.block, layer.stages, layer.maps) == ("rotation", 2, 3)
    assert make_layer("spm", 8).maps is None


def test_dense_is_torchs_own():
    assert type(make_layer("dense", 8)) is nn.Linear


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"one of \['dense', 'spm', 'lowrank', 'identity'\], got 'sparse'"):
        make_layer("sparse", 8)
