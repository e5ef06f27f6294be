"""Tables of the paper's experiments: what it reports beside what was measured.

A heading "group: name" is the column `name` of a group of columns. What was not run is a dash.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pairmix_lab.report import paper
from pairmix_lab.report.cells import in_cell, seeds, spread
from pairmix_lab.report.runs import DENSE, IDENTITY, MAIN_ANGLE_STD, SPM, Case, Run, Runs, main_case
from pairmix_lab.report.tables import Table, distinct, number
from pairmix_lab.report.timing import speedup, step_time

# What the table of teachers shows, and under which heading.
AXIS = {
    DENSE: DENSE,
    "low rank": "low rank",
    SPM: "SPM, teacher's pairs: general",
    "SPM, rotation": "SPM, teacher's pairs: rotation",
    "SPM, other pairs": "SPM, other pairs: general",
    "SPM, rotation, other pairs": "SPM, other pairs: rotation",
}


def accuracy(runs: Runs, experiment: str) -> Table:
    """The test accuracy in percent by width: the mean and the standard deviation over seeds."""
    cases = _with_papers(runs.main_cases(experiment), experiment)
    others = _others(runs, cases)
    header = [
        "n",
        *("paper: dense", "paper: SPM", "paper: gap"),
        *("ours: dense", "ours: SPM", "ours: gap"),
        *(f"ours: {name}" for name in others),
        "seeds",
    ]
    lines = []
    for case in cases:
        reported = paper.CLASSIFIED[experiment].get(case.width, {})
        theirs = [[reported[name].accuracy] if reported else [] for name in (DENSE, SPM)]
        their_gap = [reported[SPM].accuracy - reported[DENSE].accuracy] if reported else []
        ours = [_accuracies(runs, case, name) for name in (DENSE, SPM)]
        rest = [_accuracies(runs, case, name) for name in others]
        lines.append(
            [
                f"{case.width:,}",
                *(spread(values, unit=100) for values in theirs),
                spread(their_gap, unit=100, sign="+"),
                *(spread(values, unit=100) for values in ours),
                spread(accuracy_gaps(runs, case), unit=100, sign="+"),
                *(spread(values, unit=100) for values in rest),
                seeds(runs, case, [DENSE, SPM, *others]),
            ]
        )
    return [header, *lines]


def cost(runs: Runs, experiment: str) -> Table:
    """The milliseconds of a training step and the parameters of the layer, by width."""
    cases = _with_papers(runs.main_cases(experiment, timed=True), experiment)
    others = _others(runs, cases)
    sized = [name for name in (DENSE, SPM, *others) if any(_sizes(runs, case, name) for case in cases)]
    sized = [name for name in sized if name != IDENTITY]  # as large as dense
    header = [
        "n",
        *("paper, ms: dense", "paper, ms: SPM", "paper, ms: dense / SPM"),
        *("ours, ms: dense", "ours, ms: SPM", "ours, ms: dense / SPM"),
        *(f"ours, ms: {name}" for name in others),
        *(f"parameters of the layer: {name}" for name in sized),
    ]
    lines = []
    for case in cases:
        reported = paper.CLASSIFIED[experiment].get(case.width, {})
        theirs = [str(reported[name].ms) if reported else "-" for name in (DENSE, SPM)]
        their_ratio = number(reported[DENSE].ms / reported[SPM].ms if reported else None)
        times = [in_cell(step_time(runs, case, name)) for name in (DENSE, SPM)]
        rest = [in_cell(step_time(runs, case, name)) for name in others]
        ratio = in_cell(speedup(runs, case, SPM), quartiles=True)
        sizes = [next((f"{size:,}" for size in _sizes(runs, case, name)), "-") for name in sized]
        lines.append([f"{case.width:,}", *theirs, their_ratio, *times, ratio, *rest, *sizes])
    return [header, *lines]


def teacher_axis(runs: Runs) -> Table:
    """The test accuracy in percent by the teacher's distance from the identity, with other blocks and pairs too.

    Only the header if there is nothing that the main table does not say.
    """
    contenders = distinct([*AXIS, *runs.contenders(axis_cases(runs))])
    lines = [
        [
            f"{case.width:,}",
            str(case.angle_std),
            *(spread(_accuracies(runs, case, name), unit=100) for name in contenders),
            seeds(runs, case, contenders),
        ]
        for case in axis_cases(runs)
    ]
    return [["n", "angles, std", *(AXIS.get(name, name) for name in contenders), "seeds"], *lines]


def axis_cases(runs: Runs) -> list[Case]:
    """The teachers of every width at which there is more than the main comparison."""
    cases = runs.cases("teacher")
    more = {
        case.width
        for case in cases
        if case.angle_std != MAIN_ANGLE_STD or any(name.startswith("SPM, ") for name in runs.at[case])
    }
    return [case for case in cases if case.width in more]


def shakespeare(runs: Runs) -> Table:
    """What every layer came to in the end on the whole validation part, and what it cost."""
    header = ["layer", "cell", "n", "steps", "seeds", "NLL", "BPC", "ms per step", "dense / this", "parameters"]
    lines = []
    for name, rows in paper.SHAKESPEARE.items():
        last, dense = rows[-1], paper.SHAKESPEARE[DENSE][-1]
        losses = [f"{last.valid_nll:.2f}", f"{last.valid_bpc:.2f}"]
        line = [f"{name}, paper", "-", f"{paper.SHAKESPEARE_WIDTH:,}", f"{last.step:,}", "-", *losses]
        lines.append([*line, number(last.ms), number(dense.ms / last.ms), "-"])
    for case in runs.cases("shakespeare"):
        for name in runs.contenders([case]):
            chosen = runs.of(case, name)
            line = [name, str(case.cell), f"{case.width:,}", f"{chosen[0]['config']['steps']:,}", str(len(chosen))]
            losses = [spread(outcomes(chosen, key), digits=3) for key in ("valid_loss", "valid_bpc")]
            ratio = in_cell(speedup(runs, case, name), quartiles=name != DENSE)
            size = f"{chosen[0]['outcome']['parameters']:,}"
            lines.append([*line, *losses, in_cell(step_time(runs, case, name)), ratio, size])
        for name in runs.only_timed(case):
            times = [in_cell(step_time(runs, case, name)), in_cell(speedup(runs, case, name), quartiles=True)]
            lines.append([name, str(case.cell), f"{case.width:,}", *["-"] * 4, *times, "-"])
    return [header, *lines]


def shakespeare_steps(runs: Runs, case: Case) -> Table:
    """The validation loss by step, in nats and in bits: the mean over seeds; beside the paper's at its width."""
    reported = paper.SHAKESPEARE if case.width == paper.SHAKESPEARE_WIDTH else {}
    theirs = {name: {row.step: row for row in rows} for name, rows in reported.items()}
    ours = {name: [validated(run) for run in runs.of(case, name)] for name in runs.contenders([case])}
    header = ["step"]
    header += [f"paper, {name}: {column}" for name in theirs for column in ("NLL", "BPC", "ms")]
    header += [f"ours, {name}: {column}" for name in ours for column in ("NLL", "BPC")]
    steps = {step for rows in theirs.values() for step in rows}
    steps |= {step for histories in ours.values() for history in histories for step in history}
    lines = []
    for step in sorted(steps):
        line = [f"{step:,}"]
        for rows in theirs.values():
            row = rows.get(step)
            line += [f"{row.valid_nll:.2f}", f"{row.valid_bpc:.2f}", number(row.ms)] if row else ["-"] * 3
        for histories in ours.values():
            losses = [history[step]["valid_loss"] for history in histories if step in history]
            line += [f"{np.mean(losses):.3f}", f"{np.mean(losses) / math.log(2):.3f}"] if losses else ["-"] * 2
        lines.append(line)
    return [header, *lines]


def learning_rates(by_rate: Mapping[float, Runs]) -> Table:
    """The accuracy on validation rows in percent: a line for each learning rate, a column for each layer."""
    cases = distinct(case for runs in by_rate.values() for case in runs.at)
    columns = [(case, name) for case in cases for name in next(iter(by_rate.values())).contenders([case])]
    several = len(cases) > 1
    lines = []
    for rate, runs in by_rate.items():
        accuracies = [[*map(_last_accuracy, runs.of(case, name))] for case, name in columns]
        lines.append([f"{rate:g}", *(spread(values, unit=100) for values in accuracies)])
    header = [f"{name}, n = {case.width:,}" if several else name for case, name in columns]
    return [["learning rate", *header], *lines]


def _last_accuracy(run: Run) -> float:
    """On validation rows."""
    return next((row["valid_accuracy"] for row in reversed(run["rows"]) if "valid_accuracy" in row), math.nan)


def validated(run: Run) -> dict[int, Run]:
    """The rows of a run's history that have a validation loss, by step."""
    return {row["step"]: row for row in run["rows"] if row.get("valid_loss") is not None}


def accuracy_gaps(runs: Runs, case: Case) -> list[float]:
    """By how much SPM is more accurate than dense: for every seed that both have, or else in the mean."""
    dense, spm = ({run["config"]["seed"]: run for run in runs.of(case, name)} for name in (DENSE, SPM))
    both = [seed for seed in dense if seed in spm]
    if both:
        return [spm[seed]["outcome"]["test_accuracy"] - dense[seed]["outcome"]["test_accuracy"] for seed in both]
    means = [_accuracies(runs, case, name) for name in (DENSE, SPM)]
    return [float(np.mean(means[1]) - np.mean(means[0]))] if all(means) else []


def outcomes(chosen: Iterable[Run], key: str) -> list[Any]:
    """One number of what each run came to."""
    return [run["outcome"][key] for run in chosen]


def _accuracies(runs: Runs, case: Case, contender: str) -> list[float]:
    return outcomes(runs.of(case, contender), "test_accuracy")


def _sizes(runs: Runs, case: Case, contender: str) -> list[int]:
    return [size for size in outcomes(runs.of(case, contender), "mixer_parameters") if size]


def _with_papers(cases: Iterable[Case], experiment: str) -> list[Case]:
    """These cases and the paper's, by width."""
    widths = {case.width for case in cases} | set(paper.CLASSIFIED[experiment])
    return [main_case(experiment, width) for width in sorted(widths)]


def _others(runs: Runs, cases: Sequence[Case]) -> list[str]:
    """Who else ran; the variants of SPM on a teacher stand in a table of their own."""
    on_teacher = any(case.experiment == "teacher" for case in cases)
    found = [name for name in runs.contenders(cases) if name not in (DENSE, SPM)]
    return [name for name in found if not (on_teacher and name.startswith("SPM, "))]
