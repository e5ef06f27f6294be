"""Angles to start from. Each fills a tensor of angles in place; all of them give orthogonal stages.

Which one is the default was measured: see docs/initialisation.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pairmix.nn.distributed import placed_like


def near_identity_(angles: Tensor, std: float = 0.02) -> Tensor:
    """Small random rotations: normal with this standard deviation, in radians."""
    return angles.normal_(0.0, std)


def random_rotation_(angles: Tensor) -> Tensor:
    """Uniformly random rotations."""
    return angles.uniform_(-math.pi, math.pi)


def hadamard_(angles: Tensor) -> Tensor:
    """An eighth turn each, left or right at random: with a butterfly all entries of the matrix are +-1/sqrt(n)."""
    return angles.bernoulli_(0.5).sub_(0.5).mul_(math.pi / 2)


def identity_(angles: Tensor) -> Tensor:
    """No rotation at all."""
    return angles.zero_()


INITS: dict[str, Callable[[Tensor], Tensor]] = {
    "hadamard": hadamard_,
    "random_rotation": random_rotation_,
    "near_identity": near_identity_,
    "identity": identity_,
}
DEFAULT = "hadamard"
"""Of a layer in the place of a dense one."""


def coefficients(angles: Tensor) -> Tensor:
    """The rotations as general blocks: `[..., L, 4, P]`, rows a, b, c, d, for angles `[..., L, P]`."""
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([cos, -sin, sin, cos], dim=-2)


def output_scale_(d_out: Tensor, out_features: int) -> Tensor:
    """Divide by the root of the number of coordinates that `fold` sums, so that it keeps the variance."""
    n = d_out.shape[-1]
    output = torch.arange(n, device=d_out.device) % out_features
    summed = (n - 1 - output) // out_features + 1
    return d_out.copy_(placed_like(summed.to(d_out.dtype).rsqrt(), d_out))
