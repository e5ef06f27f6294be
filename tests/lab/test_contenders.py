import pickle

import pytest
import torch
from torch import nn

from oracle import assert_agrees
from pairmix import SPMLinear
from pairmix.nn.init import INITS
from pairmix_lab import contenders
from pairmix_lab.contenders import (
    CONTENDERS,
    LOW_RANK,
    RANK_64,
    SPM,
    TRAINED,
    Monarch,
    count_parameters,
    divisor_near_root,
    make,
    named,
    of_config,
    timed_at,
)

WIDTHS = (1, 2, 7, 64, 100, 129)


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("maps", [1, 3])
def test_maps_are_side_by_side(name, maps):
    layer = make(name, 6, maps=maps)
    assert layer(torch.randn(2, 5, 6)).shape == (2, 5, maps * 6)


@pytest.mark.parametrize("maps", [1, 3])
@pytest.mark.parametrize("options", [{}, {"block": "rotation"}, {"stages": 1}, {"block": "rotation", "stages": 12}])
def test_low_rank_has_the_size_of_spm_rounded_up(maps, options):
    for n in WIDTHS:
        low_rank, spm = (count_parameters(make(name, n, maps=maps, **options)) for name in ("lowrank", "spm"))
        assert 0 <= low_rank - spm < maps * 2 * n, n


@pytest.mark.parametrize("maps", [1, 3])
def test_dense_and_identity_have_the_size_of_a_matrix_and_its_bias(maps):
    for name in ("dense", "identity"):
        assert count_parameters(make(name, 7, maps=maps)) == maps * 7 * 8


@pytest.mark.parametrize("maps", [1, 3])
def test_identity_starts_as_the_identity(maps):
    x = torch.randn(4, 7)
    layer = make("identity", 7, maps=maps)
    assert layer(x).equal(x.repeat(1, maps))
    assert all(parameter.requires_grad for parameter in layer.parameters())


def test_low_rank_maps_are_of_low_rank_and_not_the_same():
    x = torch.eye(32)
    maps = make("lowrank", 32, maps=2)
    first, second = (maps(x) - maps(torch.zeros(1, 32))).chunk(2, -1)
    assert torch.linalg.matrix_rank(first, rtol=1e-4) < 32
    assert not torch.allclose(first, second)


def test_spm_takes_the_options():
    layer = make("spm", 8, maps=3, block="rotation", stages=2)
    assert isinstance(layer, SPMLinear)
    assert (layer.block, layer.stages, layer.maps) == ("rotation", 2, 3)
    assert make("spm", 8).maps is None


def test_extensions_have_twice_the_stages_or_twice_the_width():
    usual, deeper, mixture = (make(name, 6, 24, maps=3, gain=0.5) for name in ("spm", "deeper", "mixture"))
    assert (deeper.stages, deeper.width) == (2 * usual.stages, usual.width)
    assert (mixture.stages, mixture.width) == (usual.stages, 2 * usual.width)
    assert not mixture.schedule.reach().all()  # each half reaches its own coordinates alone
    for layer in (deeper, mixture):
        assert layer(torch.randn(2, 6)).shape == (2, 3 * 24)
        assert layer.gain == 0.5


def test_dense_is_torchs_own():
    assert type(make("dense", 8)) is nn.Linear


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"one of \['dense', 'spm', 'companion', 'deeper', .*\], got 'sparse'"):
        make("sparse", 8)


@pytest.mark.parametrize(
    ("config", "label"),
    [
        ({"layer": "spm", "block": "general"}, "SPM"),
        ({"layer": "spm", "block": "rotation", "pairing": "same"}, "SPM, rotation"),
        ({"layer": "spm", "block": "general", "pairing": "other"}, "SPM, other pairs"),
        ({"layer": "spm", "block": "rotation", "pairing": "other"}, "SPM, rotation, other pairs"),
        ({"layer": "spm", "block": "general", "dense_maps": "qkv,out"}, "SPM, dense attention"),
        ({"layer": "spm", "block": "general", "dense_maps": "up,down"}, "SPM, dense feed-forward"),
        ({"layer": "spm", "block": "general", "dense_maps": ""}, "SPM"),
        ({"layer": "dense", "block": "rotation", "pairing": "other"}, "dense"),
        ({"layer": "spm", "init": "own", "layer_rate": None}, "SPM"),
        ({"layer": "spm", "init": "own", "stages": 48}, "SPM, 48 stages"),
        ({"layer": "lowrank", "stages": 24}, "low rank, size of 24 stages"),
        ({"layer": "spm", "init": "near_identity", "layer_rate": None}, "SPM, near identity"),
        ({"layer": "spm", "init": "near_identity", "layer_rate": 1.0}, "SPM, near identity, common rate"),
        (
            {"layer": "spm", "block": "rotation", "pairing": "other", "init": "near_identity", "layer_rate": 1.0},
            "SPM, rotation, other pairs, near identity, common rate",
        ),
        ({"layer": "companion", "init": "hadamard", "block": "rotation"}, "SPM + low rank, hadamard"),
        ({"layer": "monarch", "block": "general"}, "Monarch"),
        ({"layer": "circulant", "block": "general"}, "circulant"),
    ],
)
def test_a_contender_is_named_by_what_it_uses(config, label):
    assert of_config(config).label == label


@pytest.mark.parametrize(
    ("old", "label"),
    [
        ("nn.Linear", "dense"),
        ("SPM", "SPM"),
        ("low rank, SPM's size", "low rank"),
        ("low rank 64", "rank 64"),
        ("Monarch", "Monarch"),
        ("torch-structured", "torch-structured butterfly"),
        ("SPM in plain torch", "SPM in plain torch"),
    ],
)
def test_older_results_have_other_names(old, label):
    assert named(old).label == label


def test_every_start_of_the_library_is_told_apart():
    labels = {of_config({"layer": "spm", "init": init}).label for init in ("own", *INITS)}
    assert len(labels) == 1 + len(INITS)


def test_a_start_makes_no_variant_and_takes_no_time():
    for label in ("SPM, near identity", "SPM, near identity, common rate", "SPM"):
        assert not contenders.labelled(label).is_variant
        assert contenders.timed_as(label) == "SPM"
    assert contenders.labelled("SPM, rotation, near identity").is_variant
    assert contenders.timed_as("SPM, rotation, near identity") == "SPM, rotation, near identity"
    assert contenders.timed_as("SPM, dense attention") == "SPM, dense attention"
    assert contenders.timed_as("circulant") == "circulant"


def test_a_name_is_of_one_contender_only():
    plain = [contender for contender in CONTENDERS if not contender.settings]
    names = [name for contender in plain for name in {contender.key, *contender.aliases}]
    assert len(set(names)) == len(names)
    assert len({contender.label for contender in CONTENDERS}) == len(CONTENDERS)


@pytest.mark.parametrize("maps", [1, 3])
def test_every_timed_layer_can_be_built_with_several_maps(maps):
    for key in timed_at(130):
        assert make(key, 130, maps=maps)(torch.randn(2, 130)).shape == (2, maps * 130), key


def test_a_timed_layer_is_not_wrapped():
    """A call that only passes the input on would count as time of the layer."""
    assert {type(build()).__name__ for build in timed_at(130).values()} <= {
        *("Linear", "SPMLinear", "LowRank", "Monarch", "Butterfly")
    }


def test_a_timed_layer_can_be_made_in_another_process():
    for key, build in timed_at(130).items():
        assert type(pickle.loads(pickle.dumps(build))()) is type(build()), key


def test_building_a_timed_layer_makes_no_other_layer(monkeypatch):
    """The memory for it would count as that of the layer."""
    builds = timed_at(130)
    monkeypatch.setattr(contenders, "equal_rank", lambda *arguments, **options: pytest.fail("built an SPM to compare"))
    for build in builds.values():
        build()


def test_a_timed_low_rank_has_the_size_of_spm_rounded_up():
    for n in (64, 100, 129):
        builds = timed_at(n)
        spm, low_rank = count_parameters(builds[SPM.key]()), count_parameters(builds[LOW_RANK.key]())
        assert 0 <= low_rank - spm < 2 * n


def test_rank_64_only_where_it_is_low():
    assert RANK_64.key not in timed_at(128)
    assert count_parameters(timed_at(130)[RANK_64.key]()) == 2 * 64 * 130 + 130


@pytest.mark.parametrize(("n", "blocks"), [(64, 8), (512, 16), (1000, 25), (7, 1)])
def test_blocks_of_monarch(n, blocks):
    assert divisor_near_root(n) == blocks


@pytest.mark.parametrize("out_features", [12, 6, 30])
def test_monarch_is_two_block_diagonal_matrices(out_features):
    layer = Monarch(12, out_features)
    x = torch.randn(5, 12)
    blocks, _, between = layer.first.shape

    def plain(dtype):
        first, second = (torch.block_diag(*factor).to(dtype) for factor in (layer.first, layer.second))
        exchanged = (x.to(dtype) @ first).view(5, blocks, between).transpose(1, 2).reshape(5, -1)
        return exchanged @ second + layer.bias.to(dtype)

    assert_agrees(layer(x), plain)


def test_every_timed_layer_runs():
    for name, build in timed_at(32).items():
        assert build()(torch.randn(3, 32)).shape == (3, 32), name
