"""Recurrences where no implementation has them: one step after the other, by the reference.

A graph that was traced where all steps are one call may be loaded where they are not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pairmix.ops import reference
from pairmix.ops.cells import GATES, unrolled
from pairmix.ops.registry import Parameters, Tensors
from pairmix.schedule import DeviceSchedule

SAVED = GATES
"""Saved is what the inputs contribute to the gates: backward computes the steps again."""


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
    """As `cpu_recurrence.forward`."""
    h, c = _run(gates, h0, c0, batch_sizes, parameters, schedule, block, cell)
    return h, c if cell == "lstm" else h.new_empty(0, h0.shape[1]), gates.clone()


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
    """As `cpu_recurrence.backward`."""
    given = [name for name, tensor in parameters._asdict().items() if tensor is not None]

    def run(gates: Tensor, h0: Tensor, c0: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        some = parameters._replace(**dict(zip(given, tensors, strict=True)))
        return _run(gates, h0, c0, batch_sizes, some, schedule, block, cell)

    (all_h, all_c), vjp, *_ = torch.func.vjp(run, saved, h0, c0, *(getattr(parameters, name) for name in given))
    of_gates, of_h0, of_c0, *others = vjp(
        (torch.zeros_like(all_h) if grad_h is None else grad_h, torch.zeros_like(all_c) if grad_c is None else grad_c)
    )
    of_parameters = dict.fromkeys(parameters._fields) | dict(zip(given, others, strict=True))
    kept = {name: gradient if getattr(needs, name) else None for name, gradient in of_parameters.items()}
    return of_gates, of_h0, of_c0 if cell == "lstm" else None, Parameters(**kept)


def _run(
    gates: Tensor,
    h0: Tensor,
    c0: Tensor,
    batch_sizes: Sequence[int] | None,
    parameters: Tensors,
    schedule: DeviceSchedule,
    block: str,
    cell: str,
) -> tuple[Tensor, Tensor]:
    def mix(x: Tensor, first: int, last: int) -> Tensor:
        return reference.forward(x, parameters.of_maps(first, last), schedule, block, schedule.n)

    return unrolled(cell, gates, h0, c0, batch_sizes, mix)
