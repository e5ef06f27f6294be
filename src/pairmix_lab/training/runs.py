"""Runs on the disk: each has a JSON file when it is finished, and a folder for its checkpoint and its scalars."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pairmix_lab import files, results
from pairmix_lab.training import locks
from pairmix_lab.training.checkpoints import CheckpointError, differences
from pairmix_lab.training.loop import Task, train
from pairmix_lab.training.processes import Processes


def is_finished(out: Path, config: Any, resume: bool, hashes: Callable[[], Mapping[str, str]] = dict) -> bool:
    """Whether the run is finished already, in which case there is nothing to resume.

    Args:
        out: the folder of all runs.
        config: of the run.
        resume: whether a finished run may be there.
        hashes: gives those of the data; called only for a result that has some.

    Raises:
        CheckpointError: if what is there is another run, or `resume` is false.
    """
    path = result_path(out, config)
    if not path.exists():
        return False
    if not resume:
        raise CheckpointError(f"{path} is of an earlier run: --resume leaves it as it is, --out chooses another place")
    try:
        stored = results.load(path)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    other = differences(config.completed(stored["config"]), asdict(config))
    if not other and "data" in stored:  # older results do not say what their data was
        other = differences(stored["data"], hashes())
    if other:
        raise CheckpointError(f"{path} is of another run: {other}; --out chooses another place")
    return True


def run(make: Callable[[], Task], out: Path, config: Any, command: str, **options: Any) -> dict[str, Any]:
    """Train, write the result and give the outcome. No other process can train the same run meanwhile.

    Args:
        make: gives the task; called only here, as it may have to read its data.
        out: the folder of all runs.
        config: of the run.
        command: the command line, for the result.
        options: of `train`.

    Raises:
        CheckpointError: if another process is training this run, and as `train` does.
    """
    task = make()
    with locks.held(out / config.name):
        trained = train(task, out / config.name, **options)
        if Processes.of_this_run().is_first:
            path = result_path(out, config)
            results.save(path, command, asdict(config), trained.rows, trained.outcome, task.data)
            files.sweep(path)
    return trained.outcome


def discard(out: Path, config: Any) -> None:
    """Remove a run, whether it is finished or not.

    Raises:
        CheckpointError: if a process is training it.
    """
    with locks.held(out / config.name):
        result_path(out, config).unlink(missing_ok=True)
        shutil.rmtree(out / config.name, ignore_errors=True)


def result_path(out: Path, config: Any) -> Path:
    """Where the result of a run is."""
    return out / f"{config.name}.json"
