"""Forward: launches the kernels pass by pass, on memory that it allocates."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from pairmix.ops.registry import Parameters, Tensors
from pairmix.ops.triton import configs, kernels
from pairmix.ops.triton.configs import Config
from pairmix.ops.triton.plan import NARROWEST, Pass, make_plan
from pairmix.schedule import DeviceSchedule

Grid = tuple[int, int, int] | Callable[[dict[str, Any]], tuple[int, int, int]]
_Result = TypeVar("_Result")
_ACC = {torch.float32: tl.float32, torch.float64: tl.float64}


class DevicePass(NamedTuple):
    """A pass of the plan, with its tables on the device."""

    plan: Pass
    columns: Tensor
    members: Tensor
    partners: Tensor


def passes_of(schedule: DeviceSchedule, narrow: bool = False) -> list[DevicePass]:
    """The plan of a schedule, in the widest tiles or in narrow ones, made and copied to its device once."""
    key = "triton, narrow tiles" if narrow else "triton"
    passes: list[DevicePass] | None = schedule.kept.get(key)
    if passes is None:
        device, order = schedule.order.device, schedule.host_order()
        with torch.inference_mode(False):
            passes = [
                DevicePass(plan, *(torch.from_numpy(t).to(device) for t in (plan.columns, plan.members, plan.partners)))
                for plan in (make_plan(order, widest=NARROWEST) if narrow else make_plan(order))
            ]
        schedule.kept[key] = passes
    return passes


def in_fastest_tiles(
    x: Tensor, schedule: DeviceSchedule, call: tuple[Hashable, ...], run: Callable[[bool], _Result]
) -> _Result:
    """The result of `run`, in narrow tiles or not; `call` is what its time depends on beside the schedule and x."""
    if not configs.tunes_width_of_tiles(schedule.n):
        return run(False)
    strides = tuple(one.plan.strides for one in passes_of(schedule))
    rows = (x.numel() // x.shape[-1]).bit_length()  # a time is kept for each power of two
    call = (*call, schedule.n, strides, rows, x.shape[-1], x.dtype, x.device)
    return run(configs.prefers_narrow_tiles(call, run))


class Operator:
    """One call of the operator: its tensors without gaps, its sizes, and the passes that compute it."""

    def __init__(
        self,
        x: Tensor,
        parameters: Tensors,
        schedule: DeviceSchedule,
        block: str,
        out_features: int,
        narrow: bool = False,
    ) -> None:
        self.x = x.reshape(-1, x.shape[-1]).contiguous()
        self.parameters: Tensors = Parameters(*(None if p is None else p.contiguous() for p in parameters))
        self.passes = passes_of(schedule, narrow)
        self.n, self.stages, self.rotation = schedule.n, schedule.stages, block == "rotation"
        self.rows, self.in_features = self.x.shape
        self.out_features, self.maps = out_features, len(parameters.blocks)
        self.dtype = torch.promote_types(x.dtype, torch.float32)

    def launch(self, kernel: Any, grid: Grid, *arguments: Any, **options: Any) -> None:
        """Launch a kernel; every launch goes through here."""
        kernel[grid](*arguments, **options)

    def launch_pass(
        self, kernel: Any, tried: Sequence[Config], grid: Grid, index: int, *arguments: Any, **constants: Any
    ) -> None:
        """Launch the kernel of a pass in its default configuration, or in the fastest of several."""
        device = self.x.device
        plan = self.passes[index].plan
        constants |= {
            "IN": self.in_features,
            "OUT": self.out_features,
            "C": plan.lanes,
            "STRIDES": plan.strides,
            "FORM": (self.n, self.rotation, plan.tiles == 1, self.parameters.residual_scale is not None),
            "FIRST": index == 0,
            "LAST": index == len(self.passes) - 1,
            "ACC": _ACC[self.dtype],
        }
        if len(tried) > 1:
            self.launch(configs.tuned(kernel, tuple(tried), device), grid, *arguments, **constants)
        else:
            self.launch(kernel, grid, *arguments, **constants, **configs.options(tried[0], kernel, device))

    def run(self, z: Tensor, start: int, stop: int) -> Tensor:
        """The output of the pass before `stop`, from the input of the pass `start`: y of all passes, from x."""
        for index in range(start, stop):
            z = self._forward_pass(z, index)
        return z

    def _forward_pass(self, z: Tensor, index: int) -> Tensor:
        plan, tables = self.passes[index].plan, self.passes[index][1:]
        is_last, is_single = index == len(self.passes) - 1, plan.tiles == 1
        folds_apart = is_last and not is_single and self.out_features < self.n
        tried = configs.forward_configs(plan.lanes, self.dtype, self.rotation, exchanges=0 in plan.strides)
        others = plan.tiles * self.maps
        memory, workers = z, -(-self.rows // min(config.rows for config in tried))
        if 0 in plan.strides or (is_last and is_single and folds_through_memory(plan, self.n, self.out_features)):
            workers = configs.workers(workers, others, tried[0], z.device)
            memory = self.empty(workers * others, max(config.rows for config in tried), plan.lanes)
        y = self.empty(self.rows, self.maps * self.n)
        if is_last and not folds_apart:
            y = z.new_empty(self.rows, self.maps * self.out_features, dtype=self.x.dtype)
        blocks, d_in, d_out, bias, scale = self.of_pass(plan)
        self.launch_pass(
            kernels.forward_pass, tried, (workers, plan.tiles, self.maps), index,
            z, blocks, d_in, d_out, bias if is_last and not folds_apart else None, scale, y, memory, *tables,
            self.rows, *self.map_steps(),
        )  # fmt: skip
        return self.folded(y, bias, self.out_features, self.maps) if folds_apart else y

    def folded(self, z: Tensor, bias: Tensor | None, features: int, outputs: int) -> Tensor:
        """The fold of `[rows, maps * n]`: of every map, or of their sum if there is one output."""
        y = z.new_empty(self.rows, outputs * features, dtype=self.x.dtype)
        rows, lanes = 4, min(256, triton.next_power_of_2(features))
        self.launch(
            kernels.fold_rows,
            (-(-self.rows // rows), -(-features // lanes), outputs),
            z, bias, y, self.rows, z.shape[1], y.shape[1], self.maps // outputs,
            N=self.n, FEATURES=features, R=rows, C=lanes,
        )  # fmt: skip
        return y

    def of_pass(self, plan: Pass) -> Tensors:
        """The parameters, of the blocks and scales only those of the pass."""
        blocks, d_in, d_out, bias, scale = self.parameters
        some = slice(plan.first, plan.last)
        # Kernels do not read scales that are not there, but they take an address.
        return Parameters(blocks[:, some], d_in, d_out, bias, (blocks if scale is None else scale)[:, some])

    def map_steps(self) -> tuple[int, int]:
        """How far apart two maps are in blocks and in scales."""
        return self.stages * (self.n // 2) * (1 if self.rotation else 4), self.stages

    def empty(self, *shape: int) -> Tensor:
        """Memory for intermediate results."""
        return self.x.new_empty(shape, dtype=self.dtype)


def folds_through_memory(plan: Pass, n: int, features: int) -> bool:
    """Whether a single tile that holds all coordinates cannot be folded in registers."""
    return features < n and (plan.lanes != n or features & (features - 1) != 0)
