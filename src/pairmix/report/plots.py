"""Pictures of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def students(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The loss of every student against steps and against time, with its accuracy; as PNG or SVG by the suffix."""
    figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for row in rows:
        losses = _smoothed(row["losses"])
        steps = np.arange(1, len(losses) + 1)
        label = f"{row['layer']}: {row['accuracy']:.1%} right, {row['parameters']:,} parameters"
        by_step.plot(steps, losses, label=label)
        by_time.plot(steps * row["ms_per_step"] / 1e3, losses)
    by_step.set(xlabel="step", ylabel="training loss")
    by_time.set(xlabel="seconds of training", xscale="log")
    by_step.legend(frameon=False)
    for axes in (by_step, by_time):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    _save(figure, path)


def initialisations(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
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


def _smoothed(values: Sequence[float], window: int = 25) -> np.ndarray[Any, Any]:
    sums = np.cumsum(np.pad(np.asarray(values, float), (1, 0)))
    stop = np.arange(1, len(values) + 1)
    start = np.maximum(stop - window, 0)
    return np.asarray((sums[stop] - sums[start]) / (stop - start))


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
