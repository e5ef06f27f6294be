"""How long a training step took: as measured in turns with the others where that was done, else in training itself."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import NamedTuple

from pairmix_lab import results
from pairmix_lab.contenders import DENSE
from pairmix_lab.report import schema
from pairmix_lab.report.experiment import Case
from pairmix_lab.report.runs import Runs
from pairmix_lab.report.tables import Rows


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


def measured_steps(path: Path) -> Rows:
    """What `pairmix bench steps` has written to a file.

    Raises:
        ValueError: for a file that is not there, or is not of `pairmix bench steps`.
    """
    try:
        run = results.load(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read; `pairmix bench steps` makes such a file: {error}") from error
    if run["config"].get("experiment") != schema.STEPS:
        raise ValueError(f"{path} is not of `pairmix bench steps`")
    schema.check(run, path, {schema.STEPS: schema.step_times({})})
    rows: Rows = run["rows"]
    return rows


def _of_training(runs: Runs, case: Case, contender: str) -> Measured | None:
    times = [run["outcome"]["ms_per_step"] for run in runs.of(case, contender)]
    return Measured(median(times), None) if times else None
