"""How long does one vector take?

A single input in inference mode and in training, where the way to the kernel counts as much as the kernel: at the
smallest width there is hardly anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from matplotlib.figure import Figure

from pairmix_lab import contenders
from pairmix_lab.bench.pictures import against_width
from pairmix_lab.bench.timing import TASKS, current_threads, measured, settings, time_layers
from pairmix_lab.contenders import DENSE, LOW_RANK, RANK_64, SPM, count_parameters
from pairmix_lab.report import tables
from pairmix_lab.report.pictures import legend_below, styled


@dataclass(frozen=True)
class Config:
    """The widths, and how long each of them is measured."""

    widths: tuple[int, ...] = (8, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    seconds: float = 5.0
    threads: tuple[int, ...] = field(default_factory=current_threads)


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Compare at every width; a row for every layer."""
    for setting in settings(config.threads):
        for n in config.widths:
            builds = contenders.timed_at(n)
            names = [one.key for one in (DENSE, SPM, LOW_RANK, RANK_64) if one.key in builds]
            cases = {name: (builds[name](), torch.randn(1, n)) for name in names}
            samples = {task: time_layers(cases, task, config.seconds / len(TASKS)) for task in TASKS}
            for name, (layer, _) in cases.items():
                sizes = {"n": n, "layer": name, "parameters": count_parameters(layer)}
                yield {**setting, **sizes, **{task: measured(samples[task], name, DENSE.key) for task in TASKS}}


def table(rows: tables.Rows) -> tables.Table:
    """The time that one vector takes; in older results only in inference mode."""

    def columns(task: str) -> list[tuple[str, Callable[[tables.Row], str]]]:
        return [
            (f"{TASKS[task]}, µs", lambda row: tables.with_quartiles(row[task], "ms", 1e3)),
            ("times as fast as dense", lambda row: tables.with_quartiles(row[task], "speedup")),
        ]

    return tables.table(
        rows,
        [
            ("n", lambda row: f"{row['n']:,}"),
            ("layer", lambda row: contenders.named(row["layer"]).label),
            *columns("inference"),
            *(columns("train") if all("train" in row for row in rows) else []),
        ],
    )


@styled
def picture(rows: tables.Rows) -> Figure:
    """The time that one vector takes, and its ratio to that of the dense layer, against the width."""
    figure = Figure(figsize=(12, 4.5))
    times, speedups = figure.subplots(1, 2)
    against_width(times, rows, "inference", "ms", "one vector, µs", unit=1e3)
    against_width(speedups, rows, "inference", "speedup", f"times as fast as {DENSE.label}")
    legend_below(figure)
    return figure


TABLES = {"operator-latency": table}
