"""The report in short: one comparison of SPM with dense for each experiment, the paper's beside ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pairmix_lab.report import paper
from pairmix_lab.report.cells import in_cell, spread
from pairmix_lab.report.experiments import accuracy_gaps, outcomes, validated
from pairmix_lab.report.runs import DENSE, EXPERIMENTS, MAIN_ANGLE_STD, SPM, Case, Runs
from pairmix_lab.report.tables import Table, number
from pairmix_lab.report.timing import speedup


@dataclass(frozen=True)
class Headline:
    """What an experiment came to.

    Attributes:
        title: which experiment, and on what.
        gap: by how much SPM is better or worse, with its unit; a dash if only one of the two ran.
        ratio: how many times as fast its step is.
        table: the same as the paper has it and as it was measured.
    """

    title: str
    gap: tuple[str, str]
    ratio: str
    table: Table


def headline(runs: Runs, experiment: str) -> Headline:
    """The comparison at the width that says most."""
    case = headline_case(runs, experiment)
    return (_modelled if experiment == "shakespeare" else _classified)(runs, case)


def headline_case(runs: Runs, experiment: str) -> Case:
    """The widest case that both layers ran on, if possible at a width of the paper's."""
    if experiment == "shakespeare":
        cases, theirs = runs.cases(experiment), {paper.SHAKESPEARE_WIDTH}
    else:
        cases, theirs = runs.main_cases(experiment) or runs.cases(experiment), set(paper.CLASSIFIED[experiment])

    def says(case: Case) -> tuple[bool, bool, int, bool]:
        measured = speedup(runs, case, SPM)
        in_turns = measured is not None and measured.quartiles is not None
        return {DENSE, SPM} <= set(runs.at[case]), case.width in theirs, case.width, in_turns

    return max(cases, key=says)


def case_name(case: Case) -> str:
    """The case in words; the main teacher goes without saying."""
    parts = [f"n = {case.width:,}"]
    parts += [f"angles {case.angle_std}"] if case.angle_std not in (None, MAIN_ANGLE_STD) else []
    parts += [str(case.cell)] if case.cell is not None else []
    return ", ".join(parts)


def _classified(runs: Runs, case: Case) -> Headline:
    names = ["dense, %", "SPM, %", "gap, points", "times as fast"]
    reported = paper.CLASSIFIED[case.experiment].get(case.width)
    theirs = ["-"] * 4
    if reported:
        dense, spm = reported[DENSE], reported[SPM]
        accuracies = [f"{100 * dense.accuracy:.2f}", f"{100 * spm.accuracy:.2f}"]
        theirs = [*accuracies, f"{100 * (spm.accuracy - dense.accuracy):+.2f}", number(dense.ms / spm.ms)]
    ours = [spread(outcomes(runs.of(case, name), "test_accuracy"), unit=100) for name in (DENSE, SPM)]
    gap = spread(accuracy_gaps(runs, case), unit=100, sign="+")
    return _headline(runs, case, (gap, "points of accuracy"), names, theirs, [*ours, gap])


def _modelled(runs: Runs, case: Case) -> Headline:
    names = ["dense, BPC", "SPM, BPC", "after steps", "gap, equal steps", "times as fast"]
    dense, spm = (paper.SHAKESPEARE[name][-1] for name in (DENSE, SPM))
    reported = {name: [{row.step: row.valid_bpc for row in rows}] for name, rows in paper.SHAKESPEARE.items()}
    theirs = [f"{dense.valid_bpc:.2f}", f"{spm.valid_bpc:.2f}", f"{dense.step:,}; {spm.step:,}"]
    theirs += [_gap_at_equal_step(reported), number(dense.ms / spm.ms)]
    chosen = {name: runs.of(case, name) for name in (DENSE, SPM)}
    ours = [spread(outcomes(many, "valid_bpc")) for many in chosen.values()]
    ours.append("; ".join(f"{many[0]['config']['steps']:,}" if many else "-" for many in chosen.values()))
    histories = {
        name: [{step: row["valid_loss"] / math.log(2) for step, row in validated(run).items()} for run in many]
        for name, many in chosen.items()
    }
    gap = _gap_at_equal_step(histories)
    return _headline(runs, case, (gap, "bits per character"), names, theirs, [*ours, gap])


def _headline(
    runs: Runs, case: Case, gap: tuple[str, str], names: list[str], theirs: list[str], ours: list[str]
) -> Headline:
    measured = speedup(runs, case, SPM)
    lines = [list(line) for line in zip(names, theirs, [*ours, in_cell(measured)], strict=True)]
    ratio = number(measured.value if measured else None)
    title = f"{EXPERIMENTS[case.experiment]}, {case_name(case)}"
    return Headline(title, (gap[0].partition(" ")[0], gap[1]), ratio, [["", "paper", "ours"], *lines])


def _gap_at_equal_step(histories: Mapping[str, list[dict[int, float]]]) -> str:
    """Bits per character of SPM less those of dense, at the last step that all have been evaluated at."""
    steps = [set(history) for runs in histories.values() for history in runs]
    common = set.intersection(*steps) if all(histories.values()) else set()
    if not common:
        return "-"
    last = max(common)
    dense, spm = (np.mean([history[last] for history in histories[name]]) for name in (DENSE, SPM))
    return f"{spm - dense:+.2f} at {last:,}"
