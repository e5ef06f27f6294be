"""How does the time of training grow with the width?

All widths take turns, and a line through the logarithms of width and time tells the exponent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from pairmix.nn import SPMLinear
from pairmix_lab.bench import memory
from pairmix_lab.bench.timing import current_threads, measured, settings, time_layers
from pairmix_lab.experiments.layers import count_parameters


@dataclass(frozen=True)
class Config:
    """The widths, and how long each of them is measured."""

    widths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    batch: int = 256
    seconds: float = 10.0
    threads: tuple[int, ...] = field(default_factory=current_threads)

    def __post_init__(self) -> None:
        if len(set(self.widths)) < 2:
            raise ValueError(f"an exponent needs two widths or more, got {list(self.widths)}")


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Measure all widths; a row for each, with the exponent of all."""
    for setting in settings(config.threads):
        layers = {str(n): SPMLinear(n, n) for n in config.widths}
        cases = {name: (layer, torch.randn(config.batch, layer.width)) for name, layer in layers.items()}
        samples = time_layers(cases, "train", config.seconds * len(config.widths))
        times = {name: measured(samples, name) for name in layers}
        exponent = fitted_exponent(config.widths, [time["ms"] for time in times.values()])
        for name, layer in layers.items():
            n = layer.width
            yield {
                **setting,
                "n": n,
                "batch": config.batch,
                "stages": layer.stages,
                "parameters": count_parameters(layer),
                "peak_bytes": memory.peak_of_training(partial(SPMLinear, n, n), config.batch, n),
                "train": times[name],
                "exponent": exponent,
            }


def fitted_exponent(widths: Sequence[int], times: Sequence[float]) -> float:
    """The p for which times are nearest to `c * width ** p`, by least squares on the logarithms."""
    slope, _ = np.polyfit(np.log(widths), np.log(times), 1)
    return float(slope)
