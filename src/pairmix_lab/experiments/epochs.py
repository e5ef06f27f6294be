"""A training set in random order, over and over."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np


def batch(rows: int, size: int, step: int, seed: int) -> np.ndarray[Any, Any]:
    """The rows of a step's batch: a function of the seed and the step alone.

    Every epoch has an order of its own. A batch may begin in one epoch and end in another.

    Args:
        rows: how many the set has.
        size: of a batch.
        step: counted from 1.
        seed: which orders.
    """
    epochs, places = np.divmod(np.arange((step - 1) * size, step * size), rows)
    return np.array([order(rows, seed, int(epoch))[place] for epoch, place in zip(epochs, places, strict=True)])


@lru_cache(maxsize=4)
def order(rows: int, seed: int, epoch: int) -> np.ndarray[Any, Any]:
    """That of the rows in an epoch, which are counted from 0."""
    return np.random.default_rng((seed, epoch)).permutation(rows)
