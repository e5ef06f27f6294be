"""Where the layers of a model are that have adapters, or can have some."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pairmix.adapters.layer import Adapted, features_of

Targets = Sequence[str] | str | Callable[[str, nn.Module], bool]
"""Which layers: the ends of their names, a regular expression for whole names, or a function of name and layer."""


class Place(NamedTuple):
    """Where a layer is; one that is shared is at several places.

    Attributes:
        name: its full name.
        parent: the module that holds it.
        key: its name there.
    """

    name: str
    parent: nn.Module
    key: str

    @property
    def found(self) -> nn.Module:
        """What is there: the layer, or the one around it."""
        return self.parent.get_submodule(self.key)

    @property
    def layer(self) -> nn.Module:
        """The layer itself."""
        return self.found.base if isinstance(self.found, Adapted) else self.found

    def put(self, module: nn.Module) -> None:
        """Put a module there."""
        setattr(self.parent, self.key, module)


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

    def below(parent: nn.Module, prefix: str) -> Iterator[Place]:
        for key, module in parent._modules.items():
            if module is None:
                continue
            if isinstance(module, Adapted) or (features_of(module) is not None and not _reads(parent)):
                yield Place(prefix + key, parent, key)
            else:
                yield from below(module, f"{prefix}{key}.")

    return below(unwrapped(model), "")


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
        if all(place.layer is not other for other in layers.values()):
            layers[place.name] = place.layer
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
