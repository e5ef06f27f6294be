"""Section 9.1: students learn the labels of a compositional teacher, argmax(W relu(SPM(x))).

How far the teacher's SPM is from the identity is the axis of the experiment: the paper reports one point of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import nn

from pairmix.nn import SPMLinear
from pairmix.nn.init import near_identity_
from pairmix.schedule import Schedule
from pairmix_lab.experiments.classification import scores
from pairmix_lab.experiments.layers import LAYERS, count_parameters, make_layer
from pairmix_lab.training.loop import LARGEST_SIZE, Batch, Recipe

UNIFORM = "uniform"
PAIRINGS = {"same": "the teacher's", "other": "random ones"}


@dataclass(frozen=True, kw_only=True)
class Config(Recipe):
    """A student and its teacher.

    Attributes:
        layer: the student's, of `LAYERS`.
        width: of the input.
        classes: how many labels there are.
        angle_std: how far the teacher is from the identity: the spread of its angles in radians, or `"uniform"` for
            angles from the whole circle.
        block: of an SPM student.
        pairing: of an SPM student: `"same"`, the teacher's pairs, or `"other"`, random ones.
    """

    experiment: str = "teacher"
    layer: str = "spm"
    width: int = 256
    classes: int = 10
    angle_std: float | str = 0.1
    block: str = "general"
    pairing: str = "same"
    stages: int | None = None
    steps: int = 1200
    batch: int = 256
    lr: float = 3e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("layer", LAYERS)
        self._check_choice("pairing", PAIRINGS)
        self._check_at_most("width", LARGEST_SIZE)
        if self.angle_std != UNIFORM and not (isinstance(self.angle_std, float) and 0 <= self.angle_std < math.inf):
            raise ValueError(f"angle_std must be a number of radians or {UNIFORM!r}, got {self.angle_std!r}")

    @property
    def name(self) -> str:
        """What its files are called."""
        kind = f"spm-{self.block}-{self.pairing}" if self.layer == "spm" else self.layer
        return f"{kind}-{self.width}-std-{self.angle_std}-seed{self.seed}"


@dataclass(frozen=True)
class Teacher:
    """A random labelling rule of the form argmax(W relu(SPM(x))), x normal.

    Attributes:
        width: of x.
        classes: how many labels there are.
        angle_std: how far the SPM is from the identity; see `Config`.
        seed: which rule, and which x.
    """

    width: int
    classes: int = 10
    angle_std: float | str = 0.1
    seed: int = 0

    def batch(self, size: int, number: int) -> Batch:
        """Inputs and labels, the same ones for the same number, others for another."""
        # Not torch's generator: of a seed it takes the lowest 32 bits alone, which cannot hold a pair.
        normal = np.random.default_rng((self.seed, number)).standard_normal((size, self.width), np.float32)
        x = torch.from_numpy(normal)
        with torch.no_grad():
            return x, self.rule(x).argmax(-1)

    @cached_property
    def rule(self) -> nn.Module:
        """What gives every label its score."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2**31 + self.seed)  # a student's is below: it must not start as a copy of the rule
            init: Any = (
                "random_rotation" if self.angle_std == UNIFORM else partial(near_identity_, std=float(self.angle_std))
            )
            mixer = SPMLinear(self.width, self.width, bias=False, init=init)
            head = nn.Linear(self.width, self.classes, bias=False)
        with torch.no_grad():
            # All coordinates have the same mean after the ReLU, so now all classes are equally likely. Otherwise some
            # rules would give half of all x the same label, and a constant guess would be half right.
            head.weight -= head.weight.mean(1, keepdim=True)
        return nn.Sequential(mixer, nn.ReLU(), head)


class Task:
    """Fresh batches without end, so that nothing can be learnt by heart."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.data: dict[str, str] = {}  # the teacher makes it all
        self.teacher = Teacher(config.width, config.classes, config.angle_std, config.seed)

    def build(self) -> nn.Module:
        return nn.Sequential(self.layer(), nn.ReLU(), nn.Linear(self.config.width, self.config.classes))

    def layer(self) -> nn.Module:
        """The one that is compared."""
        config = self.config
        schedule: str | Schedule = "butterfly"
        if config.pairing == "other":
            stages = config.stages or Schedule.butterfly(config.width).stages
            schedule = Schedule.random(config.width, stages, seed=config.seed)
        return make_layer(config.layer, config.width, block=config.block, stages=config.stages, schedule=schedule)

    def batch(self, step: int) -> Batch:
        return self.teacher.batch(self.config.batch, step)

    @cached_property
    def _validation_set(self) -> Batch:
        return self.teacher.batch(2048, 0)

    def validate(self, model: nn.Module) -> dict[str, float]:
        return scores(model, [self._validation_set], "valid")

    def conclude(self, model: nn.Module) -> dict[str, Any]:
        test_set = (self.teacher.batch(1000, (1 << 31) + number) for number in range(10))
        return {**scores(model, test_set, "test"), "mixer_parameters": count_parameters(model[0])}  # type: ignore[index]
