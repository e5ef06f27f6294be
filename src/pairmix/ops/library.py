"""The operator as torch sees it: schemas, shapes, derivatives, batching.

`pairmix::spm` is differentiated by `pairmix::spm_backward`, the closed form of the paper, and saves its inputs and
nothing else. Second derivatives, forward mode and the derivatives of `torch.func` run through the reference, whose
torch operations know all this.

A graph may run on another machine than the one that traced it, so `impl` is part of the call as the caller gave it:
`"auto"` is resolved when the operator runs, by the device of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pairmix.ops import reference, torch_internals
from pairmix.ops.registry import Impl, Parameters, Tensors, choose
from pairmix.ops.torch_internals import is_ordinary
from pairmix.schedule import DeviceSchedule

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

# A schema has no tuples with named fields: here the parameters are five positions, and nowhere else.
_library = torch.library.Library("pairmix", "DEF")
_library.define(
    "spm(Tensor x, Tensor order, Tensor blocks, Tensor? d_in, Tensor? d_out, Tensor? bias, Tensor? residual_scale, "
    "str block, SymInt out_features, str impl) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "spm_backward(Tensor grad, Tensor x, Tensor order, Tensor blocks, Tensor? d_in, Tensor? d_out, "
    "Tensor? residual_scale, str block, bool[6] needs, str impl) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
spm = torch.ops.pairmix.spm.default
spm_backward = torch.ops.pairmix.spm_backward.default


def _compute(x: Tensor, order: Tensor, *rest: Any) -> Tensor:
    *parameters, block, out_features, impl = rest
    chosen = choose(impl, x.device)
    return chosen.forward(x, Parameters(*parameters), DeviceSchedule.of(order), block, out_features)


def _compute_backward(*arguments: Any) -> Gradients:
    grad, *_, impl = arguments
    return _gradients(choose(impl, grad.device).backward, *arguments)


def _gradients(backward: Callable[..., tuple[Tensor | None, Tensors]], *arguments: Any) -> Gradients:
    """What `spm_backward` gives, by this implementation's backward: an empty tensor for what is not needed."""
    grad, x, order, blocks, d_in, d_out, residual_scale, block, needs, _ = arguments
    parameters = Parameters(blocks, d_in, d_out, None, residual_scale)
    needs_x, *needs_of_parameters = needs
    gx, of_parameters = backward(
        grad, x, parameters, DeviceSchedule.of(order), block, needs_x, Parameters(*needs_of_parameters)
    )
    gblocks, gd_in, gd_out, gbias, gresidual = (
        blocks.new_empty(0) if gradient is None else gradient for gradient in of_parameters
    )
    return x.new_empty(0) if gx is None else gx, gblocks, gd_in, gd_out, gbias, gresidual


_KERNELS: dict[Any, Callable[..., Any]] = {spm: _compute, spm_backward: _compute_backward}
for _op, _kernel in _KERNELS.items():
    _library.impl(_op, _kernel, "CompositeExplicitAutograd")


@torch.library.register_fake("pairmix::spm", lib=_library)
def _fake(x: Tensor, order: Tensor, blocks: Tensor, *arguments: Any) -> Tensor:
    *_, out_features, _ = arguments
    return x.new_empty((*x.shape[:-1], blocks.shape[0] * out_features))


@torch.library.register_fake("pairmix::spm_backward", lib=_library)
def _fake_backward(
    grad: Tensor,
    x: Tensor,
    order: Tensor,
    blocks: Tensor,
    d_in: Tensor | None,
    d_out: Tensor | None,
    residual_scale: Tensor | None,
    block: str,
    needs: Sequence[bool],
    impl: str,
) -> tuple[Tensor, ...]:
    (stages, n), maps = order.shape, blocks.shape[0]
    shapes = [blocks.shape, (maps, n), (maps, n), (maps, grad.shape[-1] // maps), (maps, stages)]
    gx = x.new_empty(x.shape if needs[0] else (0,))
    return gx, *(blocks.new_empty(shape if needed else (0,)) for shape, needed in zip(shapes, needs[1:], strict=True))


def call_directly(
    impl: Impl,
    x: Tensor,
    parameters: Tensors,
    schedule: DeviceSchedule,
    block: str,
    out_features: int,
    maps: int | None,
) -> Tensor | None:
    """`pairmix::spm` without the dispatcher, for ordinary tensors as the caller passed them.

    Returns None if the implementation does not take them as they are.
    """
    if torch.is_grad_enabled():
        y: Tensor | None = _apply_directly(x, *parameters, (impl, parameters, schedule, block, out_features, maps))
        return y
    return impl.direct(x, parameters, schedule, block, out_features, maps)  # type: ignore[misc]


class _Direct(torch.autograd.Function):
    """`call_directly`, with the closed-form backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        blocks: Tensor,
        d_in: Tensor | None,
        d_out: Tensor | None,
        bias: Tensor | None,
        residual_scale: Tensor | None,
        call: tuple[Any, ...],  # as one value: torch looks at every argument, and a small layer feels it
    ) -> Tensor | None:
        ctx.save_for_backward(x, blocks, d_in, d_out, residual_scale)
        impl, parameters, schedule, block, out_features, maps = call
        ctx.call = impl, schedule, block, maps is not None
        y: Tensor | None = impl.direct(x, parameters, schedule, block, out_features, maps)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, blocks, d_in, d_out, residual_scale = ctx.saved_tensors
        needs_x, *needs, _ = ctx.needs_input_grad
        impl, schedule, block, _ = ctx.call
        parameters, of_parameters = Parameters(blocks, d_in, d_out, None, residual_scale), Parameters(*needs)
        if not torch.is_grad_enabled() and is_ordinary(grad):
            gx, gradients = impl.backward(grad, x, parameters, schedule, block, needs_x, of_parameters)
        else:
            gx, gradients = _differentiable_gradients(ctx, grad, x, parameters, needs_x, of_parameters)
        return gx, *gradients, None


_apply_directly = torch_internals.apply_of(_Direct)


def _differentiable_gradients(
    ctx: Any, grad: Tensor, x: Tensor, parameters: Tensors, needs_x: bool, needs: Parameters[bool]
) -> tuple[Tensor | None, Tensors]:
    """The gradients by the operator of torch, which differentiates them again."""
    impl, schedule, block, has_front = ctx.call
    if not has_front:
        parameters = with_front(parameters)
    blocks, d_in, d_out, _, residual_scale = parameters
    gx, *gradients = spm_backward(
        grad, x, schedule.order, blocks, d_in, d_out, residual_scale, block, [needs_x, *needs], impl.name
    )
    kept = (gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True))
    if not has_front:
        kept = (None if gradient is None else gradient[0] for gradient in kept)
    return gx if needs_x else None, Parameters(*kept)


def with_front(parameters: Tensors) -> Tensors:
    """The parameters of one operator, with the leading dimension of maps."""
    # As views, which also tensors have whose storage was freed: the implementation says what is wrong with them.
    return Parameters(*(None if tensor is None else tensor.view(1, *tensor.shape) for tensor in parameters))


class _Differentiable(torch.autograd.Function):
    """y, with the closed-form backward."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *arguments: Any) -> Tensor:
        x, ctx.order, blocks, d_in, d_out, _, residual_scale, ctx.block, _, ctx.impl = arguments
        ctx.save_for_backward(x, blocks, d_in, d_out, residual_scale)
        y: Tensor = _below_autograd(spm, keyset, arguments)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, needs_x, _, *rest = ctx.needs_input_grad
        needs = [needs_x, *rest[:5]]
        x, *parameters = ctx.saved_tensors
        gradients = spm_backward(grad, x, ctx.order, *parameters, ctx.block, needs, ctx.impl)
        gx, *of_parameters = (gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True))
        return None, gx, None, *of_parameters, None, None, None


class _TwiceDifferentiable(torch.autograd.Function):
    """The gradients, which torch differentiates through the reference when they are differentiated again."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *arguments: Any) -> Gradients:
        *tensors, ctx.block, ctx.needs, ctx.impl = arguments
        ctx.save_for_backward(*tensors)
        gradients: Gradients = _below_autograd(spm_backward, keyset, arguments)
        return gradients

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed]

        def gradients(*differentiated: Tensor) -> Gradients:
            inputs = list(tensors)
            for i, tensor in zip(wanted, differentiated, strict=True):
                inputs[i] = tensor
            return _reference_backward(*inputs, ctx.block, ctx.needs, ctx.impl)

        vjp = torch.func.vjp(gradients, *(tensors[i] for i in wanted))[1]
        result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for i, gradient in zip(wanted, vjp(grads), strict=True):
            result[1 + i] = gradient
        return tuple(result)


def _reference_forward(*arguments: Any) -> Tensor:
    return _compute(*arguments[:-1], "reference")


def _reference_backward(*arguments: Any) -> Gradients:
    return _gradients(reference.backward, *arguments)


def _below_autograd(op: Any, keyset: Any, arguments: Sequence[Any]) -> Any:
    return torch_internals.call_below_autograd(op, _KERNELS[op], keyset, arguments)


def _register_autograd(op: Any, function: type[torch.autograd.Function], plain: Callable[..., Any]) -> None:
    # By hand, because torch.library.register_autograd fails under torch.func.grad and, worse, drops the tangents of
    # forward mode without a word.
    def kernel(keyset: Any, *arguments: Any) -> Any:
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        if torch_internals.are_transformed(tensors) or torch_internals.have_tangents(tensors):
            return plain(*arguments)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return function.apply(keyset, *arguments)
        return _below_autograd(op, keyset, arguments)

    _library.impl(op, kernel, "Autograd", with_keyset=True)


_register_autograd(spm, _Differentiable, _reference_forward)
_register_autograd(spm_backward, _TwiceDifferentiable, _reference_backward)


@torch.library.register_vmap("pairmix::spm", lib=_library)
def _batched(info: Any, in_dims: tuple[Any, ...], x: Tensor, *arguments: Any) -> tuple[Tensor, int]:
    if all(dim is None for dim in in_dims[1:]):
        return spm(x.movedim(in_dims[0], 0), *arguments), 0
    return torch.stack(list(_one_by_one(spm, info, in_dims, (x, *arguments)))), 0


@torch.library.register_vmap("pairmix::spm_backward", lib=_library)
def _batched_backward(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], int]:
    samples = _one_by_one(spm_backward, info, in_dims, arguments)
    return tuple(torch.stack(gradients) for gradients in zip(*samples, strict=True)), 0


def _one_by_one(op: Any, info: Any, in_dims: Sequence[int | None], arguments: Sequence[Any]) -> Iterator[Any]:
    for sample in range(info.batch_size):
        yield op(
            *(
                argument if dim is None else argument.select(dim, sample)
                for argument, dim in zip(arguments, in_dims, strict=True)
            )
        )
