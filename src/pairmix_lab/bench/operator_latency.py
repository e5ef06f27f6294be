"""How long does one vector take?

A single input in inference mode, where the way to the kernel counts as much as the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from pairmix_lab.bench.contenders import DENSE, LOW_RANK, LOW_RANK_64, SPM, contenders
from pairmix_lab.bench.timing import current_threads, measured, settings, time_layers
from pairmix_lab.experiments.layers import count_parameters


@dataclass(frozen=True)
class Config:
    """The widths, and how long each of them is measured."""

    widths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    seconds: float = 5.0
    threads: tuple[int, ...] = field(default_factory=current_threads)


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Compare at every width; a row for every layer."""
    for setting in settings(config.threads):
        for n in config.widths:
            builds = contenders(n)
            names = [name for name in (DENSE, SPM, LOW_RANK, LOW_RANK_64) if name in builds]
            cases = {name: (builds[name](), torch.randn(1, n)) for name in names}
            samples = time_layers(cases, "inference", config.seconds)
            for name, (layer, _) in cases.items():
                sizes = {"n": n, "layer": name, "parameters": count_parameters(layer)}
                yield {**setting, **sizes, "inference": measured(samples, name, DENSE)}
