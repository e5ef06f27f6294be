"""Many runs, several at once, in processes that can be stopped or killed at any moment; finished ones are kept."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import torch


@contextmanager
def processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Processes with one thread each. They end at once after an error or Ctrl-C, and when this process is killed.

    Raises:
        KeyboardInterrupt: after Ctrl-C, from what waits for a process or in the end.
    """
    context = multiprocessing.get_context("spawn")  # a fork would share the threads of torch, which are not there
    theirs, ours = context.Pipe(duplex=False)
    interrupted = False

    def interrupt(*_: object) -> None:
        # An exception just here may leave a lock of the pool locked, for which its threads would wait forever.
        nonlocal interrupted
        interrupted = True
        ours.close()

    with _on_ctrl_c(interrupt), theirs, ours, ProcessPoolExecutor(count, context, _begin, (theirs,)) as pool:
        try:
            yield pool
        except BaseException:
            ours.close()  # the pool itself would wait for the runs that have begun
            if interrupted:
                raise KeyboardInterrupt from None
            raise
    if interrupted:
        raise KeyboardInterrupt


def submitted(
    pool: ProcessPoolExecutor, work: Callable[..., Any], calls: Iterable[tuple[Any, ...]]
) -> list[Future[Any]]:
    """Let processes call `work` with each of the arguments."""
    # Processes start here and inherit this. Ctrl-C reaches all of them, and the one that started them decides.
    with _on_ctrl_c(signal.SIG_IGN):
        return [pool.submit(work, *arguments) for arguments in calls]


@contextmanager
def _on_ctrl_c(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _begin(parents: Connection) -> None:
    torch.set_num_threads(1)
    Thread(target=_end_with, args=(parents,), daemon=True).start()


def _end_with(parents: Connection) -> None:
    """End this process when the other end of the pipe is closed, which the kernel does for a process that is killed."""
    with suppress(EOFError, OSError):
        parents.recv()
    os._exit(1)


class Finished:
    """The outcomes of finished runs, in a file to which each is appended as soon as it is known.

    Args:
        path: the file.
        resume: whether outcomes may be there already.

    Raises:
        ValueError: if there are, and `resume` is false.
    """

    def __init__(self, path: Path, resume: bool = False) -> None:
        self.path = path
        self._outcomes: dict[str, Any] = {}
        content = path.read_text("utf-8", "replace") if path.exists() else ""
        if content and not resume:
            raise ValueError(f"{path} is of an earlier command: --resume goes on with it, --out chooses another place")
        for line in content.splitlines():
            with suppress(ValueError, KeyError, TypeError):  # a process was killed while it wrote it: run it again
                stored = json.loads(line)
                self._outcomes[_key(stored["run"])] = stored["outcome"]
        self._is_cut = bool(content) and not content.endswith("\n")

    def __contains__(self, run: Mapping[str, Any]) -> bool:
        return _key(run) in self._outcomes

    def __getitem__(self, run: Mapping[str, Any]) -> Any:
        return self._outcomes[_key(run)]

    def add(self, run: Mapping[str, Any], outcome: Any) -> None:
        """Keep the outcome of a run.

        Args:
            run: everything that decides the outcome, as JSON has it.
            outcome: as JSON has it.
        """
        self._outcomes[_key(run)] = outcome
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * self._is_cut + json.dumps({"run": run, "outcome": outcome}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._is_cut = False

    def discard(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


def _key(run: Mapping[str, Any]) -> str:
    return json.dumps(run, sort_keys=True)
