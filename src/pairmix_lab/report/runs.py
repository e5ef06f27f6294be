"""The runs that a report is made of: found, checked, and sorted by what they compare."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from pairmix_lab import contenders, results
from pairmix_lab.report import schema
from pairmix_lab.report.experiment import Case, Reported
from pairmix_lab.report.tables import Row, distinct

Run = Mapping[str, Any]

SETTINGS = (
    *("steps", "batch", "lr", "decay", "warmup", "clip", "weight_decay"),
    *("stages", "rank", "init", "layer_rate", "embedding_rate"),
)
"""What must be the same for runs to be averaged."""


@dataclass(frozen=True)
class Runs:
    """All runs of a report.

    Attributes:
        experiments: those that it knows, in the order in which they are shown.
        files: every result that it is made of, as loaded.
        at: for every case and contender (by label) its runs, one for each seed.
        steps: what `pairmix bench steps` measured, by case and contender. Its case has no setting if the time of a step
            does not depend on it.
        left_out: sentences on results that were found and are not in the report.
    """

    experiments: Sequence[Reported]
    files: Sequence[Run]
    at: Mapping[Case, Mapping[str, Sequence[Run]]]
    steps: Mapping[tuple[Case, str], Row]
    left_out: Sequence[str]

    def of(self, case: Case, contender: str) -> Sequence[Run]:
        """The runs of a contender on a case; none if it did not run."""
        return self.at.get(case, {}).get(contender, [])

    def cases(self, experiment: Reported) -> list[Case]:
        """All cases of an experiment that were run, sorted."""
        return sorted((case for case in self.at if case.experiment == experiment.name), key=experiment.order)

    def step_time(self, case: Case, contender: str) -> Row | None:
        """The time of a training step: of this case, or of its width in general."""
        contender = contenders.timed_as(contender)
        return next((found for one in self._timed_as(case) if (found := self.steps.get((one, contender)))), None)

    def only_timed(self, case: Case) -> list[str]:
        """The contenders whose steps were timed on a case, and that were not trained on it."""
        cases, trained = self._timed_as(case), {contenders.timed_as(name) for name in self.at.get(case, {})}
        return distinct(name for timed, name in self.steps if timed in cases and name not in trained)

    def contenders(self, cases: Iterable[Case]) -> list[str]:
        """The contenders that ran on any of these cases, in the usual order."""
        found = distinct(name for case in cases for name in self.at.get(case, {}))
        return sorted(found, key=contenders.position)

    def _timed_as(self, case: Case) -> tuple[Case, Case]:
        """Where the time of a step of this case may stand: it depends on no study, and mostly on no setting."""
        case = case._replace(study=None)
        return case, next(one for one in self.experiments if one.name == case.experiment).timed_as(case)


def collect(paths: Iterable[Path], experiments: Sequence[Reported]) -> Runs:
    """Load runs from files, and from folders with all that is below them.

    Args:
        paths: the files and folders.
        experiments: those that the report knows; results of others are left out.

    Raises:
        ValueError: for a path that is not there, a file that is not a result or cannot be reported, or no finished
            training run.
    """
    paths, by_name = list(paths), {experiment.name: experiment for experiment in experiments}
    loaded = _loaded(paths, experiments)
    training = _training(loaded, experiments)
    steps = [run for run in loaded if _kind(run) == schema.STEPS]
    finished = [run for run in training if _is_finished(run)]
    if not finished:
        where = ", ".join(map(str, paths)) or "no path at all"
        raise ValueError(f"no finished training run in {where}")

    by_case: dict[Case, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in finished:
        config = run["config"]
        by_case[by_name[config["experiment"]].case(config)][contenders.of_config(config).label].append(run)
    at = {
        case: {name: _comparable(runs, by_name[case.experiment]) for name, runs in names.items()}
        for case, names in by_case.items()
    }
    used = [run for names in at.values() for runs in names.values() for run in runs]
    counts = {
        "of other benchmarks": len(loaded) - len(training) - len(steps),
        "not finished": len(training) - len(finished),
        "of other settings than the longest, or the best on validation rows, or repeated later": (
            len(finished) - len(used)
        ),
    }
    left_out = [f"Left out: {_results(count)} {reason}." for reason, count in counts.items() if count]
    return Runs(experiments, [*used, *steps], at, _steps(steps, used, by_name), left_out)


def every_run(paths: Iterable[Path], experiments: Sequence[Reported]) -> list[Run]:
    """All finished training runs, also those of settings that a report leaves out."""
    return [run for run in _training(_loaded(paths, experiments), experiments) if _is_finished(run)]


def outcomes(chosen: Iterable[Run], key: str) -> list[Any]:
    """One number of the outcome of each run."""
    return [run["outcome"][key] for run in chosen]


def validated(run: Run) -> dict[int, Run]:
    """The rows of a run's history that have a validation loss, by step."""
    return {row["step"]: row for row in run["rows"] if row.get("valid_loss") is not None}


def _loaded(paths: Iterable[Path], experiments: Sequence[Reported]) -> list[Run]:
    settings = {one.setting: one.setting_shape for one in experiments if one.setting and one.setting_shape}
    kinds = {**{one.name: one.fields for one in experiments}, schema.STEPS: schema.step_times(settings)}
    return [_load(path, kinds) for path in _files(paths)]


def _training(loaded: Iterable[Run], experiments: Sequence[Reported]) -> list[Run]:
    """Those of the experiments, with what older versions did not say."""
    by_name = {experiment.name: experiment for experiment in experiments}
    return [{**run, "config": by_name[_kind(run)].completed(run["config"])} for run in loaded if _kind(run) in by_name]


def _files(paths: Iterable[Path]) -> list[Path]:
    found: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} is not there")
        found.update(filter(Path.is_file, path.rglob("*.json")) if path.is_dir() else [path])
    return sorted({path.resolve(): path for path in found}.values())


def _load(path: Path, kinds: Mapping[str, schema.Shape]) -> Run:
    run = results.load(path)
    schema.check(run, path, kinds)
    return run


def _kind(run: Run) -> str:
    return str(run["config"].get("experiment"))


def _is_finished(run: Run) -> bool:
    return bool(run["outcome"].get("finished", run["outcome"].get("step", 0) >= run["config"]["steps"]))


def _comparable(runs: Sequence[Run], experiment: Reported) -> list[Run]:
    """The runs of one contender that may be averaged, the last of each seed.

    They are of one choice of settings: of those that trained longest, with the most seeds, the one that is best on
    validation rows. Test rows have no say in it.
    """
    alike: dict[object, dict[int, Run]] = defaultdict(dict)
    for run in sorted(runs, key=lambda run: run["finished"]):
        config = run["config"]
        key = (*(config.get(name) for name in SETTINGS), run["outcome"].get("data"))
        alike[key].pop(config["seed"], None)  # so that the last one to finish stands last
        alike[key][config["seed"]] = run

    def merit(group: Mapping[int, Run]) -> tuple[object, ...]:
        several = list(group.values())
        score = mean(map(experiment.validation_score, several))
        longest = several[0]["config"]["steps"]
        return longest, len(several), -math.inf if math.isnan(score) else score, several[-1]["finished"]

    chosen = max(alike.values(), key=merit)
    return [chosen[seed] for seed in sorted(chosen)]


def _steps(
    measured: Iterable[Run], used: Iterable[Run], experiments: Mapping[str, Reported]
) -> dict[tuple[Case, str], Row]:
    """The last measurement of every step, with the batch that the training runs have, and with the most threads."""
    batches = {(run["config"]["experiment"], run["config"]["batch"]) for run in used}
    return {
        (experiments[row["experiment"]].case(row), contenders.named(row["layer"]).label): row
        for run in sorted(measured, key=lambda run: run["finished"])
        for row in sorted(run["rows"], key=lambda row: row.get("threads", 0))
        if (row["experiment"], row["batch"]) in batches
    }


def _results(count: int) -> str:
    return f"{count} result{'s' * (count > 1)}"
