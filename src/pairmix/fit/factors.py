"""Matrices as products of stages."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pairmix.fit import tall, wide
from pairmix.fit.stages import EXACT, Limits, peeled
from pairmix.pairings import butterfly_depth
from pairmix.schedule import Schedule


class Factors(NamedTuple):
    """The parameters of a layer with general blocks.

    Attributes:
        coeffs: `[L, 4, n // 2]`.
        d_in: `[n]`.
        d_out: `[n]`.
    """

    coeffs: Tensor
    d_in: Tensor
    d_out: Tensor


@torch.no_grad()
def factorise(matrix: Tensor, schedule: Schedule, limits: Limits = EXACT) -> Factors:
    """Parameters with which an SPM layer of this schedule is a matrix `[out, in]`, or near it.

    It is exact for products of the butterfly's fewest stages, if they are square with even n, or if one of the sizes is
    a multiple of the other and most of its factors are two.
    """
    matrix = matrix.double()
    order = torch.from_numpy(schedule.order.copy()).long()
    fewest = order[: butterfly_depth(schedule.n)]
    if matrix.shape[0] >= matrix.shape[1]:
        unfolded = _unfolded(matrix, schedule.n)
        coeffs, d_in = tall.peeled_tall(unfolded, fewest) or peeled(unfolded, order, limits)
        d_out = torch.ones_like(d_in)
    else:  # transposed, the stages come in the opposite order, and tile and fold change places
        unfolded = _unfolded(matrix.T, schedule.n)
        coeffs, d_out = wide.peeled_wide(unfolded, fewest.flip(0)) or peeled(unfolded, order.flip(0), limits)
        coeffs, d_in = coeffs.flip(0)[:, [0, 2, 1, 3]], torch.ones_like(d_out)
    identity = coeffs.new_tensor([1.0, 0.0, 0.0, 1.0])[:, None]
    more = identity.expand(len(order) - len(coeffs), 4, coeffs.shape[-1])
    return _balanced(torch.cat([coeffs, more]), d_in, d_out)


def _unfolded(matrix: Tensor, n: int) -> Tensor:
    """`[n, in]`, whose rows `fold` sums to those of the matrix: each is shared among the rows that it is the sum of."""
    outputs = torch.arange(n) % matrix.shape[0]
    return matrix[outputs] / torch.bincount(outputs)[outputs, None]


def _balanced(coeffs: Tensor, d_in: Tensor, d_out: Tensor) -> Factors:
    """The same product, with diagonals of one size."""
    sizes = [diagonal.square().mean().sqrt() for diagonal in (d_in, d_out)]
    ratio = (sizes[0] / sizes[1]).sqrt() if all(size > 0 for size in sizes) else torch.ones(())
    return Factors(coeffs, d_in / ratio, d_out * ratio)
