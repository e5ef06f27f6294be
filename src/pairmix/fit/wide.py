"""Wide matrices, transposed: a network of blocks that repeats its few inputs, and then a butterfly in each block.

The blocks are those of `tall.Split`, with the stages in the opposite order. The butterflies come last, and are found
exactly, as their rows share no columns. What is left are, for each position in the blocks, the m values that a network
makes of `in / g` inputs, each of which it reads r times. It has more parameters than there are such values, so there
are solutions, and damped Gauss-Newton steps find one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pairmix.fit.stages import peeled_off, product
from pairmix.fit.tall import Split, split

_STARTS, _STEPS = 5, 60
_SPREAD = 0.3
"""The standard deviation of the parameters to start from. From larger ones fewer starts lead to a solution."""
_TOLERANCE = 1e-9
"""The relative error with which a position is solved."""


def peeled_wide(matrix: Tensor, order: Tensor) -> tuple[Tensor, Tensor] | None:
    """As `stages.peeled`, for the transpose of a wide matrix and the opposite order; None for other schedules."""
    parts = split(order.flip(0), matrix.shape[1])
    if parts is None:
        return None
    coeffs = matrix.new_empty(len(order), 4, order.shape[1] // 2)
    coeffs[len(order) - parts.stages :], rows = peeled_off(matrix, order, parts.stages)
    positions = torch.arange(parts.size)
    values = rows.view(parts.blocks, parts.size, parts.segments, parts.size)[:, positions, :, positions]
    networks, diagonals = _networks(values, parts)
    coeffs[: len(order) - parts.stages] = networks.permute(1, 2, 3, 0).flatten(2)  # pairs by block and position
    return coeffs, diagonals.T.flatten()


def _networks(values: Tensor, parts: Split) -> tuple[Tensor, Tensor]:
    """Blocks `[g, stages, 4, m / 2]` and diagonals `[g, m]` that make these values, `[g, m, segments]`."""
    order = parts.network.flip(0)
    shape, count = (len(order), 4, parts.blocks // 2), 2 * order.numel()

    def made(parameters: Tensor) -> Tensor:
        return product(parameters[:count].view(shape), parameters[count:], order, parts.segments).flatten()

    sizes = values.flatten(1).norm(dim=1, keepdim=True).clamp(min=1e-300)
    wanted = values.flatten(1) / sizes
    generator = torch.Generator().manual_seed(0)  # the same in every run
    best, errors = wanted.new_zeros(len(wanted), count + parts.blocks), wanted.norm(dim=1)
    for _ in range(_STARTS):
        (unsolved,) = (errors > _TOLERANCE).nonzero(as_tuple=True)
        if not len(unsolved):
            break
        start = _SPREAD * torch.randn(len(unsolved), best.shape[1], generator=generator, dtype=values.dtype)
        found, left = _solved(made, start, wanted[unsolved])
        better = left < errors[unsolved]
        best[unsolved[better]], errors[unsolved[better]] = found[better], left[better]
    return best[:, :count].view(-1, *shape), best[:, count:] * sizes


def _solved(made: Callable[[Tensor], Tensor], start: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Parameters that make what is wanted, by steps of Levenberg and Marquardt, and the errors that are left."""
    values, jacobian = torch.func.vmap(made), torch.func.vmap(torch.func.jacrev(made))
    parameters, damping = start, wanted.new_ones(len(wanted), 1)
    difference = values(parameters) - wanted
    identity = torch.eye(wanted.shape[1], dtype=wanted.dtype)
    for _ in range(_STEPS):
        slopes = jacobian(parameters)
        damped = slopes @ slopes.mT + damping[..., None] * identity
        tried = parameters - (slopes.mT @ torch.linalg.solve(damped, difference[..., None])).squeeze(-1)
        after = values(tried) - wanted
        is_better = after.norm(dim=1, keepdim=True) < difference.norm(dim=1, keepdim=True)
        parameters, difference = torch.where(is_better, tried, parameters), torch.where(is_better, after, difference)
        damping = torch.where(is_better, damping / 5, damping * 4).clamp(1e-14, 1e6)
        if (difference.norm(dim=1) <= _TOLERANCE).all():
            break
    return parameters, difference.norm(dim=1)
