"""Section 9.2: the topic of a news item, from its words hashed into `width` features."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import nn

from pairmix_lab import files
from pairmix_lab.experiments import data
from pairmix_lab.experiments.classification import scores
from pairmix_lab.experiments.layers import LAYERS, count_parameters, make_layer
from pairmix_lab.training.loop import LARGEST_SIZE, Batch, Recipe

CLASSES = 4
WHOLE = 120_000
VALIDATION_PART = 0.05
CHECKSUM_SIZE = 32  # bytes, at the beginning of a cache file
MODELS = {**LAYERS, "softmax": "no hidden layer: softmax regression on the features"}


@dataclass(frozen=True, kw_only=True)
class Config(Recipe):
    """A classifier.

    Attributes:
        layer: the hidden one, of `MODELS`.
        width: of the hidden layer, and how many features the words are hashed into.
        stages: of SPM.
        block: of SPM.
    """

    experiment: str = "agnews"
    layer: str = "spm"
    width: int = 2048
    stages: int = 12
    block: str = "general"
    steps: int = 1200
    batch: int = 256
    lr: float = 1e-2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("layer", MODELS)
        self._check_at_most("width", LARGEST_SIZE)

    @property
    def name(self) -> str:
        """What its files are called."""
        kind = self.layer + "-rotation" * (self.block == "rotation")
        return f"{kind}-{self.width}-seed{self.seed}"


@dataclass(frozen=True)
class Part:
    """Sparse rows and their labels."""

    features: scipy.sparse.csr_matrix
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, chosen: Any) -> Batch:
        """Some of them, as dense tensors."""
        return torch.from_numpy(self.features[chosen].toarray()), self.labels[torch.as_tensor(chosen)]

    def batches(self, size: int) -> Iterator[Batch]:
        """All of them, in order."""
        for start in range(0, len(self), size):
            yield self.rows(np.arange(start, min(start + size, len(self))))


class Task:
    """The train set in random order, over and over; a twentieth of it is kept for validation."""

    def __init__(self, config: Config, folder: Path | None = None) -> None:
        self.config = config
        whole, train_hash = _hashed(data.fetch(data.AGNEWS, "train.csv", folder), config.width)
        self.test, test_hash = _hashed(data.fetch(data.AGNEWS, "test.csv", folder), config.width)
        self.data = {"agnews/train.csv": train_hash, "agnews/test.csv": test_hash}
        self.label = "AG News" if len(whole) == WHOLE else f"AG News, {len(whole):,}-row part"
        shuffled = np.random.default_rng(0).permutation(len(whole))  # the same for every seed
        split = max(1, int(VALIDATION_PART * len(whole)))
        self.valid, self.train = (
            Part(whole.features[rows], whole.labels[torch.from_numpy(rows)])
            for rows in (shuffled[:split], shuffled[split:])
        )
        if not len(self.train):
            raise data.DataError(f"the train set has too few rows: {len(whole)}")

    def build(self) -> nn.Module:
        config = self.config
        head = nn.Linear(config.width, CLASSES)
        if config.layer == "softmax":
            return nn.Sequential(head)
        hidden = make_layer(config.layer, config.width, stages=config.stages, block=config.block)
        return nn.Sequential(hidden, nn.ReLU(), head)

    def batch(self, step: int) -> Batch:
        places = np.arange((step - 1) * self.config.batch, step * self.config.batch)
        epochs, places = np.divmod(places, len(self.train))
        chosen = [_order(len(self.train), self.config.seed, int(e))[p] for e, p in zip(epochs, places, strict=True)]
        return self.train.rows(np.array(chosen))

    def validate(self, model: nn.Module) -> dict[str, float]:
        return scores(model, self.valid.batches(self.config.batch), "valid")

    def conclude(self, model: nn.Module) -> dict[str, Any]:
        return {
            **scores(model, self.test.batches(self.config.batch), "test"),
            "mixer_parameters": count_parameters(model) - CLASSES * (self.config.width + 1),
            "data": self.label,
        }


@lru_cache(maxsize=4)
def _order(rows: int, seed: int, epoch: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng((seed, epoch)).permutation(rows)


@lru_cache(maxsize=4)
def _hashed(path: Path, width: int) -> tuple[Part, str]:
    """The file with its words hashed, and its SHA-256.

    The features are kept in the user's cache, under a name that tells what they were made from.
    """
    origin = data.sha256(path.read_bytes())
    cached = data.cache() / "features" / f"agnews-{origin.removeprefix('sha256:')[:16]}-{width}"
    texts, labels = data.read_agnews(path)
    features = _read_cache(cached, (len(texts), width))
    if features is None:
        from sklearn.feature_extraction.text import HashingVectorizer  # a second of importing, mostly not needed

        features = HashingVectorizer(n_features=width, dtype=np.float32).transform(texts)
        _write_cache(cached, features)
    return Part(features, torch.tensor(labels)), origin


def _write_cache(path: Path, features: scipy.sparse.csr_matrix) -> None:
    content = BytesIO()
    scipy.sparse.save_npz(content, features)
    with files.atomic(path) as file:
        file.write(_checksum(path, content.getvalue()))
        file.write(content.getvalue())


def _read_cache(path: Path, shape: tuple[int, int]) -> scipy.sparse.csr_matrix | None:
    """The features, or None if they are not there whole: scipy would read past the end of wrong ones."""
    try:
        stored = path.read_bytes()
        checksum, content = stored[:CHECKSUM_SIZE], stored[CHECKSUM_SIZE:]
        if checksum != _checksum(path, content):
            return None
        features = scipy.sparse.load_npz(BytesIO(content))
        features.check_format(full_check=True)
    except Exception:  # whatever is wrong with it, it can be made again
        return None
    return features if (features.format, features.shape, features.dtype) == ("csr", shape, np.float32) else None


def _checksum(path: Path, content: bytes) -> bytes:
    """Of what is under this name, so that a renamed file is found too."""
    return hashlib.sha256(path.name.encode() + content).digest()
