"""The runs that a report is made of: found, checked, and sorted by what they compare."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pairmix_lab import results
from pairmix_lab.report import schema
from pairmix_lab.report.tables import Row, distinct

Run = Mapping[str, Any]

EXPERIMENTS = {
    "teacher": "Compositional teacher",
    "agnews": "AG News",
    "shakespeare": "Shakespeare",
}
CELLS = ["rnn", "gru", "attention"]
DENSE, SPM = "dense", "SPM"
IDENTITY = "dense from identity"
LAYERS = {
    "dense": DENSE,
    "spm": SPM,
    "lowrank": "low rank",
    "identity": IDENTITY,
    "softmax": "softmax only",
}
# All that a report knows of, in the order in which it shows them.
CONTENDERS = [
    DENSE,
    SPM,
    "SPM, rotation",
    "SPM, other pairs",
    "SPM, rotation, other pairs",
    *(name for name in LAYERS.values() if name not in (DENSE, SPM)),
]
MAIN_ANGLE_STD = 0.1
"""The teacher that is compared with the paper's."""


class Case(NamedTuple):
    """A task on which contenders are compared."""

    experiment: str
    width: int
    angle_std: float | str | None = None
    cell: str | None = None

    @property
    def order(self) -> tuple[object, ...]:
        """Within an experiment: by width, then from the teacher next to the identity to the uniformly random one."""
        angle = self.angle_std if isinstance(self.angle_std, int | float) else math.inf
        cell = CELLS.index(self.cell) if self.cell in CELLS else len(CELLS)
        return (self.width, angle, cell, self.cell or "")


def main_case(experiment: str, width: int) -> Case:
    """The case of a classification that stands beside the paper's."""
    return Case(experiment, width, MAIN_ANGLE_STD if experiment == "teacher" else None)


@dataclass(frozen=True)
class Runs:
    """All runs of a report.

    Attributes:
        files: every result that it is made of, as loaded.
        at: for every case and contender its runs, one a seed.
        steps: what `pairmix bench steps` measured, by case (without angles) and name of the layer.
        left_out: sentences on what was found and is not in the report.
    """

    files: Sequence[Run]
    at: Mapping[Case, Mapping[str, Sequence[Run]]]
    steps: Mapping[tuple[Case, str], Row]
    left_out: Sequence[str]

    def of(self, case: Case, contender: str) -> Sequence[Run]:
        """The runs of a contender on a case; none if it did not run."""
        return self.at.get(case, {}).get(contender, [])

    def cases(self, experiment: str) -> list[Case]:
        """All cases of an experiment that were run, sorted."""
        return sorted((case for case in self.at if case.experiment == experiment), key=lambda case: case.order)

    def main_cases(self, experiment: str, timed: bool = False) -> list[Case]:
        """The cases that stand beside the paper's, by width: those that were trained, or also those only timed."""
        widths = {case.width for case, _ in self.steps if case.experiment == experiment} if timed else set()
        widths |= {case.width for case in self.at if case == main_case(experiment, case.width)}
        return [main_case(experiment, width) for width in sorted(widths)]

    def only_timed(self, case: Case) -> list[str]:
        """Who was not trained on a case, but timed."""
        without_angle = case._replace(angle_std=None)
        return [name for timed, name in self.steps if timed == without_angle and not self.of(case, name)]

    def contenders(self, cases: Iterable[Case]) -> list[str]:
        """Who ran on any of these cases, in the usual order."""
        found = distinct(name for case in cases for name in self.at.get(case, {}))
        return sorted(found, key=lambda name: CONTENDERS.index(name) if name in CONTENDERS else len(CONTENDERS))


def collect(paths: Iterable[Path]) -> Runs:
    """Load runs from files, and from folders with all that is below them.

    Raises:
        ValueError: for a path that is not there, a file that is not a result or cannot be reported, or no finished
            training run.
    """
    paths = list(paths)
    loaded = [_load(path) for path in _files(paths)]
    files = [run for run in loaded if schema.experiment_of(run) is not None]
    training = [run for run in files if run["config"]["experiment"] in EXPERIMENTS]
    finished = [run for run in training if _is_finished(run)]
    if not finished:
        where = ", ".join(map(str, paths)) or "no path at all"
        raise ValueError(f"no finished training run in {where}")

    by_case: dict[Case, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in finished:
        by_case[_case(run["config"])][contender(run["config"])].append(run)
    at = {case: {name: _comparable(runs) for name, runs in names.items()} for case, names in by_case.items()}
    used = [run for names in at.values() for runs in names.values() for run in runs]
    steps = [run for run in files if run["config"]["experiment"] == "steps"]
    counts = {
        "of other benchmarks": len(loaded) - len(files),
        "not finished": len(training) - len(finished),
        "of other settings than the longest of its kind, or repeated later": len(finished) - len(used),
    }
    left_out = [f"Left out: {_results(count)} {reason}." for reason, count in counts.items() if count]
    return Runs([*used, *steps], at, _steps(steps, used), left_out)


def contender(config: Row) -> str:
    """What is compared, in words: the layer, and of SPM what is not the default."""
    name = LAYERS.get(config["layer"], str(config["layer"]))
    if config["layer"] != "spm":
        return name
    rotation = ", rotation" if config.get("block") == "rotation" else ""
    other_pairs = ", other pairs" if config.get("pairing") == "other" else ""
    return name + rotation + other_pairs


def _files(paths: Iterable[Path]) -> list[Path]:
    found: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} is not there")
        found.update(filter(Path.is_file, path.rglob("*.json")) if path.is_dir() else [path])
    return sorted({path.resolve(): path for path in found}.values())


def _load(path: Path) -> Run:
    run = results.load(path)
    schema.check(run, path)
    return run


def _is_finished(run: Run) -> bool:
    return bool(run["outcome"].get("finished", run["outcome"].get("step", 0) >= run["config"]["steps"]))


def _case(row: Row) -> Case:
    """Of a config, or of a row of step times, which has no angles."""
    experiment = row["experiment"]
    return Case(
        experiment,
        row["width"],
        row.get("angle_std") if experiment == "teacher" else None,
        row.get("cell") if experiment == "shakespeare" else None,
    )


def _comparable(runs: Sequence[Run]) -> list[Run]:
    """The runs of one contender that may be averaged: of the settings that trained longest, the last of each seed."""

    def settings(run: Run) -> tuple[object, ...]:
        names = ("steps", "batch", "lr", "decay", "stages")
        return (*(run["config"].get(name) for name in names), run["outcome"].get("data"))

    alike = defaultdict(list)
    for run in sorted(runs, key=lambda run: run["finished"]):
        alike[settings(run)].append(run)
    chosen = max(alike.values(), key=lambda group: (group[0]["config"]["steps"], len(group), group[-1]["finished"]))
    last = {run["config"]["seed"]: run for run in chosen}
    return [last[seed] for seed in sorted(last)]


def _steps(measured: Iterable[Run], used: Iterable[Run]) -> dict[tuple[Case, str], Row]:
    """The last measurement of every step, with the batch that the training runs have, and with the most threads."""
    batches = {(run["config"]["experiment"], run["config"]["batch"]) for run in used}
    return {
        (_case(row), LAYERS.get(row["layer"], row["layer"])): row
        for run in sorted(measured, key=lambda run: run["finished"])
        for row in sorted(run["rows"], key=lambda row: row.get("threads", 0))
        if (row["experiment"], row["batch"]) in batches
    }


def _results(count: int) -> str:
    return f"{count} result{'s' * (count > 1)}"
