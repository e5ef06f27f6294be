"""What a reader must know to trust the report: choices that were made, what is not alike, and where it was run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from pairmix_lab.report import paper
from pairmix_lab.report.runs import EXPERIMENTS, MAIN_ANGLE_STD, Run, Runs, contender
from pairmix_lab.report.summary import case_name
from pairmix_lab.report.tables import Table, distinct

OF_SPM_ONLY = {"block", "pairing", "stages"}
"""Settings that other layers have and do not use."""


def choices(runs: Runs) -> Table:
    """Every setting of the runs: a line for each, a column for each experiment."""
    by_experiment = {name: _of_experiment(runs, name) for name in EXPERIMENTS if runs.cases(name)}
    settings = distinct(key for chosen in by_experiment.values() for run in chosen for key in run["config"])
    return [
        ["", *(EXPERIMENTS[name] for name in by_experiment)],
        *(
            [setting.replace("_", " "), *(_values(chosen, setting) for chosen in by_experiment.values())]
            for setting in settings
            if setting != "experiment"
        ),
    ]


def notes(runs: Runs) -> list[str]:
    """What is not as in the paper, not alike between layers, or not there; each a sentence or two."""
    found = []
    if runs.cases("teacher"):
        found.append(
            "The paper does not say how far from the identity its teacher is, how the students start, nor the learning "
            f"rate. Ours is {MAIN_ANGLE_STD} radians from the identity where nothing else is said."
        )
    if runs.cases("agnews"):
        data = distinct(run["outcome"].get("data", "not named") for run in _of_experiment(runs, "agnews"))
        found.append(
            f"The paper trained on {paper.AG_NEWS_TRAIN_ROWS:,} rows of AG News. Ours: {'; '.join(data)}. "
            "Accuracies on different rows cannot be compared; those of our layers with each other can."
        )
    if runs.cases("shakespeare"):
        rows = [
            f"{layer} at step {row.step:,}: {row.valid_nll:.2f} nats are {row.valid_nll / math.log(2):.2f} bits, "
            f"printed is {row.valid_bpc:.2f}"
            for layer, row in paper.inconsistent()
        ]
        found.append(
            "The paper does not say which kind of network its Shakespeare model is. "
            f"Its columns of nats and bits disagree in places ({'; '.join(rows)})."
        )
    found += _differences(runs)
    missing = [title for name, title in EXPERIMENTS.items() if not runs.cases(name)]
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
    for experiment, title in EXPERIMENTS.items():
        for case in runs.cases(experiment):
            configs = {name: runs.of(case, name)[0]["config"] for name in runs.contenders([case])}
            for setting in ("steps", "batch", "lr", "decay"):
                values = {name: _value(config.get(setting)) for name, config in configs.items()}
                if len(set(values.values())) > 1:
                    listed = ", ".join(f"{name} {value}" for name, value in values.items())
                    difference = f"not the same {setting} for all: {listed}"
                    where.setdefault(difference, []).append(f"{title}, {case_name(case)}")
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


def _of_experiment(runs: Runs, experiment: str) -> list[Run]:
    return [run for case in runs.cases(experiment) for chosen in runs.at[case].values() for run in chosen]


def _values(chosen: Sequence[Run], setting: str) -> str:
    """All values of a setting; with the layers that have them if each layer has only one."""
    used = [run for run in chosen if setting not in OF_SPM_ONLY or run["config"]["layer"] == "spm"]
    found = sorted((run for run in used if setting in run["config"]), key=lambda run: _order(run["config"][setting]))
    layers: dict[str, list[str]] = {}
    for run in found:
        layers.setdefault(_value(run["config"][setting]), []).append(contender(run["config"]))
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
