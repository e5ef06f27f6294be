"""Everything that a run needs to resume, in one file with a checksum."""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from pairmix.nn.description import Described
from pairmix_lab import files

FORMAT = "pairmix checkpoint 2"
LARGEST_HEADER = 1 << 26  # bytes; a million steps with a row for every 20 have a quarter of that


class CheckpointError(Exception):
    """A run that cannot be started, resumed or stored; the message says why."""


@dataclass
class State:
    """The state of a run between two steps.

    Attributes:
        model: its weights.
        optimizer: its moments.
        step: how many steps are done. A batch depends on nothing but the seed and its step, so this is also the place
            in the data.
        record: the `rows` of the history, the `losses` since the last row, and the `milliseconds` of every step.
    """

    model: nn.Module
    optimizer: torch.optim.Adam
    step: int
    record: dict[str, Any]


def store(path: Path, state: State, config: Mapping[str, Any]) -> None:
    """Write a checkpoint, whole or not at all: an older one stays until the new one is on the disk.

    Args:
        path: the file.
        state: what is to be stored.
        config: what makes the run this one and no other: its settings, `steps` among them, and the hashes of its data.
    """
    tensors = {f"model.{name}": value for name, value in state.model.state_dict().items()}
    for index, moments in state.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in moments.items()}
    tensors["random_state"] = torch.get_rng_state()
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    about = json.dumps({"format": FORMAT, "config": dict(config), "step": state.step, "record": state.record})
    content = save(tensors, {"about": about, "digest": digest(about, tensors)})
    try:
        _check_header(content[:8])
        with files.atomic(path) as file:
            file.write(content)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path} could not be written, and is as it was before: {reason}") from error


def restore(path: Path, state: State, config: Mapping[str, Any]) -> None:
    """Read a checkpoint into `state`, if this run has written it; after an error `state` is as it was before."""
    about, tensors = _read(path)
    other = differences(about["config"], config)
    if other:
        raise CheckpointError(f"{path} is of another run: {other}")
    step, record = about["step"], about["record"]
    try:
        _check_step(step, config["steps"])
        _check_record(record, step)
        _check_tensors(tensors, state, step)
    except ValueError as error:
        raise CheckpointError(f"{path} {error}") from error

    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        kind, *rest = name.split(".")
        if kind == "optimizer":
            index, moment = rest
            moments.setdefault(int(index), {})[moment] = value.clone()  # not the mapped file
    model = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    state.model.load_state_dict(model)
    state.optimizer.load_state_dict({**state.optimizer.state_dict(), "state": moments})
    torch.set_rng_state(tensors["random_state"])
    state.step, state.record = step, record


def digest(about: str, tensors: Mapping[str, Tensor]) -> str:
    """The checksum of a checkpoint: over its description and the names, dtypes, shapes and bytes of its tensors."""
    content = hashlib.sha256(json.dumps(about).encode())
    for name, value in sorted(tensors.items()):
        content.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        content.update(value.reshape(-1).view(torch.uint8).numpy().data)  # its memory, not a copy
    return f"sha256:{content.hexdigest()}"


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """The entries that differ, in words; empty if none does."""
    shown = reprlib.Repr()
    keys = [key for key in sorted(there.keys() | here.keys()) if there.get(key) != here.get(key)]
    parts = [f"{key} is {shown.repr(there.get(key))} there and {shown.repr(here.get(key))} here" for key in keys]
    return "; ".join(parts[:8] + [f"and {len(parts) - 8} more"] * (len(parts) > 8))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with path.open("rb") as start:
            _check_header(start.read(8))
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            text = metadata.get("about", "{}")
            about = json.loads(text)
            version = about.get("format") if isinstance(about, dict) else None
            if not isinstance(version, str) or not version.startswith("pairmix checkpoint"):
                raise CheckpointError(f"{path} is not a checkpoint of pairmix")
            if version != FORMAT:
                other = f"{version}; this version of pairmix reads {FORMAT}"
                raise CheckpointError(f"{path} is of another version: {other}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read, it is cut off or no checkpoint: {error}") from error
    if metadata.get("digest") != digest(text, tensors):
        raise CheckpointError(f"{path} is damaged: its content does not match its checksum")
    if about.keys() != {"format", "config", "step", "record"} or not isinstance(about["config"], dict):
        raise CheckpointError(f"{path} is not a checkpoint of pairmix: it has {reprlib.repr(sorted(about))}")
    return about, tensors


def _check_header(start: bytes) -> None:
    """What a safetensors file begins with: how long its header is."""
    size = int.from_bytes(start, "little")
    if size > LARGEST_HEADER:
        raise ValueError(f"its header of {size} bytes is larger than {LARGEST_HEADER}")


def _check_step(step: Any, steps: int) -> None:
    if type(step) is not int or not 0 <= step <= steps:
        raise ValueError(f"has a wrong step: expected 0 to {steps}, got {reprlib.repr(step)}")


def _check_record(record: Any, step: int) -> None:
    """Whether it is one of a run of so many steps."""

    def are_numbers(values: Any, length: int) -> bool:
        return (
            isinstance(values, list)
            and len(values) == length
            and all(type(value) is float and math.isfinite(value) for value in values)
        )

    def is_row(row: Any) -> bool:
        return (
            isinstance(row, dict)
            and row.keys() >= {"step", "train_loss", "ms_per_step"}
            and all(type(value) is (int if name == "step" else float) for name, value in row.items())
        )

    if not isinstance(record, dict) or record.keys() != {"rows", "losses", "milliseconds"}:
        raise ValueError(f"has a wrong record: expected rows, losses and milliseconds, got {reprlib.repr(record)}")
    rows = record["rows"]
    if not isinstance(rows, list) or not all(map(is_row, rows)):
        raise ValueError(f"has a wrong record: rows is {reprlib.repr(rows)}")
    steps = [0, *(row["step"] for row in rows)]
    if any(before >= after for before, after in pairwise(steps)) or steps[-1] > step:
        raise ValueError(f"has a wrong record: its rows are of steps {reprlib.repr(steps[1:])} of {step}")
    for name, length in {"losses": step - steps[-1], "milliseconds": step}.items():
        if not are_numbers(record[name], length):
            raise ValueError(f"has a wrong record: {name} must be {length} numbers, got {reprlib.repr(record[name])}")


def _check_tensors(tensors: Mapping[str, Tensor], state: State, step: int) -> None:
    """Whether they are what this run would write after so many steps."""
    model = {f"model.{name}": value for name, value in state.model.state_dict().items()}
    renamed = _check_descriptions(tensors, state.model)
    tensors = {name: value for name, value in tensors.items() if name not in renamed}
    model = {name: value for name, value in model.items() if name not in renamed}
    moments: dict[tuple[int, str], Tensor] = {}
    parameters = [parameter for group in state.optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters if step else []):  # Adam has no moments before its first step
        moments |= {(index, "step"): torch.tensor(0.0), (index, "exp_avg"): parameter, (index, "exp_avg_sq"): parameter}
    expected = {**model, **{f"optimizer.{index}.{name}": value for (index, name), value in moments.items()}}
    other = differences(_forms(tensors), _forms({**expected, "random_state": torch.get_rng_state()}))
    if other:
        raise ValueError(f"does not fit this model: {other}")
    for name in [f"optimizer.{index}.step" for index, name in moments if name == "step"]:
        if tensors[name] != step:
            raise ValueError(f"does not fit this model: {name} is {float(tensors[name])}, though the step is {step}")
    try:
        torch.Generator().set_state(tensors["random_state"])
    except RuntimeError as error:
        raise ValueError(f"has a wrong random state: {error}") from error


def _check_descriptions(tensors: Mapping[str, Tensor], model: nn.Module) -> set[str]:
    """Raise unless the file describes the layers of the model.

    Returns:
        Both names of the descriptions that the file has under an older name.
    """
    renamed: set[str] = set()
    for layer, module in model.named_modules(prefix="model"):
        if isinstance(module, Described):
            name, older = f"{layer}.description", f"{layer}._extra_state"
            stored = tensors.get(name, tensors.get(older))
            other = ["it is missing"] if stored is None else module.differences_from(stored)
            if other:
                raise ValueError(f"does not fit this model: {name} is of another layer: {'; '.join(other)}")
            if name not in tensors:
                renamed |= {name, older}
    return renamed


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: f"{value.dtype} {list(value.shape)}" for name, value in tensors.items()}
