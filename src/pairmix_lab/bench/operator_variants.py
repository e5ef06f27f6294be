"""What do other kinds of SPM layer cost?

Each takes turns with the plain layer that it is nearest to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from pairmix.nn import SPMLinear
from pairmix.schedule import Schedule
from pairmix_lab.bench.pictures import column, if_several
from pairmix_lab.bench.timing import TASKS, current_threads, measured, ratios, settings, spread, time_layers
from pairmix_lab.report import tables
from pairmix_lab.report.pictures import styled


@dataclass(frozen=True)
class Kind:
    """An SPM layer, by what makes it differ from others. Every schedule has as many stages as the butterfly."""

    in_features: int
    out_features: int
    schedule: str = "butterfly"
    block: str = "general"
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """Its size, and what is not as usual."""
        sizes = " -> ".join(map(str, dict.fromkeys((self.in_features, self.out_features))))
        traits, usual = (self.schedule, self.block, self.dtype), ("butterfly", "general", "float32")
        return " ".join([sizes, *(trait for trait in traits if trait not in usual)])

    def layer(self) -> SPMLinear:
        """Such a layer."""
        return SPMLinear(
            self.in_features,
            self.out_features,
            dtype=getattr(torch, self.dtype),
            block=self.block,
            schedule=self.schedule,
            stages=Schedule.butterfly(max(self.in_features, self.out_features)).stages,
        )


def _square(n: int, **differences: str) -> Kind:
    return Kind(n, n, **differences)


@dataclass(frozen=True)
class Config:
    """Pairs of a layer and its base; `seconds` is for each pair."""

    pairs: tuple[tuple[Kind, Kind], ...] = (
        *((_square(n, schedule=kind), _square(n)) for n in (256, 1024, 4096) for kind in ("random", "brick")),
        (_square(1000), _square(1024)),
        (_square(4095), _square(4096)),
        (Kind(512, 2048), _square(2048)),
        (Kind(2048, 512), _square(2048)),
        *((_square(n, block="rotation"), _square(n)) for n in (1024, 4096)),
        *((_square(n, dtype="bfloat16"), _square(n)) for n in (1024, 4096)),
    )
    batch: int = 256
    seconds: float = 10.0
    threads: tuple[int, ...] = field(default_factory=current_threads)


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Compare every pair; a row for each."""
    for setting in settings(config.threads):
        for kind, base in config.pairs:
            cases = {
                name: (one.layer(), torch.randn(config.batch, one.in_features, dtype=getattr(torch, one.dtype)))
                for name, one in (("variant", kind), ("base", base))
            }
            row = {**setting, "batch": config.batch, "variant": kind.name, "base": base.name}
            for task in TASKS:
                samples = time_layers(cases, task, config.seconds / len(TASKS))
                cost = spread("cost", ratios(samples, "variant", "base"))
                row[task] = {**measured(samples, "variant"), "base_ms": measured(samples, "base")["ms"], **cost}
            yield row


def table(rows: tables.Rows) -> tables.Table:
    """What other kinds of SPM layer cost beside the plain one."""

    def cost(task: str) -> Callable[[tables.Row], str]:
        return lambda row: tables.with_quartiles(row[task], "cost")

    return tables.table(
        rows,
        [
            ("layer", lambda row: row["variant"]),
            ("beside", lambda row: row["base"]),
            *((f"{name}, times as long", cost(task)) for task, name in TASKS.items()),
        ],
    )


@styled
def picture(rows: tables.Rows) -> Figure:
    """The time of other kinds of SPM layer over that of the plain one, with quartiles."""
    threads = column(rows, "threads")
    names = [f"{row['variant']} / {row['base']}{if_several(threads, row['threads'])}" for row in rows]
    figure = Figure(figsize=(8, 1.5 + 0.3 * len(rows)))
    axes = figure.subplots()
    for number, (task, label) in enumerate(TASKS.items()):
        costs = np.array([row[task]["cost"] for row in rows])
        quartiles = np.array([row[task]["cost_iqr"] for row in rows])
        heights = np.arange(len(rows)) + 0.2 * (number - 0.5)
        axes.errorbar(costs, heights, xerr=abs(quartiles.T - costs), fmt="o", label=label)
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_yticks(range(len(rows)), names)
    axes.set(xlabel="time over that of the plain layer", xlim=(0, None))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.legend()
    return figure


TABLES = {"operator-variants": table}
