"""Where modules are in a model, and how another one is put there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import nn


class Place(NamedTuple):
    """Where a module is; one that is shared is at several places.

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
        """What is there."""
        return self.parent.get_submodule(self.key)

    def put(self, module: nn.Module) -> None:
        """Put a module there."""
        self.parent.register_module(self.key, module)


def outermost(model: nn.Module, wanted: Callable[[Place], bool]) -> Iterator[Place]:
    """The places whose modules are wanted, as often as a module occurs. What is within these is not looked at."""

    def below(parent: nn.Module, prefix: str) -> Iterator[Place]:
        for key, module in list(parent._modules.items()):
            if module is None:
                continue
            place = Place(prefix + key, parent, key)
            if wanted(place):
                yield place
            else:
                yield from below(module, f"{prefix}{key}.")

    return below(model, "")
