"""All steps of a recurrent network as one operator, for the implementations that have recurrences.

`pairmix::recurrence` is differentiated by `pairmix::recurrence_backward`, the paper's closed form through time. It
keeps the states and the gates of every step, and nothing of the stages between them. As for `pairmix::spm`, `"auto"`
is resolved when the operator runs: where nothing has recurrences, a graph that was traced elsewhere runs step by step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pairmix.ops import step_by_step, torch_internals
from pairmix.ops.registry import Parameters, Recurrence, choose
from pairmix.schedule import DeviceSchedule

_library = torch.library.Library("pairmix", "FRAGMENT")
_MAPS = "Tensor order, Tensor blocks, Tensor d_in, Tensor d_out, Tensor? bias, Tensor? residual_scale, str block"
_library.define(
    f"recurrence(Tensor gates, Tensor h0, Tensor c0, int[]? batch_sizes, {_MAPS}, str cell, str impl) -> "
    "(Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    f"recurrence_backward(Tensor? grad_h, Tensor? grad_c, Tensor h0, Tensor c0, int[]? batch_sizes, {_MAPS}, Tensor h, "
    "Tensor c, Tensor saved, str cell, bool[8] needs, str impl) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
recurrence = torch.ops.pairmix.recurrence.default
recurrence_backward = torch.ops.pairmix.recurrence_backward.default


_STEP_BY_STEP = Recurrence(step_by_step.forward, step_by_step.backward, step_by_step.SAVED)


def _of(impl: str, device: torch.device) -> Recurrence:
    found = choose(impl, device).recurrence
    if found is not None:
        return found
    if impl == "auto":
        return _STEP_BY_STEP
    raise NotImplementedError(f"impl={impl!r} does not compute recurrences")


def _compute(gates: Tensor, h0: Tensor, c0: Tensor, batch_sizes: Any, order: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *parameters, block, cell, impl = rest
    forward = _of(impl, gates.device).forward
    return forward(gates, h0, c0, batch_sizes, Parameters(*parameters), DeviceSchedule.of(order), block, cell)


def _compute_backward(*arguments: Any) -> tuple[Tensor, ...]:
    *states, order, blocks, d_in, d_out, bias, scale, block, h, c, saved, cell, needs, impl = arguments
    parameters = Parameters(blocks, d_in, d_out, bias, scale)
    *of_states, of_parameters = _of(impl, h.device).backward(
        *states, parameters, DeviceSchedule.of(order), block, h, c, saved, cell, Parameters(*needs[3:])
    )
    return tuple(
        gradient if needed and gradient is not None else h.new_empty(0)
        for gradient, needed in zip((*of_states, *of_parameters), needs, strict=True)
    )


_library.impl(recurrence, _compute, "CompositeExplicitAutograd")
_library.impl(recurrence_backward, _compute_backward, "CompositeExplicitAutograd")


def can_fuse(*tensors: Tensor | None) -> bool:
    """Whether operators of several parts know what is done with their tensors.

    They do not know ONNX, forward mode, and the transforms of torch.func.
    """
    if torch.onnx.is_in_onnx_export():
        return False
    if torch.compiler.is_compiling():
        return True
    given = [tensor for tensor in tensors if tensor is not None]
    return not torch_internals.are_transformed(given) and not torch_internals.have_tangents(given)


@torch.library.register_fake("pairmix::recurrence", lib=_library)
def _fake(gates: Tensor, h0: Tensor, c0: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, cell, impl = arguments
    rows, n = gates.shape[0], h0.shape[1]
    return (
        gates.new_empty(rows, n),
        gates.new_empty(rows if cell == "lstm" else 0, n),
        gates.new_empty(rows, _of(impl, gates.device).saved[cell] * n),
    )


@torch.library.register_fake("pairmix::recurrence_backward", lib=_library)
def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    _, _, h0, c0, _, order, blocks, d_in, d_out, _, _, _, h, _, _, _, needs, _ = arguments
    (stages, n), maps = order.shape, blocks.shape[0]
    of_parameters = [blocks.shape, d_in.shape, d_out.shape, (maps, n), (maps, stages)]
    shapes = [(h.shape[0], maps * n), h0.shape, c0.shape, *of_parameters]
    return tuple(h.new_empty(shape if needed else (0,)) for shape, needed in zip(shapes, needs, strict=True))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, h0, c0, ctx.batch_sizes, ctx.order, *parameters, ctx.block, ctx.cell, ctx.impl = inputs
    ctx.save_for_backward(h0, c0, *parameters, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_h: Tensor | None, grad_c: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_h is None and grad_c is None:
        return (None,) * len(ctx.needs_input_grad)
    h0, c0, *parameters, h, c, saved = ctx.saved_tensors
    *of_states, _, _, of_blocks, of_d_in, of_d_out, of_bias, of_scale, _, _, _ = ctx.needs_input_grad
    needs = [*of_states, of_blocks, of_d_in, of_d_out, of_bias, of_scale]
    gradients = recurrence_backward(
        grad_h,
        grad_c,
        h0,
        c0,
        ctx.batch_sizes,
        ctx.order,
        *parameters,
        ctx.block,
        h,
        c,
        saved,
        ctx.cell,
        needs,
        ctx.impl,
    )
    kept = [gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True)]
    return *kept[:3], None, None, *kept[3:], None, None, None


def _no_second_derivative(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
    raise NotImplementedError(
        'second derivatives of a recurrence are only computed by the reference: use impl="reference"'
    )


torch.library.register_autograd("pairmix::recurrence", _backward, setup_context=_setup_context, lib=_library)
torch.library.register_autograd("pairmix::recurrence_backward", _no_second_derivative, lib=_library)
