"""What the machine could do at best: multiply-adds in registers, and copies of tensors of the input's size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from pairmix import ops
from pairmix.nn import SPMLinear
from pairmix_lab.bench.timing import spread

# A pair costs 4 multiply-adds. Backward computes the stages again, the gradient of their input and that of the blocks.
MULTIPLY_ADDS_A_PAIR = {"inference": 4, "train": 4 + 4 + 4 + 4}
# On a quiet machine the quartiles of a bound are within a few percent of each other, or a fifth if the clock rate
# changes. Another process on one of two cores halves the rate.
WIDEST_QUARTILES = 1.5
COPY = "copy"


def calls(x: Tensor, rates: list[float]) -> dict[str, Callable[[], object]]:
    """What takes turns with the layers: a copy of x, and multiply-adds in registers if the compiled kernels are there.

    Args:
        x: the input of the layers.
        rates: grows by the multiply-adds per second of every call.
    """
    copy = partial(torch.empty_like(x).copy_, x)  # always to the same place, so in the same level of cache
    if ops.cpu.why_not(torch.device("cpu")) is not None:
        return {COPY: copy}
    return {COPY: copy, "multiply_adds": lambda: rates.append(ops.cpu.multiply_adds_per_second())}


def reached(
    layer: SPMLinear,
    x: Tensor,
    task: str,
    spm: Sequence[float],
    copy: Sequence[float],
    multiply_adds: Sequence[float],
) -> dict[str, Any]:
    """How much of each bound the layer reaches.

    A bound is disturbed if the layer seems to beat it, or if it varies so much that other processes must have been
    running.

    Args:
        layer: the one that was measured.
        x: its input.
        task: of `TASKS`.
        spm: the seconds that it took.
        copy: the seconds that a copy of x took, in the same rounds.
        multiply_adds: how many per second there were in the same rounds; empty without the compiled kernels.
    """
    seconds = median(spm)
    needed = MULTIPLY_ADDS_A_PAIR[task] * layer.stages * (layer.width // 2) * len(x)
    bounds = {
        "arithmetic": ("multiply_adds_per_second", needed, multiply_adds),
        "bandwidth": ("bytes_per_second", bytes_moved(layer, x, task), [2 * x.nbytes / time for time in copy]),
    }
    row: dict[str, Any] = {"disturbed_bounds": []}
    for bound, (rate, amount, rates) in bounds.items():
        row |= {rate: None, f"of_{bound}": None}
        if rates:
            row |= spread(rate, rates)
            row[f"of_{bound}"] = amount / row[rate] / seconds
            if row[f"of_{bound}"] > 1 or varies(row[f"{rate}_iqr"]):
                row["disturbed_bounds"].append(bound)
    return row


def varies(quartiles: Sequence[float]) -> bool:
    """Whether they are so far apart that other processes must have been running."""
    low, high = quartiles
    return high > WIDEST_QUARTILES * low


def bytes_moved(layer: SPMLinear, x: Tensor, task: str) -> int:
    """The least that is read and written: x and y; in training x again, both gradients, parameters and theirs."""
    y = x.nbytes // layer.in_features * layer.out_features
    if task == "inference":
        return x.nbytes + y
    return 3 * x.nbytes + 2 * y + 2 * sum(parameter.nbytes for parameter in layer.parameters())
