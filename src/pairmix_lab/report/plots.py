"""Pictures of results."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from pairmix_lab.report.tables import TASKS, Rows


def steps(rows: Rows, path: Path) -> None:
    """The time of a training step against the width: a panel for each experiment, a line for each model."""
    experiments = _distinct(rows, "experiment")
    figure, panels = plt.subplots(1, len(experiments), figsize=(4 * len(experiments), 4), layout="constrained")
    for axes, experiment in zip(np.atleast_1d(panels), experiments, strict=True):
        for color, layer in enumerate(_distinct(rows, "layer")):
            chosen = [row for row in rows if (row["experiment"], row["layer"]) == (experiment, layer)]
            if chosen:
                widths, times = [row["width"] for row in chosen], [row["ms"] for row in chosen]
                axes.loglog(widths, times, "o-", color=f"C{color}", markersize=4, label=layer)
        widths = _distinct([row for row in rows if row["experiment"] == experiment], "width")
        axes.set(title=experiment, xlabel="n", ylabel="ms per step")
        axes.set_xticks(widths, widths, rotation=45)
        axes.minorticks_off()
        axes.grid(alpha=0.2)
        axes.legend(frameon=False)
    _save(figure, path)


def initialisations(rows: Rows, path: Path) -> None:
    """Accuracy after training from each initialisation: one panel a teacher, one colour a block, one dot a seed."""
    teachers = sorted({row["teacher_angle_std"] for row in rows})
    inits = list(dict.fromkeys(row["init"] for row in rows))
    blocks = list(dict.fromkeys(row["block"] for row in rows))
    figure, panels = plt.subplots(
        1, len(teachers), figsize=(5 * len(teachers), 4), sharey=True, layout="constrained", squeeze=False
    )
    for axes, teacher in zip(panels[0], teachers, strict=True):
        for number, block in enumerate(blocks):
            chosen = [row for row in rows if (row["teacher_angle_std"], row["block"]) == (teacher, block)]
            heights = [inits.index(row["init"]) + 0.2 * (number - 0.5) for row in chosen]
            axes.plot([row["accuracy"] for row in chosen], heights, "o", alpha=0.7, label=block)
        axes.set(title=f"teacher with angles of std {teacher}", xlabel="test accuracy")
        axes.set_yticks(range(len(inits)), inits)
        axes.grid(axis="x", alpha=0.2)
    panels[0, 0].invert_yaxis()  # shared, so once for all
    panels[0, 0].legend(frameon=False)
    _save(figure, path)


def operator(rows: Rows, path: Path) -> None:
    """The time of every layer, and its ratio to `nn.Linear`, against the width."""
    figure, panels = plt.subplots(2, 2, figsize=(12, 7), sharex=True, layout="constrained")
    for (times, speedups), (task, name) in zip(panels, TASKS.items(), strict=True):
        _against_width(times, rows, task, "ms", f"{name}, ms")
        _against_width(speedups, rows, task, "speedup", "times as fast as nn.Linear")
    for axes in panels[-1]:
        axes.set_xlabel("n")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    _save(figure, path)


def modules(rows: Rows, path: Path) -> None:
    """How many times as fast as torch's own the SPM modules are: a bar for each, with the interquartile range."""
    ours = [row for row in rows if row["module"].startswith("SPM")]
    labels = [f"{row['module']} {row['size']:,}\n{row['steps']} steps, batch {row['batch']}" for row in ours]
    figure, axes = plt.subplots(figsize=(9, 0.7 * len(ours) + 1), layout="constrained")
    for number, (task, name) in enumerate(TASKS.items()):
        places = np.arange(len(ours)) + 0.38 * (number - 0.5)
        values = np.array([row[task]["speedup"] for row in ours])
        low, high = np.array([row[task]["speedup_iqr"] for row in ours]).T
        axes.barh(places, values, 0.36, xerr=[values - low, high - values], error_kw={"alpha": 0.4}, label=name)
        for place, value in zip(places, values, strict=True):
            axes.annotate(f" {value:.3g}", (value, place), va="center")
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xscale="log", xlabel="times as fast as torch's own module")
    axes.set_yticks(range(len(ours)), labels)
    axes.invert_yaxis()
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def operator_latency(rows: Rows, path: Path) -> None:
    """The time that one vector takes, and its ratio to `nn.Linear`, against the width."""
    figure, (times, speedups) = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    _against_width(times, rows, "inference", "ms", "one vector, µs", unit=1e3)
    _against_width(speedups, rows, "inference", "speedup", "times as fast as nn.Linear")
    for axes in (times, speedups):
        axes.set_xlabel("n")
    figure.legend(*times.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    _save(figure, path)


def operator_grid(rows: Rows, path: Path) -> None:
    """How many times as fast as `nn.Linear` SPM is: blue where it is faster, red where it is slower."""
    schedules, threads = _distinct(rows, "schedule"), _distinct(rows, "threads")
    widths, batches = _distinct(rows, "n"), _distinct(rows, "batch")
    lines = [(number, task) for number in threads for task in TASKS]
    figure, panels = plt.subplots(
        len(lines),
        len(schedules),
        figsize=(1 + (1 + 0.6 * len(batches)) * len(schedules), 1 + (1 + 0.4 * len(widths)) * len(lines)),
        layout="constrained",
        squeeze=False,
    )
    for line, (number, task) in zip(panels, lines, strict=True):
        for axes, schedule in zip(line, schedules, strict=True):
            speedups = np.full((len(widths), len(batches)), np.nan)
            for row in rows:
                if (row["threads"], row["schedule"]) == (number, schedule) and row[task]:
                    speedups[widths.index(row["n"]), batches.index(row["batch"])] = row[task]["speedup"]
            image = _heat_map(axes, speedups)
            axes.set(title=f"{schedule}, {TASKS[task]}{_if_several(threads, number)}", xlabel="batch", ylabel="n")
            axes.set_xticks(range(len(batches)), batches)
            axes.set_yticks(range(len(widths)), widths)
    figure.colorbar(image, ax=panels, label="log2 of times as fast as nn.Linear")
    _save(figure, path)


def operator_scaling(rows: Rows, path: Path) -> None:
    """The time of training against the width, with the fitted power of n."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    threads = _distinct(rows, "threads")
    for number in threads:
        chosen = [row for row in rows if row["threads"] == number]
        exponent = chosen[0]["exponent"]
        widths = np.array([row["n"] for row in chosen], float)
        times = np.array([row["train"]["ms"] for row in chosen])
        center = np.exp(np.mean(np.log(times)) - exponent * np.mean(np.log(widths)))
        (dots,) = axes.loglog(widths, times, "o", label="SPM" + _if_several(threads, number))
        axes.loglog(widths, center * widths**exponent, color=dots.get_color(), label=f"n to the {exponent:.2f}")
    axes.set(xlabel="n", ylabel="forward + backward, ms")
    _label_ticks(axes, rows)
    axes.legend(frameon=False)
    axes.grid(alpha=0.2)
    _save(figure, path)


def operator_variants(rows: Rows, path: Path) -> None:
    """The time of other kinds of SPM layer over that of the plain one, with quartiles."""
    threads = _distinct(rows, "threads")
    names = [f"{row['variant']} / {row['base']}{_if_several(threads, row['threads'])}" for row in rows]
    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.3 * len(rows)), layout="constrained")
    for number, (task, label) in enumerate(TASKS.items()):
        costs = np.array([row[task]["cost"] for row in rows])
        quartiles = np.array([row[task]["cost_iqr"] for row in rows])
        heights = np.arange(len(rows)) + 0.2 * (number - 0.5)
        axes.errorbar(costs, heights, xerr=abs(quartiles.T - costs), fmt="o", label=label)
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_yticks(range(len(rows)), names)
    axes.set(xlabel="time over that of the plain layer", xlim=(0, None))
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.2)
    axes.legend(frameon=False)
    _save(figure, path)


def _against_width(axes: Any, rows: Rows, task: str, value: str, label: str, unit: float = 1) -> None:
    """A line for each layer, with its quartiles as a band; dashed for fewer threads than the most."""
    threads = sorted(_distinct(rows, "threads"), reverse=True)
    for color, layer in enumerate(_distinct(rows, "layer")):
        for number, style in zip(threads, cycle(("-", "--", ":"))):
            chosen = [row for row in rows if (row["layer"], row["threads"]) == (layer, number)]
            widths = [row["n"] for row in chosen]
            low, high = unit * np.array([row[task][f"{value}_iqr"] for row in chosen]).reshape(-1, 2).T
            middle = [unit * row[task][value] for row in chosen]
            axes.plot(
                widths, middle, "o" + style, color=f"C{color}", markersize=3, label=layer + _if_several(threads, number)
            )
            axes.fill_between(widths, low, high, color=f"C{color}", alpha=0.2, linewidth=0)
    if value == "speedup":
        axes.axhline(1, color="grey", linewidth=1)
    axes.set(xscale="log", yscale="log", ylabel=label)
    _label_ticks(axes, rows)
    axes.grid(alpha=0.2)


def _label_ticks(axes: Any, rows: Rows) -> None:
    widths = _distinct(rows, "n")
    axes.set_xticks(widths, widths)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")


def _heat_map(axes: Any, speedups: np.ndarray[Any, Any]) -> Any:
    image = axes.imshow(np.log2(speedups), cmap="RdBu", vmin=-3, vmax=3, aspect="auto")
    for (line, column), speedup in np.ndenumerate(speedups):
        if not np.isnan(speedup):
            weight = "bold" if speedup < 1 else "normal"
            dark = abs(np.log2(speedup)) > 2
            text = f"{speedup:.0f}" if speedup >= 10 else f"{speedup:.1f}" if speedup >= 1 else f"{speedup:.2f}"
            axes.text(
                column, line, text, ha="center", va="center", fontsize="x-small", weight=weight,
                color="white" if dark else "black",
            )  # fmt: skip
    return image


def _if_several(threads: Sequence[int], number: int) -> str:
    """What a label says of the number of threads: nothing if there is only one."""
    return f", {number} thread{'s' * (number > 1)}" if len(threads) > 1 else ""


def _distinct(rows: Rows, key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
