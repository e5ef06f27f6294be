"""How much of the machine's arithmetic do the compiled kernels reach?

The kernels alone, without a module and without autograd, forward and backward apart: by width, and by kind of stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import nan
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from pairmix import ops
from pairmix.nn import SPMLinear
from pairmix.ops.registry import Parameters
from pairmix.schedule import Schedule
from pairmix_lab.bench.bounds import MULTIPLY_ADDS_A_PAIR, varies
from pairmix_lab.bench.pictures import column, if_several
from pairmix_lab.bench.timing import Samples, current_threads, interleaved, measured, settings, spread
from pairmix_lab.report import tables
from pairmix_lab.report.pictures import legend_below, styled, width_ticks

DIRECTIONS = {"forward": "tab:blue", "backward": "tab:orange"}
"""What is measured, and its colour."""
# Backward, a general block takes 4 multiply-adds for its gradient, and an angle 2.
_FORWARD = MULTIPLY_ADDS_A_PAIR["inference"]
_BACKWARD = MULTIPLY_ADDS_A_PAIR["train"] - _FORWARD
_MULTIPLY_ADDS = {
    "general": {"forward": _FORWARD, "backward": _BACKWARD},
    "rotation": {"forward": _FORWARD, "backward": _BACKWARD - 2},
}
_BOUND = "bound"

FEW, MANY = 4, 16
"""The stages of two layers that differ in nothing else: the difference of their times is that of 12 stages.

With more than 19, AVX-512 kernels would run the strided ones in several groups, and backward would compute some of them
twice.
"""
RANDOM, _STRIDE = "random", "stride "


@dataclass(frozen=True)
class Config:
    """What is measured; `seconds` is for each width and for each kind of stage."""

    widths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    stage_width: int = 1024
    batch: int = 256
    blocks: tuple[str, ...] = ("general",)
    seconds: float = 10.0
    threads: tuple[int, ...] = field(default_factory=current_threads)

    def __post_init__(self) -> None:
        if self.stage_width < 2 or self.stage_width & (self.stage_width - 1):
            raise ValueError(f"stages are measured at a width that is a power of two, got {self.stage_width}")


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Measure every width, then every kind of stage; a row for each, and for each block.

    Raises:
        ValueError: without the compiled kernels.
    """
    check_there_are_kernels()
    for setting in settings(config.threads):
        setting["instruction_set"] = ops.cpu.instruction_set()
        for n, block in product(config.widths, config.blocks):
            yield {**setting, **_of_width(n, block, config)}
        for (pairs, schedule), block in product(stage_kinds(config.stage_width).items(), config.blocks):
            yield {**setting, "pairs": pairs, **_of_stage(schedule, block, config)}


def check_there_are_kernels() -> None:
    """Raise a ValueError without the compiled kernels."""
    reason = ops.cpu.why_not(torch.device("cpu"))
    if reason is not None:
        raise ValueError(f"bench kernels measures the compiled kernels, and there are none here: {reason}")


def stage_kinds(n: int) -> dict[str, Callable[[int], Schedule]]:
    """Schedules, by the name of their pairs and then by their number of stages.

    Those of a stride pair i with i + stride at every stage, so that stages cannot be fused as those of a butterfly are.
    A random one has another matching at every stage, as layers have: one that is repeated would stay
    within a part of the width that fits into the L1 cache.
    """
    strides = [1 << k for k in range((n - 1).bit_length())]
    strided = {f"{_STRIDE}{stride}": partial(_strided, n, stride) for stride in strides}
    return {**strided, RANDOM: partial(Schedule.random, n)}


def _strided(n: int, stride: int, stages: int) -> Schedule:
    firsts = np.flatnonzero(np.arange(n) & stride == 0)
    return Schedule.from_pairs(n, [np.stack([firsts, firsts + stride], axis=1)] * stages)


def kernel_calls(schedule: Schedule, block: str, batch: int) -> dict[str, Callable[[], object]]:
    """The kernels on a square layer with this schedule: forward, and backward with all gradients."""
    n = schedule.n
    operator = SPMLinear(n, n, block=block, schedule=schedule).operator()
    given = [operator[name] for name in Parameters._fields]
    parameters = Parameters(*(None if tensor is None else tensor.detach()[None] for tensor in given))
    needs = Parameters(*(tensor is not None for tensor in given))
    x, grad, on_cpu = torch.randn(batch, n), torch.randn(batch, n), schedule.on(torch.device("cpu"))
    return {
        "forward": partial(ops.cpu.forward, x, parameters, on_cpu, block, n),
        "backward": partial(ops.cpu.backward, grad, x, parameters, on_cpu, block, True, needs),
    }


def _of_width(n: int, block: str, config: Config) -> dict[str, Any]:
    schedule = Schedule.butterfly(n)
    samples, rate = _timed(kernel_calls(schedule, block, config.batch), config.seconds)
    row = {"n": n, "batch": config.batch, "block": block, "stages": schedule.stages, **rate}
    for direction in DIRECTIONS:
        times = measured(samples, direction)
        row[direction] = {**times, **_reached(row, direction, schedule.stages, times)}
    return row


def _of_stage(schedule: Callable[[int], Schedule], block: str, config: Config) -> dict[str, Any]:
    calls = {
        f"{direction} {stages}": call
        for stages in (FEW, MANY)
        for direction, call in kernel_calls(schedule(stages), block, config.batch).items()
    }
    samples, rate = _timed(calls, config.seconds)
    row = {"n": config.stage_width, "batch": config.batch, "block": block, **rate}
    for direction in DIRECTIONS:
        apart = stage_and_rest(samples[f"{direction} {FEW}"], samples[f"{direction} {MANY}"])
        times = measured(apart, "stage")
        row[direction] = {**times, **_reached(row, direction, 1, times), "rest": measured(apart, "rest")}
    return row


def _timed(calls: Mapping[str, Callable[[], object]], seconds: float) -> tuple[Samples, dict[str, Any]]:
    """The times of the calls, and the multiply-adds per second of the machine in the same rounds."""
    rates: list[float] = []
    with torch.inference_mode():
        bound = {_BOUND: lambda: rates.append(ops.cpu.multiply_adds_per_second())}
        samples = interleaved({**calls, **bound}, seconds)
    return samples, spread("multiply_adds_per_second", rates)


def stage_and_rest(few: Mapping[int, float], many: Mapping[int, float]) -> Samples:
    """The seconds of one stage, and of what a call does besides: above all, copying rows in and out.

    Args:
        few: the seconds of a layer of `FEW` stages, by round.
        many: those of a layer of `MANY` such stages.
    """
    stage = {number: (many[number] - few[number]) / (MANY - FEW) for number in few if number in many}
    return {"stage": stage, "rest": {number: few[number] - FEW * seconds for number, seconds in stage.items()}}


def _reached(row: tables.Row, direction: str, stages: int, times: tables.Row) -> dict[str, Any]:
    """The share of the bound that so many stages reached, and whether it or their time was disturbed."""
    if times["ms"] <= 0:  # the difference of two times
        return {"of_arithmetic": None, "disturbed": True}
    needed = _MULTIPLY_ADDS[row["block"]][direction] * stages * (row["n"] // 2) * row["batch"]
    share = needed / row["multiply_adds_per_second"] / (times["ms"] / 1e3)
    disturbed = share > 1 or varies(row["multiply_adds_per_second_iqr"]) or varies(times["ms_iqr"])
    return {"of_arithmetic": share, "disturbed": disturbed}


def table(rows: tables.Rows) -> tables.Table:
    """The time of the kernels by width, and the share of the bound that they reach."""
    return tables.table(
        _of_widths(rows),
        [
            *_common_columns(),
            ("stages", lambda row: str(row["stages"])),
            *(
                column
                for direction in DIRECTIONS
                for column in (
                    (f"{direction}, ms", _time(direction)),
                    (f"{direction}, of the bound", _share(direction)),
                )
            ),
        ],
    )


def stages_table(rows: tables.Rows) -> tables.Table:
    """The time of one stage by its pairs, the share of the bound that it reaches, and the time of the rest."""
    return tables.table(
        _of_stages(rows),
        [
            *_common_columns(),
            ("pairs", lambda row: row["pairs"]),
            *(
                column
                for direction in DIRECTIONS
                for column in (
                    (f"{direction}, µs a stage", _time(direction, 1e3)),
                    (f"{direction}, of the bound", _share(direction)),
                    (f"{direction}, µs in and out", _rest(direction)),
                )
            ),
        ],
    )


def _common_columns() -> tables.Columns:
    return [
        ("n", lambda row: f"{row['n']:,}"),
        ("block", lambda row: row["block"]),
        ("kernels", lambda row: f"{row['instruction_set']}, {row['threads']} thread{'s' * (row['threads'] > 1)}"),
        ("10^9 multiply-adds/s", lambda row: tables.number(row["multiply_adds_per_second"], 1e-9)),
    ]


def _time(direction: str, unit: float = 1) -> Callable[[tables.Row], str]:
    return lambda row: tables.with_quartiles(row[direction], "ms", unit)


def _rest(direction: str) -> Callable[[tables.Row], str]:
    return lambda row: tables.with_quartiles(row[direction]["rest"], "ms", 1e3)


def _share(direction: str) -> Callable[[tables.Row], str]:
    return lambda row: tables.DISTURBED if row[direction]["disturbed"] else f"{row[direction]['of_arithmetic']:.0%}"


def _of_widths(rows: tables.Rows) -> tables.Rows:
    return [row for row in rows if "pairs" not in row]


def _of_stages(rows: tables.Rows) -> tables.Rows:
    return [row for row in rows if "pairs" in row]


@styled
def picture(rows: tables.Rows) -> Figure:
    """The share of the bound against the width, and against the stride of a stage; nothing where it was disturbed."""
    figure = Figure(figsize=(12, 4.5))
    by_width, by_stage = figure.subplots(1, 2)
    widths, stages = _of_widths(rows), _of_stages(rows)
    _draw_shares(by_width, widths, lambda row: row["n"])
    by_width.set(xscale="log", xlabel="n")
    width_ticks(by_width, column(widths, "n"))
    kinds = column(stages, "pairs")
    for is_random in (False, True):  # no line leads from the largest stride to a random matching
        chosen = [row for row in stages if (row["pairs"] == RANDOM) == is_random]
        _draw_shares(by_stage, chosen, lambda row: kinds.index(row["pairs"]))
    by_stage.set_xticks(range(len(kinds)), [kind.removeprefix(_STRIDE) for kind in kinds])
    by_stage.set_xlabel(f"stride of a stage, n = {stages[0]['n']:,}")
    for axes in (by_width, by_stage):
        axes.set(ylabel="of the multiply-add bound", ylim=(0, 1))
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    legend_below(figure)
    return figure


def _draw_shares(axes: Any, rows: tables.Rows, place: Callable[[tables.Row], int]) -> None:
    """A line for each direction, block and number of threads."""
    threads, blocks = sorted(column(rows, "threads"), reverse=True), column(rows, "block")
    for (direction, color), block, number in product(DIRECTIONS.items(), blocks, threads):
        chosen = [row for row in rows if (row["block"], row["threads"]) == (block, number)]
        shares = [nan if row[direction]["disturbed"] else row[direction]["of_arithmetic"] for row in chosen]
        look: Any = {
            "color": color,
            "linestyle": ("-", "--", ":")[threads.index(number) % 3],
            "marker": {"general": "o", "rotation": "s"}[block],
            "label": direction + f", {block}" * (len(blocks) > 1) + if_several(threads, number),
        }
        axes.plot([place(row) for row in chosen], shares, **look)


TABLES = {"kernels": table, "kernels-stages": stages_table}
