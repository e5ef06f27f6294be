"""Inputs of a layer that are more than a tensor: proxies of torch.fx, jagged tensors, tensors on several devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from pairmix.nn import distributed

if TYPE_CHECKING:
    from pairmix.nn.linear import SPMLinear


def forward_special(layer: SPMLinear, x: Any) -> Any:
    """The output of a layer for such an input, of the same kind; None for an input that is none of them."""
    if isinstance(x, fx.Proxy):  # a node of its own in the graph, as the layers of torch are
        tracer: Any = x.tracer
        return tracer.create_proxy("call_module", tracer.path_of_module(layer), (x,), {})
    if x.is_nested and x.layout == torch.jagged:
        y = layer(x.values())
        return torch.nested.nested_tensor_from_jagged(y, x.offsets(), x.lengths())
    return distributed.forward(layer, x) if distributed.is_distributed(x) else None
