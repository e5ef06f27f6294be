"""The operator as few plain operations of torch, for exporters that do not know `pairmix::spm`, such as ONNX's.

The coordinates are rows and the batch is inside, so that partners meet by moving whole rows:

    z_l = own_l * z_(l-1) + other_l * swapped(z_(l-1))

where `own` holds a and d of every pair and `other` b and c, at the places of its two members. The coordinate that is
left over is its own partner. Unlike the reference it knows the schedule itself: its numbers are constants of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pairmix.ops import reference
from pairmix.ops.registry import Tensors
from pairmix.schedule import Schedule


def decomposed(x: Tensor, parameters: Tensors, schedule: Schedule, block: str, out_features: int) -> Tensor:
    """As `reference.forward`, for a schedule whose numbers are known."""
    blocks, d_in, d_out, bias, residual_scale = parameters
    dtype = torch.promote_types(x.dtype, torch.float32)
    maps, n = blocks.shape[0], schedule.n
    z = reference.tile(x.reshape(-1, x.shape[-1]).to(dtype), n).T
    z = z.expand(maps, *z.shape) if d_in is None else z * d_in[..., None]
    own, other = _coefficients(blocks.to(dtype), residual_scale, schedule, block)
    for l, partners in enumerate(_partners(schedule)):
        z = own[:, l] * z + other[:, l] * _swapped(z, partners)
    y = z.permute(2, 0, 1)
    y = reference.fold(y if d_out is None else y * d_out, out_features)
    if bias is not None:
        y = y + bias
    return y.reshape(*x.shape[:-1], maps * out_features).to(x.dtype)


def _coefficients(
    blocks: Tensor, residual_scale: Tensor | None, schedule: Schedule, block: str
) -> tuple[Tensor, Tensor]:
    """What every coordinate and its partner are multiplied by at every stage, `[M, L, n, 1]` each."""
    if block == "rotation":
        a, c = torch.cos(blocks), torch.sin(blocks)
        b, d = -c, a
    else:
        a, b, c, d = blocks.unbind(2)
    own, other = [a, d], [b, c]
    if schedule.n % 2:
        ones = a.new_ones(a.shape[:2]) if residual_scale is None else residual_scale.to(a.dtype)
        own.append(ones[..., None])
        other.append(a.new_zeros(*a.shape[:2], 1))
    n, stages = schedule.n, schedule.stages
    starts = n * np.arange(stages)[:, None]
    places = _constant((np.argsort(schedule.order, axis=1) + starts).ravel(), blocks.device)

    def placed(parts: list[Tensor]) -> Tensor:
        flat = torch.cat(parts, dim=-1).flatten(1).index_select(1, places)
        return flat.reshape(blocks.shape[0], stages, n, 1)

    return placed(own), placed(other)


def _partners(schedule: Schedule) -> Iterator[npt.NDArray[np.int64]]:
    """For every stage the partner of every coordinate."""
    for (first, second), residual in zip(schedule.pairs, schedule.residual, strict=True):
        partners = np.full(schedule.n, residual, np.int64)
        partners[first], partners[second] = second, first
        yield partners


def _swapped(z: Tensor, partners: npt.NDArray[np.int64]) -> Tensor:
    """For every row of z, `[M, n, rows]`, that of its partner."""
    n, stride = len(partners), int(partners[0])
    if stride and n % (2 * stride) == 0:
        halves = np.arange(n).reshape(-1, 2, stride)
        if (partners == halves[:, ::-1].ravel()).all():  # a few large blocks move faster than many rows
            blocks = z.reshape(z.shape[0] * n // (2 * stride), 2, -1)
            return blocks.index_select(1, _constant(np.array([1, 0]), z.device)).reshape(z.shape)
    return z.index_select(1, _constant(partners, z.device))


def _constant(numbers: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.tensor(numbers.tolist(), dtype=torch.int64, device=device)
