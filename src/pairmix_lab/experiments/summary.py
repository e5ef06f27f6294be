"""The results of all experiments in one short table."""

from __future__ import annotations

from pathlib import Path

from pairmix_lab.contenders import DENSE, LOW_RANK, SPM
from pairmix_lab.experiments import EXPERIMENTS
from pairmix_lab.report.cells import spread
from pairmix_lab.report.runs import collect, outcomes
from pairmix_lab.report.tables import Table

CONTENDERS = (DENSE.label, LOW_RANK.label, SPM.label)


def table(results: Path) -> Table | None:
    """How well each contender does on the cases that the experiments name; None if nothing was run."""
    lines = []
    for experiment in EXPERIMENTS:
        found = sorted((results / experiment.name).glob("*.json"))
        if not experiment.in_short or not found:
            continue
        runs, (key, unit) = collect(found, [experiment]), experiment.measure
        for words, case in experiment.in_short.items():
            cells = [spread(outcomes(runs.of(case, contender), key), unit=unit) for contender in CONTENDERS]
            if set(cells) != {"-"}:
                lines.append([words, f"{case.width:,}", *cells])
    return [["task", "n", *CONTENDERS], *lines] if lines else None


TABLES = {"accuracy-summary": table}
