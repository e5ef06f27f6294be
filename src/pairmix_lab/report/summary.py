"""The result of an experiment in short: one comparison of SPM with dense, the paper's beside ours."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pairmix_lab.contenders import DENSE, SPM, labelled
from pairmix_lab.report.cells import in_cell
from pairmix_lab.report.experiment import Case, Headline, Reported
from pairmix_lab.report.runs import Runs
from pairmix_lab.report.tables import number
from pairmix_lab.report.timing import speedup


def spm_contender(runs: Runs, cases: Iterable[Case]) -> str:
    """The label of the SPM layer that ran on any of these cases: from its own start, or else from another one."""
    found = [one for one in map(labelled, runs.contenders(cases)) if one.key == SPM.key and not one.is_variant]
    return found[0].label if found else SPM.label


def headline_case(runs: Runs, cases: Iterable[Case], widths: Collection[int]) -> Case:
    """The widest case on which both dense and SPM ran, if possible at one of these widths, the paper's."""

    def says(case: Case) -> tuple[bool, bool, int, bool]:
        spm = spm_contender(runs, [case])
        measured = speedup(runs, case, spm)
        in_turns = measured is not None and measured.quartiles is not None
        return {DENSE.label, spm} <= set(runs.at[case]), case.width in widths, case.width, in_turns

    return max(cases, key=says)


def headline(
    runs: Runs,
    experiment: Reported,
    case: Case,
    *,
    gap: tuple[str, str],
    names: list[str],
    theirs: list[str],
    ours: list[str],
) -> Headline:
    """A headline whose last line is how many times as fast as dense SPM is.

    Args:
        runs: all runs.
        experiment: what was run.
        case: on what.
        gap: by how much SPM is better, and the unit.
        names: of all lines, the last of which is the ratio of times.
        theirs: what the paper reports on each line.
        ours: what was measured on each line but the last.
    """
    measured = speedup(runs, case, spm_contender(runs, [case]))
    lines = [list(line) for line in zip(names, theirs, [*ours, in_cell(measured)], strict=True)]
    ratio = number(measured.value if measured else None)
    title = f"{experiment.title}, {experiment.case_name(case)}"
    return Headline(title, (gap[0].partition(" ")[0], gap[1]), ratio, [["", "paper", "ours"], *lines])
