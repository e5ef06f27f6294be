"""How long is a training step of each experiment?

Forward, backward and update of every model, on the same batch of real data, in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pairmix_lab.bench.timing import current_threads, interleaved, measured, settings
from pairmix_lab.experiments import agnews, data, shakespeare, teacher
from pairmix_lab.experiments.language_models import SYMBOLS
from pairmix_lab.training.loop import Task, make_optimizer, timed_step

DENSE = "dense"
REST = "all but the layer"
TORCH_RNN = "torch.nn.RNN"
BLOCK = 0.1  # seconds of a turn: many steps after each other, as in training, with what they need in the caches


@dataclass(frozen=True)
class Config:
    """What is measured, and for how long.

    Attributes:
        teacher_widths: of the first experiment.
        agnews_widths: of the second; beyond `dense_up_to` without a dense layer.
        shakespeare_widths: of the third.
        cell: of the third.
        seconds: for each width; four times as long for the third experiment.
        threads: the numbers of threads.
    """

    teacher_widths: tuple[int, ...] = (256, 512, 1024, 2048)
    agnews_widths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768, 65536)
    shakespeare_widths: tuple[int, ...] = (4096,)
    cell: str = "rnn"
    dense_up_to: int = 8192
    seconds: float = 30
    threads: tuple[int, ...] = field(default_factory=current_threads)


class TorchRNN(nn.Module):
    """What `LanguageModel` is with a dense Elman cell, by torch's own module: a byte is a one-hot vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rnn = nn.RNN(SYMBOLS, width)
        self.head = nn.Linear(width, SYMBOLS)

    def forward(self, text: Tensor) -> Tensor:
        one_hot = nn.functional.one_hot(text.T, SYMBOLS).to(self.head.weight.dtype)
        logits: Tensor = self.head(self.rnn(one_hot)[0])
        return logits.transpose(0, 1)


def hashes(config: Config, folder: Path | None = None) -> dict[str, str]:
    """Those of the files that the experiments read."""
    found: dict[str, str] = {}
    for dataset, widths in ((data.AGNEWS, config.agnews_widths), (data.SHAKESPEARE, config.shakespeare_widths)):
        if widths:
            found |= data.hashes(dataset, folder)
    return found


def run(config: Config, folder: Path | None = None) -> Iterator[dict[str, Any]]:
    """Measure, a row at a time.

    Args:
        config: what.
        folder: where the data is; without it the originals are downloaded.
    """
    experiments: dict[str, Task]
    for setting in settings(config.threads):
        for width in config.teacher_widths:
            names = _layers(config, width, "lowrank")
            experiments = {name: teacher.Task(teacher.Config(layer=name, width=width)) for name in names}
            yield from _rows(experiments, {"experiment": "teacher", "width": width, **setting}, config.seconds)
        for width in config.agnews_widths:
            names = _layers(config, width, "lowrank", "softmax")
            experiments = {name: agnews.Task(agnews.Config(layer=name, width=width), folder) for name in names}
            yield from _rows(experiments, {"experiment": "agnews", "width": width, **setting}, config.seconds)
        for width in config.shakespeare_widths:
            names = _layers(config, width, "lowrank")
            experiments = {
                name: shakespeare.Task(shakespeare.Config(layer=name, width=width, cell=config.cell), folder)
                for name in names
            }
            others = {TORCH_RNN: partial(TorchRNN, width)} if config.cell == "rnn" else {}
            about = {"experiment": "shakespeare", "cell": config.cell, "width": width, **setting}
            # A dense step takes seconds.
            yield from _rows(experiments, about, 4 * config.seconds, others)


def _layers(config: Config, width: int, *others: str) -> list[str]:
    return [DENSE] * (width <= config.dense_up_to) + ["spm", *others]


def _rows(
    experiments: Mapping[str, Task],
    about: Mapping[str, Any],
    seconds: float,
    others: Mapping[str, Callable[[], nn.Module]] | None = None,
) -> Iterator[dict[str, Any]]:
    first = next(iter(experiments.values()))
    (inputs, labels), lr = first.batch(1), first.config.lr
    builds = {**{name: experiment.build for name, experiment in experiments.items()}, **(others or {})}
    steps: dict[str, Callable[[], object]] = {}
    for name, build in builds.items():
        torch.manual_seed(0)
        model = build()
        steps[name] = partial(timed_step, model, make_optimizer(model, lr), inputs, labels, lr)
    model = experiments["spm"].build()
    if isinstance(model, nn.Sequential):  # otherwise the layer is not what reads the input
        rest = model[1:]
        steps[REST] = partial(_step_of_rest, rest, make_optimizer(rest, lr), inputs, labels, lr)
    samples = interleaved(steps, seconds, block=BLOCK)
    for name in steps:
        yield {
            **about,
            "layer": name,
            "batch": first.config.batch,
            **measured(samples, name, DENSE if DENSE in samples else None),
        }


def _step_of_rest(rest: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor, lr: float) -> None:
    """What would be left of a step if the layer cost nothing: its output is there, and its gradient is computed."""
    timed_step(rest, optimizer, inputs.detach().requires_grad_(), labels, lr)
