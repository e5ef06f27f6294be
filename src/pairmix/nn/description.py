"""What a checkpoint says of a layer, so that its parameters are not loaded into another one."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from pairmix.schedule import Schedule

SIZE = 256
"""The bytes of a description. All have this shape, so that loaders, which compare shapes, load also a wrong one."""

_UNREADABLE = "its description cannot be read"


class Described(nn.Module):
    """A module with a buffer that says what its parameters mean, and that is compared before they are used.

    Every loader overwrites the buffer with the description in the checkpoint. `load_state_dict` compares that one
    before it loads any parameter; what came in another way is compared when the parameters are read.

    Attributes:
        description: JSON, padded with zeros: uint8 `[256]`.
    """

    description: Tensor
    _compared: tuple[Tensor | None, int] = (None, -1)  # the buffer that was compared last, and its version then

    def _meaning(self) -> dict[str, Any]:
        """What the parameters mean: values that JSON can hold, and a `schedule` as `of_schedule` gives it."""
        raise NotImplementedError

    @torch.no_grad()
    def _describe(self) -> None:
        """Write what this module is, on the device of its parameters."""
        device = next(self.parameters()).device
        written = self._buffers.get("description")
        if written is None or written.is_meta:
            with torch.inference_mode(False):  # an inference tensor does not count its versions
                written = torch.zeros(SIZE, dtype=torch.uint8, device=device)
            self.register_buffer("description", written)
        self._remember(written.copy_(encoded(self._meaning())))

    def _remember(self, compared: Tensor) -> None:
        if not compared.is_inference():
            self._compared = compared, compared._version

    def _check_description(self) -> None:
        """Raise if what was loaded last are the parameters of another module. To be called before they are used."""
        if is_dynamo_compiling():
            self._compare_description()
        else:
            described = self._buffers["description"]
            compared, version = self._compared
            if described is not compared or described._version != version:  # type: ignore[union-attr]
                self._compare_description()

    def _compare_description(self) -> None:
        """Raise if the buffer describes another module; else remember that it has been compared."""
        if self.description.is_inference():
            with torch.inference_mode(False):
                self.description = self.description.clone()
        described = _original(self.description)
        if not _has_data(described):
            return
        found = self.differences_from(described)
        if found and not self._is_mended(found):
            problem = "its parameters were neither initialised nor loaded: call reset_parameters() or load a checkpoint"
            raise RuntimeError(f"{type(self).__name__}: {problem if _are_unreadable(found) else _of_another(found)}")
        if described is self.description:
            self._remember(described)

    def _is_mended(self, found: list[str]) -> bool:
        """Whether the buffer was right before something calculated with it; then it is written anew.

        Moving averages of models take all buffers along, and round them.
        """
        was_right = self.description is self._compared[0]
        if was_right and _are_unreadable(found):
            self._describe()
            return True
        return False

    def differences_from(self, stored: object) -> list[str]:
        """How the module that a checkpoint describes differs from this one, in words; empty if it does not."""
        return differences(stored, self._meaning())

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        compared, version = self._compared
        if self.description is compared and compared._version != version:
            self._is_mended(self.differences_from(compared))
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "description" not in self._buffers:  # pickled by version 0.2 or before
            self._describe()
        if self.description.is_inference():  # copied in inference mode, and so has no version
            self._compared = None, -1

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        given = {**state_dict}
        key = prefix + "description"
        old = given.pop(prefix + "_extra_state", None)  # where version 0.2 and before had it
        told = [stored for stored in (given.get(key), old) if stored is not None and not _is_on_meta(stored)]
        found = [difference for stored in told for difference in self.differences_from(stored)]
        if found:
            name = prefix.removesuffix(".") or type(self).__name__
            error_msgs.append(f"{name}: {_of_another(found)}")
            return
        super()._load_from_state_dict(given, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if key in given:
            return
        if old is not None and key in missing_keys:
            missing_keys.remove(key)
        if all(prefix + name in given for name, _ in self.named_parameters(recurse=False)):
            self._describe()


# Dynamo calls this while it traces, with the real buffer: compiled code is checked and does not contain the check. This
# mark is all that torch.compiler.assume_constant_result sets, but that imports Dynamo, which takes seconds.
Described._compare_description._dynamo_marked_constant = True  # type: ignore[attr-defined]


def of_schedule(schedule: Schedule) -> dict[str, Any]:
    """A schedule as descriptions hold it, however long it is: its pairs are told by their digest."""
    told = {"kind": schedule.kind, "n": schedule.n, "stages": schedule.stages, "digest": schedule.digest}
    return {**told, **schedule.options}


def encoded(meaning: Mapping[str, Any]) -> Tensor:
    """The bytes of a JSON text, padded with zeros. A tensor, because some formats hold nothing else."""
    text = _compact(meaning)
    if len(text) > SIZE:  # with a huge seed; the digest tells schedules apart too
        schedule = {key: value for key, value in meaning["schedule"].items() if key not in ("seed", "block_size")}
        text = _compact({**meaning, "schedule": schedule})
    return torch.tensor(list(text.ljust(SIZE, b"\0")), dtype=torch.uint8, device="cpu")


def _compact(meaning: Mapping[str, Any]) -> bytes:
    return json.dumps(meaning, separators=(",", ":")).encode()


def differences(stored: object, ours: Mapping[str, Any]) -> list[str]:
    """How the layer that a checkpoint describes differs from ours. Nothing of what it describes is built.

    Args:
        stored: what the checkpoint holds: as `encoded` gives it, or a JSON text of any length without padding.
        ours: what our layer says of itself; its `schedule` is as `of_schedule` gives it.
    """
    schedule = ours["schedule"]
    most = 1000 + 16 * schedule["n"] * schedule["stages"]  # one of this layer, even with all its pairs, is shorter
    if not isinstance(stored, Tensor) or stored.dtype != torch.uint8 or stored.dim() != 1 or stored.is_meta:
        return [f"its description must be a vector of bytes, got {reprlib.repr(stored)}"]
    if len(stored) > most:
        return [f"its description has {len(stored):,} bytes, that of this layer at most {most:,}"]
    try:
        theirs = json.loads(bytes(stored.tolist()).rstrip(b"\0"))
        their_schedule = theirs["schedule"]
        described = {key: their_schedule[key] for key in ("n", "stages", "digest")}
    except (TypeError, ValueError, KeyError, IndexError, RecursionError) as error:
        return [f"{_UNREADABLE} ({error!r})"]
    found = [
        f"{key} is {str(theirs.get(key))[:40]} there and {value} here"
        for key, value in ours.items()
        if key != "schedule" and theirs.get(key) != value
    ]
    if described != {key: schedule[key] for key in described}:
        found.append(f"schedule is {_named(their_schedule)} there and {_named(schedule)} here")
    return found


def _of_another(found: list[str]) -> str:
    return f"the checkpoint is of another layer: {'; '.join(found)}"


def _are_unreadable(found: list[str]) -> bool:
    return any(difference.startswith(_UNREADABLE) for difference in found)


def _is_on_meta(stored: object) -> bool:
    return isinstance(stored, Tensor) and stored.is_meta


def _has_data(tensor: Tensor) -> bool:
    """Whether it can be read: not on meta, not a stand-in for another tensor while something traces or transforms."""
    if type(tensor) is not Tensor or tensor.is_meta:
        return False
    try:
        tensor.untyped_storage()  # the wrappers of torch.func have none
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _original(tensor: Tensor) -> Tensor:
    """The tensor in whose place torch.export has put a fake one; otherwise the tensor itself."""
    try:
        converter = tensor.fake_mode.fake_tensor_converter.meta_converter  # type: ignore[attr-defined]
        known = converter.describer.lookup_tensor.items()
        return next((real for real, number in known if converter.tensor_memo.get(number) is tensor), tensor)
    except AttributeError:
        return tensor


def _named(schedule: Mapping[str, Any]) -> str:
    """A schedule as its `repr` names it, from its description alone; own pairs are told apart by their digest."""
    known = ("n", "stages", "seed", "block_size")
    arguments: dict[str, Any] = {key: schedule[key] for key in known if key in schedule}
    if schedule.get("kind") == "from_pairs":
        arguments["digest"] = schedule["digest"]
    listed = ", ".join(f"{key}={reprlib.repr(value)}" for key, value in arguments.items())
    return f"Schedule.{str(schedule.get('kind'))[:20]}({listed})"
