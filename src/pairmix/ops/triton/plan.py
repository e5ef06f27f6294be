"""How the kernels walk a schedule: in passes over tiles of coordinates.

A pass is a run of consecutive stages whose pairs stay inside sets of few coordinates. A tile holds some of these sets.
One program computes all stages of a pass for a tile of coordinates and a few rows, without leaving its registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int32]

WIDEST = 4096
"""As many coordinates a tile has at most. Up to this width a schedule of any kind is a single tile."""
NARROWEST = 1024
"""As many a tile of several has at least: fewer would read rows in pieces too short for the memory."""
DEEPEST = 16
"""As many stages a pass has at most: the kernels unroll them, and longer code takes longer to compile."""
PADDING = -1
"""Where a tile has no coordinate."""


@dataclass(frozen=True, eq=False)
class Pass:
    """Consecutive stages, and the tiles in which they are computed.

    Attributes:
        first: the number of its first stage.
        strides: for every stage how far apart the lanes of a pair are, if lane i meets lane i ^ stride in every tile
            and pairs are numbered in the order of their lanes; else 0.
        columns: int32 `[tiles, lanes]`, the coordinates in each tile, ascending.
        members: int32 `[stages, tiles, lanes]`, where in the stage's order the coordinate stands: the firsts of all
            pairs come first, then their seconds, then the residual.
        partners: int32 `[stages, tiles, lanes]`, the lane of the coordinate's partner; its own for the residual.
    """

    first: int
    strides: tuple[int, ...]
    columns: Indices
    members: Indices
    partners: Indices

    @property
    def last(self) -> int:
        """The number of the stage after its last one."""
        return self.first + len(self.strides)

    @property
    def lanes(self) -> int:
        """How many coordinates a tile has, with padding: a power of two."""
        return int(self.columns.shape[1])

    @property
    def tiles(self) -> int:
        """How many tiles there are."""
        return int(self.columns.shape[0])


def make_plan(order: Indices, widest: int = WIDEST, narrowest: int = NARROWEST) -> list[Pass]:
    """The fewest passes for this schedule, of the smallest tiles that need no more of them.

    Args:
        order: `Schedule.order`.
        widest: the largest size of a tile, a power of two.
        narrowest: the smallest size of a tile, unless a single one holds all coordinates.
    """
    stages, n = order.shape
    if n <= widest:
        parts = max(1, -(-stages // DEEPEST))
        ends = [part * stages // parts for part in range(parts + 1)]
        everything = np.zeros(n, np.int32)
        lanes = 1 << (n - 1).bit_length()
        return [_pass(order, first, last, everything, lanes) for first, last in pairwise(ends)]
    sizes = [size for size in (narrowest << k for k in range(widest.bit_length())) if size <= widest] or [widest]
    plans = [list(_runs(order, size)) for size in sizes]
    fewest = min(len(plan) for plan in plans)
    lanes, runs = next((size, plan) for size, plan in zip(sizes, plans, strict=True) if len(plan) == fewest)
    return [_pass(order, first, last, components, lanes) for first, last, components in runs]


def _runs(order: Indices, lanes: int) -> Iterator[tuple[int, int, Indices]]:
    """The stages from first to last that close over at most so many coordinates, and the set of each coordinate."""
    stages, n = order.shape
    first, alone = 0, np.arange(n, dtype=np.int32)
    components = alone
    for l in range(stages):
        merged = _merged(components, order[l])
        if l > first and (np.bincount(merged).max() > lanes or l - first == DEEPEST):
            yield first, l, components
            first, merged = l, _merged(alone, order[l])
        components = merged
    yield first, stages, components


def _merged(components: Indices, stage: Indices) -> Indices:
    """The sets after this stage's pairs have met, each named by its lowest coordinate."""
    half = len(stage) // 2
    pairs = stage[: 2 * half].reshape(2, half)
    while True:
        firsts, seconds = components[pairs]
        lowest = np.arange(len(stage), dtype=np.int32)
        np.minimum.at(lowest, np.maximum(firsts, seconds), np.minimum(firsts, seconds))
        while (lowest[lowest] != lowest).any():
            lowest = lowest[lowest]
        merged = lowest[components]
        if (merged == components).all():
            return merged
        components = merged


def _pass(order: Indices, first: int, last: int, components: Indices, lanes: int) -> Pass:
    stages, n = order[first:last], len(components)
    half = n // 2
    columns = _packed(components, lanes)
    is_real = columns != PADDING
    lane_of = np.zeros(n, np.int32)
    lane_of[columns[is_real]] = np.nonzero(is_real)[1]
    members = np.full((len(stages), *columns.shape), PADDING, np.int32)
    partners = np.zeros_like(members)
    for l, stage in enumerate(stages):
        place, partner = np.empty_like(stage), np.arange(n, dtype=np.int32)
        place[stage] = np.arange(n, dtype=np.int32)
        partner[stage[:half]], partner[stage[half : 2 * half]] = stage[half : 2 * half], stage[:half]
        members[l, is_real] = place[columns[is_real]]
        partners[l, is_real] = lane_of[partner[columns[is_real]]]
    strides = tuple(_stride(*of_stage, n) for of_stage in zip(members, partners, strict=True))
    return Pass(first, strides, columns, members, partners)


def _packed(components: Indices, lanes: int) -> Indices:
    """Tiles of so many lanes: sets of neighbouring coordinates together, so that rows are read in long pieces."""
    sizes = np.bincount(components)
    tile_of, tile, free = np.zeros(len(sizes), np.int32), 0, lanes
    for lowest in np.flatnonzero(sizes):
        if sizes[lowest] > free:
            tile, free = tile + 1, lanes
        tile_of[lowest], free = tile, free - sizes[lowest]
    tiles = tile_of[components]
    columns = np.full((tile + 1, lanes), PADDING, np.int32)
    for number in range(tile + 1):
        inside = np.flatnonzero(tiles == number)
        columns[number, : len(inside)] = inside
    return columns


def _stride(members: Indices, partners: Indices, n: int) -> int:
    """How far apart the lanes of this stage's pairs are; 0 if that is not the same for all, or their order is not."""
    stride, lanes, half = int(partners[0, 0]), members.shape[1], n // 2
    if stride == 0 or stride & (stride - 1):
        return 0
    lane = np.arange(lanes)
    is_low = lane & stride == 0
    is_pair, is_residual = (members >= 0) & (members < 2 * half), members == 2 * half
    fits = (members == PADDING) | (is_pair & (partners == lane ^ stride) & ((members < half) == is_low))
    fits |= is_residual & is_low & (members[:, lane ^ stride] == PADDING)
    if not fits.all():
        return 0
    if len(members) > 1:
        return stride
    # A single tile reads no table: the pairs must be numbered in the order of their lanes.
    number = lane // (2 * stride) * stride + lane % stride
    is_first = members[0, is_low & (members[0] < half) & (members[0] >= 0)]
    expected = number[is_low][: len(is_first)]
    return stride if (is_first == expected).all() and _residual_is_last(members[0, is_low], half) else 0


def _residual_is_last(low: Indices, half: int) -> bool:
    """Whether the residual has the number after the last pair's among the low lanes."""
    where = np.flatnonzero(low == 2 * half)
    return len(where) == 0 or int(where[0]) == half
