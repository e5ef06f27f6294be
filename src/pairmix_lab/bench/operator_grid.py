"""Where does SPM beat a dense layer?

SPM over three kinds of schedule, with as many stages as the butterfly has, against the dense layer for many widths and
batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from pairmix_lab.bench.operator_variants import Kind
from pairmix_lab.bench.pictures import column, if_several
from pairmix_lab.bench.timing import TASKS, current_threads, measured, settings, time_layers
from pairmix_lab.contenders import DENSE
from pairmix_lab.report import tables
from pairmix_lab.report.pictures import styled


@dataclass(frozen=True)
class Config:
    """The grid, the seconds for each width, and from how many seconds on a dense layer is not waited for."""

    widths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    batches: tuple[int, ...] = (1, 4, 16, 64, 256, 1024, 4096)
    schedules: tuple[str, ...] = ("butterfly", "random", "brick")
    seconds: float = 40.0
    too_long: float = 2.0
    threads: tuple[int, ...] = field(default_factory=current_threads)


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Go through the grid; a row for every width, batch and schedule, without what would take too long."""
    for setting in settings(config.threads):
        for n in config.widths:
            for row in _of_width(config, n):
                yield {**setting, **row}


def _of_width(config: Config, n: int) -> Iterator[dict[str, Any]]:
    layers = {DENSE.key: torch.nn.Linear(n, n), **{kind: Kind(n, n, kind).layer() for kind in config.schedules}}
    seconds = config.seconds / (len(config.batches) * len(TASKS))
    seconds_a_row = dict.fromkeys(TASKS, 0.0)  # of the dense layer, at the batch before
    for batch in config.batches:
        x = torch.randn(batch, n)
        rows: dict[str, dict[str, Any]] = {
            kind: {"n": n, "batch": batch, "schedule": kind, **dict.fromkeys(TASKS)} for kind in config.schedules
        }
        for task in TASKS:
            if seconds_a_row[task] * batch > config.too_long:
                continue
            samples = time_layers({name: (layer, x) for name, layer in layers.items()}, task, seconds)
            seconds_a_row[task] = min(samples[DENSE.key].values()) / batch
            for kind, row in rows.items():
                row[task] = {**measured(samples, kind, DENSE.key), "dense_ms": measured(samples, DENSE.key)["ms"]}
        yield from (row for row in rows.values() if any(row[task] for task in TASKS))


def table(rows: tables.Rows) -> tables.Table:
    """How many times as fast as the dense layer SPM is: a line for each width, a column for each batch."""
    at = {(row["threads"], row["schedule"], row["n"], row["batch"]): row for row in rows}
    lines = {(task, *key[:-1]): {**row, "task": task} for task in TASKS for key, row in at.items()}

    def speedup(batch: int, line: tables.Row) -> str:
        row = at.get((line["threads"], line["schedule"], line["n"], batch))
        return tables.number(row[line["task"]]["speedup"] if row and row[line["task"]] else None)

    return tables.table(
        list(lines.values()),
        [
            ("", lambda line: TASKS[line["task"]]),
            ("schedule", lambda line: line["schedule"]),
            ("n", lambda line: f"{line['n']:,}"),
            *((f"batch {batch:,}", partial(speedup, batch)) for batch in tables.distinct(row["batch"] for row in rows)),
        ],
    )


@styled
def picture(rows: tables.Rows) -> Figure:
    """How many times as fast as dense SPM is: blue where it is faster, red where it is slower."""
    schedules, threads = column(rows, "schedule"), column(rows, "threads")
    widths, batches = column(rows, "n"), column(rows, "batch")
    lines = [(number, task) for number in threads for task in TASKS]
    size = (1 + (1 + 0.6 * len(batches)) * len(schedules), 1 + (1 + 0.4 * len(widths)) * len(lines))
    figure = Figure(figsize=size)
    panels = figure.subplots(len(lines), len(schedules), squeeze=False)
    for line, (number, task) in zip(panels, lines, strict=True):
        for axes, schedule in zip(line, schedules, strict=True):
            speedups = np.full((len(widths), len(batches)), np.nan)
            for row in rows:
                if (row["threads"], row["schedule"]) == (number, schedule) and row[task]:
                    speedups[widths.index(row["n"]), batches.index(row["batch"])] = row[task]["speedup"]
            image = _heat_map(axes, speedups)
            axes.set(title=f"{schedule}, {TASKS[task]}{if_several(threads, number)}", xlabel="batch", ylabel="n")
            axes.set_xticks(range(len(batches)), batches)
            axes.set_yticks(range(len(widths)), widths)
    figure.colorbar(image, ax=panels, label=f"log2 of times as fast as {DENSE.label}")
    return figure


def _heat_map(axes: Any, speedups: np.ndarray[Any, Any]) -> Any:
    axes.grid(False)
    image = axes.imshow(np.log2(speedups), cmap="RdBu", vmin=-3, vmax=3, aspect="auto")
    for (line, place), speedup in np.ndenumerate(speedups):
        if not np.isnan(speedup):
            weight = "bold" if speedup < 1 else "normal"
            dark = abs(np.log2(speedup)) > 2
            text = f"{speedup:.0f}" if speedup >= 10 else f"{speedup:.1f}" if speedup >= 1 else f"{speedup:.2f}"
            axes.text(
                place, line, text, ha="center", va="center", fontsize="x-small", weight=weight,
                color="white" if dark else "black",
            )  # fmt: skip
    return image


TABLES = {"operator-grid": table}
