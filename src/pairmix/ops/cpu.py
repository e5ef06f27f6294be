"""The compiled kernels of csrc/: hands them the addresses of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch  # before the kernels, so that they share its OpenMP threads
from torch import Tensor
from torch.utils.dlpack import from_dlpack

try:
    from pairmix import _kernels
except ImportError as error:
    _missing: str | None = f"pairmix was installed without its compiled kernels ({error})"
else:
    _missing = None

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_LARGE = 1 << 17  # bytes from which on results come from the kernels' own pool: see csrc/pool.h


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


def forward(
    x: Tensor,
    blocks: Tensor,
    order: Tensor,
    d_in: Tensor | None,
    d_out: Tensor | None,
    bias: Tensor | None,
    residual_scale: Tensor | None,
    out_features: int,
) -> Tensor:
    """As `reference.forward`."""
    rows = x.reshape(-1, x.shape[-1])
    y = _empty((*x.shape[:-1], out_features), x)
    parameters = _parameters(x, blocks, d_in, d_out, bias, residual_scale)
    tensors = [rows.data_ptr(), *rows.stride(), y.data_ptr(), *map(_address, parameters)]
    _kernels.forward(*_setting(rows, blocks, order, out_features), *tensors)
    return y


def backward(
    grad: Tensor,
    x: Tensor,
    blocks: Tensor,
    order: Tensor,
    d_in: Tensor | None,
    d_out: Tensor | None,
    residual_scale: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:
    """As `reference.backward`."""
    rows, grad_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    parameters = _parameters(x, blocks, d_in, d_out, residual_scale)
    stages, n = order.shape
    gx = _empty(x.shape if needs[0] else (0,), x)
    computed = torch.float64 if x.dtype == torch.float64 else torch.float32
    shapes = (blocks.shape, (n,), (n,), grad.shape[-1:], (stages,))
    gradients = [
        blocks.new_empty(shape if needed else (0,), dtype=computed)
        for shape, needed in zip(shapes, needs[1:], strict=True)
    ]
    _kernels.backward(
        *_setting(rows, blocks, order, grad.shape[-1]),
        *(grad_rows.data_ptr(), *grad_rows.stride()),
        *(rows.data_ptr(), *rows.stride()),
        *map(_address, parameters),
        *(result.data_ptr() if needed else 0 for result, needed in zip((gx, *gradients), needs, strict=True)),
    )
    if blocks.dtype != computed:
        gradients = [gradient.to(blocks.dtype) for gradient in gradients]
    return gx, *gradients


def _setting(rows: Tensor, blocks: Tensor, order: Tensor, out_features: int) -> list[Any]:
    is_rotation = blocks.dim() == 2
    return [_plan(order), _DTYPES[rows.dtype], is_rotation, *rows.shape, out_features, torch.get_num_threads()]


def _plan(order: Tensor) -> Any:
    """How the kernels walk this schedule. Made once, and kept with the tensor that all its layers share."""
    plan = getattr(order, "_pairmix_plan", None)
    if plan is None:
        plan = _kernels.Plan(order.numpy())
        order._pairmix_plan = plan  # type: ignore[attr-defined]
    return plan


def _empty(shape: Sequence[int], like: Tensor) -> Tensor:
    if math.prod(shape) * like.itemsize < _LARGE:
        return like.new_empty(shape)
    return from_dlpack(_kernels.empty(list(shape), _DTYPES[like.dtype]))


def _parameters(x: Tensor, *parameters: Tensor | None) -> list[Tensor | None]:
    if x.dtype in (torch.float32, torch.float64) and all(p is None or p.is_contiguous() for p in parameters):
        return list(parameters)
    computed = torch.promote_types(x.dtype, torch.float32)
    return [None if parameter is None else parameter.to(computed).contiguous() for parameter in parameters]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
