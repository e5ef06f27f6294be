"""Curves of training: the loss by step and by time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pairmix_lab.contenders import labelled
from pairmix_lab.report.experiment import Case, Reported
from pairmix_lab.report.pictures import Picture, legend_below, look, mean_line, styled
from pairmix_lab.report.runs import Runs, validated
from pairmix_lab.report.timing import step_time


def losses(runs: Runs, experiment: Reported, case: Case, name: str) -> Iterator[Picture]:
    """The loss on a case, by step and by seconds; `name` is what the names of the files begin with."""
    for by in ("step", "seconds"):
        alt = f"{experiment.title}, {experiment.case_name(case)}: validation and training loss by {by}"
        yield Picture(f"{name}-loss-by-{by}", alt, loss(runs, experiment, case, by))


@styled
def loss(runs: Runs, experiment: Reported, case: Case, by: str) -> Figure:
    """Validation loss, with the range over seeds, and training loss (thin) by "step" or by "seconds" of training."""
    figure = Figure()
    axes = figure.subplots()
    if by == "seconds":
        axes.set_xscale("log")  # before there are lines: those of runs that diverged have no limits to go by
        axes.xaxis.set_major_formatter("{x:g}")
    for name in main_contenders(runs, [case]):
        ms = step_time(runs, case, name)
        unit = 1.0 if by == "step" or ms is None else ms.value / 1e3
        valid = [{step: row["valid_loss"] for step, row in validated(run).items()} for run in runs.of(case, name)]
        train = [{row["step"]: row["train_loss"] for row in run["rows"]} for run in runs.of(case, name)]
        plain = {**look(name), "marker": None}
        steps, values = by_step(train)
        axes.plot(unit * steps, [np.mean(many) for many in values], **{**plain, "linewidth": 0.7, "alpha": 0.7})
        steps, values = by_step(valid)
        mean_line(axes, unit * steps, values, name, marker=None)
    title = f"{experiment.title}, {experiment.case_name(case)}: loss by {by}"
    axes.set(xlabel="step" if by == "step" else "seconds of training", ylabel="nats (thin: in training)", title=title)
    legend_below(figure)
    return figure


def main_contenders(runs: Runs, cases: Sequence[Case]) -> list[str]:
    """The contenders that ran, without variants of a layer; with them if nothing else ran."""
    found = runs.contenders(cases)
    return [name for name in found if not labelled(name).is_variant] or found


def by_step(histories: Iterable[Mapping[int, float]]) -> tuple[np.ndarray[Any, Any], list[list[float]]]:
    """The steps that any run has, and the values of the runs there."""
    values: dict[int, list[float]] = {}
    for history in histories:
        for step, value in history.items():
            values.setdefault(step, []).append(value)
    steps = sorted(values)
    return np.array(steps, float), [values[step] for step in steps]
