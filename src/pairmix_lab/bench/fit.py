"""Which matrices have an SPM near them?

Matrices of several kinds, and what could stand for them: SPM, low rank and their sum, at one number of parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from pairmix import SPMLinear, fit
from pairmix_lab import analyse, contenders
from pairmix_lab.contenders import COMPANION, LOW_RANK, SPM
from pairmix_lab.report import tables
from pairmix_lab.report.pictures import legend_below, styled


def _hadamard(n: int, _: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < n:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix


def _product(out_features: int, in_features: int) -> Tensor:
    return SPMLinear(in_features, out_features, bias=False, init="random_rotation").to_dense().detach()


def _decaying(out_features: int, in_features: int) -> Tensor:
    """Singular values that fall as 1 / k, as those of many trained matrices roughly do."""
    left, right = (torch.linalg.qr(torch.randn(size, in_features)).Q for size in (out_features, in_features))
    matrix: Tensor = left / torch.arange(1, in_features + 1) @ right.T
    return matrix


KINDS: dict[str, Callable[[int, int], Tensor]] = {
    "Hadamard": _hadamard,
    "product of stages": _product,
    "near the identity": lambda n, _: torch.eye(n) + 0.3 * torch.randn(n, n) / n**0.5,
    "random orthogonal": lambda n, _: torch.linalg.qr(torch.randn(n, n)).Q,
    "random": lambda *shape: torch.randn(*shape),
    "decaying singular values": _decaying,
}
CASES = (
    ("Hadamard", 1024, 1024),
    ("product of stages", 1000, 1000),
    ("product of stages", 1024, 1024),
    ("product of stages", 3072, 768),
    *((kind, 64, 64) for kind in list(KINDS)[2:]),
    *((kind, 256, 256) for kind in list(KINDS)[2:]),
    ("random", 4096, 4096),
)
"""The kind of a matrix, and its shape."""


@dataclass(frozen=True)
class Config:
    """The steps of refinement of every fit."""

    steps: int = 100
    cases: tuple[tuple[str, int, int], ...] = CASES


def run(config: Config) -> Iterator[dict[str, Any]]:
    """A row for every matrix."""
    for kind, out_features, in_features in config.cases:
        torch.manual_seed(0)
        matrix = KINDS[kind](out_features, in_features)
        started = time.perf_counter()
        fewest = fit(matrix, steps=config.steps).error
        seconds = time.perf_counter() - started
        found = analyse.analysed(kind, matrix, config.steps)._asdict()
        yield {"threads": torch.get_num_threads(), **found, "fewest": fewest, "seconds": seconds}


def table(rows: tables.Rows) -> tables.Table:
    """The errors of all that could stand for a matrix."""
    return tables.table(
        rows,
        [
            ("matrix", lambda row: row["name"]),
            ("shape", lambda row: f"{row['shape'][0]:,} x {row['shape'][1]:,}"),
            ("flatness", lambda row: f"{row['flatness']:.2f}"),
            ("SPM, fewest stages", lambda row: _error(row["fewest"])),
            ("seconds", lambda row: tables.number(row["seconds"])),
            ("parameters", lambda row: f"{row['parameters']:,}"),
            ("SPM, twice the stages", lambda row: _error(row["spm"])),
            ("low rank", lambda row: _error(row["low_rank"])),
            ("SPM + low rank", lambda row: _error(row["both"])),
        ],
    )


@styled
def picture(rows: tables.Rows) -> Figure:
    """The errors of all three beside each other."""
    figure = Figure(figsize=(10, 0.35 * len(rows) + 1.5))
    axes = figure.subplots()
    names = [f"{row['name']}, {row['shape'][0]:,} x {row['shape'][1]:,}" for row in rows]
    for key, one in (("spm", SPM), ("low_rank", LOW_RANK), ("both", COMPANION)):
        look = contenders.labelled(one.label)
        axes.plot([row[key] for row in rows], names, look.marker, color=look.color, label=one.label)
    axes.set(xlabel="relative error, at one number of parameters", xlim=(-0.02, 1.02))
    axes.invert_yaxis()
    legend_below(figure)
    return figure


def _error(error: float) -> str:
    return f"{error:.1g}" if error < 0.01 else f"{error:.3f}"


TABLES = {"fit": table}
