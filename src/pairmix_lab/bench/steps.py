"""How long is a training step of each experiment?

Forward, backward and update of every model, on the same batch of real data, in turns; and how long the update alone
is, by torch's default and fused, for the parameters of SPM layers as they are and if each layer had a single one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from pairmix.nn import SPMLinear
from pairmix_lab import contenders, experiments
from pairmix_lab.bench.pictures import column
from pairmix_lab.bench.timing import current_threads, interleaved, measured, settings
from pairmix_lab.contenders import DENSE, LOW_RANK, REST, SPM, Contender
from pairmix_lab.experiments import data
from pairmix_lab.experiments.experiment import Experiment, StepCases
from pairmix_lab.report import tables
from pairmix_lab.report.pictures import legend_below, look, styled, width_ticks
from pairmix_lab.training.loop import Task, make_optimizer, timed_step

# A model that learns its one batch ends with gradients so small that Intel's processors take twice as long for them.
_RATE = 0.0
AS_THEY_ARE, ONE_EACH, NOT_FUSED = "as they are", "one for each layer", "not fused"
"""What the times of the update are called in a row of SPM: by the parameters of its layers, and by the optimiser."""
BLOCK = 0.1  # seconds of a turn: many steps after each other, as in training, with what they need in the caches


def all_cases() -> dict[str, StepCases]:
    """What every experiment wants to be timed, by its name."""
    return {one.name: one.step_cases for one in experiments.EXPERIMENTS if one.step_cases is not None}


@dataclass(frozen=True)
class Config:
    """What is measured, and for how long.

    Attributes:
        cases: by the name of the experiment.
        dense_up_to: the largest width of a dense layer.
        seconds: for each width.
        threads: the numbers of threads.
    """

    cases: Mapping[str, StepCases] = field(default_factory=all_cases)
    dense_up_to: int = 8192
    seconds: float = 30
    threads: tuple[int, ...] = field(default_factory=current_threads)

    def as_dict(self) -> dict[str, Any]:
        """The settings for the result."""
        return {
            **{f"{name}_widths": cases.widths for name, cases in self.cases.items()},
            **{name: value for cases in self.cases.values() for name, value in cases.settings.items()},
            **{"dense_up_to": self.dense_up_to, "seconds": self.seconds, "threads": self.threads},
        }


def hashes(config: Config, folder: Path | None = None) -> dict[str, str]:
    """The hashes of the files that the experiments read."""
    found: dict[str, str] = {}
    for experiment, cases in _chosen(config):
        if experiment.dataset is not None and cases.widths:
            found |= data.hashes(experiment.dataset, folder)
    return found


def run(config: Config, folder: Path | None = None) -> Iterator[dict[str, Any]]:
    """Measure, a row at a time.

    Args:
        config: what.
        folder: where the data is; without it the originals are downloaded.
    """
    for setting in settings(config.threads):
        for experiment, cases in _chosen(config):
            for width in cases.widths:
                layers = [layer for layer in cases.layers if layer != DENSE.key or width <= config.dense_up_to]
                configs = {layer: experiment.config(layer=layer, width=width, **cases.settings) for layer in layers}
                tasks = {layer: experiment.task(one, folder) for layer, one in configs.items()}
                about = {"experiment": experiment.name, **cases.settings, "width": width, **setting}
                yield from _rows(tasks, about, cases.seconds * config.seconds, cases.others(configs[layers[0]]))


def _chosen(config: Config) -> Iterator[tuple[Experiment, StepCases]]:
    for experiment in experiments.EXPERIMENTS:
        if experiment.name in config.cases:
            yield experiment, config.cases[experiment.name]


def _rows(
    tasks: Mapping[str, Task],
    about: Mapping[str, Any],
    seconds: float,
    others: Mapping[str, Callable[[], nn.Module]],
) -> Iterator[dict[str, Any]]:
    first = next(iter(tasks.values()))
    (inputs, labels), clip = first.batch(1), first.config.clip
    builds = {**{name: task.build for name, task in tasks.items()}, **others}

    def step_of(model: nn.Module, inputs: Tensor) -> Callable[[], object]:
        return partial(timed_step, model, make_optimizer(first.groups(model), _RATE), inputs, labels, _RATE, clip)

    steps: dict[str, Callable[[], object]] = {}
    for name, build in builds.items():
        torch.manual_seed(0)
        steps[name] = step_of(build(), inputs)
    model = first.build()
    if isinstance(model, nn.Sequential):  # otherwise the layer is not what reads the input
        # What would be left if the layer cost nothing: its output is there, and the gradient of it is computed.
        steps[REST.key] = step_of(model[1:], inputs.detach().requires_grad_())
    samples = interleaved(steps, seconds, block=BLOCK)
    for name in steps:
        row = {
            **about,
            "layer": name,
            "batch": first.config.batch,
            **measured(samples, name, DENSE.key if DENSE.key in samples else None),
        }
        yield {**row, "update": _updates(tasks[name], seconds / 10)} if name == SPM.key else row


def _updates(task: Task, seconds: float) -> dict[str, Any]:
    """How long the optimiser's part of a step is, by how many parameters each SPM layer has."""
    model = task.build()
    groups = task.groups(model)
    merged = _one_for_each_layer(model, groups)
    for parameter in (parameter for group in (*groups, *merged) for parameter in group["params"]):
        parameter.grad = torch.zeros_like(parameter)
    own = [dict(group) for group in groups]  # an optimiser writes into groups, and the next one would read it
    calls = {
        AS_THEY_ARE: make_optimizer(groups, _RATE).step,
        ONE_EACH: make_optimizer(merged, _RATE).step,
        NOT_FUSED: torch.optim.AdamW(own, _RATE, weight_decay=0.0).step,
    }
    samples = interleaved(calls, seconds)
    return {name: measured(samples, name) for name in calls}


def _one_for_each_layer(model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups, with all parameters that an SPM layer has in one of them in one tensor."""
    merged = []
    for group in groups:
        ids = {id(parameter) for parameter in group["params"]}
        of_layers = [
            [parameter for parameter in layer.parameters(recurse=False) if id(parameter) in ids]
            for layer in model.modules()
            if isinstance(layer, SPMLinear)
        ]
        in_layers = {id(parameter) for of_layer in of_layers for parameter in of_layer}
        others = [parameter for parameter in group["params"] if id(parameter) not in in_layers]
        flat = [nn.Parameter(torch.cat([one.detach().flatten() for one in each])) for each in of_layers if each]
        merged.append({**group, "params": flat + others})
    return merged


def table(rows: tables.Rows) -> tables.Table:
    """The time of a training step of every model, and its ratio to that of the dense one."""
    return tables.table(
        rows,
        [
            ("experiment", lambda row: _title(row["experiment"])),
            ("n", lambda row: f"{row['width']:,}"),
            ("layer", lambda row: contenders.named(row["layer"]).label),
            ("ms per step", lambda row: tables.with_quartiles(row, "ms")),
            ("times as fast as dense", lambda row: tables.with_quartiles(row, "speedup") if "speedup" in row else "-"),
        ],
    )


def summary(rows: tables.Rows) -> tables.Table:
    """The time of a training step by experiment and width, and what is left of it if the layer cost nothing."""
    at = {(row["experiment"], row["width"], row["threads"], row["layer"]): row for row in rows}

    def time(contender: Contender) -> Callable[[tables.Row], str]:
        def of(row: tables.Row) -> str:
            found = at.get((row["experiment"], row["width"], row["threads"], contender.key))
            return "-" if found is None else tables.number(found["ms"])

        return of

    return tables.table(
        [row for row in rows if row["layer"] == SPM.key],
        [
            ("experiment", lambda row: _title(row["experiment"])),
            ("n", lambda row: f"{row['width']:,}"),
            (f"{DENSE.label}, ms", time(DENSE)),
            *((one.label, time(one)) for one in (LOW_RANK, SPM, REST)),
            ("**dense / SPM**", lambda row: f"**{tables.number(row['speedup'])}**" if "speedup" in row else "-"),
        ],
    )


def updates(rows: tables.Rows) -> tables.Table:
    """How long the optimiser's part of SPM's step is: as it is, not fused, and with one parameter a layer."""

    def microseconds(name: str) -> Callable[[tables.Row], str]:
        return lambda row: tables.with_quartiles(row["update"][name], "ms", 1e3)

    def gain(row: tables.Row) -> str:
        saved = row["update"][AS_THEY_ARE]["ms"] - row["update"][ONE_EACH]["ms"]
        return f"{100 * saved / row['ms']:.1f}%"

    return tables.table(
        [row for row in rows if "update" in row],
        [
            ("experiment", lambda row: _title(row["experiment"])),
            ("n", lambda row: f"{row['width']:,}"),
            ("step, ms", lambda row: tables.number(row["ms"])),
            ("AdamW, fused, µs", microseconds(AS_THEY_ARE)),
            ("not fused, µs", microseconds(NOT_FUSED)),
            ("one parameter a layer, fused, µs", microseconds(ONE_EACH)),
            ("would save, of the step", gain),
        ],
    )


@styled
def picture(rows: tables.Rows) -> Figure:
    """The time of a training step against the width: a panel for each experiment, a line for each model."""
    names = column(rows, "experiment")
    figure = Figure(figsize=(4 * len(names), 4.3))
    for axes, experiment in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        own = [row for row in rows if row["experiment"] == experiment]
        for layer in column(own, "layer"):
            label = contenders.named(layer).label
            chosen = [row for row in own if row["layer"] == layer]
            axes.plot([row["width"] for row in chosen], [row["ms"] for row in chosen], label=label, **look(label))
        axes.set(xscale="log", yscale="log", title=_title(experiment), xlabel="n", ylabel="ms per step")
        width_ticks(axes, column(own, "width"))
        axes.yaxis.set_major_formatter("{x:g}")
    legend_below(figure)
    return figure


def _title(name: str) -> str:
    return next((one.title for one in experiments.EXPERIMENTS if one.name == name), name)


TABLES = {"steps": table, "steps-summary": summary, "steps-update": updates}
