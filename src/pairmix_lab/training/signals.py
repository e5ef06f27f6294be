"""Stop between two steps, not in the middle of one."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from torch import distributed


class Stopped(Exception):  # noqa: N818 (no error: it is what the user wanted)
    """A run that was told to stop, and has written its checkpoint."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step:,}")
        self.step = step


class StopRequest:
    """While it is entered, Ctrl-C, SIGTERM and SIGHUP are only noted; the second Ctrl-C ends the process as usual.

    The others may come any number of times: a scheduler sends SIGTERM to all processes, and torchrun, which is one of
    them, passes on what it gets. It passes on Ctrl-C too, so under torchrun no number of them ends the process at once.
    """

    SIGNALS = tuple(signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

    def __init__(self) -> None:
        self.received = False

    def __enter__(self) -> StopRequest:
        self._before: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._note) for number in self.SIGNALS if not _is_for_nohup(number)
        }
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if number == signal.SIGINT and not distributed.is_torchelastic_launched():
            signal.signal(number, self._before[signal.SIGINT])


def _is_for_nohup(number: signal.Signals) -> bool:
    """Whether the user has started the process with nohup, so that it outlives the terminal."""
    return number.name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN
