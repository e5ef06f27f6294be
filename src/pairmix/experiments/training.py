"""Train a classifier on a stream of batches, and time the steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class History:
    """What happened at every step.

    Attributes:
        losses: the training loss.
        milliseconds: how long the step took: forward, backward and update, without making the batch.
    """

    losses: list[float]
    milliseconds: list[float]

    @property
    def median_milliseconds(self) -> float:
        """The typical step."""
        return median(self.milliseconds)


def train(
    model: nn.Module,
    batches: Iterable[Batch],
    steps: int,
    lr: float,
    on_step: Callable[[float], None] = lambda loss: None,
) -> History:
    """Train with Adam and a cosine schedule for `steps` batches.

    Args:
        model: maps inputs to logits; changed in place.
        batches: inputs and labels; as many as `steps` are taken.
        steps: how many.
        lr: the first learning rate; it falls to zero.
        on_step: called with the loss after every step.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    history = History([], [])
    for (inputs, labels), _ in zip(batches, range(steps), strict=False):
        start = time.perf_counter()
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        history.losses.append(loss.item())
        history.milliseconds.append(1e3 * (time.perf_counter() - start))
        on_step(history.losses[-1])
    return history


@torch.no_grad()
def accuracy(model: nn.Module, batch: Batch) -> float:
    """The part of the batch that the model classifies as labelled."""
    inputs, labels = batch
    return float((model(inputs).argmax(-1) == labels).double().mean())
