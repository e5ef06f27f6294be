"""What an experiment is: how it is trained, timed and reported. Commands, benchmarks and the page need nothing else."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from pairmix_lab import contenders
from pairmix_lab.experiments.data import Dataset
from pairmix_lab.report.experiment import Case, Reported
from pairmix_lab.report.runs import collect
from pairmix_lab.report.tables import Table
from pairmix_lab.training.loop import Recipe, Task


@dataclass(frozen=True)
class StepCases:
    """The training steps that `pairmix bench steps` times.

    Attributes:
        widths: each is measured on its own.
        layers: the keys of the contenders.
        settings: of the config, where they are not the default. They are also in the rows of the result.
        seconds: how much longer than others it is measured.
        others: gives other models by their names, from a config.
    """

    widths: tuple[int, ...]
    layers: tuple[str, ...] = (contenders.DENSE.key, contenders.SPM.key, contenders.LOW_RANK.key)
    settings: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 1
    others: Callable[[Any], Mapping[str, Callable[[], nn.Module]]] = lambda config: {}


LRS_WIDTH = 256
"""The width that the learning rates of a `StartCase` are for."""


@dataclass(frozen=True)
class StartCase:
    """Short runs on which `pairmix bench init` compares how SPM layers can start.

    Attributes:
        name: in the tables; no two cases have the same, and there is no comma in it.
        settings: of the config, where they are not the default.
        lrs: the learning rates to try at `LRS_WIDTH` features; every start gets the best of its own.
        widths: each is compared on its own.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    lrs: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2)
    widths: tuple[int, ...] = (256, 1024)

    def lrs_at(self, width: int) -> list[float]:
        """The learning rates to try at a width: the wider a dense model, the smaller the rate that it bears."""
        return [float(f"{lr * LRS_WIDTH / width:.2g}") for lr in self.lrs]


class Demo(NamedTuple):
    """Short runs that show what this is about, and a text for the terminal before them."""

    configs: Sequence[Any]
    text: str


class Experiment(Reported):
    """All there is to know of an experiment; one object of a class for each is in `EXPERIMENTS`.

    Attributes:
        help: of its command, in a sentence.
        config: the class of its configs; a config's `name` is that of its files.
        dataset: the files that it reads; None if it makes its data. `dataset_of` is for those that can read others.
        step_cases: what `pairmix bench steps` times; None for nothing.
        start_cases: what `pairmix bench init` trains; the config must be a `Compared`.
        demo: gives the runs of `pairmix demo`, and its parameters are the options of that command; None if it has none.
        measure: the number of an outcome that says how well a model does, and what to multiply it by for the reader.
        in_short: the cases that README shows, by what they are, each with the folder of its results.
    """

    help: str
    config: type[Any]
    dataset: Dataset | None = None
    step_cases: StepCases | None = None
    start_cases: Sequence[StartCase] = ()
    demo: Callable[..., Demo] | None = None
    measure: tuple[str, float]
    in_short: Mapping[str, tuple[str, Case]] = {}

    @abstractmethod
    def configs(self, *args: Any, **kwargs: Any) -> Sequence[Recipe]:
        """The runs that a command asks for. The parameters are the options of `pairmix train`, with their help."""

    @abstractmethod
    def task(self, config: Any, folder: Path | None = None) -> Task:
        """The model and the data of a run.

        Args:
            config: of the run.
            folder: the user's copy of the data; without it the original is downloaded.
        """

    def dataset_of(self, config: Any) -> Dataset | None:
        """The files that a run reads."""
        return self.dataset

    def completed(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        complete: Mapping[str, Any] = self.config.completed(config)
        return complete

    def in_words(self, outcome: Mapping[str, Any]) -> str:
        """The outcome of a run for the terminal; empty for nothing but its time."""
        return ""

    def table(self, name: str, results: Path) -> Table | None:
        """A table of `table_names` from the folder of all results; None if there is nothing to make it from."""
        found = sorted((results / self.name).rglob("*.json"))
        if not found:
            return None
        runs = collect([*found, *results.glob("steps*.json")], [self])
        return next((one.table for one in self.tables(runs) if one.name == name), None)
