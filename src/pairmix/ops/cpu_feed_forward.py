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


def direct(x: Tensor, up: Map, down: Map, activation: str, out_features: int) -> Tensor | None:
    """As `forward`, for ordinary tensors that need no conversion, and parameters as a module has them; else None."""
    rotations = (up.block == "rotation", down.block == "rotation")
    wide, narrow = cpu.plan_of(up.schedule), cpu.plan_of(down.schedule)
    rest = (out_features, _maps(up), _NUMBERS[activation], torch.get_num_threads(), True)
    return _kernels.feed_forward(wide, narrow, x, up.parameters, down.parameters, rotations, *rest)


def forward(x: Tensor, up: Map, down: Map, activation: str, out_features: int) -> Tensor | None:
    """As `feed_forward.in_parts`; None where the two maps are walked in different ways."""
    wide, narrow = cpu.plan_of(up.schedule), cpu.plan_of(down.schedule)
    ups, downs, rotations = _tensors(up, down)
    rest = (out_features, _maps(up), _NUMBERS[activation], torch.get_num_threads(), False)
    y = _kernels.feed_forward(wide, narrow, _rows(x), ups, downs, rotations, *rest)
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
    """As `feed_forward.in_parts_backward`; None as in `forward`. Parameters may be as a module has them here, too."""
    wide, narrow = cpu.plan_of(up.schedule), cpu.plan_of(down.schedule)
    needs, threads = (needs_x, *needs_up, *needs_down), torch.get_num_threads()
    has_front = _maps(down) is not None
    gradients = _kernels.feed_forward_backward(
        wide, narrow, _rows(grad), _rows(x), *_tensors(up, down), _maps(up), _NUMBERS[activation], needs, threads
    )
    if gradients is None:
        return None
    gx, *others = gradients
    of_down = (None if gradient is None else gradient[None] if has_front else gradient for gradient in others[5:])
    return None if gx is None else gx.view(x.shape), Parameters(*others[:5]), Parameters(*of_down)


def _maps(given: Map) -> int | None:
    """How many there are; None for one without the leading dimension."""
    blocks: Tensor = given.parameters.blocks
    return blocks.shape[0] if blocks.dim() > (2 if given.block == "rotation" else 3) else None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _tensors(up: Map, down: Map) -> tuple[Tensors, Tensors, tuple[bool, bool]]:
    """The parameters of both, of the map down without the leading dimension; and which blocks are rotations."""
    one = cpu.contiguous(down.parameters)
    if _maps(down) is not None:
        one = Parameters(*(None if tensor is None else tensor[0] for tensor in one))
    return cpu.contiguous(up.parameters), one, (up.block == "rotation", down.block == "rotation")
