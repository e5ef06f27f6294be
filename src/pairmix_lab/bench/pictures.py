"""What the pictures of benchmarks share: lines against the width, and labels with the number of threads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np

from pairmix_lab import contenders
from pairmix_lab.report.pictures import look, width_ticks
from pairmix_lab.report.tables import Rows, distinct


def column(rows: Rows, key: str) -> list[Any]:
    """The values of a field, each once."""
    return distinct(row[key] for row in rows)


def if_several(threads: Sequence[int], number: int) -> str:
    """What a label says of the number of threads: nothing if there is only one."""
    return f", {number} thread{'s' * (number > 1)}" if len(threads) > 1 else ""


def against_width(axes: Any, rows: Rows, task: str, value: str, label: str, unit: float = 1) -> None:
    """A line for each layer, with its quartiles as a band; dashed for fewer threads than the most."""
    threads = sorted(column(rows, "threads"), reverse=True)
    for layer in column(rows, "layer"):
        name = contenders.named(layer).label
        for number, dash in zip(threads, cycle(("-", "--", ":"))):
            chosen = [row for row in rows if (row["layer"], row["threads"]) == (layer, number)]
            widths = [row["n"] for row in chosen]
            low, high = unit * np.array([row[task][f"{value}_iqr"] for row in chosen]).reshape(-1, 2).T
            middle = [unit * row[task][value] for row in chosen]
            style = look(name) | ({"linestyle": dash} if len(threads) > 1 else {})
            axes.plot(widths, middle, label=name + if_several(threads, number), **style)
            axes.fill_between(widths, low, high, color=look(name)["color"], alpha=0.2, linewidth=0)
    if value == "speedup":
        axes.axhline(1, color="grey", linewidth=1)
    logarithmic(axes, rows)
    axes.set_ylabel(label)


def logarithmic(axes: Any, rows: Rows) -> None:
    """Both axes by factors, with a tick for each width."""
    axes.set(xscale="log", yscale="log", xlabel="n")
    width_ticks(axes, column(rows, "n"))
    axes.yaxis.set_major_formatter("{x:g}")
