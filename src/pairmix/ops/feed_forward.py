"""A feed-forward block as one operator: a wide map, an activation, a narrow map.

`pairmix::feed_forward` is differentiated by `pairmix::feed_forward_backward` and saves its inputs and nothing else: the
hidden layer is computed again. An implementation that has no such blocks, or not this one, computes them part by part.
Second derivatives run through the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pairmix.ops import torch_internals
from pairmix.ops.library import with_front
from pairmix.ops.registry import EVERYWHERE, IMPLS, Impl, Map, Parameters, Tensors, choose
from pairmix.ops.torch_internals import is_ordinary
from pairmix.schedule import DeviceSchedule


class Activation(NamedTuple):
    """An activation, and the gradient of its input from that of its output and the input."""

    value: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


_aten = torch.ops.aten
ACTIVATIONS = {
    "relu": Activation(torch.relu, lambda grad, z: _aten.threshold_backward(grad, z, 0)),
    "gelu": Activation(F.gelu, _aten.gelu_backward),
    "gelu_tanh": Activation(
        lambda z: F.gelu(z, approximate="tanh"), lambda grad, z: _aten.gelu_backward(grad, z, approximate="tanh")
    ),
    "silu": Activation(F.silu, _aten.silu_backward),
}
"""By name, in the order of csrc/kernel.h."""

_library = torch.library.Library("pairmix", "FRAGMENT")
_OF_MAP = (
    "Tensor {0}_order, Tensor {0}_blocks, Tensor? {0}_d_in, Tensor? {0}_d_out, Tensor? {0}_bias, Tensor? {0}_scale"
)
_MAPS = f"{_OF_MAP.format('up')}, {_OF_MAP.format('down')}, str up_block, str down_block"
_library.define(
    f"feed_forward(Tensor x, {_MAPS}, str activation, SymInt out_features, str impl) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    f"feed_forward_backward(Tensor grad, Tensor x, {_MAPS}, str activation, bool[11] needs, str impl) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
feed_forward = torch.ops.pairmix.feed_forward.default
feed_forward_backward = torch.ops.pairmix.feed_forward_backward.default


def arguments_of(up: Map, down: Map) -> tuple[Any, ...]:
    """The two maps as the operators take them."""
    return (up.schedule.order, *up.parameters, down.schedule.order, *down.parameters, up.block, down.block)


def _maps_of(arguments: Sequence[Any]) -> tuple[Map, Map]:
    *tensors, up_block, down_block = arguments
    return tuple(
        Map(Parameters(*parameters), DeviceSchedule.of(order), block)
        for (order, *parameters), block in ((tensors[:6], up_block), (tensors[6:], down_block))
    )  # type: ignore[return-value]


def _compute(x: Tensor, *rest: Any) -> Tensor:
    *of_maps, activation, out_features, impl = rest
    up, down = _maps_of(of_maps)
    chosen = choose(impl, x.device)
    fused = chosen.feed_forward
    y = None if fused is None else fused.forward(x, up, down, activation, out_features)
    return in_parts(chosen, x, up, down, activation, out_features) if y is None else y


def _compute_backward(grad: Tensor, x: Tensor, *rest: Any) -> list[Tensor]:
    *of_maps, activation, needs, impl = rest
    up, down = _maps_of(of_maps)
    needs_x, of_up, of_down = needs[0], Parameters(*needs[1:6]), Parameters(*needs[6:])
    chosen = choose(impl, x.device)
    fused = chosen.feed_forward
    found = None if fused is None else fused.backward(grad, x, up, down, activation, needs_x, of_up, of_down)
    if found is None:
        found = in_parts_backward(chosen, grad, x, up, down, activation, needs_x, of_up, of_down)
    gx, gup, gdown = found
    kept = zip((gx, *gup, *gdown), needs, strict=True)
    return [gradient if needed and gradient is not None else x.new_empty(0) for gradient, needed in kept]


def in_parts(impl: Impl, x: Tensor, up: Map, down: Map, activation: str, out_features: int) -> Tensor:
    """`down(activation(up x))`; of two maps up, the activation of the first times the second.

    Args:
        impl: what computes the maps.
        x: `[..., in_features]`.
        up: one map or two, each as wide as its schedule.
        down: one map of that width.
        activation: of `ACTIVATIONS`.
        out_features: the size of the output.
    """
    hidden = impl.forward(x, *up, up.schedule.n)
    return impl.forward(activated(hidden, activation, len(up.parameters.blocks)), *down, out_features)


def in_parts_backward(
    impl: Impl,
    grad: Tensor,
    x: Tensor,
    up: Map,
    down: Map,
    activation: str,
    needs_x: bool,
    needs_up: Parameters[bool],
    needs_down: Parameters[bool],
) -> tuple[Tensor | None, Tensors, Tensors]:
    """The gradients of x and of both maps' parameters; those that are not needed may be None."""
    hidden = impl.forward(x, *up, up.schedule.n)
    of_activated, of_down = impl.backward(
        grad, activated(hidden, activation, len(up.parameters.blocks)), *down, True, needs_down
    )
    assert of_activated is not None
    value, backward = ACTIVATIONS[activation]
    if len(up.parameters.blocks) == 1:
        of_hidden = backward(of_activated, hidden)
    else:
        gate, factor = hidden.chunk(2, -1)
        of_hidden = torch.cat([backward(of_activated * factor, gate), of_activated * value(gate)], -1)
    gx, of_up = impl.backward(of_hidden, x, *up, needs_x, needs_up)
    return gx, of_up, of_down


def activated(hidden: Tensor, activation: str, maps: int | None) -> Tensor:
    """The activation; of the outputs of two maps side by side, that of the first times the second."""
    value = ACTIVATIONS[activation].value
    if maps != 2:
        return value(hidden)
    gate, factor = hidden.chunk(2, -1)
    return value(gate) * factor


_library.impl(feed_forward, _compute, "CompositeExplicitAutograd")
_library.impl(feed_forward_backward, _compute_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("pairmix::feed_forward", lib=_library)
def _fake(x: Tensor, *arguments: Any) -> Tensor:
    *_, out_features, _ = arguments
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.register_fake("pairmix::feed_forward_backward", lib=_library)
def _fake_backward(grad: Tensor, x: Tensor, *arguments: Any) -> list[Tensor]:
    *of_maps, _, needs, _ = arguments
    tensors = [x, *of_maps[1:6], *of_maps[7:12]]
    return [
        x.new_empty(0)
        if not needed or tensor is None
        else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for tensor, needed in zip(tensors, needs, strict=True)
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.up_block, ctx.down_block, ctx.activation, _, ctx.impl = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad
    needs = [needed[0], *needed[2:7], *needed[8:13]]
    rest = (ctx.up_block, ctx.down_block, ctx.activation, needs, ctx.impl)
    gradients = feed_forward_backward(grad, *ctx.saved_tensors, *rest)
    gx, *others = (gradient if need else None for gradient, need in zip(gradients, needs, strict=True))
    return gx, None, *others[:5], None, *others[5:], None, None, None, None, None


def _setup_twice(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.up_block, ctx.down_block, ctx.activation, ctx.needs, _ = inputs
    ctx.save_for_backward(*tensors)


def _backward_twice(ctx: Any, grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Of the gradients, as those of the reference."""
    tensors = ctx.saved_tensors
    wanted = [i for i, needed in enumerate(ctx.needs_input_grad[: len(tensors)]) if needed]

    def gradients(*differentiated: Tensor) -> list[Tensor]:
        inputs = list(tensors)
        for i, tensor in zip(wanted, differentiated, strict=True):
            inputs[i] = tensor
        grad, x, *of_maps = inputs
        given = [1, *(2 + i for i in (*range(1, 6), *range(7, 12)) if of_maps[i] is not None)]

        def block(*values: Tensor) -> Tensor:
            replaced = list(inputs)
            for i, value in zip(given, values, strict=True):
                replaced[i] = value
            up, down = _maps_of((*replaced[2:], ctx.up_block, ctx.down_block))
            return in_parts(IMPLS[EVERYWHERE], replaced[1], up, down, ctx.activation, grad.shape[-1])

        found = dict(zip(given, torch.func.vjp(block, *(inputs[i] for i in given))[1](grad), strict=True))
        places = [1, *range(3, 8), *range(9, 14)]
        return [
            found[place] if need and place in found else x.new_empty(0)
            for place, need in zip(places, ctx.needs, strict=True)
        ]

    vjp = torch.func.vjp(gradients, *(tensors[i] for i in wanted))[1]
    result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    for i, gradient in zip(wanted, vjp(list(grads)), strict=True):
        result[i] = gradient
    return tuple(result)


def call_block_directly(impl: Impl, x: Tensor, up: Map, down: Map, activation: str, out_features: int) -> Tensor | None:
    """`pairmix::feed_forward` without the dispatcher, for ordinary tensors as the caller passed them.

    Returns None if the implementation does not take them as they are.
    """
    if impl.feed_forward is None or impl.feed_forward.direct is None:
        return None
    if torch.is_grad_enabled():
        rest = (up, down, impl, activation, out_features)
        y: Tensor | None = _apply_directly(x, *up.parameters, *down.parameters, *rest)
        return y
    return impl.feed_forward.direct(x, up, down, activation, out_features)


class _Direct(torch.autograd.Function):
    """`call_block_directly`, with its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> Tensor | None:
        *tensors, up, down, ctx.impl, ctx.activation, out_features = arguments
        ctx.save_for_backward(x, *tensors)
        ctx.up, ctx.down = up._replace(parameters=None), down._replace(parameters=None)
        y: Tensor | None = ctx.impl.feed_forward.direct(x, up, down, ctx.activation, out_features)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        up, down = Parameters(*tensors[:5]), Parameters(*tensors[5:])
        needs_x, *rest = ctx.needs_input_grad[:11]
        of_up, of_down = Parameters(*rest[:5]), Parameters(*rest[5:])
        wide, narrow = ctx.up._replace(parameters=up), ctx.down._replace(parameters=down)
        found = None
        if not torch.is_grad_enabled() and is_ordinary(grad):
            found = ctx.impl.feed_forward.backward(grad, x, wide, narrow, ctx.activation, needs_x, of_up, of_down)
        if found is None:
            found = _differentiable_gradients(ctx, grad, x, wide, narrow, [needs_x, *rest])
        gx, gup, gdown = found
        return gx, *gup, *gdown, None, None, None, None, None


_apply_directly = torch_internals.apply_of(_Direct)


def _differentiable_gradients(
    ctx: Any, grad: Tensor, x: Tensor, up: Map, down: Map, needs: list[bool]
) -> tuple[Tensor | None, Tensors, Tensors]:
    """The gradients by the operator of torch, which differentiates them again."""
    fronts = [map_.parameters.blocks.dim() > (2 if map_.block == "rotation" else 3) for map_ in (up, down)]
    wide, narrow = (
        map_ if has_front else map_._replace(parameters=with_front(map_.parameters))
        for map_, has_front in zip((up, down), fronts, strict=True)
    )
    gradients = feed_forward_backward(grad, x, *arguments_of(wide, narrow), ctx.activation, needs, ctx.impl.name)
    gx, *kept = (gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True))
    of_up, of_down = (
        Parameters(*(part if part is None or has_front else part[0] for part in parts))
        for parts, has_front in zip((kept[:5], kept[5:]), fronts, strict=True)
    )
    return gx, of_up, of_down


torch.library.register_autograd("pairmix::feed_forward", _backward, setup_context=_setup_context, lib=_library)
torch.library.register_autograd(
    "pairmix::feed_forward_backward", _backward_twice, setup_context=_setup_twice, lib=_library
)
