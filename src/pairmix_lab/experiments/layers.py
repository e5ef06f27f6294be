"""The layers that the experiments compare: each takes the place of a dense map of n coordinates onto n."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pairmix.nn import SPMLinear

LAYERS = {
    "dense": "nn.Linear",
    "spm": "SPMLinear",
    "lowrank": "a product of two thin matrices with as many parameters as SPMLinear",
    "identity": "nn.Linear, started at the identity",
}


def make_layer(name: str, width: int, maps: int = 1, **options: Any) -> nn.Module:
    """A layer by its name in `LAYERS`.

    Args:
        name: which.
        width: how many features it takes, and how many each map gives.
        maps: how many maps of the same input it holds; their outputs are side by side.
        options: of `SPMLinear`; they also decide how many parameters `lowrank` has.
    """
    makers: dict[str, Callable[[], nn.Module]] = {
        "dense": lambda: nn.Linear(width, maps * width),
        "spm": lambda: SPMLinear(width, width, maps=maps if maps > 1 else None, **options),
        "lowrank": lambda: SideBySide(LowRank(width, equal_rank(width, **options)) for _ in range(maps)),
        "identity": lambda: _started_at_identity(nn.Linear(width, maps * width)),
    }
    if name not in makers:
        raise ValueError(f"layer must be one of {list(makers)}, got {name!r}")
    return makers[name]()


class LowRank(nn.Sequential):
    """`y = A B x + bias` with an inner dimension of `rank`."""

    def __init__(self, n: int, rank: int) -> None:
        super().__init__(nn.Linear(n, rank, bias=False), nn.Linear(rank, n))


class SideBySide(nn.ModuleList):
    """Layers that read the same input; their outputs are side by side."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = [layer(x) for layer in self]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def equal_rank(n: int, **options: Any) -> int:
    """The smallest rank with which a low-rank layer has at least as many parameters as `SPMLinear`."""
    size = count_parameters(SPMLinear(n, n, device="meta", **options))
    return max(1, math.ceil((size - n) / (2 * n)))


def count_parameters(model: nn.Module) -> int:
    """All of them, in scalars."""
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def _started_at_identity(layer: nn.Linear) -> nn.Linear:
    eye = torch.eye(layer.in_features)
    layer.weight.copy_(eye.repeat(layer.out_features // layer.in_features, 1))
    layer.bias.zero_()
    return layer
