"""How long a training step took: as measured in turns with the others where that was done, else in training itself."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from pairmix_lab.contenders import DENSE
from pairmix_lab.report.experiment import Case
from pairmix_lab.report.runs import Runs


class Measured(NamedTuple):
    """A time or a ratio of times.

    Attributes:
        value: the median.
        quartiles: the lower and the upper one, if all contenders took turns in one quiet run; None for a time that
            training itself took, on a machine that may have been busy.
    """

    value: float
    quartiles: tuple[float, float] | None


def step_time(runs: Runs, case: Case, contender: str) -> Measured | None:
    """The milliseconds of a training step; None if it never ran."""
    row = runs.step_time(case, contender)
    if row is not None:
        return Measured(row["ms"], tuple(row["ms_iqr"]))
    return _of_training(runs, case, contender)


def speedup(runs: Runs, case: Case, contender: str) -> Measured | None:
    """How many times as long a step of the dense layer takes; None if one of the two never ran.

    Both times are of the same kind: in turns, or in training.
    """
    row = runs.step_time(case, contender)
    if row is not None and row.get("speedup") and row.get("speedup_iqr"):
        return Measured(row["speedup"], tuple(row["speedup_iqr"]))
    dense, own = _of_training(runs, case, DENSE.label), _of_training(runs, case, contender)
    return Measured(dense.value / own.value, None) if dense and own else None


def _of_training(runs: Runs, case: Case, contender: str) -> Measured | None:
    times = [run["outcome"]["ms_per_step"] for run in runs.of(case, contender)]
    return Measured(median(times), None) if times else None
