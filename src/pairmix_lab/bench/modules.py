"""How fast are recurrent networks, attention and feed-forward blocks with SPM maps?

Each takes turns with torch's own module, on the same input: forward and backward, and forward alone. A feed-forward
block in one call also takes turns with its three modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import pairmix.nn as spm
from pairmix_lab.bench.memory import bytes_kept, peak_of_training
from pairmix_lab.bench.timing import TASKS, current_threads, measured, settings, time_layers
from pairmix_lab.contenders import count_parameters
from pairmix_lab.report import tables
from pairmix_lab.report.pictures import styled


@dataclass(frozen=True)
class Case:
    """A module of this kind and size, on `batch` sequences of `steps` steps."""

    kind: str
    size: int
    steps: int
    batch: int

    @property
    def builds(self) -> dict[str, Callable[[], nn.Module]]:
        """torch's module, and then ours, by their names."""
        return {name: partial(_Output, make, self) for name, make in _MODULES[self.kind].items()}

    @property
    def shape(self) -> tuple[int, int, int]:
        """That of the input."""
        return (self.steps, self.batch, self.size)


def _three_modules(linear: Callable[[int, int], nn.Module], features: int, hidden: int) -> nn.Module:
    """A feed-forward block, one module after the other."""
    return nn.Sequential(linear(features, hidden), nn.GELU(), linear(hidden, features))


_Make = Callable[..., nn.Module]
_MODULES: dict[str, dict[str, _Make]] = {
    "RNN": {"RNN": nn.RNN, "SPMRNN": spm.SPMRNN},
    "GRU": {"GRU": nn.GRU, "SPMGRU": spm.SPMGRU},
    "LSTM": {"LSTM": nn.LSTM, "SPMLSTM": spm.SPMLSTM},
    "attention": {
        "MultiheadAttention": nn.MultiheadAttention,
        "SPMMultiheadAttention": spm.SPMMultiheadAttention,
    },
    "encoder layer": {
        "TransformerEncoderLayer": nn.TransformerEncoderLayer,
        "SPMTransformerEncoderLayer": spm.SPMTransformerEncoderLayer,
    },
    "feed-forward": {
        "Linear, GELU, Linear": partial(_three_modules, nn.Linear),
        "SPMLinear, GELU, SPMLinear": partial(_three_modules, spm.SPMLinear),
        "SPMFeedForward": spm.SPMFeedForward,
    },
}
_HEAD = 64  # the size of a head of attention, if it divides the module's


class _Output(nn.Module):
    """A module as a layer: of what it returns, only the output. Attention is self-attention, and nothing is dropped."""

    def __init__(self, make: _Make, case: Case) -> None:
        super().__init__()
        size, heads = case.size, max(1, case.size // _HEAD)
        self.is_attention = case.kind == "attention"
        if self.is_attention:
            self.module = make(size, heads)
        elif case.kind == "encoder layer":
            self.module = make(size, heads, dim_feedforward=4 * size, dropout=0.0)
        elif case.kind == "feed-forward":
            self.module = make(size, 4 * size)
        else:
            self.module = make(size, size)

    def forward(self, x: Tensor) -> Tensor:
        y = self.module(x, x, x, need_weights=False) if self.is_attention else self.module(x)
        output: Tensor = y[0] if isinstance(y, tuple) else y
        return output


@dataclass(frozen=True)
class Config:
    """What is measured, and how long each of them."""

    cases: tuple[Case, ...] = (
        Case("RNN", 1024, 64, 32),
        *(Case("GRU", size, steps, 32) for size, steps in ((256, 64), (1024, 64), (4096, 16))),
        Case("LSTM", 1024, 64, 32),
        *(Case("attention", size, 128, batch) for size, batch in ((256, 8), (1024, 8), (4096, 2))),
        Case("encoder layer", 1024, 128, 8),
        *(Case("feed-forward", size, 128, 8) for size in (256, 1024)),
    )
    seconds: float = 10.0
    threads: tuple[int, ...] = field(default_factory=current_threads)


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Compare every case; a row for each of its modules."""
    for setting in settings(config.threads):
        for case in config.cases:
            yield from _compare(case, config.seconds, setting)


def _compare(case: Case, seconds: float, setting: dict[str, Any]) -> Iterator[dict[str, Any]]:
    theirs = next(iter(case.builds))
    cases = {name: (build(), torch.randn(case.shape)) for name, build in case.builds.items()}
    samples = {}
    for task in TASKS:
        for module, _ in cases.values():
            module.train(task == "train")
        samples[task] = time_layers(cases, task, seconds / len(TASKS))
    for name, (module, x) in cases.items():
        yield {
            **setting,
            "kind": case.kind,
            "size": case.size,
            "steps": case.steps,
            "batch": case.batch,
            "module": name,
            "parameters": count_parameters(module),
            "bytes_kept": bytes_kept(module.train(), x),
            "peak_bytes": peak_of_training(case.builds[name], *case.shape),
            **{task: measured(samples[task], name, theirs) for task in TASKS},
        }


_COLUMNS: tables.Columns = [
    ("module", lambda row: row["module"]),
    ("size", lambda row: f"{row['size']:,}"),
    ("steps", lambda row: str(row["steps"])),
    ("batch", lambda row: str(row["batch"])),
]


def table(rows: tables.Rows) -> tables.Table:
    """The time of every module, and its ratio to that of torch's own."""
    return tables.table(
        rows,
        [
            *_COLUMNS,
            ("forward + backward, ms", lambda row: tables.with_quartiles(row["train"], "ms")),
            ("times as fast", lambda row: tables.with_quartiles(row["train"], "speedup")),
            ("forward, ms", lambda row: tables.with_quartiles(row["inference"], "ms")),
            ("times as fast", lambda row: tables.with_quartiles(row["inference"], "speedup")),
        ],
    )


def memory_table(rows: tables.Rows) -> tables.Table:
    """What the modules need memory for."""
    return tables.table(
        rows,
        [
            *_COLUMNS,
            ("parameters", lambda row: f"{row['parameters']:,}"),
            ("kept for backward", lambda row: tables.mebibytes(row["bytes_kept"])),
            ("peak of training", lambda row: tables.mebibytes(row["peak_bytes"])),
        ],
    )


def of_kinds(make: Callable[[tables.Rows], tables.Table], *kinds: str) -> Callable[[tables.Rows], tables.Table]:
    """A table with these kinds of modules only."""
    return lambda rows: make([row for row in rows if row["kind"] in kinds])


@styled
def picture(rows: tables.Rows) -> Figure:
    """How many times as fast as torch's own the SPM modules are: a bar for each, with the interquartile range."""
    ours = [row for row in rows if row["module"].startswith("SPM")]
    labels = [f"{row['module']} {row['size']:,}\n{row['steps']} steps, batch {row['batch']}" for row in ours]
    figure = Figure(figsize=(9, 0.7 * len(ours) + 1))
    axes = figure.subplots()
    for number, (task, name) in enumerate(TASKS.items()):
        places = np.arange(len(ours)) + 0.38 * (number - 0.5)
        values = np.array([row[task]["speedup"] for row in ours])
        low, high = np.array([row[task]["speedup_iqr"] for row in ours]).T
        axes.barh(places, values, 0.36, xerr=[values - low, high - values], error_kw={"alpha": 0.4}, label=name)
        for place, value in zip(places, values, strict=True):
            axes.annotate(f" {value:.3g}", (value, place), va="center")
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xscale="log", xlabel="times as fast as torch's own module")
    axes.set_yticks(range(len(ours)), labels)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.legend()
    return figure


_RECURRENT, _ATTENTION = ("RNN", "GRU", "LSTM"), ("attention", "encoder layer")
TABLES = {
    "modules": table,
    "modules-recurrent": of_kinds(table, *_RECURRENT),
    "modules-recurrent-memory": of_kinds(memory_table, *_RECURRENT),
    "modules-attention": of_kinds(table, *_ATTENTION),
    "modules-attention-memory": of_kinds(memory_table, *_ATTENTION),
    "modules-feed-forward": of_kinds(table, "feed-forward"),
    "modules-feed-forward-memory": of_kinds(memory_table, "feed-forward"),
}
