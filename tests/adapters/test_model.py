"""Which layers of a model are adapted, and which adapter is in use."""

import copy

import pytest
import torch
from torch import nn

from adapted import assert_unchanged, network, state, turn, turned
from pairmix import Schedule, SPMMultiheadAttention, adapters
from pairmix.adapters import Adapted


def test_targets_are_ends_of_names_an_expression_or_a_function():
    model = nn.ModuleDict({"block": network(), "blocks": network(), "head": nn.Linear(16, 4)})
    for targets, expected in {
        ("block.0", "head"): ["block.0", "head"],
        ("0",): ["block.0", "blocks.0"],
        r"block.*\.2": ["block.2", "blocks.2"],
        (lambda name, layer: layer.out_features == 4): ["head"],
    }.items():
        chosen = list(targets) if isinstance(targets, tuple) else targets
        copied = copy.deepcopy(model)
        assert list(adapters.add(copied, chosen)) == expected
        assert [name for name, module in copied.named_modules() if isinstance(module, Adapted)] == expected


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["0", "c_attn"], r"'c_attn' matches no layer that can be adapted; there are \*\.0, \*\.2"),
        ("0", r"'0' matches no layer .* there are \*\.0, \*\.2"),
        ([], "'an empty list' matches no layer"),
        (["1"], "'1' matches no layer"),
        (lambda name, layer: False, "'<lambda>' matches no layer"),
    ],
)
def test_targets_that_match_nothing(targets, message):
    model = nn.Sequential(network(), network())
    before = state(model)
    with pytest.raises(ValueError, match=message):
        adapters.add(model, targets)
    assert_unchanged(model, before)


def test_a_model_without_layers():
    with pytest.raises(ValueError, match="this model has none"):
        adapters.add(nn.Linear(4, 4), ["weight"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "a.b"}, "name must be a word without dots .* got 'a.b'"),
        ({"name": ""}, "got ''"),
        ({"name": "keys"}, "got 'keys'"),
        ({"where": "middle"}, r"where must be one of \['input', 'output'\], got 'middle'"),
        ({"schedule": "monarch"}, "schedule must be one of .* got 'monarch'"),
        ({"schedule": Schedule.butterfly(16)}, "2: the layer has the width 32, its schedule has 16"),
        ({"stages": -1}, "stages must be an integer of at least 0, got -1"),
    ],
)
def test_options_that_do_not_exist(options, message):
    model = network()
    with pytest.raises(ValueError, match=message):
        adapters.add(model, ["0", "2"], **options)
    assert not any(isinstance(module, Adapted) for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_what_was_added_prints_as_a_table():
    model = network()
    added = adapters.add(model, ["0", "2"], stages=3, scale=True)
    assert repr(added).splitlines() == [
        "layer  width  stages  where            parameters",
        "0      16     3       input and scale  40",
        "2      32     3       input and scale  80",
        "in all: 120 of 1,192 parameters (10.07%)",
    ]


def test_everything_else_is_frozen_but_what_is_to_be_kept():
    def trainable(**options):
        model = nn.ModuleDict({"body": network(), "base": nn.Linear(16, 16), "norm": nn.LayerNorm(16)})
        adapters.add(model, ["body.0", "base"], **options)
        return {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    own = {"body.0.rotations.default.angles", "base.rotations.default.angles"}
    assert trainable() == own
    assert trainable(keep_trainable=["norm"]) == own | {"norm.weight", "norm.bias"}
    assert trainable(keep_trainable=["base.bias"]) == own | {"base.base.bias"}
    assert trainable(keep_trainable=lambda name, parameter: name == "body.0.bias") == own | {"body.0.base.bias"}


def test_a_shared_layer_is_adapted_once_and_everywhere():
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    added = adapters.add(model, ".*")
    assert list(added) == ["0"]
    assert model[0] is model[2]
    adapters.remove(model)
    assert model[0] is layer
    assert model[2] is layer


def test_layers_that_their_module_does_not_call_are_left_alone():
    for attention in (nn.MultiheadAttention(16, 2), SPMMultiheadAttention(16, 2)):
        with pytest.raises(ValueError, match="matches no layer"):
            adapters.add(nn.Sequential(attention), ["out_proj"])


def test_the_fast_path_of_torchs_encoder_does_not_skip_adapters():
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        before = model(x)
        adapters.add(model, ["linear1"])
        torch.testing.assert_close(model(x), before)
        assert not torch.allclose(turn(model)(x), before)


def test_what_is_not_found_is_looked_up_in_the_layer():
    model = turned()
    assert model[0].weight is model[0].base.weight
    assert model[0].in_features == 16
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'scales'"):
        _ = model[0].scales


def test_several_adapters():
    model, x = network(), torch.randn(3, 16)
    plain = model(x)
    adapters.add(model, ["0", "2"], name="a")
    turn(model, "a")
    with_a = model(x)
    adapters.add(model, ["2"], name="b", where="output", stages=2)
    turn(model, "b")
    with_b = model(x)
    assert adapters.names(model) == ["a", "b"]
    assert len(adapters.parameters(model, "a")) == 2
    assert len(adapters.parameters(model, "b")) == 1
    assert [parameter.requires_grad for parameter in adapters.parameters(model, "a")] == [False, False]

    adapters.use(model, "a")
    assert torch.equal(model(x), with_a)
    assert [parameter.requires_grad for parameter in adapters.parameters(model, "b")] == [False]
    adapters.use(model, None)
    assert torch.equal(model(x), plain)
    adapters.use(model, "b")
    with adapters.off(model):
        assert torch.equal(model(x), plain)
    assert torch.equal(model(x), with_b)

    adapters.remove(model, "b")
    assert torch.equal(model(x), plain)
    assert adapters.names(model) == ["a"]
    adapters.use(model, "a")
    assert torch.equal(model(x), with_a)
    adapters.remove(model, "a")
    assert all(type(layer) is nn.Linear for layer in (model[0], model[2]))
    assert torch.equal(model(x), plain)


def test_off_ends_with_an_error_too():
    model, x = turned(), torch.randn(3, 16)
    y = model(x)
    with pytest.raises(KeyError), adapters.off(model):
        raise KeyError
    assert torch.equal(model(x), y)


def test_names_that_do_not_exist_or_are_taken():
    model = turned()
    for function in (adapters.use, adapters.remove, adapters.parameters, adapters.merge_, adapters.unmerge_):
        with pytest.raises(ValueError, match=r"there is no adapter 'poems'; this model has \['default'\]"):
            function(model, "poems")
    with pytest.raises(ValueError, match="has an adapter 'default' already"):
        adapters.add(model, ["0"])
    with pytest.raises(ValueError, match="this model has none"):
        adapters.use(network(), "poems")
