"""A matrix as a product of stages, found stage by stage from the rows and columns that each can reach.

The rows p and q of a matrix that ends with a stage are combinations of two rows that the stages before it made. Each of
those depends on some columns only. On the columns of the first alone both are multiples of it, so the best direction
there is a singular vector of two rows; likewise for the second; where both have columns the two are then solved for.
With a butterfly of a power of two no column belongs to both, and this is the known factorisation by singular vectors of
blocks of rank one, in O(n^2 log n). What is no product of such stages is projected onto one, in every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_PAIRS_AT_ONCE = 64
"""Their rows should fit into the cache."""


class Limits(NamedTuple):
    """Which blocks are taken from the directions of their rows, if these share columns; the others are the identity.

    Attributes:
        determinant: the least, for columns of length one. What a block solves for grows by its inverse.
        overlap: of the columns that two rows reach, the largest part that both do. Beyond it directions say little.
    """

    determinant: float
    overlap: float


EXACT = Limits(determinant=1e-6, overlap=1.0)
CAREFUL = Limits(determinant=0.2, overlap=0.75)


def peeled(matrix: Tensor, order: Tensor, limits: Limits = EXACT) -> tuple[Tensor, Tensor]:
    """The blocks of all stages, and the diagonal that is left of a matrix `[n, in]`."""
    coeffs, rows = peeled_off(matrix, order, len(order), limits)
    coordinates = torch.arange(len(rows))
    return coeffs, rows[coordinates, coordinates % matrix.shape[1]]


def peeled_off(matrix: Tensor, order: Tensor, count: int, limits: Limits = EXACT) -> tuple[Tensor, Tensor]:
    """The blocks of the last stages, as many as `count`, and what the stages before them make, `[n, in]`."""
    rows, (stages, n) = matrix.clone(), order.shape
    half = n // 2
    coeffs = rows.new_empty(stages, 4, half)
    reached = list(_reached(order, torch.arange(n) % matrix.shape[1], matrix.shape[1]))
    for stage in reversed(range(stages - count, stages)):
        first, second = order[stage, : 2 * half].view(2, half)
        for some in torch.arange(half).split(_PAIRS_AT_ONCE):
            pairs = first[some], second[some]
            coeffs[stage][:, some] = _peel_(rows, pairs, [reached[stage][side] for side in pairs], limits)
    return coeffs[stages - count :], rows


def _reached(order: Tensor, columns: Tensor, size: int) -> Iterator[Tensor]:
    """Before every stage, which columns each row depends on: bool `[n, in]`."""
    reached = torch.zeros(len(columns), size, dtype=torch.bool)
    reached[torch.arange(len(columns)), columns] = True
    half = len(columns) // 2
    for stage in order:
        yield reached
        first, second = stage[: 2 * half].view(2, half)
        both = reached[first] | reached[second]
        reached = reached.clone()
        reached[first], reached[second] = both, both


def _peel_(rows: Tensor, pairs: tuple[Tensor, Tensor], reached: list[Tensor], limits: Limits) -> Tensor:
    """Undo a stage for some pairs of rows, in place. Returns its blocks, `[4, pairs]`."""
    first, second = pairs
    p, q, of_p, of_q = rows[first], rows[second], *reached
    both = of_p & of_q
    a, c = _direction(p, q, of_p & ~of_q)
    d, minus_b = _direction(q, -p, of_q & ~of_p)
    b, determinant = -minus_b, a * d + minus_b * c
    shared = both.sum(1)
    overlap = shared / (of_p | of_q).sum(1).clamp(min=1)
    unclear = (shared > 0) & ((determinant.abs() < limits.determinant) | (overlap > limits.overlap))
    a, d, determinant = (torch.where(unclear, 1.0, entry) for entry in (a, d, determinant))
    b, c = (torch.where(unclear, 0.0, entry) for entry in (b, c))
    blocks = torch.stack([a, b, c, d])
    a, b, c, d, determinant = (entry[:, None] for entry in (a, b, c, d, determinant))
    alone_p, alone_q = (a * p + c * q) * of_p, (b * p + d * q) * of_q
    rows[first] = torch.where(both, (d * p - b * q) / determinant, alone_p)
    rows[second] = torch.where(both, (a * q - c * p) / determinant, alone_q)
    return blocks


def _direction(p: Tensor, q: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the direction that two rows have most of on some columns; (1, 0) if they have nothing."""
    p, q = p * columns, q * columns
    angle = torch.atan2(2 * (p * q).sum(1), (p * p).sum(1) - (q * q).sum(1)) / 2
    return angle.cos(), angle.sin()


def product(coeffs: Tensor, diagonal: Tensor, order: Tensor, columns: int) -> Tensor:
    """The matrix `[n, columns]` of these stages and of a diagonal before them, whose inputs are repeated."""
    n = order.shape[1]
    rows = diagonal.new_zeros(n, columns)
    rows[torch.arange(n), torch.arange(n) % columns] = diagonal
    for (a, b, c, d), stage in zip(coeffs, order, strict=True):
        first, second = stage[: n - n % 2].view(2, -1)
        p, q = rows[first], rows[second]
        rows[first], rows[second] = a[:, None] * p + b[:, None] * q, c[:, None] * p + d[:, None] * q
    return rows
