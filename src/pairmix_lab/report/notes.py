"""What a reader must know to trust the report: choices that were made, what is not alike, and where it was run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from pairmix_lab import contenders
from pairmix_lab.report.experiment import Reported
from pairmix_lab.report.runs import Run, Runs
from pairmix_lab.report.tables import Table, distinct

OF_SPM_ONLY = {*contenders.VARIANT_SETTINGS, "stages"}
"""Settings that other layers have and do not use."""


def choices(runs: Runs) -> Table:
    """Every setting of the runs: a line for each, a column for each experiment."""
    by_experiment = {one.title: chosen for one in runs.experiments if (chosen := of_experiment(runs, one))}
    settings = distinct(key for chosen in by_experiment.values() for run in chosen for key in run["config"])
    return [
        ["", *by_experiment],
        *(
            [setting.replace("_", " "), *(_values(chosen, setting) for chosen in by_experiment.values())]
            for setting in settings
            if setting != "experiment"
        ),
    ]


def notes(runs: Runs) -> list[str]:
    """What is not as in the paper, not alike between layers, or not there; each a sentence or two."""
    found = [note for experiment in runs.experiments if runs.cases(experiment) for note in experiment.notes(runs)]
    found += _differences(runs)
    missing = [experiment.title for experiment in runs.experiments if not runs.cases(experiment)]
    if missing:
        found.append(f"Not run: {', '.join(missing)}.")
    return [*found, *runs.left_out]


def provenance(runs: Runs) -> Table:
    """Machines, versions and commits that the results come from: a column for each different set of them."""
    columns: dict[str, list[Run]] = {}
    for run in runs.files:
        columns.setdefault(json.dumps([run.get("machine"), run.get("versions")], sort_keys=True), []).append(run)
    described = [_described(together) for together in columns.values()]
    names = distinct(name for column in described for name in column)
    return [["", *[""] * len(described)], *([name, *(column.get(name, "-") for column in described)] for name in names)]


def commands(runs: Runs) -> list[str]:
    """What to type to get these results again."""
    return distinct(run["command"] for run in runs.files)


def _differences(runs: Runs) -> Iterable[str]:
    """Where layers were not trained alike: a sentence for each difference, with all cases that have it."""
    where: dict[str, list[str]] = {}
    for experiment in runs.experiments:
        for case in runs.cases(experiment):
            configs = {name: runs.of(case, name)[0]["config"] for name in runs.contenders([case])}
            for setting in ("steps", "batch", "lr", "decay", "weight_decay"):
                values = {name: _value(config.get(setting)) for name, config in configs.items()}
                if len(set(values.values())) > 1:
                    listed = ", ".join(f"{name} {value}" for name, value in values.items())
                    difference = f"not the same {setting} for all: {listed}"
                    where.setdefault(difference, []).append(f"{experiment.title}, {experiment.case_name(case)}")
    return [f"{'; '.join(cases)}: {difference}." for difference, cases in where.items()]


def _described(together: Sequence[Run]) -> dict[str, str]:
    """The surroundings that these results share, and what else is to be said of them."""
    surroundings = {**together[0].get("machine", {}), **together[0].get("versions", {})}
    finished = sorted(run["finished"][:16].replace("T", " ") for run in together)
    data = distinct(f"{name} {digest}" for run in together for name, digest in run.get("data", {}).items())
    return {
        **{name.replace("_", " "): str(value) for name, value in surroundings.items()},
        "commits": ", ".join(distinct(run.get("commit") or "an installed package" for run in together)),
        "data": ", ".join(data) or "-",
        "finished": " to ".join(distinct([finished[0], finished[-1]])) + " UTC",
        "results": f"{len(together):,}",
    }


def of_experiment(runs: Runs, experiment: Reported) -> list[Run]:
    """All runs of an experiment."""
    return [run for case in runs.cases(experiment) for chosen in runs.at[case].values() for run in chosen]


def _values(chosen: Sequence[Run], setting: str) -> str:
    """All values of a setting; with the layers that have them if each layer has only one."""
    used = [run for run in chosen if setting not in OF_SPM_ONLY or run["config"]["layer"] == contenders.SPM.key]
    found = sorted((run for run in used if setting in run["config"]), key=lambda run: _order(run["config"][setting]))
    layers: dict[str, list[str]] = {}
    for run in found:
        value, config = run["config"][setting], run["config"]
        value = contenders.named(value).label if setting == "layer" else _value(value)
        layers.setdefault(value, []).append(contenders.of_config(config).label)
    if not layers:
        return "-"
    names = {value: distinct(many) for value, many in layers.items()}
    each_has_one = sum(map(len, names.values())) == len({name for many in names.values() for name in many})
    if setting in OF_SPM_ONLY | {"layer"} or len(names) == 1 or not each_has_one:
        return ", ".join(names)
    return "; ".join(f"{value} ({', '.join(many)})" for value, many in names.items())


def _order(value: Any) -> tuple[bool, float]:
    """Numbers by size, then the rest."""
    is_number = isinstance(value, int | float)
    return not is_number, float(value) if is_number else 0.0


def _value(value: Any) -> str:
    if value is None:
        return "default"
    return f"{value:,}" if type(value) is int else str(value)
