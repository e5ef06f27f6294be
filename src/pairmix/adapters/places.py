"""Where the layers of a model are that have adapters, or can have some."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pairmix.adapters.layer import Adapted, features_of, plain
from pairmix.places import Place, outermost

Targets = Sequence[str] | str | Callable[[str, nn.Module], bool]
"""Which layers: the ends of their names, a regular expression for whole names, or a function of name and layer."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, without what `torch.compile` and DDP put around it, so that names are always the same."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        else:
            return model


def places(model: nn.Module) -> Iterator[Place]:
    """The places of all layers that have adapters, or can have some. What is within these is not looked at."""

    return outermost(
        unwrapped(model),
        lambda place: (
            isinstance(place.found, Adapted) or (features_of(place.found) is not None and not _reads(place.parent))
        ),
    )


def adapted(model: nn.Module) -> dict[str, Adapted]:
    """The layers that have adapters, each once, by name."""
    found: dict[Adapted, str] = {}
    for place in places(model):
        if isinstance(place.found, Adapted):
            found.setdefault(place.found, place.name)
    return {name: layer for layer, name in found.items()}


def matching(model: nn.Module, targets: Targets) -> dict[str, nn.Module]:
    """The layers that the targets name, each once, by name.

    Raises:
        ValueError: if a target matches no layer.
    """
    layers: dict[str, nn.Module] = {}
    for place in places(model):
        layer = plain(place.found)
        if all(layer is not other for other in layers.values()):
            layers[place.name] = layer
    if isinstance(targets, str):
        found = [name for name in layers if re.fullmatch(targets, name)]
        missing = [] if found else [targets]
    elif callable(targets):
        found = [name for name, layer in layers.items() if targets(name, layer)]
        missing = [] if found else [getattr(targets, "__name__", repr(targets))]
    else:
        found = [name for name in layers if any(ends_with(name, target) for target in targets)]
        missing = [target for target in targets if not any(ends_with(name, target) for name in found)]
        missing += [] if targets else ["an empty list"]
    if missing:
        raise ValueError(f"{', '.join(map(repr, missing))} matches no layer that can be adapted; {_existing(layers)}")
    return {name: layers[name] for name in found}


def ends_with(name: str, end: str) -> bool:
    """Whether a dotted name ends with these parts."""
    return name == end or name.endswith(f".{end}")


def _existing(layers: Mapping[str, nn.Module]) -> str:
    """The names of the layers of a model, with the numbers of blocks as stars: those of all blocks are one."""
    names = dict.fromkeys(re.sub(r"(?<![^.])\d+(?=\.)", "*", name) for name in layers)
    return f"there are {', '.join(names)}" if names else "this model has none"


def _reads(parent: nn.Module) -> bool:
    """Whether a module takes the weights of its layers instead of calling them: adapters there would have no effect."""
    return isinstance(parent, nn.MultiheadAttention) or type(parent).__module__.startswith("pairmix.nn")
