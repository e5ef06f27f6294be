"""The compiled kernels; see csrc/bind_*.cpp."""

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
def caches() -> tuple[int, int]: ...
def use_caches(l1_bytes: int, l2_bytes: int, /) -> None: ...
def use_exchange_api(wanted: bool, /) -> bool: ...
def empty_cache() -> None: ...
def multiply_adds_per_second(threads: int, /) -> float: ...
def forward(
    plan: Plan,
    x: Tensor,
    parameters: tuple[Tensor | None, ...],
    rotation: bool,
    out_features: int,
    maps: int | None,
    threads: int,
    only_ordinary: bool,
    /,
) -> Tensor | None: ...
def backward(
    plan: Plan,
    grad: Tensor,
    x: Tensor,
    parameters: tuple[Tensor | None, ...],
    rotation: bool,
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
    parameters: tuple[Tensor | None, ...],
    rotation: bool,
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
    parameters: tuple[Tensor | None, ...],
    rotation: bool,
    h: Tensor,
    c: Tensor,
    saved: Tensor,
    threads: int,
    /,
) -> list[Tensor | None] | None: ...
def feed_forward(
    wide: Plan,
    narrow: Plan,
    x: Tensor,
    ups: tuple[Tensor | None, ...],
    downs: tuple[Tensor | None, ...],
    rotations: tuple[bool, bool],
    out_features: int,
    maps: int | None,
    activation: int,
    threads: int,
    only_ordinary: bool,
    /,
) -> Tensor | None: ...
def feed_forward_backward(
    wide: Plan,
    narrow: Plan,
    grad: Tensor,
    x: Tensor,
    ups: tuple[Tensor | None, ...],
    downs: tuple[Tensor | None, ...],
    rotations: tuple[bool, bool],
    maps: int | None,
    activation: int,
    needs: Sequence[bool],
    threads: int,
    /,
) -> list[Tensor | None] | None: ...
