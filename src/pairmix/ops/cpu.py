"""The compiled kernels of csrc/: hands them the addresses of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch  # before the kernels, so that they share its OpenMP threads
from torch import Tensor

try:
    from pairmix import _kernels
except ImportError as error:
    _missing: str | None = f"pairmix was installed without its compiled kernels ({error})"
else:
    _missing = None


def why_not(device: torch.device) -> str | None:
    """Why the kernels cannot run on tensors of this device; None if they can."""
    if device.type != "cpu":
        return f"the compiled kernels are for CPU tensors, not for {device.type} tensors"
    return _missing


def instruction_set() -> str:
    """The build of the kernels that this machine runs."""
    return _kernels.target()


def multiply_adds_per_second() -> float:
    """The float32 multiply-adds that this machine does in registers, with all of torch's threads."""
    return _kernels.multiply_adds_per_second(torch.get_num_threads())


def fits(x: Tensor, blocks: Tensor, order: Tensor, *rest: Any) -> bool:
    """Whether the kernels are there and these arguments of `forward` are right, and need no conversion."""
    return _missing is None and _kernels.fits(_plan(order), x, blocks, *rest)


def forward(
    x: Tensor,
    blocks: Tensor,
    order: Tensor,
    d_in: Tensor | None,
    d_out: Tensor | None,
    bias: Tensor | None,
    residual_scale: Tensor | None,
    out_features: int,
    maps: int | None,
) -> Tensor:
    """As `reference.forward`."""
    plan, threads = _plan(order), torch.get_num_threads()
    y = _kernels.forward(plan, x, blocks, d_in, d_out, bias, residual_scale, out_features, maps, threads)
    if y is None:  # perhaps for gaps between the numbers
        d_in, d_out, bias, residual_scale = map(_dense, (d_in, d_out, bias, residual_scale))
        dense = (blocks.contiguous(), d_in, d_out, bias, residual_scale)
        y = _kernels.forward(plan, _rows(x), *dense, out_features, maps, threads)
        if y is None:
            raise ValueError(f"the shapes do not fit: x {tuple(x.shape)}, blocks {tuple(blocks.shape)}")
        y = y.reshape(*x.shape[:-1], y.shape[-1])
    return y


def backward(
    grad: Tensor,
    x: Tensor,
    blocks: Tensor,
    order: Tensor,
    d_in: Tensor | None,
    d_out: Tensor | None,
    residual_scale: Tensor | None,
    maps: int | None,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """As `reference.backward`, with None for what was not asked for."""
    plan, threads = _plan(order), torch.get_num_threads()
    out_features = grad.shape[-1] // (maps or 1)
    rest = (out_features, maps, needs, threads)
    gradients = _kernels.backward(plan, grad, x, blocks, d_in, d_out, residual_scale, *rest)
    if gradients is None:
        d_in, d_out, residual_scale = map(_dense, (d_in, d_out, residual_scale))
        dense = (blocks.contiguous(), d_in, d_out, residual_scale)
        gradients = _kernels.backward(plan, _rows(grad), _rows(x), *dense, *rest)
        if gradients is None:
            raise ValueError(f"the shapes do not fit: x {tuple(x.shape)}, blocks {tuple(blocks.shape)}")
        gx, *others = gradients
        gradients = [None if gx is None else gx.reshape(x.shape), *others]
    return tuple(gradients)


_CELLS = ("tanh", "relu", "linear", "gru", "gru_reset_after", "lstm")  # as in csrc/kernel.h

SAVED = {"tanh": 0, "relu": 0, "linear": 0, "gru": 3, "gru_reset_after": 4, "lstm": 4}
"""How many numbers of every step and unit of the state a cell keeps for backward, beside the states themselves."""


def recurrence_forward(
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
    results = _kernels.recurrence_forward(
        _plan(order), _CELLS.index(cell), gates.contiguous(), h0.contiguous(), c0.contiguous(),
        _sizes(batch_sizes, gates, h0), *map(_dense, (blocks, d_in, d_out, bias, residual_scale)), torch.get_num_threads(),
    )  # fmt: skip
    if results is None:
        raise ValueError(f"the shapes do not fit: gates {tuple(gates.shape)}, h {tuple(h0.shape)}")
    h, c, saved = results
    return h, c, saved


def recurrence_backward(
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
    parameters = [_dense(parameter) for parameter in (blocks, d_in, d_out, bias, residual_scale)]
    results = _kernels.recurrence_backward(
        _plan(order), _CELLS.index(cell), _dense(grad_h), _dense(grad_c), h0.contiguous(), c0.contiguous(),
        sizes, *parameters, h, c, saved, torch.get_num_threads(),
    )  # fmt: skip
    if results is None:
        raise ValueError(f"the shapes do not fit: h {tuple(h.shape)}, saved {tuple(saved.shape)}")
    of_gates, of_mixed, of_h0, of_c0 = results
    of_parameters: list[Tensor | None] = [None] * 5
    if any(needs[3:]):
        # All steps at once: the operator's own backward, of the rows that the maps have read.
        before = _states_before(h, h0, batch_sizes)
        read = [before] if cell != "gru" else [before, saved[:, : h.shape[1]] * before]
        of_parameters = _parameter_gradients(of_gates if of_mixed is None else of_mixed, read, order, parameters, needs[3:])
    everything = (of_gates, of_h0, of_c0, *of_parameters)
    return tuple(
        h.new_empty(0) if gradient is None or not needed else gradient
        for gradient, needed in zip(everything, needs, strict=True)
    )


def _parameter_gradients(
    grad: Tensor, read: Sequence[Tensor], order: Tensor, parameters: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Of maps of which the last one has read the last of these rows, and all others the first."""
    maps, n = parameters[0].shape[0], order.shape[1]
    spans = [(0, maps)] if len(read) == 1 else [(0, maps - 1), (maps - 1, maps)]
    parts = []
    for rows, (first, last) in zip(read, spans, strict=True):
        blocks, d_in, d_out, _, residual_scale = (None if p is None else p[first:last] for p in parameters)
        columns = grad[:, first * n : last * n]
        parts.append(
            backward(columns, rows, blocks, order, d_in, d_out, residual_scale, last - first, (False, *needs))[1:]
        )
    return [None if of[0] is None else torch.cat(of) for of in zip(*parts, strict=True)]


def _states_before(h: Tensor, h0: Tensor, batch_sizes: Sequence[int] | None) -> Tensor:
    """For every row the state before its step."""
    if batch_sizes is None:
        return torch.cat([h0, h])[: h.shape[0]]
    steps = [h0, *h.split(list(batch_sizes))]
    return torch.cat([before[:size] for before, size in zip(steps, batch_sizes, strict=False)])


def _sizes(batch_sizes: Sequence[int] | None, rows: Tensor, h0: Tensor) -> list[int]:
    batch = h0.shape[0]
    return [batch] * (rows.shape[0] // max(batch, 1)) if batch_sizes is None else list(batch_sizes)


def _plan(order: Tensor) -> Any:
    """How the kernels walk this schedule. Made once, and kept with the tensor that all its layers share."""
    plan = getattr(order, "_pairmix_plan", None)
    if plan is None:
        plan = _kernels.Plan(order.numpy())
        order._pairmix_plan = plan  # type: ignore[attr-defined]
    return plan


def _dense(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
