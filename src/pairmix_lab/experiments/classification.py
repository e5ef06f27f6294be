"""What experiments share that classify: scores, tables, pictures and the fields of their results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional as F

from pairmix_lab import contenders
from pairmix_lab.experiments.experiment import Experiment
from pairmix_lab.report import curves
from pairmix_lab.report.cells import in_cell, seeds, spread
from pairmix_lab.report.experiment import Case, Headline
from pairmix_lab.report.pictures import Picture, legend_below, look, mean_line, papers_line, styled, width_ticks
from pairmix_lab.report.runs import Run, Runs, collect, outcomes
from pairmix_lab.report.schema import COUNT, SHARE, Object, Shape, training
from pairmix_lab.report.summary import headline, headline_case, spm_contender
from pairmix_lab.report.tables import NamedTable, Table, distinct, number
from pairmix_lab.report.timing import speedup, step_time
from pairmix_lab.training.loop import Batch

DENSE, SPM = contenders.DENSE.label, contenders.SPM.label
ACCURACY = (
    "Test accuracy in percent: mean ± standard deviation over seeds. "
    "The gap is SPM less dense, for the seeds that both have."
)


@torch.no_grad()
def scores(model: nn.Module, batches: Iterable[Batch], prefix: str) -> dict[str, float]:
    """The mean loss and the part that is classified as labelled, over all rows."""
    loss, right, rows = 0.0, 0, 0
    for inputs, labels in batches:
        logits = model(inputs)
        loss += float(F.cross_entropy(logits, labels, reduction="sum"))
        right += int((logits.argmax(-1) == labels).sum())
        rows += len(labels)
    return {f"{prefix}_loss": loss / rows, f"{prefix}_accuracy": right / rows}


class Classified(NamedTuple):
    """One layer at one width: its test accuracy, and the milliseconds of a training step."""

    accuracy: float
    ms: float


def fields(**config: Shape) -> Object:
    """What the result of a classification must be, with settings of its own."""
    return training(config, {"test_accuracy": SHARE, "mixer_parameters": COUNT}, {"valid_accuracy": SHARE})


class Classification(Experiment):
    """An experiment whose outcome is the accuracy on a test set.

    A table's heading "group: name" is the column `name` of a group of columns. What was not run is a dash.

    Attributes:
        paper: what the paper reports, by width and label; empty if it is not in the paper.
        main_setting: that of the cases that are compared with the paper.
        keeps_variants: whether the main tables show variants of SPM; otherwise the experiment shows them elsewhere.
    """

    fields = fields()
    measure = ("test_accuracy", 100)
    paper: Mapping[int, Mapping[str, Classified]] = {}
    main_setting: float | str | None = None
    keeps_variants = True

    @property
    def table_names(self) -> Sequence[str]:
        return [f"{self.name}-{table}" for table in ("accuracy", "cost", "lr")]

    def tables(self, runs: Runs) -> Iterator[NamedTable]:
        if not self.compared(runs):
            return
        yield NamedTable(f"{self.name}-accuracy", ACCURACY, self.accuracy(runs))
        yield NamedTable(
            f"{self.name}-cost", "The cost of a training step, and the size of the layer.", self.cost(runs)
        )

    def pictures(self, runs: Runs) -> Iterator[Picture]:
        if not self.compared(runs):
            return
        alt = f"{self.title}: test accuracy of every layer against the width"
        yield Picture(f"{self.name}-accuracy", alt, self.accuracy_picture(runs))
        alt = f"{self.title}: milliseconds of a training step against the width"
        yield Picture(f"{self.name}-time", alt, self.time_picture(runs))
        case = self.headline_case(runs)
        yield from curves.losses(runs, self, case, f"{self.name}-{case.width}")

    def in_words(self, outcome: Mapping[str, Any]) -> str:
        return f"{outcome['test_accuracy']:.1%} of the test set right"

    def validation_score(self, run: Run) -> float:
        return _last_accuracy(run)

    def compared(self, runs: Runs) -> list[Case]:
        """The cases that were run, without those of studies."""
        return [case for case in runs.cases(self) if case.study is None]

    def main_case(self, width: int) -> Case:
        """The case of a width that is compared with the paper."""
        return Case(self.name, width, self.main_setting)

    def main_cases(self, runs: Runs, timed: bool = False) -> list[Case]:
        """The main cases that were trained, and if asked for also those that were only timed, by width."""
        widths = {case.width for case, _ in runs.steps if case.experiment == self.name} if timed else set()
        widths |= {case.width for case in runs.at if case == self.main_case(case.width)}
        return [self.main_case(width) for width in sorted(widths)]

    def headline_case(self, runs: Runs) -> Case:
        """The case that says most."""
        return headline_case(runs, self.main_cases(runs) or self.compared(runs), self.paper.keys())

    def headline(self, runs: Runs) -> Headline | None:
        if not self.compared(runs):
            return None
        case = self.headline_case(runs)
        theirs = ["-"] * 4
        if case.width in self.paper:
            dense, spm = (self.paper[case.width][name] for name in (DENSE, SPM))
            reported = [f"{100 * dense.accuracy:.2f}", f"{100 * spm.accuracy:.2f}"]
            theirs = [*reported, f"{100 * (spm.accuracy - dense.accuracy):+.2f}", number(dense.ms / spm.ms)]
        own = spm_contender(runs, [case])
        ours = [spread(accuracies(runs, case, name), unit=100) for name in (DENSE, own)]
        gap = spread(accuracy_gaps(runs, case, own), unit=100, sign="+")
        names = [f"{DENSE}, %", f"{own}, %", "gap, points", "times as fast"]
        unit = (gap, "points of accuracy")
        return headline(runs, self, case, gap=unit, names=names, theirs=theirs, ours=[*ours, gap])

    def accuracy(self, runs: Runs) -> Table:
        """The test accuracy in percent by width: the mean and the standard deviation over seeds."""
        cases = self._with_papers(self.main_cases(runs))
        own, others = self._own_and_others(runs, cases)
        header = [
            "n",
            *(f"paper: {name}" for name in (DENSE, SPM, "gap") if self.paper),
            *(f"ours: {name}" for name in (DENSE, own, "gap", *others)),
            "seeds",
        ]
        lines = []
        for case in cases:
            theirs = []
            if self.paper:
                reported = self.paper.get(case.width, {})
                theirs = [spread([reported[name].accuracy] if reported else [], unit=100) for name in (DENSE, SPM)]
                gap = [reported[SPM].accuracy - reported[DENSE].accuracy] if reported else []
                theirs.append(spread(gap, unit=100, sign="+"))
            lines.append(
                [
                    f"{case.width:,}",
                    *theirs,
                    *(spread(accuracies(runs, case, name), unit=100) for name in (DENSE, own)),
                    spread(accuracy_gaps(runs, case, own), unit=100, sign="+"),
                    *(spread(accuracies(runs, case, name), unit=100) for name in others),
                    seeds(runs, case, [DENSE, own, *others]),
                ]
            )
        return [header, *lines]

    def cost(self, runs: Runs) -> Table:
        """The milliseconds of a training step and the parameters of the layer, by width."""
        cases = self._with_papers(self.main_cases(runs, timed=True))
        own, others = self._own_and_others(runs, cases)
        sized = [name for name in (DENSE, own, *others) if any(_sizes(runs, case, name) for case in cases)]
        sized = [name for name in sized if name != contenders.IDENTITY.label]  # as large as dense
        header = [
            "n",
            *(f"paper, ms: {name}" for name in (DENSE, SPM, f"{DENSE} / {SPM}") if self.paper),
            *(f"ours, ms: {name}" for name in (DENSE, own, f"{DENSE} / {SPM}", *others)),
            *(f"parameters of the layer: {name}" for name in sized),
        ]
        lines = []
        for case in cases:
            theirs = []
            if self.paper:
                reported = self.paper.get(case.width, {})
                theirs = [str(reported[name].ms) if reported else "-" for name in (DENSE, SPM)]
                theirs.append(number(reported[DENSE].ms / reported[SPM].ms if reported else None))
            times = [in_cell(step_time(runs, case, name)) for name in (DENSE, own)]
            rest = [in_cell(step_time(runs, case, name)) for name in others]
            ratio = in_cell(speedup(runs, case, own), quartiles=True)
            sizes = [next((f"{size:,}" for size in _sizes(runs, case, name)), "-") for name in sized]
            lines.append([f"{case.width:,}", *theirs, *times, ratio, *rest, *sizes])
        return [header, *lines]

    @styled
    def accuracy_picture(self, runs: Runs) -> Figure:
        """Test accuracy against the width, with the range over seeds; the paper's dotted and hollow."""
        figure = Figure()
        axes = figure.subplots()
        cases = self.main_cases(runs)
        for name in curves.main_contenders(runs, cases):
            own = [case for case in cases if runs.of(case, name)]
            mean_line(axes, [case.width for case in own], [accuracies(runs, case, name) for case in own], name)
        for name in (DENSE, SPM) if self.paper else ():
            papers_line(axes, {width: layers[name].accuracy for width, layers in self.paper.items()}, name)
        axes.set(xscale="log", xlabel="n", title=f"{self.title}: test accuracy")
        axes.yaxis.set_major_formatter("{x:.0%}")
        width_ticks(axes, [*(case.width for case in cases), *self.paper])
        legend_below(figure)
        return figure

    @styled
    def time_picture(self, runs: Runs) -> Figure:
        """Milliseconds of a training step against the width; the paper's dotted and hollow."""
        figure = Figure()
        axes = figure.subplots()
        cases = self.main_cases(runs, timed=True)
        for name in curves.main_contenders(runs, cases):
            times = {case.width: ms.value for case in cases if (ms := step_time(runs, case, name))}
            axes.plot(list(times), list(times.values()), label=name, **look(name))
        for name in (DENSE, SPM) if self.paper else ():
            papers_line(axes, {width: layers[name].ms for width, layers in self.paper.items()}, name)
        axes.set(xscale="log", yscale="log", xlabel="n", title=f"{self.title}: milliseconds per training step")
        axes.yaxis.set_major_formatter("{x:g}")
        width_ticks(axes, [*(case.width for case in cases), *self.paper])
        legend_below(figure)
        return figure

    def table(self, name: str, results: Path) -> Table | None:
        if name != f"{self.name}-lr":
            return super().table(name, results)
        rates = sorted((float(path.name), path) for path in (results / name).glob("*") if any(path.glob("*.json")))
        return learning_rates({rate: collect([path], [self]) for rate, path in rates}) if rates else None

    def _with_papers(self, cases: Iterable[Case]) -> list[Case]:
        """These cases and the paper's, by width."""
        return [self.main_case(width) for width in sorted({case.width for case in cases} | self.paper.keys())]

    def _own_and_others(self, runs: Runs, cases: Sequence[Case]) -> tuple[str, list[str]]:
        """The SPM layer that is compared with dense, and the contenders apart from these two."""
        own = spm_contender(runs, cases)
        found = [name for name in runs.contenders(cases) if name not in (DENSE, own)]
        return own, [name for name in found if self.keeps_variants or not contenders.labelled(name).is_variant]


def learning_rates(by_rate: Mapping[float, Runs]) -> Table:
    """The accuracy on validation rows in percent: a line for each learning rate, a column for each layer."""
    cases = distinct(case for runs in by_rate.values() for case in runs.at)
    columns = [(case, name) for case in cases for name in next(iter(by_rate.values())).contenders([case])]
    several = len(cases) > 1
    lines = []
    for rate, runs in by_rate.items():
        found = [[*map(_last_accuracy, runs.of(case, name))] for case, name in columns]
        lines.append([f"{rate:g}", *(spread(values, unit=100) for values in found)])
    header = [f"{name}, n = {case.width:,}" if several else name for case, name in columns]
    return [["learning rate", *header], *lines]


def accuracies(runs: Runs, case: Case, contender: str) -> list[float]:
    """The test accuracies of a contender, one for each seed."""
    return outcomes(runs.of(case, contender), "test_accuracy")


def accuracy_gaps(runs: Runs, case: Case, contender: str) -> list[float]:
    """By how much a contender is more accurate than dense: for every seed that both have, or else in the mean."""
    dense, other = ({run["config"]["seed"]: run for run in runs.of(case, name)} for name in (DENSE, contender))
    both = [seed for seed in dense if seed in other]
    if both:
        return [other[seed]["outcome"]["test_accuracy"] - dense[seed]["outcome"]["test_accuracy"] for seed in both]
    means = [accuracies(runs, case, name) for name in (DENSE, contender)]
    return [float(np.mean(means[1]) - np.mean(means[0]))] if all(means) else []


def _last_accuracy(run: Run) -> float:
    """On validation rows."""
    return next((row["valid_accuracy"] for row in reversed(run["rows"]) if "valid_accuracy" in row), math.nan)


def _sizes(runs: Runs, case: Case, contender: str) -> list[int]:
    return [size for size in outcomes(runs.of(case, contender), "mixer_parameters") if size]
