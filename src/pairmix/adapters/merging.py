"""Fold rotations into the weights of their layers, and take them out again."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from pairmix.adapters.layer import Adapted, Rotations, features_of
from pairmix.adapters.model import chains, check_exists, check_not_merged, names, take_off, use
from pairmix.adapters.places import adapted
from pairmix.dense import is_conv1d


@torch.no_grad()
def merge_(model: nn.Module, name: str = "default", *, remove: bool = False) -> None:
    """Fold an adapter into the weights of its layers: the model computes the same, up to rounding, at no extra cost.

        W' = W S R        or        W' = S R W

    Args:
        model: in which the weights are changed in place. Until `unmerge_`, adapters can neither be switched nor added.
        name: of the adapter.
        remove: also take all of its adapters off, so that plain layers are left. That cannot be undone.

    Raises:
        ValueError: if there is no such adapter; for a layer without a weight in floating point, such as a quantised
            one; or for a weight that another module reads, too. The model is as it was before.
        RuntimeError: if an adapter is merged already.

    Examples:
        >>> from pairmix import adapters
        >>> model = nn.Sequential(nn.Linear(8, 8))
        >>> _ = adapters.add(model, ["0"])
        >>> adapters.merge_(model, remove=True)
        >>> model
        Sequential(
          (0): Linear(in_features=8, out_features=8, bias=True)
        )
    """
    check_exists(model, name)
    check_not_merged(model)
    others = [other for other in names(model) if other != name]
    if remove and others:
        raise ValueError(f"without {name!r} the adapters {others} could not be told from it: remove them first")
    layers = _layers_of(model, name)
    _check_weights(model, layers)
    use(model, name)
    for layer, rotations in layers.values():
        _change(layer.base, rotations, inverse=False)
        rotations.is_merged = True
    if remove:
        take_off(model, name)


@torch.no_grad()
def unmerge_(model: nn.Module, name: str = "default") -> None:
    """Undo `merge_`: the weights are what they were before, up to rounding.

    The transposed chain undoes the rotations, and scales are divided out.

    Raises:
        ValueError: if there is no such adapter, or a scale is zero. The model is as it was before.
        RuntimeError: if the adapter is not merged.
    """
    layers = _layers_of(model, name)
    if not all(rotations.is_merged for _, rotations in layers.values()):
        raise RuntimeError(f"the adapter {name!r} is not merged")
    for layer_name, (_, rotations) in layers.items():
        if rotations.scale is not None and not rotations.scale.all():
            place = int((rotations.scale == 0).nonzero()[0])
            raise ValueError(
                f"{layer_name}: its scale of coordinate {place} is 0, so the weights of before cannot be computed: "
                "load them again"
            )
    for layer, rotations in layers.values():
        _change(layer.base, rotations, inverse=True)
        rotations.is_merged = False


def _layers_of(model: nn.Module, name: str) -> dict[str, tuple[Adapted, Rotations]]:
    layers = adapted(model)
    return {layer_name: (layers[layer_name], rotations) for layer_name, rotations in chains(model, name).items()}


def _change(layer: nn.Module, rotations: Rotations, inverse: bool) -> None:
    weight = layer.get_parameter("weight")
    matrix = weight.T if is_conv1d(layer) else weight
    matrix.copy_(rotations.folded(matrix, inverse))


def _check_weights(model: nn.Module, layers: dict[str, tuple[Adapted, Rotations]]) -> None:
    """Raise a ValueError if the weight of a layer cannot be changed, or if that would change another module."""
    readers: dict[Tensor, list[str]] = defaultdict(list)
    for module_name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                readers[parameter].append(module_name)
    for layer_name, (layer, _) in layers.items():
        weight, features = layer.base._parameters.get("weight"), features_of(layer.base)
        assert features is not None
        shape = features if is_conv1d(layer.base) else features[::-1]
        if weight is None or not weight.is_floating_point() or weight.shape != shape:
            raise ValueError(
                f"{layer_name} is a {type(layer.base).__name__}, which has no parameter `weight` of shape {shape} in "
                "floating point: nothing can be merged into it"
            )
        if len(readers[weight]) > 1:
            raise ValueError(
                f"the weight of {layer_name} is also read elsewhere, in {', '.join(readers[weight])}: merging would "
                "change that, too"
            )
