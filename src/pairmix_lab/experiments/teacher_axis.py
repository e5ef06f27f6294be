"""The axis of the teacher's experiment: how far the teacher is from the identity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from matplotlib.figure import Figure

from pairmix_lab import contenders
from pairmix_lab.experiments.classification import SPM, Classification, accuracies
from pairmix_lab.report.cells import seeds as seeds_cell
from pairmix_lab.report.cells import spread
from pairmix_lab.report.experiment import Case
from pairmix_lab.report.pictures import WIDE, Picture, legend_below, mean_line, styled
from pairmix_lab.report.runs import Runs
from pairmix_lab.report.tables import NamedTable, Table, distinct

UNIFORM = "uniform"


def tables(experiment: Classification, runs: Runs) -> Iterator[NamedTable]:
    """One, if there is more than the main comparison."""
    shown = cases(experiment, runs)
    if shown:
        caption = (
            "Test accuracy in percent by the teacher's distance from the identity: "
            "the standard deviation of its angles in radians."
        )
        yield NamedTable(f"{experiment.name}-axis", caption, table(runs, shown))


def pictures(experiment: Classification, runs: Runs) -> Iterator[Picture]:
    """One for each width."""
    shown = cases(experiment, runs)
    for width in sorted({case.width for case in shown}):
        alt = f"{experiment.title}, n = {width:,}: test accuracy against the teacher's distance from the identity"
        own = [case for case in shown if case.width == width]
        yield Picture(f"{experiment.name}-axis-{width}", alt, picture(runs, own))


def cases(experiment: Classification, runs: Runs) -> list[Case]:
    """The teachers of every width at which there is more than the main comparison."""
    compared = experiment.compared(runs)
    more = {
        case.width
        for case in compared
        if case.setting != experiment.main_setting
        or any(contenders.labelled(name).is_variant for name in runs.at[case])
    }
    return [case for case in compared if case.width in more]


def table(runs: Runs, cases: Sequence[Case]) -> Table:
    """The test accuracy in percent by the teacher's distance from the identity, with other blocks and pairs too."""
    headings = {name: _heading(name) for name in runs.contenders(cases)}
    groups = distinct(["", *map(_group, headings.values())])
    names = sorted(headings, key=lambda name: groups.index(_group(headings[name])))
    lines = [
        [
            f"{case.width:,}",
            str(case.setting),
            *(spread(accuracies(runs, case, name), unit=100) for name in names),
            seeds_cell(runs, case, names),
        ]
        for case in cases
    ]
    return [["n", "angles, std", *(headings[name] for name in names), "seeds"], *lines]


@styled
def picture(runs: Runs, cases: Sequence[Case]) -> Figure:
    """Test accuracy against the teacher's distance from the identity; uniformly random angles are the last tick."""
    figure = Figure(figsize=WIDE)
    axes = figure.subplots()
    places = _places([case.setting for case in cases])
    for name in runs.contenders(cases):
        own = [case for case in cases if runs.of(case, name)]
        mean_line(axes, [places[case.setting] for case in own], [accuracies(runs, case, name) for case in own], name)
    if UNIFORM in places and len(places) > 1:
        axes.axvline(places[UNIFORM] - 0.5, color="grey", linewidth=0.8, linestyle=":")
    title = f"Teachers of n = {cases[0].width:,}: test accuracy by distance from the identity"
    axes.set(xlabel="standard deviation of the teacher's angles, radians", title=title)
    axes.set_xticks(list(places.values()), [str(angle) for angle in places])
    axes.yaxis.set_major_formatter("{x:.0%}")
    legend_below(figure)
    return figure


def _heading(name: str) -> str:
    """That of a column: variants of SPM stand together, by their pairs and their start."""
    contender = contenders.labelled(name)
    if contender.key != contenders.SPM.key:
        return name
    pairs = "other pairs" if contender.settings.get("pairing") == "other" else "teacher's pairs"
    start = [part for part in name.split(", ")[1:] if part not in ("rotation", "other pairs")]
    return f"{', '.join([SPM, *start, pairs])}: {contender.settings.get('block', 'general')}"


def _group(heading: str) -> str:
    return heading.rpartition(": ")[0]


def _places(angles: Iterable[Any]) -> dict[Any, float]:
    """Where an angle stands: a step for every doubling; no angle at all and uniform ones a step beyond the others."""
    angles = list(angles)
    doublings = {angle: math.log2(angle) for angle in angles if not isinstance(angle, str) and angle > 0}
    first, last = (min(doublings.values()), max(doublings.values())) if doublings else (0.0, 0.0)
    beyond = {angle: last + 1 if isinstance(angle, str) else first - 1 for angle in angles if angle not in doublings}
    return {angle: (doublings | beyond)[angle] for angle in angles}
