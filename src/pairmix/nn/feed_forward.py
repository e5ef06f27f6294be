"""Feed-forward blocks."""

from __future__ import annotations

from typing import Any, TypeGuard, Unpack

import torch
from torch import Tensor, fx, nn

from pairmix import functional
from pairmix.nn import distributed
from pairmix.nn.linear import SPMLinear, SPMOptions

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class SPMFeedForward(nn.Module):
    """The feed-forward block of a transformer: a wide SPM map, an activation, and an SPM map back.

        y = down(activation(up x))        or, with `gated`,        y = down(activation(gate x) * (up x))

    The compiled kernels compute it in one call: a few rows go all the way, the hidden layer is never in memory, and
    backward needs nothing but x. With dropout in training the parts run one after the other, as they do where
    the hidden layer is narrower than the block, with `rank`, and if a hook or another module stands between them.

    Args:
        features: size of the input and of the output.
        hidden: size between the two maps.
        activation: `"relu"`, `"gelu"`, `"gelu_tanh"` or `"silu"`.
        bias: whether the maps add learned biases.
        gated: whether there is a second wide map, with which the activation of the first is multiplied, as in Llama.
        dropout: the probability of dropout before the second map.
        output_dropout: the probability of dropout after it.
        device: where the parameters live.
        dtype: their dtype.
        gain: what the output starts multiplied by; 0.5 suits a block whose output is added to what it reads.
        **options: `block`, `stages`, `schedule`, `residual`, `init`, `rank` and `impl`, as in `SPMLinear`.

    Shape:
        - input and output: `(*, features)`

    Attributes:
        up: the wide map; with `gated` two in one, first the gate.
        down: the map back.

    Examples:
        >>> block = SPMFeedForward(64, 256, "silu", gated=True)
        >>> block(torch.randn(8, 10, 64)).shape
        torch.Size([8, 10, 64])
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        activation: str = "gelu",
        bias: bool = True,
        *,
        gated: bool = False,
        dropout: float = 0.0,
        output_dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        gain: float = 1.0,
        **options: Unpack[SPMOptions],
    ) -> None:
        super().__init__()
        if activation not in functional.ACTIVATIONS:
            raise ValueError(f"activation must be one of {list(functional.ACTIVATIONS)}, got {activation!r}")
        common: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype, **options}
        self.activation = activation
        self.gated = gated
        self.up = SPMLinear(features, hidden, maps=2 if gated else None, **common)
        self.dropout = nn.Dropout(dropout)
        self.down = SPMLinear(hidden, features, gain=gain, **common)
        self.output_dropout = nn.Dropout(output_dropout)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, fx.Proxy):  # a node of its own in the graph, as the layers of torch are
            tracer: Any = x.tracer
            return tracer.create_proxy("call_module", tracer.path_of_module(self), (x,), {})
        y: Tensor = self.output_dropout(feed_forward(x, self.up, self.down, self.activation, self.dropout, self.gated))
        return y

    def extra_repr(self) -> str:
        return f"activation={self.activation}"


def feed_forward(
    x: Tensor, up: nn.Module, down: nn.Module, activation: str, dropout: nn.Module | None = None, gated: bool = False
) -> Tensor:
    """`down(dropout(activation(up x)))`, in one call if it can be."""
    drops = dropout is not None and dropout.training and getattr(dropout, "p", 0.0) > 0
    is_special = x.is_nested or distributed.is_distributed(x)
    if not drops and not is_special and _is_plain(up) and _is_plain(down):
        wide = {**up.operator(), "maps": up.maps, "out_features": up.out_features}
        return functional.feed_forward(x, wide, down.operator(), activation, out_features=down.out_features)
    hidden = functional.activated(up(x), activation, 2 if gated else None)
    y: Tensor = down(hidden if dropout is None else dropout(hidden))
    return y


def _is_plain(layer: nn.Module) -> TypeGuard[SPMLinear]:
    """Whether this is an SPM layer that nobody watches or has wrapped: calling it is all that it is for."""
    return type(layer) is SPMLinear and not any(getattr(layer, hooks) for hooks in _HOOKS)
