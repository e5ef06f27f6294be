"""What a GPT of the experiment is, what it learns from, and how it is judged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from pairmix_lab import contenders
from pairmix_lab.experiments import agnews, data, shakespeare
from pairmix_lab.experiments.language_models import HEAD
from pairmix_lab.experiments.texts import TextConfig, TextTask
from pairmix_lab.experiments.transformer import GPT, MAPS, generate

LAYERS = tuple(
    one.key for one in (contenders.DENSE, contenders.SPM, contenders.COMPANION, contenders.LOW_RANK, contenders.MONARCH)
)
EXTENSIONS = tuple(one.key for one in (contenders.DEEPER, contenders.MIXTURE))
TEXTS = {
    "shakespeare": shakespeare.SHAKESPEARE,
    "agnews": replace(agnews.AGNEWS, hashes={"train.csv": agnews.AGNEWS.hashes["train.csv"]}),
}
MOST_VALIDATED = 200_000
"""Bytes of the validation part; more would take longer than the short runs, and add no digit to the loss."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig(TextConfig):
    """What is the same whatever is trained of a GPT.

    Attributes:
        width: of the residual stream, a multiple of 64.
        depth: the number of transformer blocks.
        text: what it learns from, of `TEXTS`.
        batch: sequences of a step, over all processes.
    """

    width: int = 256
    depth: int = 4
    text: str = "shakespeare"
    batch: int = 8
    length: int = 64
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("text", TEXTS)
        if self.width < 1 or self.width % HEAD:
            raise ValueError(f"width must be a multiple of {HEAD}, the features of an attention head, got {self.width}")
        for name in ("depth", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @classmethod
    def completed(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return dict(config)  # no older version had such experiments


@dataclass(frozen=True, kw_only=True)
class Config(GPTConfig):
    """A GPT.

    Attributes:
        layer: of its maps, of `LAYERS` or `EXTENSIONS`.
        tied: whether the head is the table of bytes.
        dense_maps: those of qkv,out,up,down, in this order, that are dense whatever the layer is.
        budget: the seconds of training that `steps` stand for; None if they were chosen otherwise.
    """

    experiment: str = "gpt"
    tied: bool = False
    dense_maps: str = ""
    budget: float | None = None
    steps: int = 2000
    lr: float = 1e-3  # what suits the dense one of this width

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("layer", (*LAYERS, *EXTENSIONS))
        if not is_list_of_maps(self.dense_maps):
            raise ValueError(f"dense_maps must be some of {','.join(MAPS)} in this order, got {self.dense_maps!r}")
        if self.budget is not None and not 0 < self.budget < math.inf:
            raise ValueError(f"budget must be above 0 seconds, or None, got {self.budget}")

    @property
    def name(self) -> str:
        """What its files are called."""
        trained = f"{self.steps}steps" if self.budget is None else f"{self.budget:.12g}s"
        dense = f"-dense-{self.dense_maps.replace(',', '-')}" if self.dense_maps else ""
        shape = "".join(f"-{words.replace(' ', '')}" for words in usual_but(asdict(self)))
        return f"{self.text}-{self.kind}{dense}-{self.width}{shape}-{trained}-seed{self.seed}"


def is_list_of_maps(text: Any) -> bool:
    """Whether these are maps of a block as `Config.dense_maps` has them."""
    return isinstance(text, str) and text == ",".join(name for name in MAPS if name in text.split(","))


def usual_but(config: Mapping[str, Any]) -> tuple[str, ...]:
    """In words, what is not the default of the model."""
    words = []
    if config.get("depth", Config.depth) != Config.depth:
        words.append(f"depth {config['depth']}")
    if config.get("length", Config.length) != Config.length:
        words.append(f"length {config['length']}")
    if config.get("tied"):
        words.append("tied")
    return tuple(words)


class Task(TextTask):
    """Plays or news, a byte at a time."""

    def __init__(self, config: Config, folder: Path | None = None) -> None:
        train, valid, self.label, self.data = read(config.text, folder)
        super().__init__(config, train, valid)

    def build(self) -> nn.Module:
        return build(self.config)

    def conclude(self, model: nn.Module) -> dict[str, Any]:
        assert isinstance(model, GPT)
        return {
            **self.validate_all(model),
            "mixer_parameters": model.count_in_maps(),
            "data": self.label,
            "samples": [text.decode("latin-1") for text in generate(model, b"\n", 500, samples=2)],
        }


def build(config: Config) -> GPT:
    """The model of a config."""
    dense_maps = [name for name in MAPS if name in config.dense_maps.split(",")]
    return GPT(config.make, config.width, config.depth, config.length, tied=config.tied, dense_maps=dense_maps)


def read(text: str, folder: Path | None = None) -> tuple[bytes, bytes, str, dict[str, str]]:
    """What to learn from, what to validate on, what it is called, and the hash of the file that it comes from.

    Args:
        text: of `TEXTS`.
        folder: the user's copy of the data; without it the original is downloaded.
    """
    dataset = TEXTS[text]
    (file,) = dataset.hashes
    path = data.fetch(dataset, file, folder)
    train, valid, label = {"shakespeare": plays, "agnews": news}[text](path)
    return train, valid[:MOST_VALIDATED], label, {f"{dataset.name}/{file}": data.sha256(path.read_bytes())}


def plays(path: Path) -> tuple[bytes, bytes, str]:
    """The text to learn from, that to validate on, and what it is called."""
    return *shakespeare.split(shakespeare.read_shakespeare(path)), "tiny Shakespeare"


def news(path: Path) -> tuple[bytes, bytes, str]:
    """As `plays`; an item is a line, and no item is in both parts."""
    items = [" ".join(text.splitlines()) for text in agnews.read_agnews(path)[0]]
    shuffled = np.random.default_rng(0).permutation(len(items))  # the same for every seed
    place = len(items) - max(1, int(agnews.VALIDATION_PART * len(items)))
    train, valid = ("\n".join(items[row] for row in rows).encode() for rows in (shuffled[:place], shuffled[place:]))
    return train, valid, agnews.label(len(items))
