"""Stop between two steps, not in the middle of one."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class Stopped(Exception):  # noqa: N818 (no error: it is what the user wanted)
    """A run that was told to stop, and has written its checkpoint."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step:,}")
        self.step = step


class StopRequest:
    """While it is entered, Ctrl-C and SIGTERM are only noted; the second one ends the process as usual."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received = False

    def __enter__(self) -> StopRequest:
        self._before: dict[signal.Signals, Any] = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        signal.signal(number, self._before[signal.Signals(number)])
