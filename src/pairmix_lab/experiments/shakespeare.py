"""Section 9.3: predict the next byte of Shakespeare's plays.

The paper's "single large linear projection" is read as the map that a recurrent network applies to its state at every
step. A byte adds its row of a table to that, and a dense map reads the next byte off the state. Only the recurrent map
differs between the models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pairmix_lab.experiments import data
from pairmix_lab.experiments.language_models import CELLS, LanguageModel, generate
from pairmix_lab.experiments.layers import LAYERS, count_parameters
from pairmix_lab.training.loop import LARGEST_SIZE, Batch, Recipe, cross_entropy


@dataclass(frozen=True, kw_only=True)
class Config(Recipe):
    """The paper's settings.

    Attributes:
        layer: which map, of `LAYERS`.
        width: of the state.
        cell: `"rnn"` (Elman), `"gru"` or `"attention"`.
        length: of a sequence, in bytes.
        stages: of SPM.
        block: of SPM.
        validation_batches: how many are looked at on the way; in the end it is the whole validation part.
    """

    experiment: str = "shakespeare"
    layer: str = "spm"
    width: int = 4096
    cell: str = "rnn"
    length: int = 128
    stages: int = 12
    block: str = "general"
    steps: int = 2000
    batch: int = 32
    lr: float = 1e-3
    decay: str = "constant"
    validate_every: int = 200
    validation_batches: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("layer", LAYERS)
        self._check_choice("cell", CELLS)
        self._check_at_most("width", LARGEST_SIZE)

    @property
    def name(self) -> str:
        """What its files are called."""
        kind = self.layer + "-rotation" * (self.block == "rotation")
        return f"{self.cell}-{kind}-{self.width}-seed{self.seed}"


class Task:
    """Sequences of bytes from random places of the text; its last tenth is for validation."""

    def __init__(self, config: Config, folder: Path | None = None) -> None:
        self.config = config
        text = data.read_shakespeare(data.fetch(data.SHAKESPEARE, "input.txt", folder))
        self.data = {"shakespeare/input.txt": data.sha256(text)}
        split = int(0.9 * len(text))
        self.train, self.valid = (
            torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in (text[:split], text[split:])
        )
        if len(self.valid) <= config.length:
            raise ValueError(f"the text is too short: its validation part has {len(self.valid)} bytes")

    def build(self) -> nn.Module:
        config = self.config
        return LanguageModel(config.layer, config.width, config.cell, stages=config.stages, block=config.block)

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
        return _nats_and_bits(model, self._validation)

    def conclude(self, model: nn.Module) -> dict[str, Any]:
        assert isinstance(model, LanguageModel)
        length = self.config.length
        whole = self.valid.unfold(0, length + 1, length)
        parts = [*whole.split(self.config.batch), self.valid[None, len(whole) * length :]]
        return {
            **_nats_and_bits(model, [(part[:, :-1], part[:, 1:]) for part in parts if part.shape[1] > 1]),
            "mixer_parameters": count_parameters(model.mixer),
            "data": "tiny Shakespeare",
            "samples": [generate(model, b"\n", 500, seed).decode("latin-1") for seed in range(2)],
        }


def _nats_and_bits(model: nn.Module, batches: list[Batch]) -> dict[str, float]:
    total = sum(float(cross_entropy(model(inputs), labels)) * labels.numel() for inputs, labels in batches)
    nats = total / sum(labels.numel() for _, labels in batches)
    return {"valid_loss": nats, "valid_bpc": nats / math.log(2)}
