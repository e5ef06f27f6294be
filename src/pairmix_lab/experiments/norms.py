"""How much a layer stretches its input, and how large its gradient is."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from pairmix_lab.training.loop import Batch, cross_entropy

LARGEST_MATRIX = 1024
"""The largest width at which the singular values of the whole matrix are computed."""
ITERATIONS = 500
TOLERANCE = 1e-7


def layer_norms(model: nn.Module, layer: nn.Module, width: int, batch: Batch) -> dict[str, float]:
    """What the history of a run says of its layer.

    Args:
        model: all of it.
        layer: the part of it that is measured, from `width` features onto as many.
        width: of the layer.
        batch: on which the gradient is taken; no inference tensors.

    Returns:
        `operator_norm`, the largest singular value of the layer's matrix; `condition`, its ratio to the smallest one,
        if the matrix is small enough and not singular; `gradient_norm`, of all parameters of the layer together.
    """
    with torch.inference_mode(False), torch.enable_grad():
        found = {"gradient_norm": gradient_norm(model, layer, batch)}
        exact = copy.deepcopy(layer).double()  # the smallest singular value would drown in the rounding of float32
        if width > LARGEST_MATRIX:
            return {"operator_norm": largest_singular_value(exact, width), **found}
        values = torch.linalg.svdvals(matrix(exact, width))
        largest, smallest = float(values[0]), float(values[-1])
        if smallest > width * torch.finfo(values.dtype).eps * largest:
            found["condition"] = largest / smallest
        return {"operator_norm": largest, **found}


@torch.no_grad()
def matrix(layer: nn.Module, width: int) -> Tensor:
    """The matrix of an affine layer, whatever computes it: `layer(x) == x @ W.T + bias`."""
    dtype = next(layer.parameters()).dtype
    columns: Tensor = layer(torch.eye(width, dtype=dtype)) - layer(torch.zeros(1, width, dtype=dtype))
    return columns.T


def largest_singular_value(layer: nn.Module, width: int) -> float:
    """That of an affine layer's matrix, by power iteration: the layer, then its transpose, which autograd applies.

    Always from the same vector, so that the same layer gives the same number. It is never too large.
    """
    dtype = next(layer.parameters()).dtype
    start = torch.randn(1, width, dtype=dtype, generator=torch.Generator().manual_seed(0))
    unit, value = start / start.norm(), 0.0
    with torch.no_grad():
        bias = layer(torch.zeros(1, width, dtype=dtype))
    for _ in range(ITERATIONS):
        unit.requires_grad_()
        image = layer(unit) - bias
        before, value = value, float(image.detach().norm())
        (back,) = torch.autograd.grad(image, unit, image.detach())
        if value == 0 or abs(value - before) <= TOLERANCE * value:
            break
        unit = back / back.norm()
    return value


def gradient_norm(model: nn.Module, layer: nn.Module, batch: Batch) -> float:
    """That of the loss on a batch, of all parameters of a layer together; leaves their `grad` alone."""
    inputs, labels = batch
    gradients = torch.autograd.grad(cross_entropy(model(inputs), labels), list(layer.parameters()))
    return math.hypot(*(float(gradient.norm()) for gradient in gradients))
