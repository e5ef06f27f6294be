"""All steps of a recurrent network in the compiled kernels: hands them the addresses of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pairmix.ops import cpu
from pairmix.ops.cells import sizes_of
from pairmix.ops.registry import Parameters, Tensors
from pairmix.schedule import DeviceSchedule

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
    parameters: Tensors,
    schedule: DeviceSchedule,
    block: str,
    cell: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The states h and c after every step, and what backward needs of the gates."""
    results = _kernels.recurrence_forward(
        cpu.plan_of(schedule),
        _CELLS.index(cell),
        gates.contiguous(),
        h0.contiguous(),
        c0.contiguous(),
        sizes_of(batch_sizes, gates, h0),
        cpu.contiguous(parameters),
        block == "rotation",
        torch.get_num_threads(),
    )
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
    parameters: Tensors,
    schedule: DeviceSchedule,
    block: str,
    h: Tensor,
    c: Tensor,
    saved: Tensor,
    cell: str,
    needs: Parameters[bool],
) -> tuple[Tensor, Tensor, Tensor | None, Tensors]:
    """The gradients of gates, h0, c0 (for an LSTM) and of the parameters; None for those that are not needed."""
    sizes = sizes_of(batch_sizes, h, h0)
    parameters = cpu.contiguous(parameters)
    results = _kernels.recurrence_backward(
        cpu.plan_of(schedule),
        _CELLS.index(cell),
        None if grad_h is None else grad_h.contiguous(),
        None if grad_c is None else grad_c.contiguous(),
        h0.contiguous(),
        c0.contiguous(),
        sizes,
        parameters,
        block == "rotation",
        h,
        c,
        saved,
        torch.get_num_threads(),
    )
    if results is None:
        raise ValueError(f"the shapes do not fit: h {tuple(h.shape)}, saved {tuple(saved.shape)}")
    of_gates, of_mixed, of_h0, of_c0 = list[Any](results)
    if of_mixed is None:
        of_mixed = of_gates
    for of_state in (of_h0, of_c0):
        if of_state is not None:
            of_state[sizes[0] if sizes else 0 :] = 0  # sequences without any step
    if not any(needs):
        return of_gates, of_h0, of_c0, Parameters(None, None, None, None, None)
    # All steps at once: the operator's own backward, of the rows that the maps have read.
    of_rows = partial(_parameter_gradients, parameters=parameters, schedule=schedule, block=block, needs=needs)
    if batch_sizes is None and cell != "gru":
        # The states as they are, the first one apart: a copy of them all would take longer.
        first, others = h0.shape[0], h.shape[0] - h0.shape[0]
        of_parameters = _added(
            of_rows(of_mixed[:first], [h0[: h.shape[0]]]), of_rows(of_mixed[first:], [h[: max(others, 0)]])
        )
    else:
        before = _states_before(h, h0, batch_sizes)
        of_parameters = of_rows(of_mixed, [before] if cell != "gru" else [before, saved[:, : h.shape[1]] * before])
    return of_gates, of_h0, of_c0, of_parameters


def _parameter_gradients(
    grad: Tensor,
    read: Sequence[Tensor],
    parameters: Tensors,
    schedule: DeviceSchedule,
    block: str,
    needs: Parameters[bool],
) -> Tensors:
    """Of maps of which the last one has read the last of these rows, and all others the first."""
    maps, n = len(parameters.blocks), schedule.n
    spans = [(0, maps)] if len(read) == 1 else [(0, maps - 1), (maps - 1, maps)]
    parts = []
    for rows, (first, last) in zip(read, spans, strict=True):
        columns = grad[:, first * n : last * n]
        parts.append(cpu.backward(columns, rows, parameters.of_maps(first, last), schedule, block, False, needs)[1])
    return Parameters(*(None if of[0] is None else torch.cat(of) for of in zip(*parts, strict=True)))


def _added(some: Tensors, others: Tensors) -> Tensors:
    return Parameters(*(None if a is None else a + b for a, b in zip(some, others, strict=True)))


def _states_before(h: Tensor, h0: Tensor, batch_sizes: Sequence[int] | None) -> Tensor:
    """For every row the state before its step."""
    if batch_sizes is None:
        return torch.cat([h0, h])[: h.shape[0]]
    steps = [h0, *h.split(list(batch_sizes))]
    return torch.cat([h[:0], *(before[:size] for before, size in zip(steps, batch_sizes, strict=False))])
