"""What do other kinds of SPM layer cost?

Each takes turns with the plain layer that it is nearest to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from pairmix_lab.bench.contenders import Kind
from pairmix_lab.bench.timing import TASKS, current_threads, measured, ratios, settings, spread, time_layers


def _square(n: int, **differences: str) -> Kind:
    return Kind(n, n, **differences)


@dataclass(frozen=True)
class Config:
    """Pairs of a layer and its base; `seconds` is for each pair."""

    pairs: tuple[tuple[Kind, Kind], ...] = (
        *((_square(n, schedule=kind), _square(n)) for n in (256, 1024, 4096) for kind in ("random", "brick")),
        (_square(1000), _square(1024)),
        (_square(4095), _square(4096)),
        (Kind(512, 2048), _square(2048)),
        (Kind(2048, 512), _square(2048)),
        *((_square(n, block="rotation"), _square(n)) for n in (1024, 4096)),
        *((_square(n, dtype="bfloat16"), _square(n)) for n in (1024, 4096)),
    )
    batch: int = 256
    seconds: float = 10.0
    threads: tuple[int, ...] = field(default_factory=current_threads)


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Compare every pair; a row for each."""
    for setting in settings(config.threads):
        for kind, base in config.pairs:
            cases = {
                name: (one.layer(), torch.randn(config.batch, one.in_features, dtype=getattr(torch, one.dtype)))
                for name, one in (("variant", kind), ("base", base))
            }
            row = {**setting, "batch": config.batch, "variant": kind.name, "base": base.name}
            for task in TASKS:
                samples = time_layers(cases, task, config.seconds / len(TASKS))
                cost = spread("cost", ratios(samples, "variant", "base"))
                row[task] = {**measured(samples, "variant"), "base_ms": measured(samples, "base")["ms"], **cost}
            yield row
