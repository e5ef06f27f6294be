"""Matrices as products of stages."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pairmix.factorisation import tall
from pairmix.factorisation.stages import CAREFUL, EXACT, Limits, peeled
from pairmix.pairings import butterfly_depth
from pairmix.schedule import Schedule

__all__ = ["CAREFUL", "EXACT", "Factors", "Limits", "factorise"]


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

    For a square matrix that is a product of the butterfly's fewest stages, for even n, it is exact, and for a tall one
    whose height is a multiple of its width.
    """
    matrix = matrix.double()
    order = torch.from_numpy(schedule.order.copy()).long()
    if matrix.shape[0] >= matrix.shape[1]:
        unfolded = _unfolded(matrix, schedule.n)
        coeffs, d_in = _tall(unfolded, order) or peeled(unfolded, order, limits)
        return _balanced(coeffs, d_in, torch.ones_like(d_in))
    # Transposed, the stages come in the opposite order, and tile and fold change places.
    coeffs, d_out = peeled(_unfolded(matrix.T, schedule.n), order.flip(0), limits)
    return _balanced(coeffs.flip(0)[:, [0, 2, 1, 3]], torch.ones_like(d_out), d_out)


def _tall(matrix: Tensor, order: Tensor) -> tuple[Tensor, Tensor] | None:
    """A tall matrix by the fewest stages of a butterfly, if it is their product; further ones are the identity."""
    found = tall.peeled_tall(matrix, order[: butterfly_depth(len(matrix))])
    if found is None:
        return None
    coeffs, diagonal = found
    identity = coeffs.new_tensor([1.0, 0.0, 0.0, 1.0])[:, None].expand(len(order) - len(coeffs), 4, coeffs.shape[-1])
    return torch.cat([coeffs, identity]), diagonal


def _unfolded(matrix: Tensor, n: int) -> Tensor:
    """`[n, in]`, whose rows `fold` sums to those of the matrix: each is shared among the rows that it is the sum of."""
    outputs = torch.arange(n) % matrix.shape[0]
    return matrix[outputs] / torch.bincount(outputs)[outputs, None]


def _balanced(coeffs: Tensor, d_in: Tensor, d_out: Tensor) -> Factors:
    """The same product, with diagonals of one size."""
    sizes = [diagonal.square().mean().sqrt() for diagonal in (d_in, d_out)]
    ratio = (sizes[0] / sizes[1]).sqrt() if all(size > 0 for size in sizes) else torch.ones(())
    return Factors(coeffs, d_in / ratio, d_out * ratio)
