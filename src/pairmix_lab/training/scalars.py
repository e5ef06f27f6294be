"""The history of a run as TensorBoard reads it."""

from __future__ import annotations

import io
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path

from pairmix_lab.training.checkpoints import CheckpointError


class Scalars:
    """A file of events, which is made with the first row and has only whole rows in it.

    TensorBoard's own writer has a thread, whose errors come late and as tracebacks.

    Args:
        folder: where the file goes.
        first_step: rows from there on that are in older files of this folder are not shown.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        now = f"{time.time():017.6f}"  # files are read in the order of their names
        self.path = folder / f"events.out.tfevents.{now}.{platform.node()}.{os.getpid()}"
        self._first_step = first_step

    def add(self, row: Mapping[str, float]) -> None:
        """Write a row of the history.

        Raises:
            CheckpointError: if it cannot be written; the file is as it was before.
        """
        size = self.path.stat().st_size if self.path.exists() else 0
        records = _records(row, None if size else self._first_step)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(records)
        except OSError as error:
            self._cut(size)
            raise CheckpointError(f"{self.path} could not be written: {error.strerror}") from error

    def _cut(self, size: int) -> None:
        if size:
            os.truncate(self.path, size)
        else:
            self.path.unlink(missing_ok=True)


def _records(row: Mapping[str, float], first_step: int | None) -> bytes:
    """The row, and before it what the beginning of a file says, if it is that."""
    # A second of importing, which few commands need.
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
    from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

    values = [Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
    events = [Event(step=int(row["step"]), summary=Summary(value=values))]
    if first_step is not None:
        start = SessionLog(status=SessionLog.START)
        events = [Event(file_version="brain.Event:2"), Event(step=first_step, session_log=start), *events]
    content = io.BytesIO()
    for event in events:
        event.wall_time = time.time()
        RecordWriter(content).write(event.SerializeToString())
    return content.getvalue()
