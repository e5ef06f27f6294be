"""The compiled kernels; see csrc/module.cpp."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

class Plan:
    """How the kernels walk a schedule."""

    def __init__(self, order: npt.NDArray[np.int32]) -> None: ...

def targets() -> list[str]: ...
def target() -> str: ...
def use_target(name: str, /) -> None: ...
def use_exchange_api(wanted: bool, /) -> bool: ...
def empty_cache() -> None: ...
def multiply_adds_per_second(threads: int, /) -> float: ...
def fits(
    plan: Plan,
    x: Tensor,
    blocks: Tensor,
    d_in: Tensor | None,
    d_out: Tensor | None,
    bias: Tensor | None,
    residual_scale: Tensor | None,
    out_features: int,
    maps: int | None,
    /,
) -> bool: ...
def forward(
    plan: Plan,
    x: Tensor,
    blocks: Tensor,
    d_in: Tensor | None,
    d_out: Tensor | None,
    bias: Tensor | None,
    residual_scale: Tensor | None,
    out_features: int,
    maps: int | None,
    threads: int,
    /,
) -> Tensor | None: ...
def backward(
    plan: Plan,
    grad: Tensor,
    x: Tensor,
    blocks: Tensor,
    d_in: Tensor | None,
    d_out: Tensor | None,
    residual_scale: Tensor | None,
    out_features: int,
    maps: int | None,
    needs: Sequence[bool],
    threads: int,
    /,
) -> list[Tensor | None] | None: ...
def recurrence_forward(
    plan: Plan,
    cell: int,
    gates: Tensor,
    h0: Tensor,
    c0: Tensor,
    batch_sizes: Sequence[int],
    blocks: Tensor | None,
    d_in: Tensor | None,
    d_out: Tensor | None,
    bias: Tensor | None,
    residual_scale: Tensor | None,
    threads: int,
    /,
) -> list[Tensor] | None: ...
def recurrence_backward(
    plan: Plan,
    cell: int,
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    h0: Tensor,
    c0: Tensor,
    batch_sizes: Sequence[int],
    blocks: Tensor | None,
    d_in: Tensor | None,
    d_out: Tensor | None,
    bias: Tensor | None,
    residual_scale: Tensor | None,
    h: Tensor,
    c: Tensor,
    saved: Tensor,
    threads: int,
    /,
) -> list[Tensor | None] | None: ...
