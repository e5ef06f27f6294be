"""The operator as torch sees it: schemas, shapes, derivatives, batching.

`pairmix::spm` is differentiated by `pairmix::spm_backward`, the closed form of the paper, and saves its inputs and
nothing else. Second derivatives, forward mode and the derivatives of `torch.func` run through the reference, whose
torch operations know all this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pairmix.ops import reference, torch_internals
from pairmix.ops.reference import Gradients
from pairmix.ops.torch_internals import is_ordinary


@dataclass(frozen=True)
class Impl:
    """One way to compute the operator.

    Attributes:
        forward: as `reference.forward`.
        backward: as `reference.backward`; what was not asked for may be None.
        why_not: why it cannot run on this device here; None if it can.
        fits: whether it can run here and these arguments of `forward`, if x is an ordinary tensor, are right and can be
            computed as they are, without checking them in Python; False if it cannot tell.
    """

    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor | None, ...]]
    why_not: Callable[[torch.device], str | None]
    fits: Callable[..., bool] = lambda *arguments: False


IMPLS: dict[str, Impl] = {}
"""The implementations by name, the preferred ones first. `pairmix.ops` fills it."""

_library = torch.library.Library("pairmix", "DEF")
_library.define(
    "spm(Tensor x, Tensor blocks, Tensor order, Tensor? d_in, Tensor? d_out, Tensor? bias, Tensor? residual_scale, "
    "SymInt out_features, int? maps, str impl) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "spm_backward(Tensor grad, Tensor x, Tensor blocks, Tensor order, Tensor? d_in, Tensor? d_out, "
    "Tensor? residual_scale, int? maps, bool[6] needs, str impl) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
spm = torch.ops.pairmix.spm.default
spm_backward = torch.ops.pairmix.spm_backward.default


def _compute(*arguments: Any) -> Tensor:
    *inputs, impl = arguments
    return IMPLS[impl].forward(*inputs)


def _compute_backward(*arguments: Any) -> tuple[Tensor, ...]:
    grad, *rest, impl = arguments
    gradients = IMPLS[impl].backward(grad, *rest)
    return tuple(grad.new_empty(0) if gradient is None else gradient for gradient in gradients)


_KERNELS: dict[Any, Callable[..., Any]] = {spm: _compute, spm_backward: _compute_backward}
for _op, _kernel in _KERNELS.items():
    _library.impl(_op, _kernel, "CompositeExplicitAutograd")


@torch.library.register_fake("pairmix::spm", lib=_library)
def _fake(x: Tensor, *arguments: Any) -> Tensor:
    *_, out_features, maps, _ = arguments
    return x.new_empty((*x.shape[:-1], out_features * (maps or 1)))


@torch.library.register_fake("pairmix::spm_backward", lib=_library)
def _fake_backward(
    grad: Tensor,
    x: Tensor,
    blocks: Tensor,
    order: Tensor,
    d_in: Tensor | None,
    d_out: Tensor | None,
    residual_scale: Tensor | None,
    maps: int | None,
    needs: Sequence[bool],
    impl: str,
) -> tuple[Tensor, ...]:
    stages, n = order.shape
    front = () if maps is None else (maps,)
    out_features = grad.shape[-1] // (maps or 1)
    parameter_shapes = [blocks.shape, (*front, n), (*front, n), (*front, out_features), (*front, stages)]
    gx = x.new_empty(x.shape if needs[0] else (0,))
    return gx, *(
        blocks.new_empty(shape if needed else (0,)) for shape, needed in zip(parameter_shapes, needs[1:], strict=True)
    )


def call_directly(impl: str, *arguments: Any) -> Tensor:
    """`pairmix::spm` without the dispatcher: for ordinary tensors only."""
    *inputs, _, _ = arguments
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs):
        y: Tensor = _apply(None, *arguments, impl)
        return y
    return IMPLS[impl].forward(*arguments)


class _Differentiable(torch.autograd.Function):
    """y, with the closed-form backward."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *arguments: Any) -> Tensor:
        x, blocks, ctx.order, d_in, d_out, _, residual_scale, _, ctx.maps, ctx.impl = arguments
        ctx.save_for_backward(x, blocks, d_in, d_out, residual_scale)
        ctx.is_direct = keyset is None
        y: Tensor = _compute(*arguments) if ctx.is_direct else _below_autograd(spm, keyset, arguments)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, of_x, of_blocks, _, *of_others, _, _, _ = ctx.needs_input_grad
        needs = [of_x, of_blocks, *of_others]
        x, blocks, d_in, d_out, residual_scale = ctx.saved_tensors
        inputs = (grad, x, blocks, ctx.order, d_in, d_out, residual_scale, ctx.maps, needs)
        if ctx.is_direct and not torch.is_grad_enabled() and is_ordinary(grad):
            gradients = IMPLS[ctx.impl].backward(*inputs)
        else:
            gradients = spm_backward(*inputs, ctx.impl)
        gx, gblocks, *rest = (gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True))
        return None, gx, gblocks, None, *rest, None, None, None


_apply = torch_internals.apply_of(_Differentiable)


class _TwiceDifferentiable(torch.autograd.Function):
    """The gradients, which torch differentiates through the reference when they are differentiated again."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *arguments: Any) -> Gradients:
        *tensors, ctx.maps, ctx.needs, _ = arguments
        ctx.save_for_backward(*tensors)
        gradients: Gradients = _below_autograd(spm_backward, keyset, arguments)
        return gradients

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        reference_backward: Callable[..., Gradients] = partial(reference.backward, maps=ctx.maps, needs=ctx.needs)
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed]

        def gradients(*differentiated: Tensor) -> Gradients:
            inputs = list(tensors)
            for i, tensor in zip(wanted, differentiated, strict=True):
                inputs[i] = tensor
            return reference_backward(*inputs)

        vjp = torch.func.vjp(gradients, *(tensors[i] for i in wanted))[1]
        result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for i, gradient in zip(wanted, vjp(grads), strict=True):
            result[1 + i] = gradient
        return tuple(result)


def _below_autograd(op: Any, keyset: Any, arguments: Sequence[Any]) -> Any:
    return torch_internals.call_below_autograd(op, _KERNELS[op], keyset, arguments)


def _register_autograd(op: Any, function: type[torch.autograd.Function], plain: Callable[..., Any]) -> None:
    # By hand, because torch.library.register_autograd fails under torch.func.grad and, worse, drops the tangents of
    # forward mode without a word.
    def kernel(keyset: Any, *arguments: Any) -> Any:
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        if torch_internals.are_transformed(tensors) or torch_internals.have_tangents(tensors):
            return plain(*arguments[:-1])
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return function.apply(keyset, *arguments)
        return _below_autograd(op, keyset, arguments)

    _library.impl(op, kernel, "Autograd", with_keyset=True)


_register_autograd(spm, _Differentiable, reference.forward)
_register_autograd(spm_backward, _TwiceDifferentiable, reference.backward)


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
