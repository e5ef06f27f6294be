"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

SUFFIX = ".part"


@contextmanager
def atomic(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that takes the place of `path` when all of it is on the disk.

    After an error, or a crash at any moment, `path` is what it was before. Its folder is made if need be.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, suffix=SUFFIX, delete=False) as file:
        part = Path(file.name)
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            part.chmod(0o644)
            part.replace(path)
        except BaseException as error:
            part.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno is not None and error.filename is None:
                error.filename = str(path)  # a full disk does not say what did not fit
            raise


def sweep(path: Path) -> None:
    """Remove what processes that were killed while they wrote `path` have left beside it."""
    for part in path.parent.glob(f"{path.name}*{SUFFIX}"):
        part.unlink(missing_ok=True)
