"""Runs on the disk: each has a JSON file when it is finished, and a folder for its checkpoint and its scalars."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pairmix import files, results
from pairmix.experiments.checkpoints import CheckpointError
from pairmix.experiments.processes import Processes
from pairmix.experiments.training import Experiment, train


def is_finished(out: Path, config: Any, resume: bool) -> bool:
    """Whether the run is finished already, in which case there is nothing to resume.

    Raises:
        CheckpointError: if what is there is another run, or is not to be gone on with.
    """
    path = result_path(out, config)
    if not path.exists():
        return False
    if not resume:
        raise CheckpointError(f"{path} is of an earlier run: --resume leaves it as it is, --out chooses another place")
    try:
        stored = results.load(path)["config"]
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    ours = asdict(config)
    differences = [
        f"{key} is {stored.get(key)!r} there and {ours[key]!r} here" for key in ours if stored.get(key) != ours[key]
    ]
    if differences:
        raise CheckpointError(f"{path} is of another run: {'; '.join(differences)}; --out chooses another place")
    return True


def run(make: Callable[[], Experiment], out: Path, config: Any, command: str, **options: Any) -> dict[str, Any]:
    """Train, and write the result; gives what it came to.

    Args:
        make: gives the experiment; called only here, as it may have to read its data.
        out: the folder of all runs.
        config: that of the experiment.
        command: what to type for this run alone.
        options: of `train`.
    """
    trained = train(make(), out / config.name, **options)
    if Processes.of_this_run().is_first:
        path = result_path(out, config)
        results.save(path, command, asdict(config), trained.rows, trained.outcome)
        files.sweep(path)
    return trained.outcome


def discard(out: Path, config: Any) -> None:
    """Remove a run, whether it is finished or not."""
    result_path(out, config).unlink(missing_ok=True)
    shutil.rmtree(out / config.name, ignore_errors=True)


def result_path(out: Path, config: Any) -> Path:
    """Where the result of a run is."""
    return out / f"{config.name}.json"
