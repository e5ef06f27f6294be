"""Bytes of a text to learn from: sequences from random places, and how well a model predicts the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pairmix_lab.experiments.compared import Compared
from pairmix_lab.training.loop import Batch, cross_entropy


@dataclass(frozen=True, kw_only=True)
class TextConfig(Compared):
    """A model of the next byte.

    Attributes:
        length: of a sequence, in bytes.
        validation_batches: how many are looked at on the way; in the end it is the whole validation part.
    """

    length: int = 128
    validation_batches: int = 10


class TextTask:
    """Sequences of bytes from random places of a text, and another part of it for validation."""

    def __init__(self, config: TextConfig, train: bytes, valid: bytes) -> None:
        self.config: Any = config
        self.train, self.valid = (
            torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in (train, valid)
        )
        if len(self.valid) <= config.length:
            raise ValueError(f"the text is too short: its validation part has {len(self.valid)} bytes")

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.config.groups(model)
        return groups

    def batch(self, step: int) -> Batch:
        return self._sequences(self.train, (self.config.seed, step))

    @cached_property
    def _validation(self) -> list[Batch]:
        return [self._sequences(self.valid, (number,)) for number in range(self.config.validation_batches)]

    def _sequences(self, text: Tensor, seed: tuple[int, ...]) -> Batch:
        """Some from random places."""
        # Not torch's generator: of a seed it takes the lowest 32 bits alone, which cannot hold a pair.
        starts = np.random.default_rng(seed).integers(len(text) - self.config.length, size=(self.config.batch, 1))
        places = torch.from_numpy(starts) + torch.arange(self.config.length + 1)
        sequences = text[places]
        return sequences[:, :-1], sequences[:, 1:]

    def validate(self, model: nn.Module) -> dict[str, float]:
        return nats_and_bits(model, self._validation)

    def validate_all(self, model: nn.Module) -> dict[str, float]:
        """The loss on the whole validation part."""
        length = self.config.length
        whole = self.valid.unfold(0, length + 1, length)
        parts = [*whole.split(self.config.batch), self.valid[None, len(whole) * length :]]
        return nats_and_bits(model, [(part[:, :-1], part[:, 1:]) for part in parts if part.shape[1] > 1])


def nats_and_bits(model: nn.Module, batches: list[Batch]) -> dict[str, float]:
    """The mean loss of a byte."""
    total = sum(float(cross_entropy(model(inputs), labels)) * labels.numel() for inputs, labels in batches)
    nats = total / sum(labels.numel() for _, labels in batches)
    return {"valid_loss": nats, "valid_bpc": nats / math.log(2)}
