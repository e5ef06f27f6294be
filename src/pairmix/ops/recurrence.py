"""All steps of a recurrent network as one operator, computed by the compiled kernels.

`pairmix::recurrence` is differentiated by `pairmix::recurrence_backward`, the paper's closed form through time. It
keeps the states and the gates of every step, and nothing of the stages between them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pairmix.ops import cpu_recurrence, torch_internals
from pairmix.ops.steps import GATES

_library = torch.library.Library("pairmix", "FRAGMENT")
_MAPS = "Tensor blocks, Tensor order, Tensor d_in, Tensor d_out, Tensor? bias, Tensor? residual_scale"
_library.define(
    f"recurrence(Tensor gates, Tensor h0, Tensor c0, int[]? batch_sizes, {_MAPS}, str cell) -> "
    "(Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    f"recurrence_backward(Tensor? grad_h, Tensor? grad_c, Tensor h0, Tensor c0, int[]? batch_sizes, {_MAPS}, Tensor h, "
    "Tensor c, Tensor saved, str cell, bool[8] needs) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
recurrence = torch.ops.pairmix.recurrence.default
recurrence_backward = torch.ops.pairmix.recurrence_backward.default
_library.impl(recurrence, cpu_recurrence.forward, "CPU")
_library.impl(recurrence_backward, cpu_recurrence.backward, "CPU")


def can_recur(*tensors: Tensor | None) -> bool:
    """Whether the operator knows what is done with its tensors: not forward mode, nor the transforms of torch.func."""
    if torch.compiler.is_compiling():
        return True
    given = [tensor for tensor in tensors if tensor is not None]
    return not torch_internals.are_transformed(given) and not torch_internals.have_tangents(given)


@torch.library.register_fake("pairmix::recurrence", lib=_library)
def _fake(gates: Tensor, h0: Tensor, c0: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    cell, rows, n = arguments[-1], gates.shape[0], h0.shape[1]
    return (
        gates.new_empty(rows, n),
        gates.new_empty(rows if cell == "lstm" else 0, n),
        gates.new_empty(rows, cpu_recurrence.SAVED[cell] * n),
    )


@torch.library.register_fake("pairmix::recurrence_backward", lib=_library)
def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    _, _, h0, c0, _, blocks, order, d_in, d_out, _, _, h, _, _, cell, needs = arguments
    (stages, n), maps = order.shape, GATES[cell]
    of_parameters = [blocks.shape, d_in.shape, d_out.shape, (maps, n), (maps, stages)]
    shapes = [(h.shape[0], maps * n), h0.shape, c0.shape, *of_parameters]
    return tuple(h.new_empty(shape if needed else (0,)) for shape, needed in zip(shapes, needs, strict=True))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, h0, c0, ctx.batch_sizes, blocks, ctx.order, *rest, ctx.cell = inputs
    ctx.save_for_backward(h0, c0, blocks, *rest, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_h: Tensor | None, grad_c: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    h0, c0, blocks, d_in, d_out, bias, residual_scale, h, c, saved = ctx.saved_tensors
    of_gates, of_h0, of_c0, _, of_blocks, _, *of_others, _ = ctx.needs_input_grad
    needs = [of_gates, of_h0, of_c0, of_blocks, *of_others]
    if grad_h is None and grad_c is None:
        return (None,) * len(ctx.needs_input_grad)
    gradients = recurrence_backward(
        grad_h, grad_c, h0, c0, ctx.batch_sizes, blocks, ctx.order, d_in, d_out, bias, residual_scale, h, c, saved,
        ctx.cell, needs,
    )  # fmt: skip
    kept = [gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True)]
    return *kept[:3], None, kept[3], None, *kept[4:], None


def _no_second_derivative(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
    raise NotImplementedError(
        'second derivatives of a recurrence are not computed by the compiled kernels: use impl="reference"'
    )


torch.library.register_autograd("pairmix::recurrence", _backward, setup_context=_setup_context, lib=_library)
torch.library.register_autograd("pairmix::recurrence_backward", _no_second_derivative, lib=_library)
