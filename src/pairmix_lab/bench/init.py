"""Which initialisation trains best?

Students of the teacher's form start from each initialisation, for both blocks, from several seeds, on a teacher close
to the identity and on one far from it. Everything else is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from torch import nn

from pairmix.nn import SPMLinear
from pairmix.nn.init import INITS, near_identity_
from pairmix_lab.experiments import teacher
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
