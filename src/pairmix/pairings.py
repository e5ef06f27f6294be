"""The stages of each kind of schedule, as permutations: the firsts of all pairs, their seconds, the residual."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int32]


def butterfly_depth(n: int) -> int:
    """The fewest stages with which a butterfly reaches everything."""
    # For odd n the coordinate left over at the first stage loses one doubling, so one stage more is the minimum.
    return (n - 1).bit_length() + (n % 2 and n > 1)


def butterfly_stages(n: int) -> list[Indices]:
    """Strides 1, 2, 4, ... inside blocks, then a perfect shuffle of the blocks.

    Write the even width as m blocks of g, with g the largest power of two that leaves m even. The strides mix
    each block in log2 g stages. Then blocks meet as in a perfect shuffle: the block at place j meets the one at
    j + m/2, and the two are read out at the places 2j and 2j + 1, so that the places reached double with every
    stage and ceil(log2 m) stages suffice. Large g is what a vectorised kernel likes: whole vectors meet.

    An odd width is the even one above it without its last coordinate; whoever would meet that one is left over.
    The shuffle starts with its halves swapped, which keeps the missing coordinate near the middle: from there
    a single extra stage repairs every path that led through it (tests/test_schedule.py checks this).
    """
    even = n + n % 2
    g = (even & -even) // 2
    m = even // g
    coordinates = np.arange(even, dtype=np.int32)
    stages: list[Indices] = []
    stride = 1
    while stride < g:
        stages.append(coordinates.reshape(-1, 2, stride).swapaxes(0, 1))
        stride *= 2
    places = np.roll(np.arange(m), m // 2)
    for _ in range((m - 1).bit_length()):
        meeting = places.reshape(2, m // 2)
        stages.append(coordinates.reshape(m, g)[np.sort(meeting[:, np.argsort(meeting.min(axis=0))], axis=0)])
        places = meeting.T.ravel()
    stages = [stage.reshape(2, even // 2) for stage in stages]
    return [_without_last(stage) for stage in stages] if n % 2 else [stage.ravel() for stage in stages]


def _without_last(stage: Indices) -> Indices:
    first, second = stage
    left_over = second == second.max()  # seconds are larger than firsts, so the last coordinate is one of them
    return np.concatenate([first[~left_over], second[~left_over], first[left_over]])


def brick_depth(n: int) -> int:
    """The fewest stages with which bricks reach everything."""
    # The cone of influence grows by one on each side and stage; at the ends of a line (odd n) it bounces.
    return n // 2 if n % 2 == 0 else n - (n == 1)


def brick_stages(n: int) -> list[Indices]:
    """Neighbours, alternating."""
    line = np.arange(n, dtype=np.int32)
    stages: list[Indices] = []
    for coordinates in (line, np.roll(line, -1)):
        paired = coordinates[: n - n % 2].reshape(-1, 2).T
        stages.append(np.concatenate([paired.ravel(), coordinates[n - n % 2 :]]))
    return stages


def random_stages(n: int, seed: int) -> Iterator[Indices]:
    """Random matchings without end."""
    # Raw bits and a stable sort: NumPy promises the stream of a bit generator for good, not that of permutation().
    bits = np.random.PCG64(seed)
    while True:
        yield np.argsort(bits.random_raw(n), kind="stable").astype(np.int32)


@functools.lru_cache(maxsize=64)
def random_depth(n: int, seed: int) -> int:
    """The fewest stages with which every input reaches every output, a slice of the inputs at a time."""
    more = random_stages(n, seed)
    stages: list[Indices] = []
    for start in range(0, n, 1024):
        sets = Reached(n, range(start, min(start + 1024, n)))
        for stage in stages:
            sets.meet(stage)
        while not sets.complete():
            stages.append(next(more))
            sets.meet(stages[-1])
    return len(stages)


class Reached:
    """For every coordinate the set of inputs that it depends on, as bits; the two members of a pair share a row."""

    def __init__(self, n: int, inputs: range) -> None:
        singletons = np.zeros((n, len(inputs)), bool)
        singletons[inputs, np.arange(len(inputs))] = True
        self.rows = np.packbits(singletons, axis=1)
        self.row_of = np.arange(n)
        self.everything = np.packbits(np.ones(len(inputs), bool))

    def meet(self, stage: Indices) -> None:
        half = len(stage) // 2
        first, second, residual = np.split(self.row_of[stage], [half, 2 * half])
        self.rows = np.concatenate([self.rows[first] | self.rows[second], self.rows[residual]])
        self.row_of[stage] = np.concatenate([np.tile(np.arange(half), 2), np.arange(half, len(self.rows))])

    def complete(self) -> bool:
        return bool((self.rows == self.everything).all())
