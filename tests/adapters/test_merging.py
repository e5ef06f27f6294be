"""Rotations folded into weights, and taken out again."""

import copy

import pytest
import torch
from torch import nn

import oracle
from adapted import LAYERS, SIZES, Quantised, assert_unchanged, matrix, state, turn, turned
from pairmix import adapters


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("where", ["input", "output"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("sizes", SIZES[:3], ids=str)
def test_merging_and_back(sizes, layer, where, scale, dtype):
    model = nn.Sequential(LAYERS[layer](*sizes)).to(dtype)
    adapters.add(model, ["0"], where=where, scale=scale, stages=5)
    turn(model)
    rotations = model[0].chain("default")
    nn.init.uniform_(rotations.scale, 0.5, 2) if scale else None
    before = model[0].weight.detach().clone()
    plain, mixing = (before.T if layer == "Conv1D" else before).double(), matrix(rotations)

    adapters.merge_(model)
    merged = model[0].weight.detach().T if layer == "Conv1D" else model[0].weight.detach()
    exact = plain @ mixing if where == "input" else mixing @ plain
    eps = 64 * torch.finfo(dtype).eps
    assert (merged.double() - exact).norm() <= eps * exact.norm()
    x = torch.randn(4, sizes[0], dtype=dtype)
    assert torch.equal(model(x), model[0].base(x))

    adapters.unmerge_(model)
    assert (model[0].weight.double() - before.double()).norm() <= (4 if scale else 1) * eps * before.double().norm()


def test_merging_computes_the_same():
    model, x = turned(scale=True), torch.randn(5, 16)

    def plain(dtype):
        with torch.no_grad():
            return copy.deepcopy(model).to(dtype)(x.to(dtype))

    merged = copy.deepcopy(model)
    adapters.merge_(merged)
    oracle.assert_agrees(merged(x), plain)
    plainer = copy.deepcopy(model)
    adapters.merge_(plainer, remove=True)
    assert [type(layer) for layer in plainer] == [nn.Linear, nn.GELU, nn.Linear]
    assert torch.equal(plainer(x), merged(x))


def test_what_cannot_be_done_while_an_adapter_is_merged(tmp_path):
    model = turned()
    adapters.save(model, tmp_path / "adapter.safetensors")
    with pytest.raises(RuntimeError, match="the adapter 'default' is not merged"):
        adapters.unmerge_(model)
    adapters.merge_(model)
    before = state(model)
    for change in (
        adapters.merge_,
        adapters.remove,
        lambda model: adapters.use(model, None),
        lambda model: adapters.off(model).__enter__(),
        lambda model: adapters.add(model, ["0"], name="other"),
        lambda model: adapters.load(model, tmp_path / "adapter.safetensors"),
    ):
        with pytest.raises(RuntimeError, match=r"'default' is merged into the weights: unmerge_\(model, 'default'\)"):
            change(model)
    assert_unchanged(model, before)
    adapters.save(model, tmp_path / "merged.safetensors")  # the same as before merging
    assert (tmp_path / "merged.safetensors").read_bytes() == (tmp_path / "adapter.safetensors").read_bytes()


def test_a_scale_of_zero_cannot_be_divided_out():
    model = turned(scale=True)
    with torch.no_grad():
        model[2].chain("default").scale[3] = 0
    adapters.merge_(model)
    before = state(model)
    with pytest.raises(ValueError, match="2: its scale of coordinate 3 is 0"):
        adapters.unmerge_(model)
    assert_unchanged(model, before)


def test_layers_without_a_float_weight_cannot_be_merged():
    model = nn.Sequential(nn.Linear(16, 16), Quantised(16, 16))
    adapters.add(model, ["0", "1"])
    before = state(model)
    with pytest.raises(ValueError, match=r"1 is a Quantised, which has no parameter `weight` of shape \(16, 16\)"):
        adapters.merge_(model)
    assert_unchanged(model, before)


def test_a_weight_that_is_read_elsewhere_cannot_be_merged():
    model = nn.ModuleDict({"table": nn.Embedding(11, 16), "head": nn.Linear(16, 11, bias=False)})
    model["head"].weight = model["table"].weight
    adapters.add(model, ["head"])
    with pytest.raises(ValueError, match=r"the weight of head is also read elsewhere, in table, head\.base"):
        adapters.merge_(model)


def test_merging_for_good_is_refused_while_there_are_others():
    model = turned()
    adapters.add(model, ["0"], name="other")
    with pytest.raises(ValueError, match=r"the adapters \['other'\] could not be told from it"):
        adapters.merge_(model, remove=True)
    adapters.merge_(model, "default")
    assert [layer.used for layer in (model[0], model[2])] == ["default", "default"]
