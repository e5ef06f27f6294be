"""Everything that a run needs to go on, in one file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from pairmix import files

FORMAT = "pairmix checkpoint 1"


class CheckpointError(Exception):
    """A checkpoint that cannot be gone on from; the message says why."""


@dataclass
class State:
    """What a run has come to.

    Attributes:
        model: its weights.
        optimizer: its moments.
        step: how many steps are done. A batch depends on nothing but the seed and its step, so this is also the place
            in the data.
        record: everything else that is worth keeping, as JSON.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int
    record: dict[str, Any]


def store(path: Path, state: State, config: Mapping[str, Any]) -> None:
    """Write a checkpoint, whole or not at all: an older one stays until the new one is on the disk."""
    tensors = {f"model.{name}": value for name, value in state.model.state_dict().items()}
    for index, moments in state.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in moments.items()}
    tensors["random_state"] = torch.get_rng_state()
    about = {"format": FORMAT, "config": dict(config), "step": state.step, "record": state.record}
    content = save({name: value.contiguous() for name, value in tensors.items()}, {"about": json.dumps(about)})
    try:
        with files.atomic(path) as file:
            file.write(content)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written, and is as it was before: {error.strerror}") from error


def restore(path: Path, state: State, config: Mapping[str, Any]) -> None:
    """Read a checkpoint into `state`, if it is one of a run with the same config."""
    about, tensors = _read(path)
    differences = [
        f"{key} is {about['config'].get(key)!r} there and {config.get(key)!r} here"
        for key in sorted(about["config"].keys() | config.keys())
        if about["config"].get(key) != config.get(key)
    ]
    if differences:
        raise CheckpointError(f"{path} is of another run: {'; '.join(differences)}")
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            index, _, moment = rest.partition(".")
            moments.setdefault(int(index), {})[moment] = value.clone()  # not the mapped file
    weights = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    try:
        state.model.load_state_dict(weights)
        state.optimizer.load_state_dict({**state.optimizer.state_dict(), "state": moments})
        torch.set_rng_state(tensors["random_state"])
    except (RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} does not fit this model: {error}") from error
    state.step, state.record = about["step"], about["record"]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("about", "{}"))
            if not isinstance(about, dict) or about.get("format") != FORMAT:
                raise CheckpointError(f"{path} is not a checkpoint of pairmix, or one of another version")
            return about, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read, it is cut off or no checkpoint: {error}") from error
