"""Which kernels a call of the operator launches on a GPU, and what they read and write.

The calls run on tensors of the device `meta`, which have sizes and no contents, so nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from pairmix.nn import SPMLinear
from pairmix.ops.registry import Parameters
from pairmix.schedule import Schedule

DIRECTIONS = ("forward", "backward")
BUTTERFLY, RANDOM = "butterfly", "random"


@dataclass(frozen=True)
class Case:
    """A call: a square layer with float32 parameters, and rows in `dtype`, as under autocast."""

    n: int
    pairs: str
    block: str
    dtype: str
    direction: str

    @property
    def schedule(self) -> Schedule:
        """A butterfly, or as many stages of random pairs."""
        butterfly = Schedule.butterfly(self.n)
        return butterfly if self.pairs == BUTTERFLY else Schedule.random(self.n, butterfly.stages, seed=0)


class Launch(NamedTuple):
    """A kernel, its grid, its arguments by name, and the options of Triton."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    options: dict[str, int]

    @property
    def name(self) -> str:
        """Of the kernel."""
        return str(self.kernel.__name__)


class Call(NamedTuple):
    """What a call launches, and how many bytes it has to read and write at least."""

    launches: list[Launch]
    needed_bytes: int


def recorded(case: Case, batch: int, multiprocessors: int, warp_size: int) -> Call:
    """What a call with so many rows launches, on a GPU with so many multiprocessors.

    All gradients are asked for. What is needed: x, y and the parameters once; backward x, both gradients, the
    parameters and their gradients.
    """
    layer = SPMLinear(case.n, case.n, block=case.block, schedule=case.schedule, device="meta")
    x = torch.empty(batch, case.n, dtype=getattr(torch, case.dtype), device="meta")
    launches = launches_of(layer, x, case.direction, multiprocessors, warp_size)
    size = sum(parameter.nbytes for parameter in layer.parameters())
    return Call(launches, 2 * x.nbytes + size if case.direction == "forward" else 3 * x.nbytes + 2 * size)


def launches_of(layer: SPMLinear, x: Tensor, direction: str, multiprocessors: int, warp_size: int) -> list[Launch]:
    """The launches of a layer on the device `meta`: forward, or backward with the gradients that it requires."""
    from pairmix.ops.triton import configs
    from pairmix.ops.triton.gradients import Backward
    from pairmix.ops.triton.launch import Operator

    launches: list[Launch] = []

    class Recorder(Operator):
        def launch(self, kernel: Any, grid: Any, *arguments: Any, **options: Any) -> None:
            named = dict(zip(kernel.arg_names, arguments, strict=False)) | options
            taken = {name: named.pop(name) for name in kernel.arg_names}
            launches.append(Launch(kernel, grid, taken, named))

    given = [layer.operator()[name] for name in Parameters._fields]
    parameters = Parameters(*(None if tensor is None else tensor.detach()[None] for tensor in given))
    device = configs.Device(multiprocessors, warp_size)
    with mock.patch.object(configs, "device_of", return_value=device):
        operator = Recorder(x, parameters, layer.schedule.on(x.device), layer.block, layer.out_features)
        if direction == "forward":
            operator.run(operator.x, 0, len(operator.passes))
        else:
            needs = Parameters(*(tensor is not None and tensor.requires_grad for tensor in given))
            Backward(operator, x.new_empty(len(x), layer.out_features), True, needs).run()
    return launches


@dataclass(frozen=True)
class Traffic:
    """What a launch reads, writes and computes.

    Attributes:
        rows: bytes of rows, which go from and to DRAM: every launch reads or writes them all.
        reused: bytes that programs read again, or add to, for every tile of rows. A cache that holds them loads them
            from DRAM, or writes them back, once.
        cached: bytes between the cache and the multiprocessors: rows, and reused ones every time.
        multiply_adds: of the stages, those included that backward computes again.
    """

    rows: int
    reused: int
    cached: int
    multiply_adds: int

    def dram(self, cache_bytes: int) -> int:
        """Bytes from and to DRAM. Of reused ones that do not all fit into the cache, a share misses it every time."""
        missing = max(0.0, 1 - cache_bytes / max(1, self.reused))
        return self.rows + self.reused + int(missing * max(0, self.cached - self.rows - self.reused))


def traffic(launch: Launch) -> Traffic:
    """What a launch reads and writes, from its arguments and its grid.

    It follows the code of the kernels, and assumes that no L1 cache helps.
    """
    if launch.name in ("forward_pass", "backward_pass"):
        return _Pass(launch).traffic()
    # The small kernels read and write everything once.
    size = sum(tensor.nbytes for tensor in launch.arguments.values() if isinstance(tensor, Tensor))
    return Traffic(size, 0, size, 0)


_COS_AND_SIN = 24
"""About as many multiply-adds the cosine and the sine of an angle take."""


class _Pass:
    """The launch of a pass."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.given = launch, launch.arguments
        self.strides: tuple[int, ...] = self.given["STRIDES"]
        n, rotation, single, _ = self.given["FORM"]
        self.n, self.rotation, self.single = int(n), bool(rotation), bool(single)
        self.is_backward = launch.name == "backward_pass"
        self.row_tiles: int = -(-self.given["rows"] // self.given["R"])
        self.lanes: int = launch.grid[1] * self.given["C"]
        self.tile_bytes: int = self.lanes * self.given["R"] * self.given["ACC"].primitive_bitwidth // 8
        self.forwards = list(self._forwards()) if self.is_backward else [1] * len(self.strides)

    def _forwards(self) -> Iterator[int]:
        """How often backward computes each stage: once to the end, and again in every group but the last."""
        held, last = self.given["HELD"], (len(self.strides) - 1) // self.given["HELD"]
        for l in range(len(self.strides)):
            is_again = l // held < last and l % held < held - 1
            is_left_out = l == len(self.strides) - 1 and not self.given["OF_D_OUT"]
            yield 1 + is_again - is_left_out

    def traffic(self) -> Traffic:
        blocks = self.given["blocks"]
        stage_bytes = blocks.nbytes // max(1, len(self.strides))
        row_bytes = [tensor.nbytes for tensor in self._rows()]
        diagonals = self._diagonals()
        uses = [count + self.is_backward for count in self.forwards]
        again = sum(use * size for use, size in diagonals) + sum(
            use * (stage_bytes * (1 + (self.rotation and stride == 0)) + self._table_bytes(stride))
            for use, stride in zip(uses, self.strides, strict=True)
        )
        moved = self._exchanged_bytes() + self._checkpoint_bytes() + self._reread_bytes()
        added = 2 * self._slot_bytes()
        tables = sum(map(self._table_bytes, self.strides))
        sizes = [size for _, size in diagonals]
        kept = blocks.nbytes + sum(sizes) + tables + self._own_bytes() + self.launch.grid[0] * self._slot_bytes()
        pairs = (self.n // 2) * self.given["rows"]
        work = 4 * sum(self.forwards) + (8 * len(self.strides) if self.is_backward else 0)
        angles = self.rotation * sum(uses) * self.row_tiles * (self.n // 2)
        cached = sum(row_bytes) + self.row_tiles * (again + added) + moved
        return Traffic(sum(row_bytes), kept, cached, pairs * work + _COS_AND_SIN * angles)

    def _input(self) -> Tensor:
        x: Tensor = self.given["x"]
        return x

    def _rows(self) -> list[Tensor]:
        return [self.given[name] for name in (("grad", "x", "gx") if self.is_backward else ("x", "y"))]

    def _diagonals(self) -> list[tuple[int, int]]:
        """How often diagonals and bias are read for a tile, and their bytes.

        Backward reads d_in with every reading of x that computes stages, and for the gradient of x.
        """
        of_d_in = 2 + (len(self.strides) > self.given["HELD"]) if self.is_backward else 1
        uses = {"d_in": of_d_in * self.given["FIRST"], "d_out": int(self.given["LAST"]), "bias": 1}
        return [
            (use, self.given[name].nbytes) for name, use in uses.items() if use and self.given.get(name) is not None
        ]

    def _table_bytes(self, stride: int) -> int:
        """Bytes of members and partners of a stage: none if lanes are coordinates, only the firsts' at a stride."""
        if stride:
            return 0 if self.single else 4 * self.lanes // 2
        return 2 * 4 * self.lanes

    def _own_bytes(self) -> int:
        """Bytes of all programs' own memory; the first tile is idle unless a stage exchanges values through it."""
        memory: Tensor = self.given["memory"]
        if memory is self._input():
            return 0
        programs = math.prod(self.launch.grid)
        return memory.nbytes - (0 if 0 in self.strides else programs * self.tile_bytes // self.launch.grid[1])

    def _exchanged_bytes(self) -> int:
        """Bytes that partners write and read, where a stage has no stride."""
        uses = [count + 2 * self.is_backward for count, s in zip(self.forwards, self.strides, strict=True) if s == 0]
        return 2 * sum(uses) * self.row_tiles * self.tile_bytes

    def _checkpoint_bytes(self) -> int:
        """Bytes of inputs of stages that backward writes and reads: of every group but the first and the last."""
        if not self.is_backward:
            return 0
        groups = math.ceil(len(self.strides) / self.given["HELD"])
        return int(2 * max(0, groups - 2) * self.row_tiles * self.tile_bytes)

    def _reread_bytes(self) -> int:
        """Bytes of the pass's input that backward reads again: for the first group, and for the gradient of d_in."""
        if not self.is_backward:
            return 0
        times = (len(self.strides) > self.given["HELD"]) + bool(self.given["OF_D_IN"])
        return int(times * self._input().nbytes)

    def _slot_bytes(self) -> int:
        """Bytes of a worker's sums that this pass adds to."""
        if not self.is_backward:
            return 0
        of_stages = len(self.strides) * (self.n // 2) * (2 if self.rotation else 4)
        others = self.n * (self.given["OF_D_IN"] + self.given["OF_D_OUT"]) + self.given["OUT"] * self.given["OF_BIAS"]
        return int((of_stages + others) * self.given["slots"].itemsize)
