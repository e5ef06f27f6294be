"""Layers whose parameters and inputs are DTensors."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pairmix.nn.linear import SPMLinear


def is_distributed(tensor: Any) -> bool:
    """Whether this is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # takes long to import, and without it there are none
    return module is not None and isinstance(tensor, module.DTensor)


def placed_like(values: Tensor, tensor: Any) -> Tensor:
    """The values on the devices that have a tensor of their shape, each with its part."""
    if not is_distributed(tensor):
        return values
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(values, tensor.device_mesh, tensor.placements, src_data_rank=None)


def forward(layer: SPMLinear, x: Any) -> Any:
    """Every device computes its rows with all parameters; the gradients of these are then sums over the devices."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    last = x.dim() - 1
    for placement in x.placements:
        if not (placement.is_replicate() or (placement.is_shard() and placement.dim % x.dim() != last)):
            raise ValueError(
                f"an SPM layer mixes all features: its input must not be split along them, got {placement}"
            )
    gradients = [Replicate() if placement.is_replicate() else Partial() for placement in x.placements]

    def local(name: str, parameter: Any) -> Any:
        if not is_distributed(parameter):
            raise ValueError(f"the input is a DTensor, so {name} must be one: use distribute_module")
        if not all(placement.is_replicate() for placement in parameter.placements):
            raise ValueError(
                f"{name} is split over devices ({parameter.placements}), which SPM layers do not support: replicate it"
            )
        return parameter.to_local(grad_placements=gradients)

    tensors = {name: local(name, parameter) for name, parameter in layer.named_parameters()}
    description: Any = layer.description
    if is_distributed(description):
        tensors["description"] = description.to_local()
    y = torch.func.functional_call(layer, tensors, (x.to_local(),))
    return DTensor.from_local(y, x.device_mesh, x.placements, run_check=False)
