"""A run is trained by one process at a time, or by several that train it together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from pairmix_lab.training.checkpoints import CheckpointError
from pairmix_lab.training.processes import Processes

try:
    import fcntl
except ImportError:  # Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """While this is entered, no other process trains the run of this folder. The kernel lets go of it for a killed one.

    Of several processes that train together the first one holds the lock, and all are told if it does not get it.

    Raises:
        CheckpointError: if another process holds it, or the file cannot be written. Nothing has been changed then.
    """
    processes = Processes.of_this_run()
    with ExitStack() as stack:
        problem = None
        if processes.is_first:
            try:
                stack.enter_context(_locked(folder / "lock"))
            except CheckpointError as error:
                problem = str(error)
        problem = processes.told_by_first(problem)
        if problem is not None:
            raise CheckpointError(problem)
        yield


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file that has the number of this process in it; it goes away in the end, with folders made for it."""
    made = [folder for folder in path.parents if not folder.exists()]
    try:
        try:
            file = _opened(path)
        except OSError as error:
            raise CheckpointError(f"{path} could not be written: {error.strerror}") from error
        with file:
            try:
                yield
            finally:
                path.unlink(missing_ok=True)  # before others can get it
    finally:
        with suppress(OSError):  # there is something in it
            for folder in made:
                folder.rmdir()


def _opened(path: Path) -> IO[bytes]:
    """The file, once this process has the lock on it."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            file = stack.enter_context(path.open("a+b", buffering=0))
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                holder = file.read().decode("ascii", "replace").strip()
                who = f"process {holder}" if holder else "another process"
                raise CheckpointError(f"{path.parent}: {who} is training this run") from error
            if not _is_at(file, path):  # its holder has just removed it: this lock is on nothing
                continue
            try:
                file.truncate(0)
                file.write(f"{os.getpid()}\n".encode())
            except OSError:
                path.unlink()
                raise
            stack.pop_all()
            return file


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
