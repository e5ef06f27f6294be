"""One run, one JSON file: what was asked, what was measured, on what."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import distributed

from pairmix import doctor
from pairmix_lab import files

SCHEMA = 2
"""Of what `save` writes. A file that does not say is of schema 1: it may lack hashes of the data."""
RESULTS = "results"
"""The folder of the work tree that only holds what was measured."""


def save(
    path: Path,
    command: str,
    config: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    outcome: Mapping[str, Any] | None = None,
    data: Mapping[str, str] | None = None,
) -> None:
    """Write a run to `path`, whole or not at all.

    Args:
        path: the file; its folder is made if need be.
        command: what to type to measure this again, as `command_line` gives it.
        config: every setting of the run, seeds included.
        rows: everything that was measured.
        outcome: the numbers at the end of the run, if they are not among the rows.
        data: the files that were read, such as "NAME/FILE", with their hashes as "sha256:<hex>".
    """
    run = {
        "schema": SCHEMA,
        "command": command,
        "config": dict(config),
        **({} if data is None else {"data": dict(data)}),
        **({} if outcome is None else {"outcome": dict(outcome)}),
        "rows": [dict(row) for row in rows],
        "machine": doctor.machine(),
        "versions": doctor.versions(),
        "commit": commit(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    with files.atomic(path) as file:
        file.write((json.dumps(run, indent=1) + "\n").encode())


def load(path: Path) -> dict[str, Any]:
    """Read a run back."""
    try:
        run: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read, it is cut off or not JSON: {error}") from error
    for name, kind, words in (("config", dict, "an object"), ("rows", list, "a list")):
        if not isinstance(run, dict) or name not in run:
            raise ValueError(f"{path} is not a result of pairmix: it has no {name}")
        if not isinstance(run[name], kind):
            raise ValueError(f"{path} is not a result of pairmix: {name} must be {words}, got {in_words(run[name])}")
    if run.get("schema", 1) not in (1, SCHEMA):
        raise ValueError(f"{path} has schema {in_words(run['schema'])}; this version of pairmix reads 1 and {SCHEMA}")
    return run


def in_words(value: Any) -> str:
    """A value of a result for a message: short, however large it is."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def command_line() -> str:
    """The command that runs, as it was typed."""
    program, *arguments = sys.argv
    path = Path(program)
    is_pairmix = path.stem == "pairmix" or path.parts[-2:] == ("pairmix", "__main__.py")
    line = shlex.join(["pairmix" if is_pairmix else program, *arguments])
    if distributed.is_torchelastic_launched():
        return f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']} -m {line}"
    return line


def check_traceable(out: Path) -> None:
    """Make sure, before anything is measured, that the commit of a result in this folder says what was measured.

    Args:
        out: the folder. Outside of the work tree that runs, or ignored by git, it may be any.

    Raises:
        ValueError: if it is part of the work tree, and that has been changed.
    """
    root, out = _work_tree(), out.resolve()
    if root is None or not out.is_relative_to(root):
        return
    if _git(root, "check-ignore", str(out / "result.json"), accept=(0, 1)):
        return
    changes = _changes(root)
    if changes:
        shown = ", ".join(changes[:3]) + (f" and {len(changes) - 3} more" if len(changes) > 3 else "")
        raise ValueError(
            f"{root} has changes that no commit holds ({shown}), so a result in {out} could not be traced to its code: "
            f"commit them, or let --out be a folder outside of it or one that git ignores, such as runs"
        )


def commit() -> str | None:
    """The commit of the work tree that runs, with a + if it has been changed; None for an installed package."""
    root = _work_tree()
    return None if root is None else _git(root, "rev-parse", "HEAD").strip() + "+" * bool(_changes(root))


def _work_tree() -> Path | None:
    """The one that holds this file; None if git does not know it."""
    try:
        _git(Path(__file__).parent, "ls-files", "--error-unmatch", __file__)
        return Path(_git(Path(__file__).parent, "rev-parse", "--show-toplevel").strip()).resolve()
    except (OSError, subprocess.CalledProcessError):
        return None


def _changes(root: Path) -> list[str]:
    """The files that are not as committed, except for what was measured."""
    return [line[3:] for line in _git(root, "status", "--porcelain", "--", ".", f":(exclude){RESULTS}").splitlines()]


def _git(folder: Path, *arguments: str, accept: Sequence[int] = (0,)) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
    if done.returncode not in accept:
        raise subprocess.CalledProcessError(done.returncode, done.args, done.stdout, done.stderr)
    return done.stdout
