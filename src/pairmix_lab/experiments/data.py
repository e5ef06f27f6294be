"""The text data of the experiments: where it is, and what is in it."""

from __future__ import annotations

import csv
import hashlib
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
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
    hashes: Mapping[str, str]


AGNEWS = Dataset(
    "agnews",
    "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv",
    {"train.csv": "md5:b1a00f826fdfbd249f79597b59e1dc12", "test.csv": "md5:d52ea96a97a2d943681189a97654912d"},
)
SHAKESPEARE = Dataset(
    "shakespeare",
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare",
    {"input.txt": "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"},
)


def fetch(dataset: Dataset, file: str, folder: Path | None = None) -> Path:
    """The local path of a file, which is downloaded the first time it is asked for.

    Args:
        dataset: what it belongs to.
        file: its name.
        folder: the user's own copy, `folder/agnews/train.csv` and so on, which may be a part of the original; then
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
    """The SHA-256 of every file of a dataset as it is here, by names such as "agnews/train.csv"."""
    return {f"{dataset.name}/{file}": sha256(fetch(dataset, file, folder).read_bytes()) for file in dataset.hashes}


def sha256(content: bytes) -> str:
    """The hash of a file, as it stands in checkpoints and results."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def cache() -> Path:
    """The folder for what is downloaded or computed once: $PAIRMIX_CACHE, or the usual place."""
    return Path(os.environ.get("PAIRMIX_CACHE") or pooch.os_cache("pairmix"))


def read_agnews(path: Path) -> tuple[list[str], list[int]]:
    """The texts, title and description in one, and their classes 0 to 3."""
    texts, labels = [], []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.reader(file, strict=True)  # a file that ends inside a quoted text has been cut
            try:
                for row in rows:
                    if len(row) != 3:
                        raise ValueError(f"expected class, title and description, got {reprlib.repr(row)}")
                    if row[0] not in ("1", "2", "3", "4"):
                        raise ValueError(f"expected a class from 1 to 4, got {row[0]!r}")
                    labels.append(int(row[0]) - 1)
                    texts.append(f"{row[1]} {row[2]}".strip())
            except UnicodeDecodeError as error:  # the file is decoded in pieces, ahead of the rows
                raise DataError(f"{path}, after line {rows.line_num}: {error}") from error
            except (ValueError, csv.Error) as error:
                raise DataError(f"{path}, line {rows.line_num}: {error}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not texts:
        raise DataError(f"{path} is empty")
    return texts, labels


def read_shakespeare(path: Path) -> bytes:
    """The whole text."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not text:
        raise DataError(f"{path} is empty")
    return text


def _why_it_failed(error: OSError | ValueError, folder: Path, answers: list[Any]) -> str:
    """What pooch ran into. The errors of the network are OSErrors too, but without a number."""
    if isinstance(error, ValueError):
        return f"what came is not the original ({error})"
    if error.errno is not None or isinstance(error, PermissionError):
        return f"the folder {folder} cannot be used; set PAIRMIX_CACHE to another one ({error})"
    if not answers:
        return f"there is no connection ({error})"
    if not answers[-1].ok:
        return f"the server does not give it ({error})"
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
