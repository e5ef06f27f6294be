"""A small run, and ways to stop it."""

import json
import math
import signal
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors import safe_open
from torch import nn

from pairmix_lab.experiments import teacher
from pairmix_lab.training.loop import train
from pairmix_lab.training.signals import Stopped

CONFIG = teacher.Config(width=16, steps=40, batch=32, lr=1e-2, log_every=7, validate_every=15)
LOGGED = [1, 7, 14, 15, 21, 28, 30, 35, 40]
VALIDATED = [1, 15, 30, 40]
CONFIGS = {
    "dense": replace(CONFIG, layer="dense"),
    "spm general": CONFIG,
    "spm rotation": replace(CONFIG, block="rotation"),
    "lowrank": replace(CONFIG, layer="lowrank"),
}


class WithDropout(teacher.Task):
    """Draws from torch's random state in every step."""

    def build(self):
        return nn.Sequential(*super().build(), nn.Dropout(0.1))


class NotANumber(teacher.Task):
    """Has one bad batch."""

    def batch(self, step):
        inputs, labels = super().batch(step)
        return inputs * (math.nan if step == 20 else 1), labels


class Doing(teacher.Task):
    """Calls a function before one of its methods."""

    def __init__(self, method, action):
        super().__init__(CONFIG)
        then = getattr(self, method)
        setattr(self, method, lambda *arguments: (action(), then(*arguments))[1])


EXPERIMENTS = {name: partial(teacher.Task, config) for name, config in CONFIGS.items()}
EXPERIMENTS["with dropout"] = partial(WithDropout, CONFIG)


class Crash(Exception):  # noqa: N818
    pass


def crash():
    raise Crash


def interrupt(number=signal.SIGINT):
    signal.raise_signal(number)


def at_step(number, *actions):
    def on_step(step, loss, milliseconds):
        if step == number:
            for action in actions:
                action()

    return on_step


def stop_at(step, experiment, folder, **options):
    with pytest.raises(Stopped, match=f"stopped after step {step}") as stopped:
        train(experiment, folder, on_step=at_step(step, interrupt), **options)
    assert stopped.value.step == step


def stored_step(folder):
    with safe_open(folder / "checkpoint.safetensors", framework="pt") as file:
        return json.loads(file.metadata()["about"])["step"]


def names(folder):
    return sorted(path.name for path in folder.rglob("*"))


def without_times(rows):
    return [{name: value for name, value in row.items() if name != "ms_per_step"} for row in rows]


def assert_same(trained, expected):
    """The same weights, history and outcome, to the bit."""
    weights, wanted = trained.model.state_dict(), expected.model.state_dict()
    assert weights.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(weights[name], value), name
    assert without_times(trained.rows) == without_times(expected.rows)
    assert without_times([trained.outcome]) == without_times([expected.outcome])
