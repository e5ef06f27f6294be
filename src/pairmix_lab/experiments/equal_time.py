"""Models compared at equal training time: how many steps a budget allows, and which model does best with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from pairmix_lab.contenders import DENSE, named
from pairmix_lab.report.cells import spread
from pairmix_lab.report.experiment import Case
from pairmix_lab.report.pictures import WIDE, legend_below, look, styled
from pairmix_lab.report.runs import Run, Runs, outcomes, validated
from pairmix_lab.report.tables import Rows, Table, number
from pairmix_lab.report.timing import step_time

SECONDS, STEPS = "s", "steps"


class Setting(NamedTuple):
    """What tells the cases of one width apart; as text it is the setting of a `Case`.

    Attributes:
        text: what the models learn from.
        amount: how long.
        unit: of the amount, `SECONDS` or `STEPS`.
        shape: in words, what is not usual of the model.
    """

    text: str
    amount: float
    unit: str
    shape: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join([self.text, f"{self.amount:,.12g} {self.unit}", *self.shape])

    @classmethod
    def of(cls, case: Case) -> Setting:
        """The setting of a case."""
        text, amount, *shape = str(case.setting).split(", ")
        value, unit = amount.split()
        return cls(text, float(value.replace(",", "")), unit, tuple(shape))

    @property
    def model_and_text(self) -> str:
        """All but the time."""
        return ", ".join([self.text, *self.shape])


def steps_within(budget: float, rows: Rows, experiment: str, contender: str, width: int, batch: int) -> int | None:
    """The steps that a budget in seconds allows, by the times of `pairmix bench steps`; None if they lack this one."""
    found = [
        row
        for row in rows
        if (row["experiment"], row["width"], row["batch"]) == (experiment, width, batch)
        and named(row["layer"]).label == contender
    ]
    if not found:
        return None
    ms: float = max(found, key=lambda row: row.get("threads", 0))["ms"]  # the time that a report shows, too
    return round(1e3 * budget / ms)


def longest(cases: Iterable[Case]) -> list[Case]:
    """Of the cases that differ in nothing but the time, those with the most of it."""
    found: dict[tuple[object, ...], Case] = {}
    for case in cases:
        setting = Setting.of(case)
        key = (case.width, setting._replace(amount=0))
        if key not in found or setting.amount > Setting.of(found[key]).amount:
            found[key] = case
    return list(found.values())


def by_budget(cases: Iterable[Case]) -> dict[str, dict[float, list[Case]]]:
    """The cases of all widths, by text and model, and then by budget in seconds, sorted."""
    found: dict[str, dict[float, list[Case]]] = {}
    for case in cases:
        setting = Setting.of(case)
        if setting.unit == SECONDS:
            found.setdefault(setting.model_and_text, {}).setdefault(setting.amount, []).append(case)
    return {name: dict(sorted(budgets.items())) for name, budgets in found.items()}


def best(runs: Runs, cases: Iterable[Case], contender: str) -> Case | None:
    """The case on which a contender has the lowest mean loss over seeds; None if it ran on none of them."""

    def loss(case: Case) -> tuple[bool, float]:
        mean = _mean_loss(runs, case, contender)
        return math.isnan(mean), mean

    return min((case for case in cases if runs.of(case, contender)), key=loss, default=None)


def frontier_table(runs: Runs, cases: Sequence[Case]) -> Table:
    """For every budget and contender the width that does best, and its loss."""
    lines = []
    for name, budgets in by_budget(cases).items():
        for budget, same in budgets.items():
            for contender in runs.contenders(same):
                found = best(runs, same, contender)
                assert found is not None
                chosen = runs.of(found, contender)
                widths = ", ".join(f"{case.width:,}" for case in same if runs.of(case, contender))
                losses = [spread(outcomes(chosen, key), digits=3) for key in ("valid_loss", "valid_bpc")]
                line = [name, f"{budget:,g} s", contender, f"{found.width:,}", widths]
                lines.append([*line, f"{chosen[0]['config']['steps']:,}", str(len(chosen)), *losses])
    return [["text", "budget", "layer", "best n", "of", "steps", "seeds", "nats", "bits"], *lines]


@styled
def frontier_picture(runs: Runs, title: str, budgets: Mapping[float, Sequence[Case]]) -> Figure:
    """The loss of each contender at its best width, which stands at the point, against the budget."""
    figure = Figure(figsize=WIDE)
    axes = figure.subplots()
    axes.set_xscale("log")
    for name in runs.contenders(case for same in budgets.values() for case in same):
        points = []
        for budget, same in budgets.items():
            found = best(runs, same, name)
            if found is not None and math.isfinite(_mean_loss(runs, found, name)):
                points.append((budget, _mean_loss(runs, found, name)))
                axes.annotate(
                    f"{found.width:,}", points[-1], (0, 6), textcoords="offset points", ha="center", fontsize="x-small",
                    color=look(name)["color"],
                )  # fmt: skip
        axes.plot([budget for budget, _ in points], [loss for _, loss in points], label=name, **look(name))
    axes.set(xlabel="seconds of training", ylabel="validation loss at the best width, nats per byte", title=title)
    axes.set_xticks(list(budgets), [f"{budget:,g}" for budget in budgets])
    axes.minorticks_off()
    axes.margins(0.06, 0.1)
    legend_below(figure)
    return figure


def time_to_dense(runs: Runs, cases: Sequence[Case]) -> Table:
    """The seconds after which each contender is as good as the dense model of its width is in the end.

    Losses are those on the way, which all contenders have of the same bytes, and the mean over seeds.
    """
    chosen = [case for case in longest(cases) if Setting.of(case).unit == SECONDS and _curve(runs, case, DENSE.label)]
    names = runs.contenders(chosen)
    lines = []
    for case in chosen:
        *_, target = _curve(runs, case, DENSE.label).values()
        seconds = [_seconds_to(target, runs, case, name) for name in names]
        setting = Setting.of(case)
        line = [setting.model_and_text, f"{case.width:,}", f"{setting.amount:,g} s", f"{target:.3f}"]
        lines.append([*line, *(number(value) for value in seconds)])
    return [["text", "n", "budget", "loss of dense", *(f"{name}, s" for name in names)], *lines]


def _mean_loss(runs: Runs, case: Case, contender: str) -> float:
    return float(np.mean(outcomes(runs.of(case, contender), "valid_loss")))


def _curve(runs: Runs, case: Case, contender: str) -> dict[int, float]:
    """The mean validation loss at the steps at which all seeds were validated."""
    histories: list[dict[int, Run]] = [validated(run) for run in runs.of(case, contender)]
    common = set.intersection(*map(set, histories)) if histories else set()
    return {step: float(np.mean([one[step]["valid_loss"] for one in histories])) for step in sorted(common)}


def _seconds_to(target: float, runs: Runs, case: Case, contender: str) -> float | None:
    ms = step_time(runs, case, contender)
    reached = [step for step, loss in _curve(runs, case, contender).items() if loss <= target]
    return reached[0] * ms.value / 1e3 if ms and reached else None
