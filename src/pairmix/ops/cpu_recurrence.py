"""All steps of a recurrent network in the compiled kernels: hands them the addresses of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from pairmix.ops import cpu

with suppress(ImportError):  # `cpu.why_not` tells
    import pairmix._kernels as _kernels

_CELLS = ("tanh", "relu", "linear", "gru", "gru_reset_after", "lstm")  # as in csrc/kernel.h

SAVED = {"tanh": 0, "relu": 0, "linear": 0, "gru": 3, "gru_reset_after": 4, "lstm": 4}
"""How many numbers of every step and unit of the state a cell keeps for backward, beside the states themselves."""


def forward(
    gates: Tensor,
    h0: Tensor,
    c0: Tensor,
    batch_sizes: Sequence[int] | None,
    blocks: Tensor,
    order: Tensor,
    d_in: Tensor,
    d_out: Tensor,
    bias: Tensor | None,
    residual_scale: Tensor | None,
    cell: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The states h and c after every step, and what backward needs of the gates."""
    sizes = _sizes(batch_sizes, gates, h0)
    parameters: Any = map(cpu.dense, (blocks, d_in, d_out, bias, residual_scale))
    states = (h0.contiguous(), c0.contiguous(), sizes)
    arguments: Any = (gates.contiguous(), *states, *parameters, torch.get_num_threads())
    results = _kernels.recurrence_forward(cpu.plan_of(order), _CELLS.index(cell), *arguments)
    if results is None:
        raise ValueError(f"the shapes do not fit: gates {tuple(gates.shape)}, h {tuple(h0.shape)}")
    h, c, saved = results
    return h, c, saved


def backward(
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    h0: Tensor,
    c0: Tensor,
    batch_sizes: Sequence[int] | None,
    blocks: Tensor,
    order: Tensor,
    d_in: Tensor,
    d_out: Tensor,
    bias: Tensor | None,
    residual_scale: Tensor | None,
    h: Tensor,
    c: Tensor,
    saved: Tensor,
    cell: str,
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:
    """The gradients of gates, h0, c0, blocks, d_in, d_out, bias and residual_scale; empty where not needed."""
    sizes = _sizes(batch_sizes, h, h0)
    parameters: Any = [cpu.dense(parameter) for parameter in (blocks, d_in, d_out, bias, residual_scale)]
    states = (h0.contiguous(), c0.contiguous(), sizes)
    grads = (cpu.dense(grad_h), cpu.dense(grad_c))
    arguments: Any = (*grads, *states, *parameters, h, c, saved, torch.get_num_threads())
    results = _kernels.recurrence_backward(cpu.plan_of(order), _CELLS.index(cell), *arguments)
    if results is None:
        raise ValueError(f"the shapes do not fit: h {tuple(h.shape)}, saved {tuple(saved.shape)}")
    of_gates, of_mixed, of_h0, of_c0 = list[Any](results)
    if of_mixed is None:
        of_mixed = of_gates
    for of_state in (of_h0, of_c0):
        if of_state is not None:
            of_state[sizes[0] if sizes else 0 :] = 0  # sequences without any step
    of_parameters: list[Tensor | None] = [None] * 5
    if any(needs[3:]):
        # All steps at once: the operator's own backward, of the rows that the maps have read.
        wanted = order, parameters, needs[3:]
        if batch_sizes is None and cell != "gru":
            # The states as they are, the first one apart: a copy of them all would take longer.
            first, others = h0.shape[0], h.shape[0] - h0.shape[0]
            of_parameters = _added(
                _parameter_gradients(of_mixed[:first], [h0[: h.shape[0]]], *wanted),
                _parameter_gradients(of_mixed[first:], [h[: max(others, 0)]], *wanted),
            )
        else:
            before = _states_before(h, h0, batch_sizes)
            read = [before] if cell != "gru" else [before, saved[:, : h.shape[1]] * before]
            of_parameters = _parameter_gradients(of_mixed, read, *wanted)
    everything = (of_gates, of_h0, of_c0, *of_parameters)
    return tuple(
        h.new_empty(0) if gradient is None or not needed else gradient
        for gradient, needed in zip(everything, needs, strict=True)
    )


def _parameter_gradients(
    grad: Tensor, read: Sequence[Tensor], order: Tensor, parameters: Sequence[Any], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Of maps of which the last one has read the last of these rows, and all others the first."""
    maps, n = parameters[0].shape[0], order.shape[1]
    spans = [(0, maps)] if len(read) == 1 else [(0, maps - 1), (maps - 1, maps)]
    parts = []
    for rows, (first, last) in zip(read, spans, strict=True):
        some: list[Any] = [None if p is None else p[first:last] for p in parameters]
        blocks, d_in, d_out, _, residual_scale = some
        columns = grad[:, first * n : last * n]
        parts.append(
            cpu.backward(columns, rows, blocks, order, d_in, d_out, residual_scale, last - first, (False, *needs))[1:]
        )
    return [None if of[0] is None else torch.cat(of) for of in zip(*parts, strict=True)]


def _added(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if a is None or b is None else a + b for a, b in zip(some, others, strict=True)]


def _states_before(h: Tensor, h0: Tensor, batch_sizes: Sequence[int] | None) -> Tensor:
    """For every row the state before its step."""
    if batch_sizes is None:
        return torch.cat([h0, h])[: h.shape[0]]
    steps = [h0, *h.split(list(batch_sizes))]
    return torch.cat([h[:0], *(before[:size] for before, size in zip(steps, batch_sizes, strict=False))])


def _sizes(batch_sizes: Sequence[int] | None, rows: Tensor, h0: Tensor) -> list[int]:
    batch = h0.shape[0]
    return [batch] * (rows.shape[0] // max(batch, 1)) if batch_sizes is None else list(batch_sizes)
