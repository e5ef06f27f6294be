"""A feed-forward block in the compiled kernels: hands them the addresses of tensors."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from pairmix.ops import cpu
from pairmix.ops.feed_forward import ACTIVATIONS
from pairmix.ops.registry import Map, Parameters, Tensors

with suppress(ImportError):  # `cpu.why_not` tells
    import pairmix._kernels as _kernels

_NUMBERS = {name: number for number, name in enumerate(ACTIVATIONS)}


def forward(x: Tensor, up: Map, down: Map, activation: str, out_features: int) -> Tensor | None:
    """As `feed_forward.in_parts`; None where the two maps are walked in different ways."""
    wide, narrow = cpu.plan_of(up.schedule), cpu.plan_of(down.schedule)
    maps, threads = len(up.parameters.blocks), torch.get_num_threads()
    y = _kernels.feed_forward(
        wide, narrow, _rows(x), *_tensors(up, down), out_features, maps, _NUMBERS[activation], threads
    )
    return None if y is None else y.view(*x.shape[:-1], out_features)


def backward(
    grad: Tensor,
    x: Tensor,
    up: Map,
    down: Map,
    activation: str,
    needs_x: bool,
    needs_up: Parameters[bool],
    needs_down: Parameters[bool],
) -> tuple[Tensor | None, Tensors, Tensors] | None:
    """As `feed_forward.in_parts_backward`; None as in `forward`."""
    wide, narrow = cpu.plan_of(up.schedule), cpu.plan_of(down.schedule)
    needs, maps, threads = (needs_x, *needs_up, *needs_down), len(up.parameters.blocks), torch.get_num_threads()
    gradients = _kernels.feed_forward_backward(
        wide, narrow, _rows(grad), _rows(x), *_tensors(up, down), maps, _NUMBERS[activation], needs, threads
    )
    if gradients is None:
        return None
    gx, *others = gradients
    of_down = (None if gradient is None else gradient[None] for gradient in others[5:])
    return None if gx is None else gx.view(x.shape), Parameters(*others[:5]), Parameters(*of_down)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _tensors(up: Map, down: Map) -> tuple[Tensors, Tensors, tuple[bool, bool]]:
    """Of the maps up with their leading dimension, of the one down without it; and which blocks are rotations."""
    one = Parameters(*(None if tensor is None else tensor[0] for tensor in cpu.contiguous(down.parameters)))
    return cpu.contiguous(up.parameters), one, (up.block == "rotation", down.block == "rotation")
