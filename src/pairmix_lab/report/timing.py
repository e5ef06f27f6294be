"""How long a training step took: as measured in turns with the others where that was done, else in training itself."""

from __future__ import annotations

import json
from collections import defaultdict
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

    Both times are of the same kind: in turns, or in training on machines of one kind, with as many threads.
    """
    row = runs.step_time(case, contender)
    if row is not None and row.get("speedup") and row.get("speedup_iqr"):
        return Measured(row["speedup"], tuple(row["speedup_iqr"]))
    dense, own = _by_machine(runs, case, DENSE.label), _by_machine(runs, case, contender)
    shared = dense.keys() & own.keys()
    if not shared:
        return None
    times = [median(time for machine in shared for time in of[machine]) for of in (dense, own)]
    return Measured(times[0] / times[1], None)


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


def _by_machine(runs: Runs, case: Case, contender: str) -> dict[str, list[float]]:
    """The milliseconds of a step in every run, by what it ran on."""
    times = defaultdict(list)
    for run in runs.of(case, contender):
        times[json.dumps(run["machine"], sort_keys=True)].append(run["outcome"]["ms_per_step"])
    return times


def _of_training(runs: Runs, case: Case, contender: str) -> Measured | None:
    times = [run["outcome"]["ms_per_step"] for run in runs.of(case, contender)]
    return Measured(median(times), None) if times else None
