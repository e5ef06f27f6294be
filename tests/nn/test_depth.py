"""Layers that get deeper, and lose the stages that they do not need."""

import copy

import pytest
import torch
from torch import nn

import oracle
from pairmix import Schedule, SPMLinear

CASES = [
    {},
    {"block": "rotation"},
    {"maps": 3},
    {"maps": 2, "block": "rotation"},
    {"rank": 2},
    {"schedule": "random"},
    {"schedule": "random_blocks"},
    {"schedule": "brick", "stages": 4},
    {"stages": 0},
]
OPTIMIZERS = [
    torch.optim.Adam,
    lambda parameters: torch.optim.Adam(parameters, fused=True),
    lambda parameters: torch.optim.SGD(parameters, 1e-3, momentum=0.9),
]


def trained(n, optimizer=torch.optim.Adam, steps=3, **options):
    """A layer after some steps, with the optimiser that took them."""
    layer = SPMLinear(n, n, **options)
    made = optimizer(layer.parameters())
    for _ in range(steps):
        take_step(layer, made)
    return layer, made


def take_step(layer, optimizer):
    x = torch.randn(5, layer.in_features)
    optimizer.zero_grad()
    (layer(x).square().sum() + layer(x)[:, 0].sum()).backward()
    optimizer.step()


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 7, 16])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_a_deeper_layer_computes_the_same(n, options, more):
    layer, _ = trained(n, **options)
    x, before = torch.randn(4, n), copy.deepcopy(layer)
    assert layer.deepen_(more) is layer
    assert layer.stages == before.stages + more
    assert (layer.schedule.order[: before.stages] == before.schedule.order).all()
    oracle.assert_agrees(layer(x), lambda dtype: before.to(dtype)(x.to(dtype)))
    assert layer.prune_() == list(range(before.stages, layer.stages + more))
    assert layer.schedule == before.schedule
    for name, parameter in layer.named_parameters():
        assert parameter.equal(dict(before.float().named_parameters())[name])


def test_the_pairs_of_new_stages_come_next():
    assert SPMLinear(8, 8).deepen_(2).schedule == Schedule.butterfly(8, 5)
    assert SPMLinear(8, 8, schedule="random", stages=3).deepen_(2).schedule == Schedule.random(8, 5)
    assert SPMLinear(8, 8, schedule="random_blocks").deepen_(2).schedule == Schedule.random_blocks(8, 5)
    own = Schedule.from_pairs(4, [[(0, 3), (1, 2)]])
    deeper = SPMLinear(4, 4, schedule=own).deepen_(2).schedule
    assert deeper.pairs[0].tolist() == own.pairs[0].tolist()
    assert deeper.pairs[1:].tolist() == Schedule.butterfly(4).pairs.tolist()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("block", ["general", "rotation"])
def test_the_optimizer_goes_on(optimizer, block):
    layer, made = trained(7, optimizer, block=block)
    name = "coeffs" if block == "general" else "angles"
    old = getattr(layer, name)
    moments = {key: value.clone() for key, value in made.state[old].items() if getattr(value, "shape", ()) == old.shape}
    stages = layer.stages
    layer.deepen_(2, made)
    new = getattr(layer, name)
    assert moments
    assert sum(new is parameter for group in made.param_groups for parameter in group["params"]) == 1
    assert not any(old is parameter for group in made.param_groups for parameter in group["params"])
    for key, moment in moments.items():
        assert made.state[new][key][:stages].equal(moment)
        assert not made.state[new][key][stages:].any()
    before = new.detach().clone()
    take_step(layer, made)
    assert (getattr(layer, name)[stages:] != before[stages:]).any()
    identity = torch.tensor([1.0, 0.0, 0.0, 1.0])[:, None] if block == "general" else 0.0
    with torch.no_grad():
        getattr(layer, name)[1] = identity
        layer.residual_scale[1] = 1.0
    assert layer.prune_(optimizer=made) == [1]
    take_step(layer, made)


def test_stages_near_the_identity_are_pruned():
    layer = SPMLinear(16, 16, init="identity")
    with torch.no_grad():
        layer.coeffs[1, 2, 3] = 1e-3
        layer.coeffs[2, 0, 0] = 1.1
    before = copy.deepcopy(layer)
    assert layer.prune_(1e-2) == [0, 1, 3]
    assert layer.schedule.pairs.tolist() == before.schedule.pairs[2:3].tolist()
    # What was removed differs from the identity by a thousandth in one entry.
    difference = (layer.to_dense() - before.to_dense()).abs().max()
    assert 0 < difference < 1.2e-3
    assert layer.prune_(0.01) == []
    assert layer.prune_(0.2) == [0]
    assert layer.stages == 0


def test_every_map_and_the_residual_count():
    layer = SPMLinear(7, 7, maps=2, init="identity", stages=3)
    with torch.no_grad():
        layer.coeffs[1, 0, 1, 2] = 0.5
        layer.residual_scale[0, 2] = 0.5
    assert layer.prune_(0.1) == [1]
    rotation = SPMLinear(8, 8, block="rotation", init="identity", stages=2)
    nn.init.constant_(rotation.angles, 2 * torch.pi)
    assert rotation.prune_(1e-5) == [0, 1]  # a whole turn is no turn


def test_a_deeper_layer_can_be_stored():
    layer = SPMLinear(8, 8).deepen_(2)
    SPMLinear(8, 8, stages=5).load_state_dict(layer.state_dict())
    with pytest.raises(RuntimeError, match=r"stages=5.* there and .*stages=3.* here"):
        SPMLinear(8, 8).load_state_dict(layer.state_dict())


def test_frozen_parameters_stay_frozen():
    layer = SPMLinear(8, 8).requires_grad_(False).deepen_(1)
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def test_bad_arguments():
    with pytest.raises(ValueError, match="more must be an integer of at least 0, got -1"):
        SPMLinear(4, 4).deepen_(-1)
    with pytest.raises(ValueError, match="tolerance must be at least 0, got nan"):
        SPMLinear(4, 4).prune_(float("nan"))
