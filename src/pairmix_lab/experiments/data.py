"""The text data of the experiments: where it is, and what is in it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pooch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


class DataError(Exception):
    """The data is missing, cannot be downloaded, or is not what it should be."""


@dataclass(frozen=True)
class Dataset:
    """Files that belong together.

    Attributes:
        name: the folder that they are in.
        home: the URL that the originals are under.
        hashes: of the original files, by their names.
    """

    name: str
    home: str
    hashes: Mapping[str, str] = field(hash=False)  # a dictionary has no hash


def fetch(dataset: Dataset, file: str, folder: Path | None = None) -> Path:
    """The local path of a file, which is downloaded the first time it is asked for.

    Args:
        dataset: what it belongs to.
        file: its name.
        folder: the user's own copy, `folder/NAME/FILE`, which may be a part of the original; then
            nothing is downloaded. Without it the original is kept in the user's cache, or in $PAIRMIX_CACHE.
    """
    url = f"{dataset.home}/{file}"
    needed = " and ".join(f"{dataset.name}/{name}" for name in dataset.hashes)
    ways = (
        f"There are two ways to get it:\n- connect to the internet and leave out --data: it is downloaded from {url}\n"
        f"- pass --data DIR, with {needed} inside that folder"
    )
    if folder is not None:
        path = folder / dataset.name / file
        if not os.access(path, os.R_OK):
            raise DataError(f"{path} is missing or cannot be read.\n{ways}")
        return path

    folder = cache() / dataset.name
    bar = _DownloadBar(f"{dataset.name}/{file}")
    answers: list[Any] = []
    downloader = pooch.HTTPDownloader(
        bar,
        chunk_size=2**16,
        headers={"Accept-Encoding": "identity"},  # so that the bytes that the bar counts are those of the file
        hooks={"response": lambda answer, **_: answers.append(answer)},
    )
    try:
        return Path(pooch.retrieve(url, dataset.hashes[file], file, folder, downloader=downloader))
    except (OSError, ValueError) as error:
        reason = _why_it_failed(error, folder, answers)
        raise DataError(f"{dataset.name}/{file} could not be downloaded: {reason}.\n{ways}") from error
    finally:
        bar.close()
        for answer in answers:
            answer.close()  # which pooch does not do if it fails


def hashes(dataset: Dataset, folder: Path | None = None) -> dict[str, str]:
    """The SHA-256 of every file of a dataset as it is here, by names such as "NAME/FILE"."""
    return {f"{dataset.name}/{file}": sha256(fetch(dataset, file, folder).read_bytes()) for file in dataset.hashes}


def sha256(content: bytes) -> str:
    """The hash of a file, as it stands in checkpoints and results."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def cache() -> Path:
    """The folder for what is downloaded or computed once: $PAIRMIX_CACHE, or the usual place."""
    return Path(os.environ.get("PAIRMIX_CACHE") or pooch.os_cache("pairmix"))


def _why_it_failed(error: OSError | ValueError, folder: Path, answers: list[Any]) -> str:
    """What pooch ran into. The errors of the network are OSErrors too, but without a number."""
    if isinstance(error, ValueError):
        return f"the download does not match its checksum ({error})"
    if error.errno is not None or isinstance(error, PermissionError):
        return f"the folder {folder} cannot be used; set PAIRMIX_CACHE to another one ({error})"
    if not answers:
        return f"there is no connection ({error})"
    if not answers[-1].ok:
        return f"the server refused it ({error})"
    return f"the connection was cut ({error})"


class _DownloadBar:
    """What pooch wants of a progress bar: it sets `total` when the answer begins, then calls the methods."""

    def __init__(self, name: str) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task(name, total=None)

    def _begin(self, size: int) -> None:
        self._progress.update(self._task, total=size or None)  # 0: the server did not say
        self._progress.start()

    total = property(None, _begin)

    def update(self, size: int) -> None:
        self._progress.advance(self._task, size)

    def reset(self) -> None:
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        if self._progress.live.is_started:
            self._progress.stop()
