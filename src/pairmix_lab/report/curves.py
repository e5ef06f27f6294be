"""Pictures of the paper's experiments."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from pairmix_lab.report import paper
from pairmix_lab.report.experiments import axis_cases, outcomes, validated
from pairmix_lab.report.runs import DENSE, EXPERIMENTS, SPM, Case, Runs
from pairmix_lab.report.style import STYLE, look, mean_line, papers_line, styled
from pairmix_lab.report.summary import case_name, headline_case
from pairmix_lab.report.timing import step_time

WIDE = (12.2, 4.8)


class Picture(NamedTuple):
    """A figure with the name of its file and what it shows, in a sentence."""

    name: str
    alt: str
    figure: Figure

    @property
    def is_wide(self) -> bool:
        """Whether it needs the width of two others."""
        return bool(self.figure.get_size_inches()[0] == WIDE[0])

    def as_file(self, form: str) -> bytes:
        """The figure as "svg" or "png"."""
        file = io.BytesIO()
        with mpl.rc_context(STYLE):
            self.figure.savefig(file, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
        return file.getvalue()


def pictures(runs: Runs, experiment: str) -> Iterator[Picture]:
    """All pictures of an experiment that was run."""
    name = EXPERIMENTS[experiment]
    if experiment != "shakespeare":
        alt = f"{name}: test accuracy of every layer against the width"
        yield Picture(f"{experiment}-accuracy", alt, accuracy(runs, experiment))
        alt = f"{name}: milliseconds of a training step against the width"
        yield Picture(f"{experiment}-time", alt, time(runs, experiment))
    for case in runs.cases(experiment) if experiment == "shakespeare" else [headline_case(runs, experiment)]:
        slug = "-".join(str(part) for part in (experiment, case.cell, case.width) if part is not None)
        for by in ("step", "seconds"):
            alt = f"{name}, {case_name(case)}: validation and training loss by {by}"
            yield Picture(f"{slug}-loss-by-{by}", alt, loss(runs, case, by))
    for width in sorted({case.width for case in axis_cases(runs)} if experiment == "teacher" else ()):
        alt = f"{name}, n = {width:,}: test accuracy against the teacher's distance from the identity"
        yield Picture(f"teacher-axis-{width}", alt, teacher_axis(runs, width))
    if experiment == "agnews":
        yield Picture("agnews-frontier", f"{name}: test accuracy against the time of a step", frontier(runs))


@styled
def accuracy(runs: Runs, experiment: str) -> Figure:
    """Test accuracy against the width, with the range over seeds; the paper's dotted and hollow."""
    figure = Figure()
    axes = figure.subplots()
    cases = runs.main_cases(experiment)
    for name in _without_variants(runs, cases):
        own = [case for case in cases if runs.of(case, name)]
        accuracies = [outcomes(runs.of(case, name), "test_accuracy") for case in own]
        mean_line(axes, [case.width for case in own], accuracies, name)
    for name in (DENSE, SPM):
        reported = paper.CLASSIFIED[experiment].items()
        papers_line(axes, {width: layers[name].accuracy for width, layers in reported}, name)
    axes.set(xscale="log", xlabel="n", title=f"{EXPERIMENTS[experiment]}: test accuracy")
    axes.yaxis.set_major_formatter("{x:.0%}")
    _widths(axes, cases, experiment)
    _legend(figure)
    return figure


@styled
def time(runs: Runs, experiment: str) -> Figure:
    """Milliseconds of a training step against the width; the paper's dotted and hollow."""
    figure = Figure()
    axes = figure.subplots()
    cases = runs.main_cases(experiment, timed=True)
    for name in _without_variants(runs, cases):
        times = {case.width: ms.value for case in cases if (ms := step_time(runs, case, name))}
        axes.plot(list(times), list(times.values()), label=name, **look(name))
    for name in (DENSE, SPM):
        papers_line(axes, {width: layers[name].ms for width, layers in paper.CLASSIFIED[experiment].items()}, name)
    axes.set(xscale="log", yscale="log", xlabel="n", title=f"{EXPERIMENTS[experiment]}: milliseconds per training step")
    axes.yaxis.set_major_formatter("{x:g}")
    _widths(axes, cases, experiment)
    _legend(figure)
    return figure


@styled
def loss(runs: Runs, case: Case, by: str) -> Figure:
    """Validation loss, with the range over seeds, and training loss (thin) by "step" or by "seconds" of training."""
    figure = Figure()
    axes = figure.subplots()
    if by == "seconds":
        axes.set_xscale("log")  # before there are lines: those of runs that diverged have no limits to go by
        axes.xaxis.set_major_formatter("{x:g}")
    for name in _without_variants(runs, [case]):
        ms = step_time(runs, case, name)
        unit = 1.0 if by == "step" or ms is None else ms.value / 1e3
        valid = [{step: row["valid_loss"] for step, row in validated(run).items()} for run in runs.of(case, name)]
        train = [{row["step"]: row["train_loss"] for row in run["rows"]} for run in runs.of(case, name)]
        plain = {**look(name), "marker": None}
        steps, losses = _by_step(train)
        axes.plot(unit * steps, [np.mean(values) for values in losses], **{**plain, "linewidth": 0.7, "alpha": 0.7})
        steps, losses = _by_step(valid)
        mean_line(axes, unit * steps, losses, name, marker=None)
    title = f"{EXPERIMENTS[case.experiment]}, {case_name(case)}: loss by {by}"
    axes.set(xlabel="step" if by == "step" else "seconds of training", ylabel="nats (thin: in training)", title=title)
    _legend(figure)
    return figure


@styled
def teacher_axis(runs: Runs, width: int) -> Figure:
    """Test accuracy against the teacher's distance from the identity; uniformly random angles are the last tick."""
    figure = Figure(figsize=WIDE)
    axes = figure.subplots()
    cases = [case for case in axis_cases(runs) if case.width == width]
    places = _places([case.angle_std for case in cases])
    for name in runs.contenders(cases):
        own = [case for case in cases if runs.of(case, name)]
        accuracies = [outcomes(runs.of(case, name), "test_accuracy") for case in own]
        mean_line(axes, [places[case.angle_std] for case in own], accuracies, name)
    if "uniform" in places and len(places) > 1:
        axes.axvline(places["uniform"] - 0.5, color="grey", linewidth=0.8, linestyle=":")
    title = f"Teachers of n = {width:,}: test accuracy by distance from the identity"
    axes.set(xlabel="standard deviation of the teacher's angles, radians", title=title)
    axes.set_xticks(list(places.values()), [str(angle) for angle in places])
    axes.yaxis.set_major_formatter("{x:.0%}")
    _legend(figure)
    return figure


@styled
def frontier(runs: Runs) -> Figure:
    """AG News: test accuracy against the time of a step, a point a layer and width, and the best for every time."""
    figure = Figure(figsize=WIDE)
    axes = figure.subplots()
    cases = runs.cases("agnews")
    points = []
    for name in runs.contenders(cases):
        own = []
        for case in cases:
            ms = step_time(runs, case, name)
            if ms and runs.of(case, name):
                own.append((ms.value, float(np.mean(outcomes(runs.of(case, name), "test_accuracy")))))
                axes.annotate(
                    f"{case.width:,}", own[-1], (0, 6), textcoords="offset points", ha="center", fontsize="x-small",
                    color=look(name)["color"],
                )  # fmt: skip
        axes.plot(*zip(*own, strict=True), label=name, **{**look(name), "linestyle": "none"})
        points += own
    line: Any = {"color": "grey", "linewidth": 1, "drawstyle": "steps-post", "zorder": 1}
    axes.plot(*zip(*pareto(points), strict=True), label="best for its time", **line)
    axes.set(xscale="log", xlabel="milliseconds per training step", title="AG News: test accuracy against time")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:.1%}")
    axes.margins(0.06, 0.1)
    _legend(figure)
    return figure


def pareto(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (time, accuracy) of which no other is both as fast and more accurate, by time."""
    best: list[tuple[float, float]] = []
    for time_, accuracy_ in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or accuracy_ > best[-1][1]:
            best.append((time_, accuracy_))
    return best


def _without_variants(runs: Runs, cases: Sequence[Case]) -> list[str]:
    """Those that stand in the main tables; if nobody else ran, all."""
    found = runs.contenders(cases)
    return [name for name in found if not name.startswith("SPM, ")] or found


def _by_step(histories: Iterable[Mapping[int, float]]) -> tuple[np.ndarray[Any, Any], list[list[float]]]:
    """The steps that any run has, and the values of the runs there."""
    values: dict[int, list[float]] = {}
    for history in histories:
        for step, value in history.items():
            values.setdefault(step, []).append(value)
    steps = sorted(values)
    return np.array(steps, float), [values[step] for step in steps]


def _places(angles: Iterable[Any]) -> dict[Any, float]:
    """Where an angle stands: a step for every doubling; no angle at all and uniform ones a step beyond the others."""
    angles = list(angles)
    doublings = {angle: math.log2(angle) for angle in angles if not isinstance(angle, str) and angle > 0}
    first, last = (min(doublings.values()), max(doublings.values())) if doublings else (0.0, 0.0)
    beyond = {angle: last + 1 if isinstance(angle, str) else first - 1 for angle in angles if angle not in doublings}
    return {angle: (doublings | beyond)[angle] for angle in angles}


def _widths(axes: Any, cases: Iterable[Case], experiment: str) -> None:
    """A tick for each width."""
    widths = sorted({case.width for case in cases} | set(paper.CLASSIFIED[experiment]))
    axes.set_xticks(widths, [f"{width:,}" for width in widths])
    if len(widths) > 6:
        axes.tick_params("x", rotation=40)
    axes.minorticks_off()


def _legend(figure: Figure) -> None:
    """Below the axes, where it hides nothing."""
    figure.legend(loc="outside lower center", ncols=5 if figure.get_size_inches()[0] == WIDE[0] else 3)
