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

import torch

from pairmix.experiments.teacher import Teacher, student
from pairmix.experiments.training import accuracy, train
from pairmix.nn import SPMLinear
from pairmix.nn.init import INITS, near_identity_


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


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Train the whole grid, a row at a time."""
    grid = product(config.teacher_angle_stds, config.inits.items(), config.blocks, config.seeds)
    for angle_std, (name, init), block, seed in grid:
        teacher = Teacher(config.width, angle_std=angle_std, seed=seed)
        torch.manual_seed(seed)
        model = student(SPMLinear(config.width, config.width, block=block, init=init), config.width)
        history = train(model, teacher.batches(config.batch), config.steps, config.lr)
        yield {
            "teacher_angle_std": angle_std,
            "init": name,
            "block": block,
            "seed": seed,
            "accuracy": accuracy(model, teacher.test_set()),
            "final_loss": sum(history.losses[-50:]) / len(history.losses[-50:]),
        }
