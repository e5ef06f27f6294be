"""How long does a training step take where it is not alone?

In a loop of its own a layer finds everything in the caches, and all cores to itself. Other layers of a model empty the
caches between two calls, and other programs take cores.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from pairmix_lab import contenders
from pairmix_lab.bench.pictures import column
from pairmix_lab.bench.timing import current_threads, settings, spread, training_step
from pairmix_lab.contenders import DENSE, SPM, count_parameters
from pairmix_lab.report import tables
from pairmix_lab.report.pictures import legend_below, look, styled

_BUSY = """
import os
parent = os.getppid()
print(flush=True)
while os.getppid() == parent:
    sum(range(100_000))
"""
ALONE, COLD, BUSY = "alone", "cold", "busy"
CONDITIONS = {ALONE: "alone", COLD: "other data in between", BUSY: "beside a busy program"}
"""What is measured, and what tables and pictures call it."""
OTHER_DATA = 64 << 20
"""Bytes that are read and written between two steps, as a dense layer of width 4,096 does: more than caches hold."""
ROUNDS = 4


@dataclass(frozen=True)
class Config:
    """What is measured; `seconds` is for each layer under each condition."""

    widths: tuple[int, ...] = (1024, 4096)
    batch: int = 256
    seconds: float = 8.0
    threads: tuple[int, ...] = field(default_factory=current_threads)


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Measure both layers at every width under all conditions, in turns; a row for each layer."""
    for setting in settings(config.threads):
        for n in config.widths:
            builds = contenders.timed_at(n)
            layers = {name: builds[name]() for name in (DENSE.key, SPM.key)}
            steps = {name: training_step(layer, torch.randn(config.batch, n)) for name, layer in layers.items()}
            times = _timed(steps, config.seconds)
            for name, layer in layers.items():
                sizes = {"n": n, "batch": config.batch, "layer": name, "parameters": count_parameters(layer)}
                alone = statistics.mean(times[name][ALONE])
                yield {**setting, **sizes, **{key: _measured(found, alone) for key, found in times[name].items()}}


def _timed(steps: dict[str, Callable[[], None]], seconds: float) -> dict[str, dict[str, list[float]]]:
    """The seconds of each step, by its name and the condition."""
    other = torch.zeros(OTHER_DATA // 4)
    times: dict[str, dict[str, list[float]]] = {name: {condition: [] for condition in CONDITIONS} for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            step()  # brings back what the step before displaced
            times[name][ALONE] += _repeated(step, seconds / ROUNDS)
            times[name][COLD] += _repeated(step, seconds / ROUNDS, lambda: other.add_(1))
            with busy_program():
                times[name][BUSY] += _repeated(step, seconds / ROUNDS)
    return times


def _repeated(step: Callable[[], None], seconds: float, before: Callable[[], object] = lambda: None) -> list[float]:
    """How long each step takes, for so long, and twice at least; what is called before each is not counted."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 2 or time.perf_counter() < end:
        before()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


@contextmanager
def busy_program() -> Iterator[subprocess.Popen[bytes]]:
    """Another program that computes all the time, on one core, until this one ends, however it does."""
    program = [sys.executable, "-c", _BUSY]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # it has begun
            yield process
        finally:
            process.kill()


def _measured(times: list[float], alone: float) -> dict[str, Any]:
    """The median and the mean, which shows single steps that take long, and the mean beside that of steps alone."""
    mean = statistics.mean(times)
    return {
        "samples": len(times),
        **spread("ms", [1e3 * seconds for seconds in times]),
        "mean_ms": 1e3 * mean,
        "times_alone": mean / alone,
    }


def table(rows: tables.Rows) -> tables.Table:
    """The time of a step under each condition: the median with its quartiles, the mean, and its ratio to that alone."""
    return tables.table(
        rows,
        [
            ("n", lambda row: f"{row['n']:,}"),
            ("layer", lambda row: contenders.named(row["layer"]).label),
            *(column for condition in CONDITIONS for column in _columns(condition)),
        ],
    )


def _columns(condition: str) -> tables.Columns:
    label = CONDITIONS[condition]
    columns: tables.Columns = [
        (f"{label}, ms", lambda row: tables.with_quartiles(row[condition], "ms")),
        ("mean", lambda row: tables.number(row[condition]["mean_ms"])),
    ]
    ratio = ("times the mean alone", lambda row: f"{row[condition]['times_alone']:.2f}")
    return columns if condition == ALONE else [*columns, ratio]


@styled
def picture(rows: tables.Rows) -> Figure:
    """The mean time of a step beside that alone, by width: a bar for each layer and condition."""
    figure = Figure(figsize=(8, 4.5))
    axes = figure.subplots()
    widths, layers = column(rows, "n"), column(rows, "layer")
    disturbed = [condition for condition in CONDITIONS if condition != ALONE]
    kinds = [(layer, condition) for layer in layers for condition in disturbed]
    for k, (layer, condition) in enumerate(kinds):
        label = contenders.named(layer).label
        heights = [row[condition]["times_alone"] for row in rows if row["layer"] == layer]
        places = np.arange(len(heights)) + (k - (len(kinds) - 1) / 2) / (len(kinds) + 1)
        style: Any = {"color": look(label)["color"], "alpha": 1.0 if condition == BUSY else 0.5}
        axes.bar(places, heights, 1 / (len(kinds) + 1), label=f"{label}, {CONDITIONS[condition]}", **style)
    axes.axhline(1, color="grey", linewidth=1)
    axes.set_xticks(range(len(widths)), [f"{n:,}" for n in widths])
    axes.set(xlabel="n", ylabel="mean time of a step / alone")
    legend_below(figure)
    return figure


TABLES = {"operator-conditions": table}
