"""Adapters as files: their parameters, and what describes them, without the model."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pairmix.adapters.layer import Rotations, plain
from pairmix.adapters.model import Trainable, attach, chains, check_not_merged, like, names, width
from pairmix.adapters.places import places
from pairmix.schedule import Schedule

FORMAT = "pairmix adapter 1"
"""Of what `save` writes."""
_KEY = "pairmix"


def save(model: nn.Module, path: str | os.PathLike[str], name: str = "default") -> None:
    """Write an adapter to a file of safetensors, whole or not at all.

    The file holds the parameters of the adapter alone. What they mean is in its metadata, as JSON: the layers, their
    schedules, where the rotations are, and the versions that wrote it.

    Raises:
        ValueError: if there is no such adapter.
        ImportError: without the package safetensors.
    """
    save_tensors, _ = _safetensors()
    rotations = chains(model, name)
    tensors = {
        f"{layer}.{parameter_name}": parameter.detach().cpu().contiguous()
        for layer, one in rotations.items()
        for parameter_name, parameter in one.named_parameters()
    }
    about = {
        "format": FORMAT,
        "name": name,
        "layers": {layer: _about(one) for layer, one in rotations.items()},
        "schedules": {one.schedule.digest: one.schedule.to_dict() for one in rotations.values()},
        "versions": {package: metadata.version(package) for package in ("pairmix", "torch")},
    }
    _write(Path(path), save_tensors(tensors, {_KEY: json.dumps(about)}))


def load(
    model: nn.Module, path: str | os.PathLike[str], name: str | None = None, *, keep_trainable: Trainable = ()
) -> str:
    """Read an adapter from a file of `save` into a model, wholly or not at all.

    If the model has an adapter of this name, the parameters are copied into it, in place. If not, the adapter is added,
    everything else is frozen, and it is in use.

    Args:
        model: a model with the layers that the adapter was trained on.
        path: the file.
        name: of the adapter in this model; None for the name under which it was saved.
        keep_trainable: as in `add`.

    Returns:
        The name of the adapter.

    Raises:
        ValueError: if the file cannot be read or does not fit the model; the message says what differs. The model is as
            it was before.
        RuntimeError: if an adapter is merged.
        ImportError: without the package safetensors.

    Examples:
        >>> from pairmix import adapters
        >>> folder = tempfile.mkdtemp()
        >>> model = nn.Sequential(nn.Linear(8, 8))
        >>> _ = adapters.add(model, ["0"], name="poems")
        >>> save(model, f"{folder}/poems.safetensors", "poems")
        >>> other = nn.Sequential(nn.Linear(8, 8))
        >>> load(other, f"{folder}/poems.safetensors")
        'poems'
    """
    check_not_merged(model)
    about, tensors = _read(Path(path))
    name = about["name"] if name is None else name
    try:
        rotations = _built(model, about, tensors)
        if name in names(model):
            _check_same(chains(model, name), rotations)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} does not fit this model: {error}") from error
    if name not in names(model):
        attach(model, name, rotations, keep_trainable)
        return name
    with torch.no_grad():
        for layer, one in chains(model, name).items():
            for parameter_name, parameter in one.named_parameters():
                parameter.copy_(rotations[layer].get_parameter(parameter_name))
    return name


def _about(rotations: Rotations) -> dict[str, Any]:
    """What the parameters mean, apart from their values."""
    schedule = rotations.schedule
    return {
        "where": rotations.where,
        "scale": rotations.scale is not None,
        "width": schedule.n,
        "stages": schedule.stages,
        "schedule": schedule.digest,
    }


def _built(model: nn.Module, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Rotations]:
    """The rotations of a file, with their values, for the layers of this model."""
    layers = {place.name: plain(place.found) for place in places(model)}
    missing = [name for name in about["layers"] if name not in layers]
    if missing:
        raise ValueError(f"it is for the layers {', '.join(missing)}, which are not there or cannot be adapted")
    rotations = {}
    for name, described in about["layers"].items():
        where, angles = str(described.get("where")), tensors.get(f"{name}.angles")
        n = width(layers[name], where)
        if described.get("width") != n:
            raise ValueError(f"{name}: the width is {described.get('width')} there and {n} here")
        # Compared before the schedule is made: that of a damaged file could be of any size.
        schedule = about["schedules"].get(described.get("schedule"))
        stages = None if angles is None or angles.dim() != 2 else angles.shape[0]
        if not isinstance(schedule, dict) or (schedule.get("n"), schedule.get("stages")) != (n, stages):
            raise ValueError(f"{name}: it has no schedule of width {n} for its {stages} stages")
        if schedule.get("digest") != described["schedule"]:
            raise ValueError(f"{name}: its schedule has another digest than the layer says")
        options: dict[str, Any] = {"where": where, "scale": bool(described.get("scale"))}
        rotations[name] = Rotations(Schedule.from_dict(schedule), **options, **like(layers[name]))
    _fill(rotations, tensors)
    return rotations


@torch.no_grad()
def _fill(rotations: Mapping[str, Rotations], tensors: Mapping[str, Tensor]) -> None:
    parameters = {
        f"{layer}.{name}": parameter for layer, one in rotations.items() for name, parameter in one.named_parameters()
    }
    for kind, found in (
        ("lacks", parameters.keys() - tensors.keys()),
        ("has too many", tensors.keys() - parameters.keys()),
    ):
        if found:
            raise ValueError(f"it {kind} tensors: {', '.join(sorted(found))}")
    for name, parameter in parameters.items():
        stored = tensors[name]
        if stored.shape != parameter.shape or not stored.is_floating_point():
            raise ValueError(
                f"{name} is {stored.dtype} of shape {tuple(stored.shape)} there, and must be in floating point and of "
                f"shape {tuple(parameter.shape)}"
            )
        parameter.copy_(stored)


def _check_same(ours: Mapping[str, Rotations], theirs: Mapping[str, Rotations]) -> None:
    """Raise a ValueError if the two are not of the same layers, and alike there."""
    for words, found in (("not here", theirs.keys() - ours.keys()), ("only here", ours.keys() - theirs.keys())):
        if found:
            raise ValueError(f"the adapter is on other layers; {words}: {', '.join(sorted(found))}")
    for layer, one in ours.items():
        there, here = _about(theirs[layer]), _about(one)
        differences = [f"{key} is {there[key]} there and {here[key]} here" for key in here if there[key] != here[key]]
        if differences:
            raise ValueError(f"{layer}: {'; '.join(differences)}")


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    _, safe_open = _safetensors()
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there, or no file")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get(_KEY, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # of safetensors, of the disk, of JSON
        raise ValueError(f"{path} cannot be read, it is cut off or no file of safetensors: {error}") from error
    version = about.get("format") if isinstance(about, dict) else None
    if version != FORMAT:
        raise ValueError(
            f"{path} is no adapter that this version of pairmix reads: its format is {version!r}, not {FORMAT!r}"
        )
    parts = (about.get("layers"), about.get("schedules"))
    if not all(isinstance(part, dict) and all(isinstance(one, dict) for one in part.values()) for part in parts):
        raise ValueError(f"{path} is damaged: it does not describe its layers and schedules")
    if not isinstance(about.get("name"), str):
        raise ValueError(f"{path} is damaged: it has no name")
    return about, tensors


def _write(path: Path, content: bytes) -> None:
    """Write a file that takes the place of `path` when all of it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, suffix=".part", delete=False) as file:
        part = Path(file.name)
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            part.chmod(0o644)
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _safetensors() -> tuple[Any, Any]:
    try:
        from safetensors import safe_open
        from safetensors.torch import save
    except ImportError as error:
        raise ImportError("files of adapters need safetensors: pip install safetensors") from error
    return save, safe_open
