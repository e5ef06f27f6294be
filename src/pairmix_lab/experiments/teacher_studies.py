"""What the paper's theory says of the teacher's students: how many rows they need, and how norms behave in training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pairmix_lab.experiments.classification import Classification, accuracies
from pairmix_lab.report.cells import seeds as seeds_cell
from pairmix_lab.report.cells import spread
from pairmix_lab.report.curves import by_step
from pairmix_lab.report.experiment import Case, Study
from pairmix_lab.report.pictures import WIDE, Picture, legend_below, mean_line, styled, width_ticks
from pairmix_lab.report.runs import Run, Runs
from pairmix_lab.report.tables import NamedTable, Table, distinct, number

ROWS, NORMS = "rows", "norms"
TUNED = {"lr": "learning rate", "weight_decay": "weight decay"}
MEASURED = {"operator_norm": "operator norm", "condition": "condition", "gradient_norm": "gradient norm"}


def study(config: Any) -> Study | None:
    """The study that a config belongs to; None for the main comparison."""
    if config.get(ROWS):
        return Study(ROWS, config[ROWS])
    return Study(NORMS) if config.get(NORMS) else None


def tables(experiment: Classification, runs: Runs) -> Iterator[NamedTable]:
    """One for each study that was run."""
    cases = _cases(experiment, runs, ROWS)
    if cases:
        caption = (
            "Test accuracy in percent of the model in the end, by the number of rows that it was trained on. "
            f"{_tuned_in_words(runs, cases)} Weight decay is of matrices: the mixing parameters of SPM have none."
        )
        yield NamedTable(f"{experiment.name}-{ROWS}", caption, by_rows(runs, cases))
    cases = _cases(experiment, runs, NORMS)
    if cases:
        caption = (
            "Norms of the layer after the first step, in the end, and the largest at any validation: the mean over "
            "seeds. The operator norm is that of the whole layer: its diagonal matrices scale what rotations leave as "
            "long as it was. The condition is its ratio to the smallest singular value; a dash if the matrix is "
            "singular or too large. The gradient is that of the loss on the validation rows, by the layer's own "
            "parameters."
        )
        yield NamedTable(f"{experiment.name}-{NORMS}", caption, by_norm(runs, cases))


def pictures(experiment: Classification, runs: Runs) -> Iterator[Picture]:
    """One for each teacher of each study."""
    rows = _cases(experiment, runs, ROWS)
    for width, setting in distinct((case.width, case.setting) for case in rows):
        own = [case for case in rows if (case.width, case.setting) == (width, setting)]
        title = f"{experiment.title}, n = {width:,}, angles {setting}: test accuracy by the rows it was trained on"
        yield Picture(f"{experiment.name}-{ROWS}-{width}-{setting}", title, rows_picture(runs, own, title))
    for case in _cases(experiment, runs, NORMS):
        title = f"{experiment.title}, n = {case.width:,}, angles {case.setting}: operator norm and gradient norm"
        name = f"{experiment.name}-{NORMS}-{case.width}-{case.setting}"
        yield Picture(name, f"{title} by step", norms_picture(runs, case, title))


def by_rows(runs: Runs, cases: Sequence[Case]) -> Table:
    """The test accuracy in percent by teacher and number of rows, and what was chosen where that is not one choice."""
    names = runs.contenders(cases)
    tuned = {setting: words for setting, words in TUNED.items() if len(_values(runs, cases, names, setting)) > 1}
    header = ["n", "angles, std", ROWS, *names, "seeds"]
    header += [f"{words}: {name}" for words in tuned.values() for name in names]
    lines = []
    for case in cases:
        line = [f"{case.width:,}", str(case.setting), f"{_row_count(case):,}"]
        line += [spread(accuracies(runs, case, name), unit=100) for name in names]
        line.append(seeds_cell(runs, case, names))
        for setting in tuned:
            line += [next((f"{value:g}" for value in _values(runs, [case], [name], setting)), "-") for name in names]
        lines.append(line)
    return [header, *lines]


def by_norm(runs: Runs, cases: Sequence[Case]) -> Table:
    """The norms of each contender at the start, in the end, and at their largest."""
    moments = ("start", "end", "largest")
    header = ["n", "angles, std", "layer", *(f"{words}: {moment}" for words in MEASURED.values() for moment in moments)]
    lines = []
    for case in cases:
        for name in runs.contenders([case]):
            line = [f"{case.width:,}", str(case.setting), name]
            for key in MEASURED:
                histories = [list(history.values()) for run in runs.of(case, name) if (history := measured(run, key))]
                found = [(values[0], values[-1], max(values)) for values in histories]
                line += [number(float(mean)) for mean in np.mean(found, axis=0)] if found else ["-"] * len(moments)
            lines.append([*line, str(len(runs.of(case, name)))])
    return [[*header, "seeds"], *lines]


def measured(run: Run, key: str) -> dict[int, float]:
    """One of the norms by step, where it was measured."""
    return {row["step"]: row[key] for row in run["rows"] if key in row}


@styled
def rows_picture(runs: Runs, cases: Sequence[Case], title: str) -> Figure:
    """Test accuracy against the number of rows, with the range over seeds."""
    figure = Figure(figsize=WIDE)
    axes = figure.subplots()
    for name in runs.contenders(cases):
        own = [case for case in cases if runs.of(case, name)]
        mean_line(axes, [*map(_row_count, own)], [accuracies(runs, case, name) for case in own], name)
    axes.set(xscale="log", xlabel="rows of the training set", title=title)
    axes.yaxis.set_major_formatter("{x:.0%}")
    width_ticks(axes, map(_row_count, cases))
    legend_below(figure)
    return figure


@styled
def norms_picture(runs: Runs, case: Case, title: str) -> Figure:
    """The operator norm and the gradient norm by step, with the range over seeds."""
    figure = Figure(figsize=WIDE)
    figure.suptitle(title, x=0.01, ha="left", fontsize="medium", fontweight="bold")
    for axes, key in zip(figure.subplots(1, 2), ("operator_norm", "gradient_norm"), strict=True):
        for name in runs.contenders([case]):
            steps, values = by_step(measured(run, key) for run in runs.of(case, name))
            mean_line(axes, steps, values, name)
        axes.set(xlabel="step", ylabel=MEASURED[key], yscale="log")
        for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            which("{x:g}")
    legend_below(figure)
    return figure


def _cases(experiment: Classification, runs: Runs, name: str) -> list[Case]:
    """Those of a study, sorted."""
    return [case for case in runs.cases(experiment) if case.study is not None and case.study.name == name]


def _row_count(case: Case) -> int:
    assert case.study is not None
    assert case.study.value is not None
    return case.study.value


def _values(runs: Runs, cases: Sequence[Case], names: Sequence[str], setting: str) -> list[Any]:
    """Those of a setting that the shown runs have."""
    several = [runs.of(case, name) for case in cases for name in names]
    return sorted({run["config"].get(setting) for chosen in several for run in chosen})


def _tuned_in_words(runs: Runs, cases: Sequence[Case]) -> str:
    """Which values of the tuned settings are shown, and why those."""
    names = runs.contenders(cases)
    found = {words: _values(runs, cases, names, setting) for setting, words in TUNED.items()}
    several = [words for words, values in found.items() if len(values) > 1]
    parts = [f"a {words} of {values[0]:g} for all" for words, values in found.items() if len(values) == 1]
    parts += [f"the {words} that is best on the validation rows, for each layer and set" for words in several]
    return f"Trained with {' and '.join(parts)}."
