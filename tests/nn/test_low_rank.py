"""A low-rank map beside the mixing: `y = SPM(x) + up (down x)`."""

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import oracle
from pairmix import SPMLinear, functional
from pairmix.functional import add_low_rank

BLOCKS = ["general", "rotation"]


def randomised(*args, **kwargs):
    layer = SPMLinear(*args, **kwargs)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def with_gradients(output, leaves):
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return [output, *torch.autograd.grad((output * weights).sum(), leaves)]


def by_parts(layer, x, dtype):
    """The same layer without the low-rank map, by the reference, and products of matrices."""
    twin = copy.deepcopy(layer).to(dtype)
    x = x.detach().to(dtype).requires_grad_()
    plain = {**twin.operator(), "impl": "reference", "maps": twin.maps, "out_features": twin.out_features}
    down, up = plain.pop("down"), plain.pop("up")
    front = [(down, up)] if twin.maps is None else list(zip(down, up, strict=True))
    y = functional.spm(x, **plain) + torch.cat([x @ inner.T @ outer.T for inner, outer in front], -1)
    return with_gradients(y, [x, *twin.parameters()])


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("maps", [None, 1, 3])
@pytest.mark.parametrize(
    ("in_features", "out_features", "rank"), [(8, 8, 2), (7, 7, 1), (1, 1, 3), (3, 12, 4), (13, 5, 2)]
)
@pytest.mark.parametrize("leading", [(5,), (), (2, 3), (0,)], ids=str)
def test_output_and_gradients(in_features, out_features, rank, maps, block, leading):
    layer = randomised(in_features, out_features, rank=rank, maps=maps, block=block)
    x = torch.randn(*leading, in_features, requires_grad=True)
    oracle.assert_agrees(with_gradients(layer(x), [x, *layer.parameters()]), lambda dtype: by_parts(layer, x, dtype))


@pytest.mark.parametrize("maps", [None, 2])
def test_to_dense_is_the_layer(maps):
    layer, x = randomised(6, 9, rank=2, maps=maps), torch.randn(4, 6)
    oracle.assert_agrees(
        layer(x),
        lambda dtype: x.to(dtype) @ copy.deepcopy(layer).to(dtype).to_dense().T + layer.bias.to(dtype).flatten(),
    )


@pytest.mark.parametrize("maps", [None, 2])
def test_second_derivatives(maps):
    layer = randomised(5, 3, rank=2, maps=maps, dtype=torch.float64)
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    y = layer(x).detach().requires_grad_()
    assert gradcheck(add_low_rank, (y, x, layer.down, layer.up))
    assert gradgradcheck(add_low_rank, (y, x, layer.down, layer.up))
    assert gradgradcheck(layer, (x,))


def test_it_starts_without_it():
    torch.manual_seed(0)
    layer = SPMLinear(16, 8, rank=3)
    assert not layer.up.any()
    assert layer.down.detach().std() == pytest.approx(16**-0.5, rel=0.5)
    x = torch.randn(4, 16)
    layer(x).square().sum().backward()
    assert layer.up.grad.abs().min() > 0  # it learns from the first step on


def test_function_and_layer_are_one():
    layer, x = randomised(6, 6, rank=2), torch.randn(4, 6)
    assert functional.spm(x, **layer.operator()).equal(layer(x))


@pytest.mark.parametrize("maps", [None, 2])
def test_vmap_compile_and_autocast(maps):
    layer, x = randomised(8, 8, rank=2, maps=maps), torch.randn(5, 8)
    expected = layer(x)
    torch.testing.assert_close(torch.vmap(layer)(x), expected)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(x)
    assert half.dtype == torch.bfloat16
    # Two products and a sum, rounded to eight bits each, of numbers as large as these.
    allowed = 8 * torch.finfo(torch.bfloat16).eps * expected.abs().max()
    assert (half - expected).abs().max() < allowed


def test_its_state():
    layer, file = randomised(8, 8, rank=2), io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = SPMLinear(8, 8, rank=2)
    other.load_state_dict(torch.load(file))
    assert other.to_dense().equal(layer.to_dense())
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"down", "up"'):
        SPMLinear(8, 8).load_state_dict(layer.state_dict())
    with pytest.raises(RuntimeError, match=r'Missing key.*"down", "up"'):
        layer.load_state_dict(SPMLinear(8, 8).state_dict())
    assert "rank=2" in repr(layer)


@pytest.mark.parametrize(
    ("down", "up", "message"),
    [
        ((2, 5), (4, 2), r"down and up of shapes \(2, 5\) and \(4, 2\) do not map 4 features onto 4"),
        ((2, 4), (5, 2), r"\(2, 4\) and \(5, 2\) do not map 4 features onto 4"),
        ((2, 4), (4, 3), r"\(2, 4\) and \(4, 3\)"),
        ((2, 2, 4), (4, 2), r"\(2, 2, 4\) and \(4, 2\)"),
        ((2, 4), None, "down and up belong together, got down alone"),
        (None, (4, 2), "down and up belong together, got up alone"),
    ],
)
def test_shapes_that_do_not_fit(down, up, message):
    x = torch.randn(3, 4)
    down, up = (None if shape is None else torch.zeros(shape) for shape in (down, up))
    with pytest.raises(ValueError, match=message):
        functional.spm(x, **{**SPMLinear(4, 4).operator(), "down": down, "up": up})
    assert partial(add_low_rank, x, x)(torch.zeros(2, 4), torch.zeros(4, 2)).equal(x)
