"""A chain of rotations, and a layer with such chains before or after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from pairmix import functional
from pairmix.dense import is_conv1d
from pairmix.nn.description import Described, of_schedule
from pairmix.schedule import Schedule

INPUT, OUTPUT = "input", "output"
WHERE = (INPUT, OUTPUT)
_HALF = (torch.bfloat16, torch.float16)


class Rotations(Described):
    """A chain of rotation stages that starts exactly as the identity, and optionally a scale for every coordinate.

        y = S R x        R = B_L ... B_1

    The coordinate that an odd width leaves over at a stage passes unchanged, so that R is orthogonal.

    Args:
        schedule: which coordinates are paired at which stage; its `n` is the width.
        where: whether it mixes the `"input"` or the `"output"` of its layer.
        scale: whether S is learned; without it, it is the identity.
        device: where the parameters live.
        dtype: their dtype.

    Shape:
        - input and output: `(*, n)`, in half precision also with parameters in float32

    Attributes:
        angles: `[L, n // 2]`.
        scale: `[n]`, or None.
    """

    scale: nn.Parameter | None

    def __init__(
        self,
        schedule: Schedule,
        *,
        where: str = INPUT,
        scale: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_where(where)
        self.schedule = schedule
        self.where = where
        self._is_merged = False
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.angles = nn.Parameter(torch.empty(schedule.stages, schedule.n // 2, **like))
        self.register_parameter("scale", nn.Parameter(torch.empty(schedule.n, **like)) if scale else None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Be the identity again."""
        self.angles.zero_()
        if self.scale is not None:
            self.scale.fill_(1.0)
        self._describe()

    @property
    def is_merged(self) -> bool:
        """Whether the weights of the layer hold it already."""
        return self._is_merged

    @is_merged.setter
    def is_merged(self, merged: bool) -> None:
        self._is_merged = merged
        self._describe()

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        self._check_description()
        return _mixed(x, functional.Parameters(self.angles, None, self.scale, bias, None), self.schedule)

    def around(self, bias: Tensor) -> Tensor:
        """What `S R (W x + bias)` lacks of `S R (W x) + bias`: `bias - S R bias`, which starts as zero."""
        bias = bias.to(self.angles.dtype)
        with torch.autocast(bias.device.type, enabled=False):  # or rounding would make it start as something else
            return bias - cast(Tensor, self(bias))

    def folded(self, weight: Tensor, inverse: bool = False) -> Tensor:
        """The weight `[out, in]` of a layer with S R folded into it, or with `inverse` taken out of it again.

        Before the layer that is `W S R`, after it `S R W`. No matrix of S R is built: the chain, or its transpose, runs
        over the rows of W or over its columns.
        """
        before = self.where == INPUT
        wide = torch.promote_types(torch.promote_types(weight.dtype, self.angles.dtype), torch.float32)
        rows = (weight if before else weight.T).to(wide)
        angles, scale = self.angles.to(wide), None if self.scale is None else self.scale.to(wide)
        if inverse and scale is not None:
            scale = scale.reciprocal()
        if before == inverse:
            rows = _mixed(rows, functional.Parameters(angles, None, scale, None, None), self.schedule)
        else:  # R transposed, after S
            last_first = self.schedule.only(range(self.schedule.stages - 1, -1, -1))
            rows = _mixed(rows, functional.Parameters(-angles.flip(0), scale, None, None, None), last_first)
        return (rows if before else rows.T).to(weight.dtype)

    def _meaning(self) -> dict[str, Any]:
        return {
            "where": self.where,
            "scale": self.scale is not None,
            "merged": self.is_merged,
            "schedule": of_schedule(self.schedule),
        }

    def extra_repr(self) -> str:
        return (
            f"width={self.schedule.n}, stages={self.schedule.stages}, schedule={self.schedule.kind}, "
            f"where={self.where}, scale={self.scale is not None}"
        )


class Adapted(nn.Module):
    """A layer with rotations before or after it, by the names of their adapters; one of them, or none, is in use.

        y = W (S R x) + b        or        y = S R (W x) + b

    What is not found here is looked up in the layer itself: `adapted.weight`, `adapted.in_features`.

    Attributes:
        base: the layer.
        rotations: by the name of the adapter.
        used: the name of the adapter in use; None for the layer as it is.
    """

    base: nn.Module
    rotations: nn.ModuleDict

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.rotations = nn.ModuleDict()
        self.used: str | None = None
        self.train(base.training)

    def chain(self, name: str) -> Rotations:
        """The rotations of an adapter."""
        return cast(Rotations, self.rotations[name])

    def forward(self, x: Tensor) -> Tensor:
        rotations = None if self.used is None else self.chain(self.used)
        if rotations is None:
            y = self.base(x)
        elif rotations.is_merged:
            rotations._check_description()  # or weights that hold no rotations could have been loaded
            y = self.base(x)
        elif rotations.where == INPUT:
            y = self.base(rotations(x))
        else:
            bias = bias_of(self.base)
            y = rotations(self.base(x), None if bias is None else rotations.around(bias))
        return cast(Tensor, y)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # How a wrapper is copied and pickled is no business of the layer in it.
            if name == "base" or name.startswith("__"):
                raise
            return getattr(super().__getattr__("base"), name)


def check_where(where: object) -> None:
    """Raise a ValueError if rotations cannot be there."""
    if where not in WHERE:
        raise ValueError(f"where must be one of {list(WHERE)}, got {where!r}")


def plain(module: nn.Module) -> nn.Module:
    """The layer itself, without what is around it."""
    return module.base if isinstance(module, Adapted) else module


def features_of(layer: nn.Module) -> tuple[int, int] | None:
    """How many features a layer takes and gives; None if it does not say, and so is no linear map."""
    found = (
        (layer.nx, layer.nf)
        if is_conv1d(layer)
        else (getattr(layer, "in_features", None), getattr(layer, "out_features", None))
    )
    taken, given = found
    return (taken, given) if isinstance(taken, int) and isinstance(given, int) else None


def bias_of(layer: nn.Module) -> Tensor | None:
    """The bias of a layer, which quantised layers of torch give when they are called for it."""
    bias: Tensor | Callable[[], Tensor | None] | None = getattr(layer, "bias", None)
    return bias if bias is None or isinstance(bias, Tensor) else bias()


def _mixed(x: Tensor, parameters: functional.Tensors, schedule: Schedule) -> Tensor:
    is_mixed = x.dtype in _HALF and parameters.blocks.dtype == torch.float32
    if is_mixed and not torch.is_autocast_enabled(x.device.type):
        # Under autocast the operator takes parameters in float32 for inputs in half precision.
        with torch.autocast(x.device.type, x.dtype):
            return functional.mix(x, parameters, schedule, "rotation", schedule.n)
    return functional.mix(x, parameters, schedule, "rotation", schedule.n)
