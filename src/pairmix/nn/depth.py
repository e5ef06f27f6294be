"""More or fewer stages for a layer that has been trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from pairmix.nn.init import coefficients

if TYPE_CHECKING:
    from pairmix.nn.linear import SPMLinear

Change = Callable[[Tensor, Tensor], Tensor]
"""`change(values, start)`: from the values of all stages, `[L, ...]`, those of the new ones; `start` is that of one."""


class _Staged(NamedTuple):
    """A parameter with a row for every stage: in which dimension, and what the row of an identity is."""

    dim: int
    identity: Tensor


_STAGED = {
    "coeffs": _Staged(-3, torch.tensor([1.0, 0.0, 0.0, 1.0])[:, None]),
    "angles": _Staged(-2, torch.zeros(())),
    "residual_scale": _Staged(-1, torch.ones(())),
}


def appended(values: Tensor, start: Tensor, stages: int) -> Tensor:
    """The values, and then those of as many new stages."""
    return torch.cat([values, start.to(values).expand(stages, *values.shape[1:])])


@torch.no_grad()
def distances_from_identity(layer: SPMLinear) -> Tensor:
    """For every stage, how far an entry of its blocks, in any map, is from that of the identity."""
    coeffs = layer.coeffs if layer.block == "general" else coefficients(layer.angles)
    differences = (coeffs - _STAGED["coeffs"].identity.to(coeffs)).movedim(-3, 0).flatten(1)
    if layer.residual_scale is not None:
        of_scales = (layer.residual_scale - 1).movedim(-1, 0)
        differences = torch.cat([differences, of_scales.unsqueeze(-1).flatten(1)], dim=1)
    # A layer of width one has no blocks, and a stage without any is the identity.
    return differences.abs().amax(1) if differences.shape[1] else differences.new_zeros(layer.stages)


@torch.no_grad()
def change_stages_(layer: SPMLinear, change: Change, optimizer: torch.optim.Optimizer | None) -> None:
    """Change the parameters that have a row for every stage, and with them what an optimiser knows of them."""
    for name, (dim, identity) in _STAGED.items():
        old = layer._parameters.get(name)
        if old is not None:
            new = nn.Parameter(_changed(old, dim, change, identity), old.requires_grad)
            layer._parameters[name] = new
            if optimizer is not None:
                _hand_over(optimizer, old, new, dim, change)


def _changed(values: Tensor, dim: int, change: Change, start: Tensor) -> Tensor:
    return change(values.movedim(dim, 0), start).movedim(0, dim).contiguous()


def _hand_over(
    optimizer: torch.optim.Optimizer, old: nn.Parameter, new: nn.Parameter, dim: int, change: Change
) -> None:
    """Let an optimiser train the new parameter in the place of the old one; its moments of new stages are zero."""
    for group in optimizer.param_groups:
        group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
    state = optimizer.state.pop(old, None)
    if state:
        optimizer.state[new] = {
            key: _changed(value, dim, change, torch.zeros(()))
            if isinstance(value, Tensor) and value.shape == old.shape
            else value
            for key, value in state.items()
        }
