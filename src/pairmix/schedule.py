"""Which coordinates meet at which stage."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pairmix import pairings
from pairmix.pairings import Indices


class DeviceSchedule:
    """A schedule on one device, and all that implementations derive from it there, once.

    Attributes:
        order: `Schedule.order` as a tensor, which is what the operator takes; shared by all layers, so never written.
        n: the number of coordinates.
        stages: the number of stages.
        kept: what implementations have made of it, under a key of their own.
    """

    def __init__(self, order: torch.Tensor) -> None:
        self.order = order
        self._on_host: Indices | None = None
        self.stages, self.n = order.shape
        self.kept: dict[str, Any] = {}
        self._version = order._version

    @staticmethod
    def of(order: torch.Tensor) -> DeviceSchedule:
        """That of a tensor that came through the dispatcher: the same as before if it is the same tensor."""
        known: DeviceSchedule | None = getattr(order, "_pairmix_schedule", None)
        if known is None or known._version != order._version:
            known = DeviceSchedule(order)
            order._pairmix_schedule = known  # type: ignore[attr-defined]
        return known

    def host_order(self) -> Indices:
        """`order` for the host, which waits for the device only if it got the tensor alone, as from a loaded graph."""
        if self._on_host is None:
            self._on_host = self.order.cpu().numpy()
        return self._on_host


@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """The pairings of all stages, in the order in which they are applied: immutable, hashable, comparable.

    A stage pairs up `n` coordinates into `n // 2` disjoint pairs; for odd `n` one coordinate, the residual, is
    left over. Make one with `butterfly`, `random_blocks`, `random`, `brick` or `from_pairs`.

    Attributes:
        order: read-only int32 array `[stages, n]`, a permutation of the coordinates for every stage: the firsts of
            all pairs, then their seconds, then the residual.
        kind: the constructor's name.
        seed: the seed of `random` and `random_blocks`, else None.
        block_size: how many coordinates a block of `random_blocks` has, else None.

    Examples:
        >>> Schedule.butterfly(4).pairs.tolist()
        [[[0, 2], [1, 3]], [[0, 1], [2, 3]]]
        >>> Schedule.butterfly(1000)
        Schedule.butterfly(n=1000, stages=10)
    """

    order: Indices
    kind: str
    seed: int | None = None
    block_size: int | None = None
    _on_cpu: DeviceSchedule = field(init=False)
    _elsewhere: dict[torch.device, DeviceSchedule] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        order = np.ascontiguousarray(self.order, np.int32)
        # Bytes are immutable, and so is an array of them: nobody can make it writeable again.
        object.__setattr__(self, "order", np.ndarray(order.shape, np.int32, order.tobytes()))
        # A schedule outlives the mode it was made in, so its tensor must be neither an inference nor a fake tensor.
        with torch.inference_mode(False):
            on_cpu = DeviceSchedule.of(torch.utils.dlpack.from_dlpack(order.copy()))
        object.__setattr__(self, "_on_cpu", on_cpu)

    @classmethod
    def butterfly(cls, n: int, stages: int | None = None) -> Schedule:
        """The default: every output depends on every input after the fewest possible stages, for any width.

        That is `ceil(log2 n)` stages for even `n` and one more for odd `n`. For a power of two these are the
        strides 1, 2, 4, ..., n / 2. Fewer stages are a prefix, more start over.

        Args:
            n: the number of coordinates.
            stages: the number of stages, or None for the fewest that reach everything.
        """
        return _generated("butterfly", n, _stages_or(stages, n, pairings.butterfly_depth))

    @classmethod
    def brick(cls, n: int, stages: int | None = None) -> Schedule:
        """Neighbours, alternating: (0, 1), (2, 3), ... and then (1, 2), (3, 4), ...; for even `n` in a ring.

        Args:
            n: the number of coordinates.
            stages: the number of stages, or None for the fewest that reach everything: n / 2, or n if n is odd.
        """
        return _generated("brick", n, _stages_or(stages, n, pairings.brick_depth))

    @classmethod
    def random(cls, n: int, stages: int | None = None, seed: int = 0) -> Schedule:
        """A uniformly random matching at every stage, the same for the same seed on every machine.

        Args:
            n: the number of coordinates.
            stages: the number of stages, or None for the fewest that reach everything, found by trying.
            seed: a non-negative integer.
        """
        _check_integer("seed", seed, at_least=0)
        stages = _stages_or(stages, n, lambda n: pairings.random_depth(n, seed))
        return _generated("random", n, stages, seed=seed)

    @classmethod
    def random_blocks(cls, n: int, stages: int | None = None, seed: int = 0, *, block_size: int = 16) -> Schedule:
        """Blocks of neighbours that are paired at random, so that the kernels still compute whole vectors.

            inside blocks     lane k meets lane k ^ 1, then k ^ 2, k ^ 4, ..., k ^ (block_size / 2)
            between blocks    a butterfly over the blocks in random order, which meet lane by lane

        Each stage between blocks is a uniformly random matching of them. The stages are not independent, because
        independent ones often miss some coordinates: these reach everything in as few stages as `butterfly`, for any
        width. More stages start over, with a new random order. It is the same for the same seed on every machine.

        An even number of blocks must make up `n`, or `n + 1` for odd `n`. Where it does not, they are halved until it
        does: to 4 coordinates for n = 1000, to single ones for n = 6. Two blocks, as for n = 32, can only be paired in
        one way; smaller ones leave more to chance.

        Args:
            n: the number of coordinates.
            stages: the number of stages, or None for the fewest that reach everything.
            seed: a non-negative integer.
            block_size: a power of two. 16 numbers in float32 are one vector of AVX-512, or two of AVX2.

        Examples:
            >>> Schedule.random_blocks(8, seed=1, block_size=2).pairs[1:].tolist()
            [[[4, 5, 0, 1], [2, 3, 6, 7]], [[4, 5, 2, 3], [0, 1, 6, 7]]]
            >>> Schedule.random_blocks(1000)
            Schedule.random_blocks(n=1000, stages=10, seed=0, block_size=4)
        """
        _check_integer("seed", seed, at_least=0)
        _check_integer("block_size", block_size, at_least=1)
        if block_size & (block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {block_size}")
        stages = _stages_or(stages, n, pairings.butterfly_depth)
        return _generated("random_blocks", n, stages, seed=seed, block_size=pairings.largest_block(n, block_size))

    @classmethod
    def from_pairs(cls, n: int, pairs: Iterable[Iterable[Iterable[int]]]) -> Schedule:
        """Your own pairing: for every stage a list of `n // 2` pairs of coordinates.

        Args:
            n: the number of coordinates.
            pairs: `[stages][n // 2][2]`, nested sequences or an integer array.

        Raises:
            ValueError: if a stage is no matching; the message names the stage and the coordinate.

        Examples:
            >>> Schedule.from_pairs(4, [[(0, 3), (1, 2)], [(0, 1), (2, 3)]]).stages
            2
        """
        _check_integer("n", n, at_least=1)
        return cls(_stacked(n, (_check_stage(n, number, stage) for number, stage in enumerate(pairs))), "from_pairs")

    @classmethod
    def side_by_side(cls, schedules: Sequence[Schedule]) -> Schedule:
        """Several schedules as one, each on coordinates of its own.

        A layer with this schedule and a multiple of its features as `width` is the sum of several mixers: `tile` gives
        each of them the whole input, and `fold` adds their outputs.

        Args:
            schedules: of as many stages each, and at most one of them of odd width.

        Examples:
            >>> butterfly, other = Schedule.butterfly(8), Schedule.random(8, stages=3)
            >>> Schedule.side_by_side([butterfly, other])
            Schedule.from_pairs(n=16, stages=3)
        """
        if not schedules:
            raise ValueError("expected at least one schedule, got none")
        if len({schedule.stages for schedule in schedules}) > 1 or sum(schedule.n % 2 for schedule in schedules) > 1:
            raise ValueError(f"expected as many stages of each and at most one odd width, got {list(schedules)}")
        starts = np.cumsum([0, *(schedule.n for schedule in schedules[:-1])])
        pairs = [schedule.pairs + start for schedule, start in zip(schedules, starts, strict=True)]
        merged = np.concatenate(pairs, axis=2).transpose(0, 2, 1)
        return cls.from_pairs(sum(schedule.n for schedule in schedules), merged)

    def extended(self, more: int) -> Schedule:
        """The same stages and then as many more: those that come next in its kind, or a butterfly's after own pairs."""
        _check_integer("more", more, at_least=0)
        if self.kind != "from_pairs":
            return _generated(self.kind, self.n, self.stages + more, **self.options)
        added = _generated("butterfly", self.n, more).order
        return Schedule(np.concatenate([self.order, added]), "from_pairs")

    def only(self, stages: Sequence[int]) -> Schedule:
        """Only these stages, which are counted from 0."""
        outside = [stage for stage in stages if not 0 <= stage < self.stages]
        if outside:
            raise ValueError(f"{self} has no stage {outside[0]}")
        if self.kind != "from_pairs" and list(stages) == list(range(len(stages))):
            return _generated(self.kind, self.n, len(stages), **self.options)
        return Schedule(self.order[list(stages)].reshape(-1, self.n), "from_pairs")

    def on(self, device: torch.device) -> DeviceSchedule:
        """This schedule on a device, copied there once."""
        if device.type == "cpu":
            return self._on_cpu
        if torch.compiler.is_dynamo_compiling():  # a constant of the graph, which is not copied in every call
            return DeviceSchedule(_order_on(self, device))
        if torch.compiler.is_compiling():  # a copy made here would be part of the graph, not of the schedule
            return DeviceSchedule(self._on_cpu.order.to(device))
        return self._copied(device)

    def _copied(self, device: torch.device) -> DeviceSchedule:
        if device not in self._elsewhere:
            with torch.inference_mode(False):
                copied = DeviceSchedule.of(self._on_cpu.order.to(device))
            copied._on_host = self.order
            self._elsewhere[device] = copied
        return self._elsewhere[device]

    @functools.cached_property
    def n(self) -> int:
        """The number of coordinates."""
        return int(self.order.shape[1])

    @functools.cached_property
    def stages(self) -> int:
        """The number of stages, the paper's L."""
        return int(self.order.shape[0])

    @property
    def options(self) -> dict[str, int]:
        """What its constructor takes beside `n` and `stages`."""
        return {option: getattr(self, option) for option in _OPTIONS.get(self.kind, ())}

    @functools.cached_property
    def pairs(self) -> Indices:
        """Read-only int32 array `[stages, 2, n // 2]`: `pairs[l, :, p]` are the two members of pair `p`."""
        half = self.n // 2
        return _read_only(self.order[:, : 2 * half].reshape(self.stages, 2, half))

    @functools.cached_property
    def residual(self) -> Indices:
        """Read-only int32 array `[stages]`: the coordinate left over at each stage, -1 for even `n`."""
        return _read_only(self.order[:, -1] if self.n % 2 else np.full(self.stages, -1, np.int32))

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the pairing: equal for equal schedules, however they were made."""
        return hashlib.sha256(f"{self.stages}x{self.n}:".encode() + self.order.astype("<i4").tobytes()).hexdigest()

    def reach(self) -> npt.NDArray[np.bool_]:
        """Which outputs depend on which inputs: a bool array `[n, n]`, indexed `[output, input]`."""
        sets = pairings.Reached(self.n, range(self.n))
        for stage in self.order:
            sets.meet(stage)
        return np.unpackbits(sets.rows[sets.row_of], axis=1, count=self.n).astype(bool)

    def to_dict(self) -> dict[str, Any]:
        """A description that JSON can hold, from which `from_dict` makes an equal schedule."""
        description: dict[str, Any] = {"kind": self.kind, "n": self.n, "stages": self.stages, "digest": self.digest}
        if self.kind == "from_pairs":
            description["pairs"] = self.pairs.transpose(0, 2, 1).tolist()
        return {**description, **self.options}

    @classmethod
    def from_dict(cls, description: dict[str, Any]) -> Schedule:
        """The schedule that `to_dict` described.

        Raises:
            ValueError: if the description is incomplete, or does not give the pairing whose digest it carries.
        """
        try:
            kind, n, stages, digest = (description[key] for key in ("kind", "n", "stages", "digest"))
            if kind == "from_pairs":
                schedule = cls.from_pairs(n, description["pairs"])
            elif kind in tuple(_OPTIONS):  # a damaged description may hold what is not hashable
                schedule = getattr(cls, kind)(n, stages, **{option: description[option] for option in _OPTIONS[kind]})
            else:
                raise ValueError(f"unknown kind of schedule: {kind!r}")
        except KeyError as missing:
            raise ValueError(f"not the description of a schedule, {missing} is missing: {description}") from None
        if schedule.digest != digest:
            raise ValueError(
                f"{schedule!r} has the digest {schedule.digest}, its description says {digest!r}: "
                "it has been changed, or another version of pairmix made it"
            )
        return schedule

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Schedule) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        arguments = {"n": self.n, "stages": self.stages, **self.options}
        return f"Schedule.{self.kind}({', '.join(f'{name}={value}' for name, value in arguments.items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Schedule.from_dict, (self.to_dict(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Schedule:
        return self


def _order_on(schedule: Schedule, device: torch.device) -> torch.Tensor:
    return schedule._copied(device).order


# What torch.compiler.assume_constant_result does, which would import the whole compiler.
_order_on._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _check_integer(name: str, value: object, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name} must be an integer of at least {at_least}, got {value!r}")


def _stages_or(stages: int | None, n: int, depth: Callable[[int], int]) -> int:
    _check_integer("n", n, at_least=1)
    if stages is None:
        return depth(n)
    _check_integer("stages", stages, at_least=0)
    return stages


_OPTIONS: dict[str, tuple[str, ...]] = {
    "butterfly": (),
    "brick": (),
    "random": ("seed",),
    "random_blocks": ("seed", "block_size"),
}
"""What the constructor of each generated kind takes beside `n` and `stages`."""

_STAGES: dict[str, Callable[..., Iterator[Indices]]] = {
    "butterfly": lambda n: cycle(pairings.butterfly_stages(n)),
    "brick": lambda n: cycle(pairings.brick_stages(n)),
    "random": pairings.random_stages,
    "random_blocks": pairings.random_blocks_stages,
}


# Layers of one width share one schedule: a model of a hundred layers holds its pairing once.
@functools.lru_cache(maxsize=64)
def _generated(kind: str, n: int, stages: int, **options: int) -> Schedule:
    return Schedule(_stacked(n, islice(_STAGES[kind](n, **options), stages)), kind, **options)


def _stacked(n: int, stages: Iterable[Indices]) -> Indices:
    rows = list(stages)
    return np.stack(rows) if rows else np.empty((0, n), np.int32)


def _read_only(array: Indices) -> Indices:
    array.flags.writeable = False
    return array


def _check_stage(n: int, number: int, stage: Iterable[Iterable[int]]) -> Indices:
    try:
        pairs = np.asarray(stage if isinstance(stage, np.ndarray) else [tuple(pair) for pair in stage])
    except (TypeError, ValueError):
        raise ValueError(f"stage {number}: expected a list of pairs of coordinates, got {stage!r}") from None
    if pairs.size == 0:
        pairs = np.empty((0, 2), np.int32)
    if pairs.shape[1:] != (2,) or not np.issubdtype(pairs.dtype, np.integer):
        raise ValueError(f"stage {number}: expected pairs of two integers, got {pairs.dtype} of shape {pairs.shape}")
    outside = pairs[(pairs < 0) | (pairs >= n)]
    if outside.size:
        raise ValueError(f"stage {number}: coordinate {outside[0]} is not in 0..{n - 1}")
    times = np.bincount(pairs.ravel(), minlength=n)
    if times.max() > 1:
        raise ValueError(f"stage {number}: coordinate {times.argmax()} is paired twice")
    unpaired = np.flatnonzero(times == 0)
    if len(pairs) != n // 2:
        raise ValueError(
            f"stage {number}: {len(pairs)} pairs, but width {n} takes {n // 2}; coordinate {unpaired[0]} is unpaired"
        )
    return np.concatenate([pairs.T.ravel(), unpaired]).astype(np.int32)
