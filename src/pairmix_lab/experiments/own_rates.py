"""Runs in which every contender has the learning rate that is best for it on validation (`pairmix train --lrs`)."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pairmix_lab import contenders
from pairmix_lab.experiments import EXPERIMENTS
from pairmix_lab.experiments.experiment import Experiment
from pairmix_lab.report.cells import in_cell, spread
from pairmix_lab.report.experiment import Case
from pairmix_lab.report.runs import Run, Runs, collect, every_run, outcomes
from pairmix_lab.report.tables import Table
from pairmix_lab.report.timing import speedup, step_time

FOLDERS = {
    "teacher-own": "teacher",
    "teacher-wide": "teacher",
    "agnews-own": "agnews",
    "shakespeare-own": "shakespeare",
    "elman": "shakespeare",
    "elman-wide": "shakespeare",
    "gpt": "gpt",
    "gpt-avx512": "gpt",
    "extensions": "gpt",
}
"""The folders of results with such runs, and their experiments."""
TIMES = {"extensions": "extensions", "gpt-avx512": "avx512-zen5"}
"""Where the times of their steps are, if not among the results of all."""
DENSE = contenders.DENSE.label


class Tried(NamedTuple):
    """What has been trained with several rates.

    Attributes:
        case: on what.
        label: of the contender.
        embedding_rate: what the rate of its embeddings was multiplied by; None for what `pairmix.param_groups` says.
    """

    case: Case
    label: str
    embedding_rate: float | None


def tried(experiment: Experiment, folder: Path) -> dict[Tried, dict[float, float]]:
    """By learning rate, the validation loss of the first seed in the end."""
    if not folder.is_dir():
        return {}
    losses: dict[Tried, dict[float, float]] = defaultdict(dict)
    first: dict[Tried, int] = {}
    for run in sorted(every_run([folder], [experiment]), key=lambda run: int(run["config"]["seed"])):
        one = _tried(experiment, run)
        if first.setdefault(one, run["config"]["seed"]) == run["config"]["seed"]:
            losses[one][run["config"]["lr"]] = last_loss(run)
    return losses


def _tried(experiment: Experiment, run: Run) -> Tried:
    config = run["config"]
    return Tried(experiment.case(config), contenders.of_config(config).label, config.get("embedding_rate"))


def last_loss(run: Run) -> float:
    """On validation rows."""
    return float(next(row["valid_loss"] for row in reversed(run["rows"]) if row.get("valid_loss") is not None))


def table(name: str, results: Path) -> Table | None:
    """What every contender of a folder comes to with its own rate; None if nothing was run."""
    experiment = _experiment(FOLDERS[name])
    rates = tried(experiment, results / name)
    if not rates:
        return None
    runs = collect([results / name, *(results / TIMES.get(name, "")).glob("steps*.json")], [experiment])
    key, unit = experiment.measure
    digits = 2 if unit == 100 else 3
    lines = []
    for case in runs.cases(experiment):
        for label in runs.contenders([case]):
            chosen = runs.of(case, label)
            config, outcome = chosen[0]["config"], chosen[0]["outcome"]
            lines.append(
                [
                    experiment.case_name(case),
                    label,
                    _rate(config["lr"], rates[_tried(experiment, chosen[0])], config.get("embedding_rate")),
                    f"{config['steps']:,}",
                    str(len(chosen)),
                    spread(outcomes(chosen, key), unit=unit, digits=digits),
                    *_times(runs, case, label),
                    f"{outcome['mixer_parameters']:,}",
                ]
            )
    measured = "accuracy, %" if unit == 100 else "bits per byte"
    header = ["case", "layer", "rate", "steps", "seeds", measured, "ms per step", "dense / this"]
    return [[*header, "parameters of the layers"], *lines]


def _times(runs: Runs, case: Case, label: str) -> list[str]:
    return [in_cell(step_time(runs, case, label)), in_cell(speedup(runs, case, label))]


def _rate(chosen: float, losses: dict[float, float], embedding_rate: float | None) -> str:
    """Marked if it is the smallest or the largest that was tried: a rate beyond it may be better."""
    edges = {min(losses): " (smallest)", max(losses): " (largest)"} if len(losses) > 1 else {}
    embeddings = "" if embedding_rate is None else f", embeddings x {embedding_rate:g}"
    return f"{chosen:g}{edges.get(chosen, '')}{embeddings}"


def transfer(results: Path) -> Table | None:
    """What SPM comes to with the rate that is best for dense, beside its own best rate of the same grid."""
    lines = []
    for name, owner in FOLDERS.items():
        experiment = _experiment(owner)
        losses = tried(experiment, results / name)
        by_case = sorted(losses.items(), key=lambda one: (experiment.order(one[0].case), one[0].label))
        for (case, label, _), spm in by_case:
            dense = losses.get(Tried(case, DENSE, None))
            if contenders.labelled(label).key != contenders.SPM.key or not dense:
                continue
            at, own = _best(dense), _best(spm)
            if at in spm and len(spm) > 1:  # with one rate there is nothing to compare
                cells = [f"{at:g}", f"{own:g}", f"{spm[at]:.3f}", f"{spm[own]:.3f}", f"{spm[at] / spm[own]:.3f}"]
                lines.append([f"{experiment.title}, {experiment.case_name(case)}", label, *cells])
    header = ["case", "layer", "rate: dense", "rate: own", "loss: dense's rate", "loss: own rate", "ratio"]
    return [header, *lines] if lines else None


def _best(losses: dict[float, float]) -> float:
    return min(losses, key=lambda lr: math.inf if math.isnan(losses[lr]) else losses[lr])


def _experiment(name: str) -> Experiment:
    return next(one for one in EXPERIMENTS if one.name == name)


TABLES = {
    **{f"{name.removesuffix('-own')}-own": partial(table, name) for name in FOLDERS},
    "transfer": transfer,
}
