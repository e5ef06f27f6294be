"""A first look: a dense and an SPM student learn from the same teacher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from pairmix.experiments.teacher import Teacher, count_parameters, student
from pairmix.experiments.training import accuracy, train
from pairmix.nn import SPMLinear

LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "dense": lambda width: nn.Linear(width, width),
    "SPM": lambda width: SPMLinear(width, width),
}


@dataclass(frozen=True)
class Config:
    """What both students are trained with."""

    width: int = 256
    steps: int = 1200
    batch: int = 256
    lr: float = 3e-3
    angle_std: float = 0.1
    seed: int = 0


def run(config: Config, on_step: Callable[[str, float], None]) -> list[dict[str, Any]]:
    """Train the students one after the other; `on_step` is told whose step it was and its loss."""
    teacher = Teacher(config.width, angle_std=config.angle_std, seed=config.seed)
    test_set = teacher.test_set()
    rows = []
    for name, layer in LAYERS.items():
        torch.manual_seed(config.seed)
        model = student(layer(config.width), config.width)
        history = train(model, teacher.batches(config.batch), config.steps, config.lr, partial(on_step, name))
        rows.append(
            {
                "layer": name,
                "accuracy": accuracy(model, test_set),
                "parameters": count_parameters(model[0]),
                "ms_per_step": history.median_milliseconds,
                "losses": history.losses,
            }
        )
    return rows
