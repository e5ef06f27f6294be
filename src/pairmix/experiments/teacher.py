"""The compositional teacher of section 9.1: an SPM, a ReLU and a dense map decide the label."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from pairmix.experiments.training import Batch
from pairmix.nn import SPMLinear
from pairmix.nn.init import near_identity_


@dataclass(frozen=True)
class Teacher:
    """A random labelling rule of the form argmax(W relu(SPM(x))), x normal.

    Attributes:
        width: of x.
        classes: how many labels there are.
        angle_std: how far the SPM is from the identity, in radians.
        seed: which rule, and which x.
    """

    width: int
    classes: int = 10
    angle_std: float = 0.1
    seed: int = 0

    def batches(self, size: int) -> Iterator[Batch]:
        """Fresh batches without end, the same ones for the same seed."""
        return self._batches(size, stream=1)

    def test_set(self, size: int = 10_000) -> Batch:
        """A batch that is not among the training batches."""
        return next(self._batches(size, stream=2))

    def _batches(self, size: int, stream: int) -> Iterator[Batch]:
        rule = self._rule()
        generator = torch.Generator().manual_seed(self._seed(stream))
        while True:
            x = torch.randn(size, self.width, generator=generator)
            with torch.no_grad():
                labels = rule(x).argmax(-1)
            yield x, labels

    def _seed(self, stream: int) -> int:
        # Far from the small seeds that students are started from: a student must not start as a copy of the rule.
        return 1_000_003 * (self.seed + 1) + stream

    def _rule(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed(stream=0))
            init = partial(near_identity_, std=self.angle_std)
            mixer = SPMLinear(self.width, self.width, bias=False, init=init)
            return nn.Sequential(mixer, nn.ReLU(), nn.Linear(self.width, self.classes, bias=False))


def student(first_layer: nn.Module, width: int, classes: int = 10) -> nn.Sequential:
    """A classifier of the teacher's form around the layer that is to be compared."""
    return nn.Sequential(first_layer, nn.ReLU(), nn.Linear(width, classes))


def count_parameters(model: nn.Module) -> int:
    """All of them, in scalars."""
    return sum(parameter.numel() for parameter in model.parameters())
