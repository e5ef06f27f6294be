"""Dense linear maps as other libraries write them."""

from __future__ import annotations

from torch import Tensor, nn


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is the `Conv1D` of transformers, a linear map whose weight is stored transposed."""
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__) and hasattr(module, "nf")


def matrix_of(module: nn.Module) -> Tensor:
    """The matrix `[out_features, in_features]` of a dense linear map, a view of its weight.

    Raises:
        TypeError: if this is not one.
    """
    if isinstance(module, nn.Linear):
        return module.weight
    if is_conv1d(module):
        weight: Tensor = module.weight  # type: ignore[assignment]
        return weight.T
    raise TypeError(f"expected an nn.Linear, a Conv1D of transformers or a matrix, got {type(module).__name__}")
