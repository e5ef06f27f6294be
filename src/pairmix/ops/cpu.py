"""The compiled kernels of csrc/: hands them the addresses of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch  # before the kernels, so that they share its OpenMP threads
from torch import Tensor

_missing: str | None = None
try:
    import pairmix._kernels as _kernels  # `from pairmix import` would blame a circular import for a missing file
except ModuleNotFoundError:
    _missing = "pairmix was installed without its compiled kernels"
except ImportError as error:
    _missing = f"the compiled kernels cannot be loaded ({error})"


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


def empty_cache() -> None:
    """Free the memory that the kernels keep for the next call; see `pairmix.empty_cache`."""
    if _missing is None:
        _kernels.empty_cache()


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
            raise _refusal(x=x, blocks=blocks, d_in=d_in, d_out=d_out, bias=bias, residual_scale=residual_scale)
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
            raise _refusal(x=x, blocks=blocks, d_in=d_in, d_out=d_out, residual_scale=residual_scale, grad=grad)
        gx, *others = gradients
        gradients = [None if gx is None else gx.reshape(x.shape), *others]
    return tuple(gradients)


def plan_of(order: Tensor) -> Any:
    """How the kernels walk this schedule. Made once, and kept with the tensor that all its layers share."""
    plan, version = getattr(order, "_pairmix_plan", (None, None))
    if version != order._version:  # written to since, or never planned
        plan = _kernels.Plan(order.numpy())
        order._pairmix_plan = plan, order._version  # type: ignore[attr-defined]
    return plan


def _refusal(**tensors: Tensor | None) -> Exception:
    """Why the kernels do not take these tensors."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.numel() and not tensor.data_ptr():
            return RuntimeError(f"{name} has the shape {tuple(tensor.shape)}, but its storage was freed")
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items() if tensor is not None)
    return ValueError(f"the shapes do not fit: {shapes}")


def dense(parameter: Tensor | None) -> Tensor | None:
    """The same numbers, without gaps between them."""
    return None if parameter is None else parameter.contiguous()


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
