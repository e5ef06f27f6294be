"""Which initialisation trains best?

Students of the teacher's form start from each initialisation, for both blocks, from several seeds, on a teacher close
to the identity and on one far from it. Everything else is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import mean
from typing import Any

from matplotlib.figure import Figure
from torch import nn

from pairmix.nn import SPMLinear
from pairmix.nn.init import INITS, near_identity_
from pairmix_lab.contenders import SPM, of_config
from pairmix_lab.experiments import teacher
from pairmix_lab.report.pictures import styled
from pairmix_lab.report.tables import Rows, Table, distinct
from pairmix_lab.training.loop import train


@dataclass(frozen=True)
class Config:
    """The grid, and what every run in it is trained with."""

    width: int = 256
    steps: int = 1200
    batch: int = 256
    lr: float = 3e-3
    teacher_angle_stds: tuple[float, ...] = (0.1, 0.5)
    blocks: tuple[str, ...] = ("general", "rotation")
    near_identity_stds: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def inits(self) -> dict[str, Any]:
        """Every initialisation of the grid, by the name it has in the results."""
        near = {f"near_identity {std:g}": partial(near_identity_, std=std) for std in self.near_identity_stds}
        return {**{name: init for name, init in INITS.items() if name != "near_identity"}, **near}

    @property
    def runs(self) -> int:
        """How many runs there are in the grid."""
        return len(self.teacher_angle_stds) * len(self.blocks) * len(self.inits) * len(self.seeds)


class Student(teacher.Task):
    """An SPM student that starts from a given initialisation."""

    def __init__(self, config: teacher.Config, init: Any) -> None:
        super().__init__(config)
        self.init = init

    def layer(self) -> nn.Module:
        return SPMLinear(self.config.width, self.config.width, block=self.config.block, init=self.init)


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Train the whole grid, a row at a time."""
    grid = product(config.teacher_angle_stds, config.inits.items(), config.blocks, config.seeds)
    shared: dict[str, Any] = {"width": config.width, "steps": config.steps, "batch": config.batch, "lr": config.lr}
    for angle_std, (name, init), block, seed in grid:
        student = Student(teacher.Config(**shared, angle_std=angle_std, block=block, seed=seed), init)
        trained = train(student)
        yield {
            "teacher_angle_std": angle_std,
            "init": name,
            "block": block,
            "seed": seed,
            "accuracy": trained.outcome["test_accuracy"],
            "final_loss": trained.rows[-1]["train_loss"],
        }


def table(rows: Rows) -> Table:
    """The mean accuracy over seeds from each initialisation: a column for each teacher and block."""
    columns = distinct((row["teacher_angle_std"], row["block"]) for row in rows)
    header = ["init", *(f"teacher {std}, {block}" for std, block in columns)]
    lines = []
    for init in distinct(row["init"] for row in rows):
        cells = [
            mean(
                row["accuracy"] for row in rows if (row["init"], row["teacher_angle_std"], row["block"]) == (init, *key)
            )
            for key in columns
        ]
        lines.append([init, *(f"{cell:.3f}" for cell in cells)])
    return [header, *lines]


@styled
def picture(rows: Rows) -> Figure:
    """Accuracy after training from each initialisation: a panel per teacher, a colour per block, a dot per seed."""
    teachers = sorted({row["teacher_angle_std"] for row in rows})
    inits, blocks = distinct(row["init"] for row in rows), distinct(row["block"] for row in rows)
    figure = Figure(figsize=(5 * len(teachers), 4))
    panels = figure.subplots(1, len(teachers), sharey=True, squeeze=False)
    for axes, std in zip(panels[0], teachers, strict=True):
        for number, block in enumerate(blocks):
            chosen = [row for row in rows if (row["teacher_angle_std"], row["block"]) == (std, block)]
            heights = [inits.index(row["init"]) + 0.2 * (number - 0.5) for row in chosen]
            color = of_config({"layer": SPM.key, "block": block}).color
            axes.plot([row["accuracy"] for row in chosen], heights, "o", color=color, alpha=0.7, label=block)
        axes.set(title=f"teacher with angles of std {std}", xlabel="test accuracy")
        axes.set_yticks(range(len(inits)), inits)
        axes.grid(visible=False, axis="y")
    panels[0, 0].invert_yaxis()  # shared, so once for all
    panels[0, 0].legend()
    return figure


TABLES = {"init": table}
