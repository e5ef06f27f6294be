"""How fast is the operator?

SPM, a dense layer and other structured layers in one run, in turns: time, memory, and how near SPM comes to what the
machine could do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from matplotlib.figure import Figure

from pairmix.nn import SPMLinear
from pairmix_lab import contenders
from pairmix_lab.bench import bounds, memory
from pairmix_lab.bench.pictures import against_width
from pairmix_lab.bench.timing import TASKS, current_threads, measured, settings, time_layers
from pairmix_lab.contenders import DENSE, LOW_RANK, SPM, Contender, count_parameters
from pairmix_lab.report import tables
from pairmix_lab.report.pictures import legend_below, styled


@dataclass(frozen=True)
class Config:
    """What is compared, and for how long: `seconds` is for each width."""

    widths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    batch: int = 256
    seconds: float = 40.0
    threads: tuple[int, ...] = field(default_factory=current_threads)


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Compare at every width; a row for every layer."""
    for setting in settings(config.threads):
        for n in config.widths:
            for row in _compare(n, config.batch, config.seconds):
                yield {**setting, **row}


def _compare(n: int, batch: int, seconds: float) -> list[dict[str, Any]]:
    builds = contenders.timed_at(n)
    layers = {name: build() for name, build in builds.items()}
    x = torch.randn(batch, n)
    rows: dict[str, dict[str, Any]] = {
        name: {
            "n": n,
            "batch": batch,
            "layer": name,
            "parameters": count_parameters(layer),
            "bytes_kept": memory.bytes_kept(layer, x),
            "peak_bytes": memory.peak_of_training(builds[name], batch, n),
        }
        for name, layer in layers.items()
    }
    cases = {name: (layer, x) for name, layer in layers.items()}
    spm = layers[SPM.key]
    assert isinstance(spm, SPMLinear)
    for task in TASKS:
        multiply_adds: list[float] = []
        samples = time_layers(cases, task, seconds / len(TASKS), **bounds.calls(x, multiply_adds))
        for name, row in rows.items():
            row[task] = measured(samples, name, DENSE.key)
        times, copies = ([*samples[name].values()] for name in (SPM.key, bounds.COPY))
        rows[SPM.key][task] |= bounds.reached(spm, x, task, times, copies, multiply_adds)
    return list(rows.values())


def table(rows: tables.Rows) -> tables.Table:
    """The time of every layer, and its ratio to that of the dense one."""
    return tables.table(
        rows,
        [
            ("n", lambda row: f"{row['n']:,}"),
            ("layer", lambda row: contenders.named(row["layer"]).label),
            ("forward + backward, ms", lambda row: tables.with_quartiles(row["train"], "ms")),
            ("times as fast as dense", lambda row: tables.with_quartiles(row["train"], "speedup")),
            ("forward, ms", lambda row: tables.with_quartiles(row["inference"], "ms")),
            ("times as fast as dense", lambda row: tables.with_quartiles(row["inference"], "speedup")),
        ],
    )


def summary(rows: tables.Rows) -> tables.Table:
    """SPM beside dense and a low rank of the same size, by width."""
    at = {(row["n"], contenders.named(row["layer"]).key): row for row in rows}

    def time(task: str, contender: Contender) -> Callable[[tables.Row], str]:
        return lambda row: tables.number(at[row["n"], contender.key][task]["ms"])

    def speedup(task: str) -> Callable[[tables.Row], str]:
        return lambda row: f"**{tables.number(row[task]['speedup'])}**"

    return tables.table(
        [row for row in rows if contenders.named(row["layer"]) is SPM],
        [
            ("n", lambda row: f"{row['n']:,}"),
            *(
                column
                for task, name in TASKS.items()
                for column in (
                    (f"{name}, ms: {DENSE.label}", time(task, DENSE)),
                    (LOW_RANK.label, time(task, LOW_RANK)),
                    (SPM.label, time(task, SPM)),
                    (f"**times as fast as {DENSE.label}**", speedup(task)),
                )
            ),
        ],
    )


def memory_table(rows: tables.Rows) -> tables.Table:
    """What every layer needs memory for."""
    return tables.table(
        rows,
        [
            ("n", lambda row: f"{row['n']:,}"),
            ("layer", lambda row: contenders.named(row["layer"]).label),
            ("parameters", lambda row: f"{row['parameters']:,}"),
            ("kept for backward", lambda row: tables.mebibytes(row["bytes_kept"])),
            ("peak of training", lambda row: tables.mebibytes(row["peak_bytes"])),
        ],
    )


def bounds_table(rows: tables.Rows) -> tables.Table:
    """How near SPM comes to what the machine could do."""

    def share(task: str, bound: str) -> Callable[[tables.Row], str]:
        def of(row: tables.Row) -> str:
            if bound in row[task].get("disturbed_bounds", ()):
                return tables.DISTURBED
            value = row[task][f"of_{bound}"]
            return "-" if value is None else f"{value:.0%}"

        return of

    return tables.table(
        [row for row in rows if "of_bandwidth" in row["train"]],
        [
            ("n", lambda row: f"{row['n']:,}"),
            ("10^9 multiply-adds/s", lambda row: tables.number(row["train"]["multiply_adds_per_second"], 1e-9)),
            ("copied GB/s", lambda row: tables.number(row["train"]["bytes_per_second"], 1e-9)),
            *(
                (f"{name}, of the {bound}", share(task, bound))
                for task, name in TASKS.items()
                for bound in ("arithmetic", "bandwidth")
            ),
        ],
    )


@styled
def picture(rows: tables.Rows) -> Figure:
    """The time of every layer, and its ratio to that of the dense one, against the width."""
    figure = Figure(figsize=(12, 8))
    panels = figure.subplots(2, 2, sharex=True)
    for (times, speedups), (task, name) in zip(panels, TASKS.items(), strict=True):
        against_width(times, rows, task, "ms", f"{name}, ms")
        against_width(speedups, rows, task, "speedup", f"times as fast as {DENSE.label}")
    for axes in panels[0]:
        axes.set_xlabel("")  # it is below the others
    legend_below(figure)
    return figure


TABLES = {
    "operator": table,
    "operator-summary": summary,
    "operator-memory": memory_table,
    "operator-bounds": bounds_table,
}
