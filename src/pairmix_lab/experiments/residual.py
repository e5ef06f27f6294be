"""A network of residual branches around the layers that are compared."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

BRANCHES = 3


class Branch(nn.Module):
    """`x + down(relu(up(norm(x))))`.

    Args:
        make: makes a layer from and onto `width` features, as `Compared.make`.
        width: of x.
        gain: what the output of `down` starts multiplied by, where the layer knows such a thing.
    """

    def __init__(self, make: Callable[..., nn.Module], width: int, gain: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = make()
        self.down = make(gain=gain)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.relu(self.up(self.norm(x))))
        return y


def residual_network(make: Callable[..., nn.Module], width: int, classes: int) -> nn.Sequential:
    """Branches one after the other, a norm and a dense map onto the classes."""
    # Independent branches add their variances: so all of them together add the same, however many they are.
    gain = 1 / math.sqrt(BRANCHES)
    branches = nn.Sequential(*(Branch(make, width, gain) for _ in range(BRANCHES)))
    return nn.Sequential(branches, nn.LayerNorm(width), nn.Linear(width, classes))
