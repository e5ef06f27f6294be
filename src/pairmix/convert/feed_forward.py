"""Feed-forward blocks as wholes: recognised by what they compute, whatever class they are of."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import permutations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pairmix.convert.twins import HOOKS, LINEAR, Map, Twin, of_dense
from pairmix.dense import matrix_of
from pairmix.functional import ACTIVATIONS, activated
from pairmix.nn import SPMFeedForward, SPMLinear

_SIZE = 8
"""Features of the small layers on which a module is tried."""
_TOLERANCE = 1e-12
"""How far two float64 results may differ, relative to the largest number of a row: `gelu_tanh` is 1e-4 from `gelu`."""


@dataclass(frozen=True)
class Parts:
    """Which child of a module is which part of a feed-forward block.

    Attributes:
        ups: the wide map; with a gate two of them, first the gate.
        down: the map back.
        activation: its name in `SPMFeedForward`.
        dropout: the one before `down`, if there is one.
        output_dropout: the one after it, if there is one.
    """

    ups: tuple[str, ...]
    down: str
    activation: str
    dropout: str | None
    output_dropout: str | None

    def placed(self, ups: list[nn.Module], down: nn.Module, block: SPMFeedForward) -> dict[str, nn.Module | None]:
        """These layers and the dropouts of the block, by the names of the children that they are."""
        dropouts = ((self.dropout, block.dropout), (self.output_dropout, block.output_dropout))
        layers = zip(self.ups, ups, strict=True)
        return {**dict(layers), self.down: down, **{key: module for key, module in dropouts if key is not None}}


class _Origin(NamedTuple):
    """What a block was made from, for the way back. A tuple, so that nothing of it is in state dicts.

    Attributes:
        module: the dense module without its layers and dropouts.
        parts: which children they are.
    """

    module: nn.Module
    parts: Parts


def twin_of_dense_block(module: nn.Module) -> Twin | None:
    """How a module is replaced as a whole, if it computes a feed-forward block and nothing else."""
    parts = recognised(module)
    return None if parts is None else _twin(parts)


def twin_of_spm_block(module: nn.Module) -> Twin | None:
    """How a block that was converted as a whole goes back, unless other layers have taken the place of its own."""
    if not isinstance(module, SPMFeedForward) or not hasattr(module, "_origin"):
        return None
    origin: Any = module._origin
    return _twin(origin.parts) if {type(module.up), type(module.down)} == {SPMLinear} else None


def _twin(parts: Parts) -> Twin:
    return Twin(nn.Module, SPMFeedForward, partial(_to_spm, parts), _to_dense, partial(_maps, parts))


def _to_spm(parts: Parts, module: nn.Module, **options: Any) -> SPMFeedForward:
    names = (*parts.ups, parts.down)
    # In the order in which they are made one by one, so that they start with the same numbers.
    made: dict[str, Any] = {
        name: LINEAR.to_spm(child, **options) for name, child in module.named_children() if name in names
    }
    *ups, down = (made[name] for name in names)
    gated = len(ups) > 1
    up = _side_by_side(ups) if gated else ups[0]
    block = SPMFeedForward(up.in_features, up.out_features, parts.activation, gated=gated, device="meta")
    block.up, block.down = up, down
    for name, child in (("dropout", parts.dropout), ("output_dropout", parts.output_dropout)):
        if child is not None:
            setattr(block, name, module.get_submodule(child))
    emptied = _with_children(module, dict.fromkeys(parts.placed(ups, down, block)))
    block._origin = _Origin(emptied, parts)  # type: ignore[assignment]
    trained = any(parameter.requires_grad for parameter in module.parameters())
    return block.requires_grad_(trained)


def _to_dense(block: SPMFeedForward) -> nn.Module:
    origin: Any = block._origin
    module, parts = origin
    ups = [LINEAR.to_dense(layer) for layer in _one_by_one(block.up)]
    return _with_children(module, parts.placed(ups, LINEAR.to_dense(block.down), block))


def _maps(parts: Parts, dense: nn.Module, block: SPMFeedForward) -> Iterator[Map]:
    layers = (*_one_by_one(block.up), block.down)
    for name, layer in zip((*parts.ups, parts.down), layers, strict=True):
        yield from LINEAR.maps(dense.get_submodule(name), layer)


def _with_children(module: nn.Module, children: Mapping[str, nn.Module | None]) -> nn.Module:
    """The same module with other children, which keep their order."""
    made = copy.copy(module)
    made._modules = {**module._modules, **children}
    return made


def _side_by_side(layers: list[SPMLinear]) -> SPMLinear:
    """Layers that read the same input as one layer with several maps."""
    names = [name for name, _ in layers[0].named_parameters()]
    stacked = {name: torch.stack([layer.get_parameter(name).detach() for layer in layers]) for name in names}
    return _with_parameters(layers[0], len(layers), stacked)


def _one_by_one(layer: SPMLinear) -> list[SPMLinear]:
    """The maps of a layer as layers of their own, which share its memory."""
    if layer.maps is None:
        return [layer]
    parameters = dict(layer.named_parameters())
    return [
        _with_parameters(layer, None, {name: parameter.detach()[number] for name, parameter in parameters.items()})
        for number in range(layer.maps)
    ]


def _with_parameters(layer: SPMLinear, maps: int | None, values: Mapping[str, Tensor]) -> SPMLinear:
    made = copy.copy(layer)
    made.maps = maps
    made._parameters = {name: nn.Parameter(values[name]) if name in values else None for name in layer._parameters}
    made._buffers = {}
    made._describe()
    return made


def recognised(module: nn.Module) -> Parts | None:
    """The parts of a feed-forward block, if that is what a module computes; None if it computes anything else.

    Its children say which parts there could be. Which of them are what is found by trying: the module computes with
    small random layers in the place of its own, and the result must be that of the block, in training and evaluation.
    """
    layers = {name: child for name, child in module._modules.items() if child is not None and of_dense(child) is LINEAR}
    if len(layers) not in (2, 3) or not _has_nothing_else(module, layers):
        return None
    dropouts = [name for name, child in module._modules.items() if type(child) is nn.Dropout]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            tried = _Trial(module, layers, dropouts)
            return next((parts for parts in _possible(layers, dropouts) if tried.is_computed_by(parts)), None)
    except Exception:  # whatever the forward of another library raises: it is no block that we know
        return None


def _has_nothing_else(module: nn.Module, layers: Mapping[str, nn.Module]) -> bool:
    """Whether a call of the module is one of these layers and of functions, and nobody watches what is in between."""
    parameters = [parameter for layer in layers.values() for parameter in layer.parameters()]
    alike = {(parameter.dtype, parameter.device, parameter.requires_grad) for parameter in parameters}
    inner = [part for part in module.modules() if part is not module]
    arguments = list(inspect.signature(module.forward).parameters.values())
    return (
        len(set(layers.values())) == len(layers)
        and set(module.parameters()) == set(parameters)
        and not any(True for _ in module.buffers())
        and len(alike) == 1
        and len(arguments) == 1
        and arguments[0].kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        and not any(getattr(part, hooks) for part in inner for hooks in HOOKS)
        and not any("forward" in vars(part) for part in module.modules())  # as accelerate wraps it
    )


def _possible(layers: Mapping[str, nn.Module], dropouts: list[str]) -> Iterator[Parts]:
    """All ways in which layers of these sizes and dropouts can be parts of a block."""
    for *ups, down in permutations(layers):
        shapes = {matrix_of(layers[name]).shape for name in ups} | {matrix_of(layers[down]).T.shape}
        if len(shapes) == 1 and len({layers[name].bias is None for name in ups}) == 1:
            for activation, *placed in product(ACTIVATIONS, [None, *dropouts], [None, *dropouts]):
                yield Parts(tuple(ups), down, activation, *placed)


class _Trial:
    """A module with small random layers in the place of its own, and what it computes with them.

    A dropout becomes a fixed factor for every coordinate, which shows where it is.
    """

    def __init__(self, module: nn.Module, layers: Mapping[str, nn.Module], dropouts: list[str]) -> None:
        like: Any = {"device": "cpu", "dtype": torch.float64}
        small = {name: nn.Linear(_SIZE, _SIZE, layer.bias is not None, **like) for name, layer in layers.items()}
        factors = {name: _Factors(torch.rand(_SIZE, **like) + 0.5) for name in dropouts}
        others = {name: child for name, child in module._modules.items() if name not in (*small, *dropouts)}
        self.parts: Mapping[str, nn.Module] = {**small, **factors}
        self.module = _with_children(module, {**copy.deepcopy(others), **self.parts})
        # From small to large: some activations are the same but for large inputs.
        self.x = torch.randn(2, 10, _SIZE, **like) * torch.logspace(-2, 3, 10, **like)[:, None]
        self.outputs = [self.module.train(training).forward(self.x) for training in (True, False)]

    def is_computed_by(self, parts: Parts) -> bool:
        """Whether the module computed what a block of these parts does."""
        wide = torch.cat([self.parts[name](self.x) for name in parts.ups], -1)
        hidden = activated(wide, parts.activation, len(parts.ups))
        y = self._dropped(self.parts[parts.down](self._dropped(hidden, parts.dropout)), parts.output_dropout)
        allowed = _TOLERANCE * y.abs().amax(-1, keepdim=True)
        return all(found.shape == y.shape and bool(((found - y).abs() <= allowed).all()) for found in self.outputs)

    def _dropped(self, x: Tensor, dropout: str | None) -> Tensor:
        y: Tensor = x if dropout is None else self.parts[dropout](x)
        return y


class _Factors(nn.Module):
    def __init__(self, factors: Tensor) -> None:
        super().__init__()
        self.factors = factors

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors
