"""How fast is the operator?

SPM, a dense layer and other structured layers in one run, in turns: time, memory, and how near SPM comes to what the
machine could do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from pairmix.nn import SPMLinear
from pairmix_lab.bench import bounds, memory
from pairmix_lab.bench.contenders import DENSE, SPM, contenders
from pairmix_lab.bench.timing import TASKS, current_threads, measured, settings, time_layers
from pairmix_lab.experiments.layers import count_parameters


@dataclass(frozen=True)
class Config:
    """What is compared, and for how long: `seconds` is for each width."""

    widths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    batch: int = 256
    seconds: float = 40.0
    threads: tuple[int, ...] = field(default_factory=current_threads)


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Compare at every width; a row for every layer."""
    for setting in settings(config.threads):
        for n in config.widths:
            for row in _compare(n, config.batch, config.seconds):
                yield {**setting, **row}


def _compare(n: int, batch: int, seconds: float) -> list[dict[str, Any]]:
    builds = contenders(n)
    layers = {name: build() for name, build in builds.items()}
    x = torch.randn(batch, n)
    rows: dict[str, dict[str, Any]] = {
        name: {
            "n": n,
            "batch": batch,
            "layer": name,
            "parameters": count_parameters(layer),
            "bytes_kept": memory.bytes_kept(layer, x),
            "peak_bytes": memory.peak_of_training(builds[name], batch, n),
        }
        for name, layer in layers.items()
    }
    cases = {name: (layer, x) for name, layer in layers.items()}
    spm = layers[SPM]
    assert isinstance(spm, SPMLinear)
    for task in TASKS:
        multiply_adds: list[float] = []
        samples = time_layers(cases, task, seconds / len(TASKS), **bounds.calls(x, multiply_adds))
        for name, row in rows.items():
            row[task] = measured(samples, name, DENSE)
        times, copies = ([*samples[name].values()] for name in (SPM, bounds.COPY))
        rows[SPM][task] |= bounds.reached(spm, x, task, times, copies, multiply_adds)
    return list(rows.values())
