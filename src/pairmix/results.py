"""One run, one JSON file: what was asked, what was measured, on what."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import pairmix
from pairmix import files


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
        command: what to type to measure this again.
        config: every setting of the run, seeds included.
        rows: everything that was measured.
        outcome: what it came to in the end, if that is not among the rows.
        data: the hashes of the files that it read, by their names.
    """
    run = {
        "command": command,
        "config": dict(config),
        **({} if outcome is None else {"outcome": dict(outcome)}),
        **({} if data is None else {"data": dict(data)}),
        "rows": [dict(row) for row in rows],
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    with files.atomic(path) as file:
        file.write((json.dumps(run, indent=1) + "\n").encode())


def load(path: Path) -> dict[str, Any]:
    """Read a run back."""
    try:
        run = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read, it is cut off or no result: {error}") from error
    missing = {"config", "rows"} - (set(run) if isinstance(run, dict) else set())
    if missing:
        raise ValueError(f"{path} is not a result of pairmix: it has no {' and no '.join(sorted(missing))}")
    for field in {"config", "data"} & run.keys():
        if not isinstance(run[field], dict):
            raise ValueError(f"{path} is not a result of pairmix: its {field} is no object")
    return dict(run)


def command_line() -> str:
    """The command line of this process."""
    return shlex.join(["pairmix", *sys.argv[1:]])


def machine() -> dict[str, Any]:
    """The processor, its cores and the threads in use."""
    return {
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
    }


def versions() -> dict[str, str]:
    """Of Python, pairmix and what it computes with."""
    return {
        "python": platform.python_version(),
        "pairmix": pairmix.__version__,
        **{name: metadata.version(name) for name in ("torch", "numpy")},
    }


def commit() -> str | None:
    """The commit of the working copy that runs, with a + if it has been changed; None for an installed package."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        finished = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True)
        return finished.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", __file__)
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", str(here)) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
