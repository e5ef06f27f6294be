"""Section 9.2: the topic of a news item, from its words hashed into `width` features."""

from __future__ import annotations

import csv
import hashlib
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import scipy.sparse
import torch
import typer
from matplotlib.figure import Figure
from torch import nn

from pairmix_lab import contenders, files
from pairmix_lab.contenders import count_parameters
from pairmix_lab.experiments import data, epochs, options
from pairmix_lab.experiments.classification import DENSE, SPM, Classification, Classified, accuracies, scores
from pairmix_lab.experiments.compared import Compared
from pairmix_lab.experiments.experiment import StartCase, StepCases
from pairmix_lab.report.experiment import Case
from pairmix_lab.report.notes import of_experiment
from pairmix_lab.report.pictures import WIDE, Picture, legend_below, look, styled
from pairmix_lab.report.runs import Runs
from pairmix_lab.report.tables import Row, distinct
from pairmix_lab.report.timing import step_time
from pairmix_lab.training.loop import Batch

CLASSES = 4
WHOLE = 120_000
VALIDATION_PART = 0.05
CHECKSUM_SIZE = 32  # bytes, at the beginning of a cache file
MODELS = (*contenders.TRAINED, contenders.SOFTMAX.key)  # the last has no hidden layer
AGNEWS = data.Dataset(
    "agnews",
    "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv",
    {"train.csv": "md5:b1a00f826fdfbd249f79597b59e1dc12", "test.csv": "md5:d52ea96a97a2d943681189a97654912d"},
)


@dataclass(frozen=True, kw_only=True)
class Config(Compared):
    """A classifier.

    Attributes:
        layer: the hidden one, of `MODELS`.
        width: of the hidden layer, and how many features the words are hashed into.
        dropout: the part of a training row's features that is left out at random, which the others are scaled up for.
    """

    experiment: str = "agnews"
    width: int = 2048
    stages: int | None = 12
    steps: int = 1200
    batch: int = 256
    lr: float = 1e-2
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("layer", MODELS)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")

    @property
    def name(self) -> str:
        """What its files are called."""
        dropout = f"-dropout{self.dropout:g}" if self.dropout else ""
        return f"{self.kind}-{self.width}{dropout}-seed{self.seed}"

    @classmethod
    def completed(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"dropout": 0.0, **super().completed(config)}


@dataclass(frozen=True)
class Part:
    """Sparse rows and their labels."""

    features: scipy.sparse.csr_matrix
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, chosen: Any) -> Batch:
        """Some of them, as dense tensors."""
        return torch.from_numpy(self.features[chosen].toarray()), self.labels[torch.as_tensor(chosen)]

    def batches(self, size: int) -> Iterator[Batch]:
        """All of them, in order."""
        for start in range(0, len(self), size):
            yield self.rows(np.arange(start, min(start + size, len(self))))


class Task:
    """The train set in random order, over and over; a twentieth of it is kept for validation."""

    def __init__(self, config: Config, folder: Path | None = None) -> None:
        self.config = config
        whole, train_hash = _hashed(data.fetch(AGNEWS, "train.csv", folder), config.width)
        self.test, test_hash = _hashed(data.fetch(AGNEWS, "test.csv", folder), config.width)
        self.data = {"agnews/train.csv": train_hash, "agnews/test.csv": test_hash}
        self.label = label(len(whole))
        shuffled = np.random.default_rng(0).permutation(len(whole))  # the same for every seed
        split = max(1, int(VALIDATION_PART * len(whole)))
        self.valid, self.train = (
            Part(whole.features[rows], whole.labels[torch.from_numpy(rows)])
            for rows in (shuffled[:split], shuffled[split:])
        )
        if not len(self.train):
            raise data.DataError(f"the train set has too few rows: {len(whole)}")

    def build(self) -> nn.Module:
        config = self.config
        head = nn.Linear(config.width, CLASSES)
        if config.layer == contenders.SOFTMAX.key:
            return nn.Sequential(head)
        return nn.Sequential(config.make(), nn.ReLU(), head)

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return self.config.groups(model)

    def batch(self, step: int) -> Batch:
        config = self.config
        inputs, labels = self.train.rows(epochs.batch(len(self.train), config.batch, step, config.seed))
        if config.dropout:  # by the step alone, so that a run that is resumed leaves out the same
            kept = np.random.default_rng((config.seed, step)).random(inputs.shape, np.float32) >= config.dropout
            inputs *= torch.from_numpy(kept) / (1 - config.dropout)
        return inputs, labels

    def validate(self, model: nn.Module) -> dict[str, float]:
        return scores(model, self.valid.batches(self.config.batch), "valid")

    def conclude(self, model: nn.Module) -> dict[str, Any]:
        return {
            **scores(model, self.test.batches(self.config.batch), "test"),
            "mixer_parameters": count_parameters(model) - CLASSES * (self.config.width + 1),
            "data": self.label,
        }


def _left_out(dropout: float) -> str:
    return f"{dropout:.0%} of the features left out"


class AGNewsExperiment(Classification):
    """Classifiers of news with one hidden layer or another."""

    name = "agnews"
    title = "AG News"
    help = "Section 9.2: the topic of a news item, from hashed words."
    text = (
        "News articles of four classes, as hashed sparse features. One layer or another maps n features onto n; "
        "a softmax over the classes follows."
    )
    config = Config
    dataset = AGNEWS
    in_short = {  # noqa: RUF012
        "AG News: accuracy, %": ("agnews-own", Case(name, 4096)),
        "AG News, with dropout: accuracy, %": ("agnews-own", Case(name, 4096, _left_out(0.3))),
    }
    step_cases = StepCases(
        widths=(2048, 4096, 8192, 16384, 32768, 65536),
        layers=(*StepCases.layers, contenders.SOFTMAX.key),
    )
    start_cases = (StartCase("AG News", {"steps": 600, "stages": None}, (3e-3, 1e-2, 3e-2, 1e-1)),)
    paper = {  # noqa: RUF012
        2048: {DENSE: Classified(0.8700, 127.306), SPM: Classified(0.9290, 35.029)},
        4096: {DENSE: Classified(0.8917, 484.117), SPM: Classified(0.9570, 68.824)},
    }

    def configs(
        self,
        layers: Annotated[
            str, typer.Option(help=f"Which models to compare, of {', '.join(MODELS)}.")
        ] = "dense,spm,lowrank,softmax",
        widths: options.Widths = "2048,4096",
        seeds: options.Seeds = "0,1,2",
        blocks: options.Blocks = "general",
        stages: options.Stages = Config.stages,
        steps: options.Steps = Config.steps,
        batch: options.BatchSize = Config.batch,
        lr: options.Rate = Config.lr,
        inits: options.Inits = Config.init,
        rank: options.Rank = Config.rank,
        layer_rate: options.LayerRate = Config.layer_rate,
        dropout: Annotated[
            float, typer.Option(help="The part of a training row's features that is left out at random.")
        ] = Config.dropout,
    ) -> list[Config]:
        return options.grid(
            Config,
            width=options.whole_numbers("--widths", widths),
            layer=options.words("--layers", layers, MODELS),
            block=options.words("--blocks", blocks, options.BLOCKS),
            seed=options.whole_numbers("--seeds", seeds, least=0),
            stages=stages,
            steps=steps,
            batch=batch,
            lr=lr,
            init=options.words("--inits", inits, options.INITS),
            rank=rank,
            layer_rate=layer_rate,
            dropout=dropout,
        )

    def task(self, config: Config, folder: Path | None = None) -> Task:
        return Task(config, folder)

    def case(self, row: Row) -> Case:
        dropout = row.get("dropout", 0.0)
        return Case(self.name, row["width"], _left_out(dropout) if dropout else None)

    def notes(self, runs: Runs) -> Iterable[str]:
        rows = distinct(run["outcome"].get("data", "not named") for run in of_experiment(runs, self))
        yield (
            f"The paper trained on {WHOLE:,} rows of AG News. Ours: {'; '.join(rows)}. "
            "Accuracies on different rows cannot be compared; those of our layers with each other can."
        )

    def pictures(self, runs: Runs) -> Iterator[Picture]:
        yield from super().pictures(runs)
        alt = f"{self.title}: test accuracy against the time of a step"
        yield Picture(f"{self.name}-frontier", alt, self.frontier(runs))

    @styled
    def frontier(self, runs: Runs) -> Figure:
        """Test accuracy against the time of a step: a point for each layer and width, and the best for every time."""
        figure = Figure(figsize=WIDE)
        axes = figure.subplots()
        cases = runs.cases(self)
        points = []
        for name in runs.contenders(cases):
            own = []
            for case in cases:
                ms = step_time(runs, case, name)
                if ms and runs.of(case, name):
                    own.append((ms.value, float(np.mean(accuracies(runs, case, name)))))
                    axes.annotate(
                        f"{case.width:,}", own[-1], (0, 6), textcoords="offset points", ha="center", fontsize="x-small",
                        color=look(name)["color"],
                    )  # fmt: skip
            axes.plot(*zip(*own, strict=True), label=name, **{**look(name), "linestyle": "none"})
            points += own
        line: Any = {"color": "grey", "linewidth": 1, "drawstyle": "steps-post", "zorder": 1}
        axes.plot(*zip(*pareto(points), strict=True), label="best for its time", **line)
        axes.set(
            xscale="log", xlabel="milliseconds per training step", title=f"{self.title}: test accuracy against time"
        )
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:.1%}")
        axes.margins(0.06, 0.1)
        legend_below(figure)
        return figure


EXPERIMENT = AGNewsExperiment()


def pareto(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (time, accuracy) of which no other is both as fast and more accurate, by time."""
    best: list[tuple[float, float]] = []
    for time, accuracy in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or accuracy > best[-1][1]:
            best.append((time, accuracy))
    return best


def label(rows: int) -> str:
    """What results call a train set of this size."""
    return "AG News" if rows == WHOLE else f"AG News, {rows:,}-row part"


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
                raise data.DataError(f"{path}, after line {rows.line_num}: {error}") from error
            except (ValueError, csv.Error) as error:
                raise data.DataError(f"{path}, line {rows.line_num}: {error}") from error
    except OSError as error:
        raise data.DataError(f"{path} cannot be read: {error}") from error
    if not texts:
        raise data.DataError(f"{path} is empty")
    return texts, labels


@lru_cache(maxsize=4)
def _hashed(path: Path, width: int) -> tuple[Part, str]:
    """The file with its words hashed, and its SHA-256.

    The features are kept in the user's cache, under a name that tells what they were made from.
    """
    origin = data.sha256(path.read_bytes())
    cached = data.cache() / "features" / f"agnews-{origin.removeprefix('sha256:')[:16]}-{width}"
    texts, labels = read_agnews(path)
    features = _read_cache(cached, (len(texts), width))
    if features is None:
        from sklearn.feature_extraction.text import HashingVectorizer  # a second of importing, mostly not needed

        features = HashingVectorizer(n_features=width, dtype=np.float32).transform(texts)
        _write_cache(cached, features)
    return Part(features, torch.tensor(labels)), origin


def _write_cache(path: Path, features: scipy.sparse.csr_matrix) -> None:
    content = BytesIO()
    scipy.sparse.save_npz(content, features)
    with files.atomic(path) as file:
        file.write(_checksum(path, content.getvalue()))
        file.write(content.getvalue())


def _read_cache(path: Path, shape: tuple[int, int]) -> scipy.sparse.csr_matrix | None:
    """The features, or None if they are not there whole: scipy would read past the end of wrong ones."""
    try:
        stored = path.read_bytes()
        checksum, content = stored[:CHECKSUM_SIZE], stored[CHECKSUM_SIZE:]
        if checksum != _checksum(path, content):
            return None
        features = scipy.sparse.load_npz(BytesIO(content))
        features.check_format(full_check=True)
    except Exception:  # whatever is wrong with it, it can be made again
        return None
    return features if (features.format, features.shape, features.dtype) == ("csr", shape, np.float32) else None


def _checksum(path: Path, content: bytes) -> bytes:
    """Of what is under this name, so that a renamed file is found too."""
    return hashlib.sha256(path.name.encode() + content).digest()
