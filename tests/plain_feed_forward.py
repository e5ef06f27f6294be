"""Feed-forward blocks part by part, and how far rounding may lead from that."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from pairmix import SPMFeedForward
from pairmix.functional import activated

Compute = Callable[[SPMFeedForward, Tensor], Tensor]


def in_parts(block: SPMFeedForward, x: Tensor) -> Tensor:
    y: Tensor = block.down(activated(block.up(x), block.activation, block.up.maps))
    return y


def as_a_whole(block: SPMFeedForward, x: Tensor) -> Tensor:
    y: Tensor = block(x)
    return y


def outputs(compute: Compute, block: SPMFeedForward, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """y, and the gradients of x and of all parameters that require one."""
    wanted = {"x": x.detach().requires_grad_()}
    y = compute(block, wanted["x"])
    wanted |= {name: parameter for name, parameter in block.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(y, list(wanted.values()), grad.to(y))
    return {"output": y.detach(), **dict(zip(wanted, gradients, strict=True))}


def assert_as_close_as_its_parts(block: SPMFeedForward, x: Tensor, grad: Tensor) -> None:
    """To what the parts are in float64: not much further from it than the parts are in this precision.

    How far they are in float64 is what they are in float32, in its roundings. Where an activation vanishes, float64 has
    rounded numbers as large as its input, too.
    """
    rough = torch.float32 if x.dtype == torch.float64 else x.dtype
    exact, parts = (
        outputs(in_parts, copy.deepcopy(block).to(dtype), x.to(dtype), grad.to(dtype))
        for dtype in (torch.float64, rough)
    )
    whole = outputs(as_a_whole, block, x, grad)
    eps, finest = torch.finfo(x.dtype).eps, torch.finfo(torch.float64).eps
    input_size = x.detach().double().abs().max().item() if x.numel() else 0.0
    for name, expected in exact.items():
        assert whole[name].shape == expected.shape
        if not expected.numel():
            continue
        size = expected.abs().max().item()
        usual, off = ((found[name].double() - expected).abs().max().item() for found in (parts, whole))
        usual *= eps / torch.finfo(rough).eps
        allowed = 4 * usual + 32 * (eps * size + finest * input_size**2)
        assert off <= allowed, f"{name} is off by {off:.1e}, its parts by {usual:.1e}; allowed are {allowed:.1e}"
