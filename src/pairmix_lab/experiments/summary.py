"""The results of all experiments in one short table."""

from __future__ import annotations

from pathlib import Path

from pairmix_lab import contenders
from pairmix_lab.experiments import EXPERIMENTS
from pairmix_lab.report.cells import spread
from pairmix_lab.report.runs import collect, outcomes
from pairmix_lab.report.tables import Table

KEYS = (contenders.DENSE.key, contenders.LOW_RANK.key, contenders.MONARCH.key, contenders.SPM.key)
"""The layers that are shown, from every start and without variants."""


def table(results: Path) -> Table | None:
    """How well each contender does on the cases that the experiments name; None if nothing was run."""
    known = [one for key in KEYS for one in contenders.CONTENDERS if one.key == key and not one.is_variant]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for experiment in EXPERIMENTS:
        key, unit = experiment.measure
        for words, (folder, case) in experiment.in_short.items():
            found = sorted((results / folder).rglob("*.json"))
            runs = collect(found, [experiment]) if found else None
            if runs and runs.contenders([case]):
                cells[words, f"{case.width:,}"] = {
                    name: spread(outcomes(runs.of(case, name), key), unit=unit) for name in runs.contenders([case])
                }
    shown = [one.label for one in known if any(one.label in line for line in cells.values())]
    lines = [[*task, *(line.get(name, "-") for name in shown)] for task, line in cells.items()]
    return [["task", "n", *shown], *lines] if lines else None


TABLES = {"accuracy-summary": table}
