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
    blocks = _blocks(n, largest_block(n, at_most=n))
    stages = _strides(blocks)
    for meeting in _shuffle(_halves_swapped(np.arange(len(blocks), dtype=np.int32))):
        stages.append(blocks[np.sort(meeting[:, np.argsort(meeting.min(axis=0))], axis=0)])
    return [_order(n, stage) for stage in stages]


def largest_block(n: int, at_most: int) -> int:
    """The largest power of two, up to `at_most`, that divides the width, rounded up to even, an even number of times.

    Args:
        n: the width.
        at_most: a power of two, or any number that is no limit.
    """
    even = n + n % 2
    return min(at_most, (even & -even) // 2)


def _blocks(n: int, size: int) -> Indices:
    return np.arange(n + n % 2, dtype=np.int32).reshape(-1, size)


def _strides(blocks: Indices) -> list[Indices]:
    """Lane k of a block meets lane k ^ stride."""
    strides = [2**k for k in range(blocks.shape[1].bit_length() - 1)]
    return [blocks.reshape(-1, 2, stride).swapaxes(0, 1) for stride in strides]


def _shuffle(places: Indices) -> Iterator[Indices]:
    """Which blocks meet at each stage of a perfect shuffle, `[2, m // 2]`, if it starts with these at its m places."""
    for _ in range((len(places) - 1).bit_length()):
        meeting = places.reshape(2, -1)
        yield meeting
        places = meeting.T.ravel()


def _halves_swapped(places: Indices) -> Indices:
    return np.roll(places, len(places) // 2)


def _order(n: int, stage: Indices) -> Indices:
    """A stage `[2, ...]` of the even width as a permutation; an odd width lacks its last coordinate."""
    first, second = pairs = stage.reshape(2, -1)
    if n % 2 == 0:
        return pairs.ravel()
    left_over = (pairs == n).any(axis=0)
    return np.concatenate([first[~left_over], second[~left_over], pairs[:, left_over].min(axis=0)])


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
    bits = np.random.PCG64(seed)
    while True:
        yield _permutation(bits, n)


def _permutation(bits: np.random.PCG64, n: int) -> Indices:
    # Raw bits and a stable sort: NumPy promises the stream of a bit generator for good, not that of permutation().
    return np.argsort(bits.random_raw(n), kind="stable").astype(np.int32)


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


def random_blocks_stages(n: int, seed: int, block_size: int) -> Iterator[Indices]:
    """Rounds without end: strides inside blocks, then a perfect shuffle of the blocks, which starts in random order.

    A shuffle reaches every block in as few stages from any order, so a round takes as many as a butterfly. Only the
    last block is not moved. It starts at the last place, where a shuffle leaves it, so it is the second of the last
    pair at every stage. The kernels pad an odd width there: its vectors are whole, too.

    An odd width takes one stage more. The missing coordinate is in an odd lane, so no path to an even lane leads
    through it, and the stride 1 of the next round brings to odd lanes what their even neighbours have. Blocks of one
    coordinate have no such neighbours: there, as in the butterfly, the missing one starts near the middle, and the
    first stage of the round is repeated.

    Args:
        n: the number of coordinates.
        seed: of the orders.
        block_size: a power of two, as `largest_block` gives it for this width.
    """
    blocks = _blocks(n, block_size)
    last = len(blocks) - 1
    bits = np.random.PCG64(seed)
    while True:
        places = np.append(_permutation(bits, last), np.int32(last))
        if n % 2 and block_size == 1:
            stages = [blocks[meeting] for meeting in _shuffle(_halves_swapped(places))]
            stages.append(stages[0])
        else:
            stages = _strides(blocks) + [blocks[meeting] for meeting in _shuffle(places)]
        yield from (_order(n, stage) for stage in stages)


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
