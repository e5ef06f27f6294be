"""How well a classifier does."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional as F

from pairmix_lab.training.loop import Batch


@torch.no_grad()
def scores(model: nn.Module, batches: Iterable[Batch], prefix: str) -> dict[str, float]:
    """The mean loss and the part that is classified as labelled, over all rows."""
    loss, right, rows = 0.0, 0, 0
    for inputs, labels in batches:
        logits = model(inputs)
        loss += float(F.cross_entropy(logits, labels, reduction="sum"))
        right += int((logits.argmax(-1) == labels).sum())
        rows += len(labels)
    return {f"{prefix}_loss": loss / rows, f"{prefix}_accuracy": right / rows}
