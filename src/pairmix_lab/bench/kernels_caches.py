"""How large should the kernels' tiles be?

They take fixed shares of the L1 and the L2 cache. The same kernels run here with the tiles of machines whose caches are
smaller and larger than this one's: where one of these is faster, the shares are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from matplotlib.figure import Figure

from pairmix import ops
from pairmix.schedule import Schedule
from pairmix_lab.bench.kernels import DIRECTIONS, check_there_are_kernels, kernel_calls
from pairmix_lab.bench.pictures import column
from pairmix_lab.bench.timing import current_threads, interleaved, measured, settings
from pairmix_lab.report import tables
from pairmix_lab.report.pictures import legend_below, styled, width_ticks

AS_THEY_ARE = (1.0, 1.0)
OTHERS = ((0.5, 1.0), (2.0, 1.0), (1.0, 0.5), (1.0, 2.0), (1.0, 4.0))
"""How large the L1 and the L2 cache are taken to be, beside this machine's."""


@dataclass(frozen=True)
class Config:
    """What is measured; `seconds` is for each width."""

    widths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    batch: int = 256
    seconds: float = 15.0
    threads: tuple[int, ...] = field(default_factory=current_threads)


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Measure every width; a row for it with each size of the caches.

    Raises:
        ValueError: without the compiled kernels.
    """
    check_there_are_kernels()
    before = ops.cpu.caches()
    try:
        for setting in settings(config.threads):
            setting |= {"instruction_set": ops.cpu.instruction_set(), "l1_bytes": before[0], "l2_bytes": before[1]}
            for n in config.widths:
                yield from ({**setting, **row} for row in _of_width(n, before, config))
    finally:
        ops.cpu.use_caches(*before)


def _of_width(n: int, caches: tuple[int, int], config: Config) -> Iterator[dict[str, Any]]:
    calls = {
        f"{direction} {factors}": _with_caches(caches, factors, call)
        for direction, call in kernel_calls(Schedule.butterfly(n), "general", config.batch).items()
        for factors in (AS_THEY_ARE, *OTHERS)
    }
    with torch.inference_mode():
        samples = interleaved(calls, config.seconds)
    for factors in (AS_THEY_ARE, *OTHERS):
        row: dict[str, Any] = {"n": n, "batch": config.batch, "l1_factor": factors[0], "l2_factor": factors[1]}
        for direction in DIRECTIONS:
            row[direction] = measured(samples, f"{direction} {factors}", dense=f"{direction} {AS_THEY_ARE}")
        yield row


def _with_caches(
    caches: tuple[int, int], factors: tuple[float, float], call: Callable[[], object]
) -> Callable[[], object]:
    l1_bytes, l2_bytes = (int(size * factor) for size, factor in zip(caches, factors, strict=True))

    def run() -> None:
        ops.cpu.use_caches(l1_bytes, l2_bytes)
        call()

    return run


def table(rows: tables.Rows) -> tables.Table:
    """How many times as fast the kernels are with the tiles of other caches."""
    return tables.table(
        rows,
        [
            ("n", lambda row: f"{row['n']:,}"),
            ("kernels", lambda row: f"{row['instruction_set']}, {row['threads']} thread{'s' * (row['threads'] > 1)}"),
            ("L1", lambda row: f"{row['l1_factor']:g} x {row['l1_bytes'] >> 10} KiB"),
            ("L2", lambda row: f"{row['l2_factor']:g} x {row['l2_bytes'] >> 10} KiB"),
            *(
                column
                for direction in DIRECTIONS
                for column in (
                    (f"{direction}, ms", _cell(direction, "ms")),
                    ("times as fast", _cell(direction, "speedup")),
                )
            ),
        ],
    )


def _cell(direction: str, value: str) -> Callable[[tables.Row], str]:
    return lambda row: tables.with_quartiles(row[direction], value)


@styled
def picture(rows: tables.Rows) -> Figure:
    """How many times as fast, against the width: a line for every size of the caches."""
    figure = Figure(figsize=(12, 4.5))
    threads = max(column(rows, "threads"))
    for axes, direction in zip(figure.subplots(1, 2, sharey=True), DIRECTIONS, strict=True):
        for l1, l2 in OTHERS:
            chosen = [row for row in rows if (row["l1_factor"], row["l2_factor"], row["threads"]) == (l1, l2, threads)]
            label = f"L1 x {l1:g}" if l2 == 1 else f"L2 x {l2:g}"
            axes.plot([row["n"] for row in chosen], [row[direction]["speedup"] for row in chosen], "o-", label=label)
        axes.axhline(1, color="grey", linewidth=1)
        axes.set(xscale="log", xlabel="n", ylabel="times as fast as with this machine's", title=direction)
        width_ticks(axes, column(rows, "n"))
    legend_below(figure)
    return figure


TABLES = {"kernels-caches": table}
