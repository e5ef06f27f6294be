"""How results are written in the cells of a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mode

import numpy as np

from pairmix_lab.report.experiment import Case
from pairmix_lab.report.runs import Runs
from pairmix_lab.report.tables import number
from pairmix_lab.report.timing import Measured

MARK = "†"
"""After a time that training itself took."""


def spread(values: Sequence[float], *, unit: float = 1, digits: int = 2, sign: str = "") -> str:
    """The mean, and the standard deviation if there are several values; a dash if there are none."""
    if not values:
        return "-"
    middle = f"{unit * np.mean(values):{sign}.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ± {unit * np.std(values, ddof=1):.{digits}f}"


def seeds(runs: Runs, case: Case, contenders: Iterable[str]) -> str:
    """The number of seeds that most contenders have, and the contenders with another number."""
    counts = {name: len(runs.of(case, name)) for name in contenders if runs.of(case, name)}
    if not counts:
        return "-"
    usual = mode(counts.values())
    return ", ".join([str(usual), *(f"{name} {count}" for name, count in counts.items() if count != usual)])


def in_cell(measured: Measured | None, quartiles: bool = False) -> str:
    """A time or a ratio, if asked for with its quartiles; marked if it is of training itself."""
    if measured is None:
        return "-"
    if measured.quartiles is None:
        return number(measured.value) + MARK
    low, high = measured.quartiles
    return f"{number(measured.value)} ({number(low)} to {number(high)})" if quartiles else number(measured.value)
