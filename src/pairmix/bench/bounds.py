"""What the machine could do at best: multiply-adds in registers, and copies of tensors of the input's size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from pairmix import ops
from pairmix.nn import SPMLinear

# A pair costs 4 multiply-adds. Backward computes the stages again, the gradient of their input and that of the blocks.
MULTIPLY_ADDS_A_PAIR = {"inference": 4, "train": 4 + 4 + 4 + 4}


def multiply_adds_per_second() -> float | None:
    """The best of a few tries; None without the compiled kernels."""
    if ops.cpu.why_not(torch.device("cpu")) is not None:
        return None
    return max(ops.cpu.multiply_adds_per_second() for _ in range(5))


def copy_of(x: Tensor) -> Callable[[], object]:
    """A call that copies x to where it was copied before, so in the same level of cache."""
    return partial(torch.empty_like(x).copy_, x)


def reached(layer: SPMLinear, x: Tensor, task: str, spm: list[float], copy: list[float]) -> dict[str, Any]:
    """How much of each bound the layer reaches.

    Args:
        layer: who was measured.
        x: its input.
        task: what it did.
        spm: the seconds that it took.
        copy: the seconds that a copy of x took.
    """
    seconds, arithmetic, bandwidth = median(spm), multiply_adds_per_second(), 2 * x.nbytes / median(copy)
    multiply_adds = MULTIPLY_ADDS_A_PAIR[task] * layer.stages * (layer.width // 2) * len(x)
    return {
        "multiply_adds_per_second": arithmetic,
        "bytes_per_second": bandwidth,
        "of_arithmetic": multiply_adds / arithmetic / seconds if arithmetic else None,
        "of_bandwidth": bytes_moved(layer, x, task) / bandwidth / seconds,
    }


def bytes_moved(layer: SPMLinear, x: Tensor, task: str) -> int:
    """The least that is read and written: x and y; in training x again, both gradients, parameters and theirs."""
    y = x.nbytes // layer.in_features * layer.out_features
    if task == "inference":
        return x.nbytes + y
    return 3 * x.nbytes + 2 * y + 2 * sum(parameter.nbytes for parameter in layer.parameters())
