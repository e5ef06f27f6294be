"""What a checkpoint says of a layer, so that its parameters are not loaded into another one."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def encoded(meaning: Mapping[str, Any]) -> Tensor:
    """The bytes of a JSON text. A tensor, because some checkpoint formats hold nothing else."""
    return torch.frombuffer(bytearray(json.dumps(dict(meaning)).encode()), dtype=torch.uint8)


def differences(stored: object, ours: Mapping[str, Any]) -> list[str]:
    """How the layer that a checkpoint describes differs from ours. Nothing of what it describes is built.

    Args:
        stored: what the checkpoint holds, as `encoded` gives it.
        ours: what our layer says of itself; its `schedule` is as `Schedule.to_dict` gives it.
    """
    schedule = ours["schedule"]
    most = 1000 + 16 * schedule["n"] * schedule["stages"]  # one of this layer, even with all its pairs, is shorter
    if not isinstance(stored, Tensor) or stored.dtype != torch.uint8 or stored.dim() != 1 or stored.is_meta:
        return [f"its description must be a vector of bytes, got {reprlib.repr(stored)}"]
    if len(stored) > most:
        return [f"its description has {len(stored):,} bytes, that of this layer at most {most:,}"]
    try:
        theirs = json.loads(stored.cpu().numpy().tobytes())
        their_schedule = theirs["schedule"]
        described = {key: their_schedule[key] for key in ("n", "stages", "digest")}
    except (TypeError, ValueError, KeyError, IndexError, RecursionError) as error:
        return [f"its description cannot be read ({error!r})"]
    compared = {key: value for key, value in ours.items() if key != "schedule"}
    if schedule["n"] % 2 == 0:
        del compared["residual"]  # without a residual it makes no difference
    found = [
        f"{key} is {str(theirs.get(key))[:40]} there and {value} here"
        for key, value in compared.items()
        if theirs.get(key) != value
    ]
    if described != {key: schedule[key] for key in described}:
        found.append(f"schedule is {_named(their_schedule)} there and {_named(schedule)} here")
    return found


def _named(schedule: Mapping[str, Any]) -> str:
    """A schedule as its `repr` names it, from its description alone; own pairs are told apart by their digest."""
    arguments: dict[str, Any] = {key: schedule[key] for key in ("n", "stages", "seed") if key in schedule}
    if schedule.get("kind") == "from_pairs":
        arguments["digest"] = schedule["digest"]
    listed = ", ".join(f"{key}={reprlib.repr(value)}" for key, value in arguments.items())
    return f"Schedule.{str(schedule.get('kind'))[:20]}({listed})"
