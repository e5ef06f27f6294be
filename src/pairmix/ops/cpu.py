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
    return _missing is None and _kernels.fits(plan_of(order), x, blocks, *rest)


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
    plan, threads = plan_of(order), torch.get_num_threads()
    y = _kernels.forward(plan, x, blocks, d_in, d_out, bias, residual_scale, out_features, maps, threads)
    if y is None:  # perhaps for gaps between the numbers
        d_in, d_out, bias, residual_scale = map(dense, (d_in, d_out, bias, residual_scale))
        arguments = (blocks.contiguous(), d_in, d_out, bias, residual_scale)
        y = _kernels.forward(plan, _rows(x), *arguments, out_features, maps, threads)
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
    plan, threads = plan_of(order), torch.get_num_threads()
    out_features = grad.shape[-1] // (maps or 1)
    rest = (out_features, maps, needs, threads)
    gradients = _kernels.backward(plan, grad, x, blocks, d_in, d_out, residual_scale, *rest)
    if gradients is None:
        d_in, d_out, residual_scale = map(dense, (d_in, d_out, residual_scale))
        arguments = (blocks.contiguous(), d_in, d_out, residual_scale)
        gradients = _kernels.backward(plan, _rows(grad), _rows(x), *arguments, *rest)
        if gradients is None:
            raise ValueError(f"the shapes do not fit: x {tuple(x.shape)}, blocks {tuple(blocks.shape)}")
        gx, *others = gradients
        gradients = [None if gx is None else gx.reshape(x.shape), *others]
    return tuple(gradients)


def plan_of(order: Tensor) -> Any:
    """How the kernels walk this schedule. Made once, and kept with the tensor that all its layers share."""
    plan = getattr(order, "_pairmix_plan", None)
    if plan is None:
        plan = _kernels.Plan(order.numpy())
        order._pairmix_plan = plan  # type: ignore[attr-defined]
    return plan


def dense(parameter: Tensor | None) -> Tensor | None:
    """The same numbers, without gaps between them."""
    return None if parameter is None else parameter.contiguous()


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
