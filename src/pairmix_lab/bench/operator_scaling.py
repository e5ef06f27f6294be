"""How does the time of training grow with the width?

All widths take turns, and a line through the logarithms of width and time tells the exponent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from pairmix.nn import SPMLinear
from pairmix_lab.bench import memory
from pairmix_lab.bench.pictures import column, if_several, logarithmic
from pairmix_lab.bench.timing import current_threads, measured, settings, time_layers
from pairmix_lab.contenders import SPM, count_parameters
from pairmix_lab.report import tables
from pairmix_lab.report.pictures import look, styled


@dataclass(frozen=True)
class Config:
    """The widths, and how long each of them is measured."""

    widths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    batch: int = 256
    seconds: float = 10.0
    threads: tuple[int, ...] = field(default_factory=current_threads)

    def __post_init__(self) -> None:
        if len(set(self.widths)) < 2:
            raise ValueError(f"an exponent needs two widths or more, got {list(self.widths)}")


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Measure all widths; a row for each, with the exponent of all."""
    for setting in settings(config.threads):
        layers = {str(n): SPMLinear(n, n) for n in config.widths}
        cases = {name: (layer, torch.randn(config.batch, layer.width)) for name, layer in layers.items()}
        samples = time_layers(cases, "train", config.seconds * len(config.widths))
        times = {name: measured(samples, name) for name in layers}
        exponent = fitted_exponent(config.widths, [time["ms"] for time in times.values()])
        for name, layer in layers.items():
            n = layer.width
            yield {
                **setting,
                "n": n,
                "batch": config.batch,
                "stages": layer.stages,
                "parameters": count_parameters(layer),
                "peak_bytes": memory.peak_of_training(partial(SPMLinear, n, n), config.batch, n),
                "train": times[name],
                "exponent": exponent,
            }


def fitted_exponent(widths: Sequence[int], times: Sequence[float]) -> float:
    """The p for which times are nearest to `c * width ** p`, by least squares on the logarithms."""
    slope, _ = np.polyfit(np.log(widths), np.log(times), 1)
    return float(slope)


def table(rows: tables.Rows) -> tables.Table:
    """The time of training at growing widths, and the exponent of its growth."""
    return tables.table(
        rows,
        [
            ("n", lambda row: f"{row['n']:,}"),
            ("stages", lambda row: str(row["stages"])),
            ("parameters", lambda row: f"{row['parameters']:,}"),
            ("forward + backward, ms", lambda row: tables.with_quartiles(row["train"], "ms")),
            ("peak", lambda row: tables.mebibytes(row["peak_bytes"])),
            ("exponent over all n", lambda row: f"{row['exponent']:.2f}"),
        ],
    )


@styled
def picture(rows: tables.Rows) -> Figure:
    """The time of training against the width, with the fitted power of n."""
    figure = Figure()
    axes = figure.subplots()
    threads = sorted(column(rows, "threads"), reverse=True)
    for number, dash in zip(threads, cycle(("-", "--", ":"))):
        chosen = [row for row in rows if row["threads"] == number]
        exponent = chosen[0]["exponent"]
        widths = np.array([row["n"] for row in chosen], float)
        times = np.array([row["train"]["ms"] for row in chosen])
        center = np.exp(np.mean(np.log(times)) - exponent * np.mean(np.log(widths)))
        own = {**look(SPM.label), "linestyle": "none"}
        axes.plot(widths, times, label=SPM.label + if_several(threads, number), **own)
        line: Any = {"color": own["color"], "linestyle": dash, "label": f"n to the {exponent:.2f}"}
        axes.plot(widths, center * widths**exponent, **line)
    logarithmic(axes, rows)
    axes.set_ylabel("forward + backward, ms")
    axes.legend()
    return figure


TABLES = {"operator-scaling": table}
