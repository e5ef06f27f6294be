"""What an implementation of the operator is, and which there are."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from pairmix.schedule import DeviceSchedule

T = TypeVar("T")


class Parameters(NamedTuple, Generic[T]):
    """One value for each parameter of the operator: the tensors themselves, their gradients, or which are needed.

    Implementations see tensors with a leading dimension of maps, the operators that read the same input: M of them.
    """

    blocks: T
    """`[M, L, P]`, angles of rotations, or `[M, L, 4, P]`, rows a, b, c, d."""
    d_in: T
    """`[M, n]`; None for ones, as for all that follow."""
    d_out: T
    """`[M, n]`."""
    bias: T
    """`[M, out_features]`; None for zeros."""
    residual_scale: T
    """`[M, L]`, for odd n only."""

    def of_maps(self: Tensors, first: int, last: int) -> Tensors:
        """Those of the maps first ... last - 1, as views."""
        return Parameters(*(None if tensor is None else tensor[first:last] for tensor in self))


Tensors = Parameters[Any]
"""Tensors, or None for what is not given."""


@dataclass(frozen=True)
class Recurrence:
    """How an implementation computes all steps of a recurrent cell.

    Attributes:
        forward: as `cpu_recurrence.forward`.
        backward: as `cpu_recurrence.backward`.
        saved: for each cell, how many numbers of every step and unit of the state it saves for backward, besides the
            states themselves.
    """

    forward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor | None, Tensor | None, Tensor | None, Tensors]]
    saved: Mapping[str, int]


class Map(NamedTuple):
    """One operator, or several that read the same input, with everything but the input."""

    parameters: Tensors
    schedule: DeviceSchedule
    block: str


@dataclass(frozen=True)
class FeedForward:
    """How an implementation computes a feed-forward block as a whole.

    Attributes:
        forward: as `feed_forward.in_parts`; None if it cannot compute this one.
        backward: as `feed_forward.in_parts_backward`; None likewise.
        direct: forward for ordinary CPU tensors as the caller passed them, unchecked, as `Impl.direct`.
    """

    forward: Callable[..., Tensor | None]
    backward: Callable[..., tuple[Tensor | None, Tensors, Tensors] | None]
    direct: Callable[..., Tensor | None] | None = None


@dataclass(frozen=True)
class Impl:
    """One way to compute the operator.

    Attributes:
        name: what `impl=` calls it.
        forward: as `reference.forward`.
        backward: as `reference.backward`; gradients that are not needed may be None.
        why_not: why it cannot run on this device here; None if it can.
        preferred_on: the type of device on which `impl="auto"` chooses it, if it can run there.
        recurrence: how it computes recurrences; None to compute them step by step.
        feed_forward: how it computes feed-forward blocks; None to compute them part by part.
        direct: forward for ordinary CPU tensors as the caller passed them, unchecked: takes also `maps`, which is None
            for a single operator without the leading dimension. Returns None if the arguments need to be checked or
            converted. Its backward then also takes parameters without the leading dimension.
        details: what `pairmix doctor` says about it where it can run.
        advice: what to install so that `impl="auto"` can choose it on this device, which a warning says once; None if
            nothing is missing, or the machine is not made for it.
        empty_cache: frees the memory that it keeps for the next call.
    """

    name: str
    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor | None, Tensors]]
    why_not: Callable[[torch.device], str | None]
    preferred_on: str | None = None
    recurrence: Recurrence | None = None
    feed_forward: FeedForward | None = None
    direct: Callable[..., Tensor | None] | None = None
    details: Callable[[], str] = lambda: ""
    advice: Callable[[torch.device], str | None] = lambda device: None
    empty_cache: Callable[[], None] = lambda: None


IMPLS: dict[str, Impl] = {}
"""The registered implementations by name."""
DIRECT: dict[str, Impl] = {}
"""For `impl=` as the caller gives it, the implementation that takes ordinary CPU tensors directly, if there is one."""
EVERYWHERE = "reference"
"""The implementation that runs on every device."""


def register(impl: Impl) -> None:
    """Add an implementation.

    Raises:
        ValueError: if its name is taken, or another implementation is preferred on its device already.
    """
    if impl.name in ("auto", *IMPLS):
        raise ValueError(f"an implementation called {impl.name!r} is registered already")
    rival = next((name for name, other in IMPLS.items() if other.preferred_on == impl.preferred_on), None)
    if impl.preferred_on is not None and rival is not None:
        raise ValueError(f"{rival!r} is preferred on {impl.preferred_on!r} already, so {impl.name!r} cannot be")
    IMPLS[impl.name] = impl
    if impl.direct is not None and impl.why_not(torch.device("cpu")) is None:
        DIRECT[impl.name] = impl
        if impl.preferred_on == "cpu":
            DIRECT["auto"] = impl


def unregister(name: str) -> None:
    """Remove an implementation."""
    removed = IMPLS.pop(name)
    for key in [key for key, impl in DIRECT.items() if impl is removed]:
        del DIRECT[key]


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def choose(name: str, device: torch.device) -> Impl:
    """The implementation that runs on this device: the preferred one for `"auto"`, else the named one or an error.

    Raises:
        ValueError: for a name that is not registered.
        RuntimeError: for an implementation that cannot run on this device here.
    """
    if name == "auto":
        preferred = next((impl for impl in IMPLS.values() if impl.preferred_on == device.type), None)
        if preferred is None or preferred.why_not(device) is None:
            return preferred or IMPLS[EVERYWHERE]
        advice = preferred.advice(device)
        if advice is not None and not torch.compiler.is_compiling():
            _warn_once(f"SPM layers run on impl={EVERYWHERE!r}, which is slow: {advice}")
        return IMPLS[EVERYWHERE]
    if name not in IMPLS:
        raise ValueError(f"impl must be one of {['auto', *IMPLS]}, got {name!r}")
    reason = IMPLS[name].why_not(device)
    if reason is not None:
        raise RuntimeError(f"impl={name!r} cannot run here: {reason}")
    return IMPLS[name]
