"""Where does SPM beat a dense layer?

SPM over three kinds of schedule, with as many stages as the butterfly has, against `nn.Linear` for many widths and
batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from pairmix_lab.bench.contenders import DENSE, Kind
from pairmix_lab.bench.timing import TASKS, current_threads, measured, settings, time_layers


@dataclass(frozen=True)
class Config:
    """The grid, the seconds for each width, and from how many seconds on a dense layer is not waited for."""

    widths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    batches: tuple[int, ...] = (1, 4, 16, 64, 256, 1024, 4096)
    schedules: tuple[str, ...] = ("butterfly", "random", "brick")
    seconds: float = 40.0
    too_long: float = 2.0
    threads: tuple[int, ...] = field(default_factory=current_threads)


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Go through the grid; a row for every width, batch and schedule, without what would take too long."""
    for setting in settings(config.threads):
        for n in config.widths:
            for row in _of_width(config, n):
                yield {**setting, **row}


def _of_width(config: Config, n: int) -> Iterator[dict[str, Any]]:
    layers = {DENSE: torch.nn.Linear(n, n), **{kind: Kind(n, n, kind).layer() for kind in config.schedules}}
    seconds = config.seconds / (len(config.batches) * len(TASKS))
    seconds_a_row = dict.fromkeys(TASKS, 0.0)  # of the dense layer, at the batch before
    for batch in config.batches:
        x = torch.randn(batch, n)
        rows: dict[str, dict[str, Any]] = {
            kind: {"n": n, "batch": batch, "schedule": kind, **dict.fromkeys(TASKS)} for kind in config.schedules
        }
        for task in TASKS:
            if seconds_a_row[task] * batch > config.too_long:
                continue
            samples = time_layers({name: (layer, x) for name, layer in layers.items()}, task, seconds)
            seconds_a_row[task] = min(samples[DENSE].values()) / batch
            for kind, row in rows.items():
                row[task] = {**measured(samples, kind, DENSE), "dense_ms": measured(samples, DENSE)["ms"]}
        yield from (row for row in rows.values() if any(row[task] for task in TASKS))
