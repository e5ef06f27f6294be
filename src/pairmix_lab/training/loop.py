"""Train a model, step by step, so that it can be stopped or killed at any moment, and resumed.

A batch is a function of the seed and the step alone, and so is the learning rate. A run that is resumed from a
checkpoint therefore gives the same result as one that was never stopped, to the last bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pairmix_lab import files
from pairmix_lab.training import checkpoints
from pairmix_lab.training.processes import Processes
from pairmix_lab.training.scalars import Scalars
from pairmix_lab.training.signals import Stopped, StopRequest

Batch = tuple[Tensor, Tensor]
OnStep = Callable[[int, float, float], None]
"""Is told the step, its loss and its milliseconds."""


MOST_STEPS = 10**6  # a checkpoint has the time of every step
LARGEST_SIZE = 2**31 - 1  # an index of SPM has 32 bits


class DivergenceError(ValueError):
    """The loss is not a number any more."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained. Every experiment adds the settings of its model and its data.

    Attributes:
        steps: how many.
        batch: rows of a step, over all processes.
        lr: the learning rate of AdamW, before the groups of the model scale it.
        decay: `"cosine"`, from `lr` to zero, or `"constant"`.
        warmup: over how many steps the rate first rises to `lr`, in a line.
        clip: the largest norm of all gradients together; None for any.
        weight_decay: of matrices.
        seed: which random start and which batches.
        log_every: how many steps a row of the history sums up.
        validate_every: after how many steps the model is validated; also after the first and the last.
    """

    steps: int
    batch: int
    lr: float
    decay: str = "cosine"
    warmup: int = 0
    clip: float | None = None
    weight_decay: float = 0.0
    seed: int = 0
    log_every: int = 20
    validate_every: int = 100

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "log_every", "validate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        self._check_at_most("steps", MOST_STEPS)
        self._check_at_most("batch", LARGEST_SIZE)
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be above 0, got {self.lr}")
        self._check_choice("decay", ("cosine", "constant"))
        if not 0 <= self.warmup <= self.steps:
            raise ValueError(f"warmup must be in 0..{self.steps}, the steps, got {self.warmup}")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"clip must be above 0, or None, got {self.clip}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be at least 0, got {self.weight_decay}")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be in 0..2^31-1, got {self.seed}")

    @classmethod
    def completed(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config of a result, with what older versions did not say because they had no choice."""
        return {"warmup": 0, "clip": None, "weight_decay": 0.0, **config}

    def _check_at_most(self, name: str, limit: int) -> None:
        if getattr(self, name) > limit:
            raise ValueError(f"{name} must be at most {limit}, got {getattr(self, name)}")

    def _check_choice(self, name: str, choices: Iterable[str]) -> None:
        if getattr(self, name) not in choices:
            raise ValueError(f"{name} must be one of {list(choices)}, got {getattr(self, name)!r}")

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, which are counted from 1."""
        rate = self.lr * min(1.0, step / max(1, self.warmup))
        return rate if self.decay == "constant" else rate * (1 + math.cos(math.pi * (step - 1) / self.steps)) / 2


class Task(Protocol):
    """A model, and the data that it learns from."""

    @property
    def config(self) -> Recipe:
        """All its settings."""

    @property
    def data(self) -> Mapping[str, str]:
        """The files that it reads, such as "NAME/FILE", with their hashes "sha256:..."."""

    def build(self) -> nn.Module:
        """The model before training, from torch's random state."""

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Its parameters, as groups for the optimiser; the rate of a group is multiplied by its `lr_scale`."""

    def batch(self, step: int) -> Batch:
        """Inputs and labels of a step, the same ones for the same step."""

    def validate(self, model: nn.Module) -> dict[str, float]:
        """How well the model does on data that it does not learn from."""

    def conclude(self, model: nn.Module) -> dict[str, Any]:
        """The outcome: what the result says of the trained model."""


@dataclass(frozen=True)
class Trained:
    """A finished run: its history and its outcome."""

    model: nn.Module
    rows: list[dict[str, Any]]
    outcome: dict[str, Any]


def train(
    task: Task,
    folder: Path | None = None,
    *,
    resume: bool = False,
    save_every: float = 60,
    on_step: OnStep = lambda step, loss, milliseconds: None,
) -> Trained:
    """Train with AdamW to the end.

    Args:
        task: the model and the data.
        folder: where checkpoints and TensorBoard's scalars go; None for nowhere.
        resume: continue from the checkpoint in the folder, if there is one. If false, a checkpoint there is an error.
        save_every: seconds between checkpoints.
        on_step: called after every step.

    Raises:
        Stopped: after a signal to stop; the checkpoint has been written.
        DivergenceError: if the loss is not finite.
        CheckpointError: for a checkpoint that is there and not to be overwritten, does not fit or cannot be written.
    """
    processes = Processes.of_this_run()
    with StopRequest() as stop_request:
        run = Run(task, processes, folder, resume)
        saved_at = time.monotonic()
        while run.state.step < task.config.steps:
            on_step(run.state.step + 1, *run.advance())
            if processes.any(stop_request.received):
                run.store()
                raise Stopped(run.state.step)
            if time.monotonic() - saved_at >= save_every:
                run.store()
                saved_at = time.monotonic()
        trained = run.finish()
        if processes.any(stop_request.received):  # else Ctrl-C would only end this run, and the next one would start
            raise Stopped(run.state.step)
        return trained


class Run:
    """A model between two steps."""

    def __init__(self, task: Task, processes: Processes, folder: Path | None, resume: bool) -> None:
        self.task, self.processes, self.config = task, processes, task.config
        self.description = {**asdict(self.config), **task.data}
        torch.manual_seed(self.config.seed)
        model = task.build()
        record: dict[str, Any] = {"rows": [], "losses": [], "milliseconds": []}  # losses: since the last row
        self.state = checkpoints.State(model, make_optimizer(task.groups(model), self.config.lr), 0, record)
        self.checkpoint = None if folder is None else folder / "checkpoint.safetensors"
        if self.checkpoint is not None and self.checkpoint.exists():
            if not resume:
                raise checkpoints.CheckpointError(
                    f"{self.checkpoint} is of an earlier run: --resume goes on with it, another --out leaves it alone"
                )
            checkpoints.restore(self.checkpoint, self.state, self.description)
        if self.checkpoint is not None and processes.is_first:
            files.sweep(self.checkpoint)
        self.rows: list[dict[str, Any]] = self.state.record["rows"]
        self.milliseconds: list[float] = self.state.record["milliseconds"]
        self.losses: list[float] = self.state.record["losses"]
        self.parallel_model = processes.parallel(model)
        self.scalars = Scalars(folder, self.state.step + 1) if folder is not None and processes.is_first else None

    def advance(self) -> tuple[float, float]:
        """Take a step; its loss and its milliseconds."""
        state, config = self.state, self.config
        inputs, labels = self.processes.share(self.task.batch(state.step + 1), config.batch)
        loss, milliseconds = timed_step(
            self.parallel_model, state.optimizer, inputs, labels, config.lr_at(state.step + 1), config.clip
        )
        state.step += 1
        loss = self.processes.mean(loss)
        if not math.isfinite(loss):
            raise DivergenceError(
                f"the loss is {loss} at step {state.step:,}: a smaller learning rate than {config.lr} may help"
            )
        self.losses.append(loss)
        self.milliseconds.append(round(milliseconds, 4))
        validates = state.step % config.validate_every == 0 or state.step in (1, config.steps)
        if validates or state.step % config.log_every == 0:
            self._log(validates)
        return loss, milliseconds

    def _log(self, validates: bool) -> None:
        row = {
            "step": self.state.step,
            "train_loss": mean(self.losses),
            "ms_per_step": median(self.milliseconds[-len(self.losses) :]),
        }
        if validates and self.processes.is_first:
            with torch.inference_mode():
                row |= self.task.validate(self.state.model)
        self.rows.append(row)
        self.losses.clear()
        if self.scalars is not None:
            self.scalars.add(row)

    def store(self) -> None:
        """Write the checkpoint."""
        if self.checkpoint is not None and self.processes.is_first:
            checkpoints.store(self.checkpoint, self.state, self.description)

    def finish(self) -> Trained:
        """Write the last checkpoint and give the outcome."""
        self.store()
        outcome = {
            "step": self.state.step,
            "parameters": sum(parameter.numel() for parameter in self.state.model.parameters()),
            "ms_per_step": median(self.milliseconds),
            "processes": self.processes.count,
        }
        if self.processes.is_first:
            with torch.inference_mode():
                outcome |= self.task.conclude(self.state.model)
        return Trained(self.state.model, self.rows, outcome)


def make_optimizer(parameters: Iterable[Any], lr: float) -> torch.optim.AdamW:
    """AdamW as one fused operation, which is much the fastest on a CPU; with it a dense layer gains most.

    Args:
        parameters: or groups of them, as any optimiser takes them.
        lr: the learning rate.
    """
    return torch.optim.AdamW(parameters, lr, weight_decay=0.0, fused=True)


def timed_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    labels: Tensor,
    lr: float,
    clip: float | None = None,
) -> tuple[float, float]:
    """One training step: the loss, and how many milliseconds forward, backward and update took."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    start = time.perf_counter()
    loss = cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    value = loss.item()
    return value, 1e3 * (time.perf_counter() - start)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over all rows, also if they have several dimensions."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())
