"""Adapters of a model: add them, choose one, take them off."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pairmix.adapters.layer import INPUT, Adapted, Rotations, check_where, features_of, plain
from pairmix.adapters.places import Targets, adapted, ends_with, matching, places, unwrapped
from pairmix.nn.linear import make_schedule
from pairmix.schedule import Schedule
from pairmix.tables import aligned

Trainable = Sequence[str] | Callable[[str, nn.Parameter], bool]
"""Parameters: the ends of their names, or of those of modules that hold them; or a function of name and parameter."""


class Added(dict[str, Rotations]):
    """What was added to which layer, by its name. Printed, it is a table.

    Attributes:
        total: the number of parameters of the model, with the adapters.
        chosen: what was chosen for the caller, in a sentence; empty for nothing.
    """

    total: int = 0
    chosen: str = ""

    def __repr__(self) -> str:
        lines = [
            [
                name,
                f"{rotations.schedule.n:,}",
                str(rotations.schedule.stages),
                rotations.where + " and scale" * (rotations.scale is not None),
                f"{_count(rotations):,}",
            ]
            for name, rotations in self.items()
        ]
        trainable = sum(map(_count, self.values()))
        total = f"{trainable:,} of {self.total:,} parameters ({trainable / max(1, self.total):.2%})"
        table = aligned([["layer", "width", "stages", "where", "parameters"], *lines])
        return "\n".join([*table, f"in all: {total}", *filter(None, [self.chosen])])


def add(
    model: nn.Module,
    targets: Targets,
    *,
    name: str = "default",
    stages: int | None = None,
    schedule: str | Schedule = "butterfly",
    where: str = INPUT,
    scale: bool = False,
    keep_trainable: Trainable = (),
) -> Added:
    """Put rotations before or after layers of a model, in place, and freeze everything else.

        y = W (S R x) + b        or        y = S R (W x) + b

    R starts exactly as the identity, so the model computes the same as before. A layer can be any module that is
    called, has `in_features` and `out_features`, and is differentiable, such as `nn.Linear`, or a quantised one; or the
    Conv1D of transformers. The new adapter is in use, and those of other names stay as they are, frozen.

    The parameters are in float32, or in float64 for a layer in float64. With half-precision inputs the rotations are
    computed in float32, and their output has the dtype of the input.

    Args:
        model: in place of each layer it holds an `Adapted` afterwards, whose `base` is the layer.
        targets: which layers: a list of the ends of their names, such as `["attn.c_attn", "mlp.c_fc"]`; a regular
            expression for whole names; or a function of name and layer that says whether.
        name: of the adapter; no dot, and no other adapter of the model has it.
        stages: of each chain; None for the fewest with which every coordinate depends on every other.
        schedule: `"butterfly"`, `"random_blocks"`, `"random"` (seed 0), `"brick"` or a `Schedule` of the width of all
            these layers.
        where: `"input"` for rotations before the layer, `"output"` for rotations after it.
        scale: whether also S is learned, a number for each coordinate. Without it, S is the identity.
        keep_trainable: the parameters of the model that are not frozen: a list of the ends of their names, or of those
            of modules that hold them; or a function of name and parameter.

    Raises:
        ValueError: for targets that match no layer, a name that is taken, or an option that does not exist. The model
            is as it was before.
        RuntimeError: if an adapter is merged.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
        >>> add(model, ["0", "2"])
        layer  width  stages  where  parameters
        0      64     6       input  192
        2      256    8       input  1,024
        in all: 1,216 of 20,426 parameters (5.95%)
        stages=None: the fewest with which every coordinate depends on every other
    """
    check_not_merged(model)
    found = matching(model, targets)
    rotations = {}
    for layer_name, layer in found.items():
        n = width(layer, where)
        try:
            pairs = make_schedule(schedule, n, stages)
        except ValueError as error:
            raise ValueError(f"{layer_name}: {error}") from error
        rotations[layer_name] = Rotations(pairs, where=where, scale=scale, **like(layer))
    attach(model, name, rotations, keep_trainable)
    added = Added(rotations)
    added.total = sum(parameter.numel() for parameter in model.parameters())
    if stages is None and isinstance(schedule, str):
        added.chosen = "stages=None: the fewest with which every coordinate depends on every other"
    return added


def attach(model: nn.Module, name: str, rotations: Mapping[str, Rotations], keep_trainable: Trainable = ()) -> None:
    """Put rotations on the layers of these names, freeze everything else, and use them."""
    if not name or "." in name or hasattr(nn.ModuleDict, name):
        raise ValueError(f"name must be a word without dots that is no method of nn.ModuleDict, got {name!r}")
    if name in names(model):
        raise ValueError(f"this model has an adapter {name!r} already; it has {names(model)}")
    found = list(places(model))
    layers = {place.name: plain(place.found) for place in found}
    own = {layers[layer_name]: one for layer_name, one in rotations.items()}
    wrappers: dict[nn.Module, Adapted] = {}
    for place in found:
        wrapper, layer = place.found, plain(place.found)
        if layer not in own:
            continue
        if not isinstance(wrapper, Adapted):
            wrapper = wrappers.setdefault(layer, Adapted(layer))
            place.put(wrapper)
            if isinstance(place.parent, nn.TransformerEncoderLayer):
                # Its fast path reads the weights instead of calling the layers, except where there are hooks.
                wrapper.register_forward_hook(_nothing)
        wrapper.rotations[name] = own[layer]
    _freeze(unwrapped(model), keep_trainable)
    use(model, name)


def use(model: nn.Module, name: str | None) -> None:
    """Let a model compute with an adapter, or with None as it did without any.

    The parameters of that adapter require gradients afterwards, and those of all others do not.

    Raises:
        ValueError: if there is no such adapter.
        RuntimeError: if an adapter is merged.
    """
    check_not_merged(model)
    if name is not None:
        check_exists(model, name)
    for layer in adapted(model).values():
        layer.used = name if name is not None and name in layer.rotations else None
        for other, rotations in layer.rotations.items():
            rotations.requires_grad_(other == name)


@contextmanager
def off(model: nn.Module) -> Iterator[None]:
    """Within this context, let a model compute as it did without adapters.

    Examples:
        >>> model = nn.Sequential(nn.Linear(8, 8))
        >>> x = torch.randn(2, 8)
        >>> y = model(x)
        >>> _ = add(model, ["0"])
        >>> _ = nn.init.normal_(parameters(model)[0])
        >>> with off(model):
        ...     torch.equal(model(x), y)
        True
        >>> torch.equal(model(x), y)
        False
    """
    check_not_merged(model)
    before = {layer: layer.used for layer in adapted(model).values()}
    try:
        for layer in before:
            layer.used = None
        yield
    finally:
        for layer, used in before.items():
            layer.used = used


def names(model: nn.Module) -> list[str]:
    """The names of a model's adapters."""
    return list(dict.fromkeys(name for layer in adapted(model).values() for name in layer.rotations))


def parameters(model: nn.Module, name: str = "default") -> list[nn.Parameter]:
    """The parameters of an adapter.

    Raises:
        ValueError: if there is no such adapter.
    """
    return [parameter for rotations in chains(model, name).values() for parameter in rotations.parameters()]


def remove(model: nn.Module, name: str = "default") -> None:
    """Take an adapter off. Layers without another one are again what they were before; they stay frozen.

    Raises:
        ValueError: if there is no such adapter.
        RuntimeError: if an adapter is merged: `unmerge_` first, or leave it to `merge_(model, name, remove=True)`.
    """
    check_exists(model, name)
    check_not_merged(model)
    take_off(model, name)


def take_off(model: nn.Module, name: str) -> None:
    """`remove`, whatever the weights hold."""
    for place in list(places(model)):
        layer = place.found
        if not isinstance(layer, Adapted):
            continue
        if name in layer.rotations:
            del layer.rotations[name]
        layer.used = None if layer.used == name else layer.used
        if not layer.rotations:
            place.put(layer.base)


def chains(model: nn.Module, name: str) -> dict[str, Rotations]:
    """The rotations of an adapter, by the name of the layer.

    Raises:
        ValueError: if there is no such adapter.
    """
    check_exists(model, name)
    layers = adapted(model).items()
    return {layer_name: layer.chain(name) for layer_name, layer in layers if name in layer.rotations}


def check_exists(model: nn.Module, name: str) -> None:
    """Raise a ValueError if a model has no such adapter."""
    if name not in names(model):
        raise ValueError(f"there is no adapter {name!r}; this model has {names(model) or 'none'}")


def check_not_merged(model: nn.Module) -> None:
    """Raise a RuntimeError if an adapter of a model is merged into its weights."""
    for layer in adapted(model).values():
        for name in layer.rotations:
            if layer.chain(name).is_merged:
                raise RuntimeError(f"the adapter {name!r} is merged into the weights: unmerge_(model, {name!r}) first")


def width(layer: nn.Module, where: str) -> int:
    """How many features there are before or after a layer."""
    check_where(where)
    features = features_of(layer)
    assert features is not None
    return features[0 if where == INPUT else 1]


def like(layer: nn.Module) -> dict[str, Any]:
    """Device and dtype of rotations for a layer."""
    tensors = [*layer.parameters(), *layer.buffers()]
    is_double = any(tensor.dtype == torch.float64 for tensor in tensors)
    device = tensors[0].device if tensors else torch.device("cpu")
    return {"device": device, "dtype": torch.float64 if is_double else torch.float32}


def _freeze(model: nn.Module, keep_trainable: Trainable) -> None:
    """Freeze all parameters but these; those of adapters are not meant."""

    def is_kept(name: str, parameter: nn.Parameter) -> bool:
        if callable(keep_trainable):
            return keep_trainable(name, parameter)
        parts = name.split(".")
        paths = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        return any(ends_with(path, kept) for path in paths for kept in keep_trainable)

    of_adapters, plain = set[nn.Parameter](), dict[nn.Parameter, str]()
    for layer_name, layer in adapted(model).items():
        of_adapters.update(layer.rotations.parameters())
        # To the caller, parameters have the names that they have without adapters.
        plain |= {parameter: f"{layer_name}.{name}" for name, parameter in layer.base.named_parameters()}
    for name, parameter in model.named_parameters():
        if parameter not in of_adapters and not is_kept(plain.get(parameter, name), parameter):
            parameter.requires_grad_(False)


def _count(rotations: Rotations) -> int:
    return sum(parameter.numel() for parameter in rotations.parameters())


def _nothing(module: nn.Module, inputs: Any, output: Any) -> None:
    pass
