"""The compiled kernels of csrc/: hands them the addresses of tensors."""

from __future__ import annotations

from typing import Any, NoReturn

import torch  # before the kernels, so that they share its OpenMP threads
from torch import Tensor

from pairmix.ops.registry import Parameters, Tensors
from pairmix.schedule import DeviceSchedule

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


def instruction_sets() -> list[str]:
    """The builds of the kernels that this machine could run, the best one first."""
    return _kernels.targets()


def use_instruction_set(name: str) -> None:
    """Run another build of the kernels."""
    _kernels.use_target(name)


def multiply_adds_per_second() -> float:
    """The float32 multiply-adds that this machine does in registers, with all of torch's threads."""
    return _kernels.multiply_adds_per_second(torch.get_num_threads())


def caches() -> tuple[int, int]:
    """The bytes of the L1 and of the L2 cache that the kernels make their tiles for: this machine's, unless changed."""
    return _kernels.caches()


def details() -> str:
    """The instruction set, and the caches that tiles are made for."""
    l1, l2 = (size >> 10 for size in caches())
    return f"built for {instruction_set()}, tiles for {l1} KiB of L1 and {l2} KiB of L2 cache"


def use_caches(l1_bytes: int, l2_bytes: int) -> None:
    """Make tiles as for a machine with caches of these sizes."""
    _kernels.use_caches(l1_bytes, l2_bytes)


def empty_cache() -> None:
    """Free the memory that the kernels keep for the next call; see `pairmix.empty_cache`."""
    if _missing is None:
        _kernels.empty_cache()


def direct(
    x: Tensor, parameters: Tensors, schedule: DeviceSchedule, block: str, out_features: int, maps: int | None
) -> Tensor | None:
    """As `forward`, if these are ordinary tensors that fit together and need no conversion; else None.

    With `maps=None` the parameters are those of one operator, without the leading dimension.
    """
    if block != "rotation" and block != "general":
        return None
    rotation, threads = block == "rotation", torch.get_num_threads()
    y = _kernels.forward(plan_of(schedule), x, parameters, rotation, out_features, maps, threads, True)
    if y is None:
        _check_storage(x=x, **parameters._asdict())
    return y


def forward(x: Tensor, parameters: Tensors, schedule: DeviceSchedule, block: str, out_features: int) -> Tensor:
    """As `reference.forward`."""
    rest = (block == "rotation", out_features, parameters.blocks.shape[0], torch.get_num_threads(), False)
    y = _kernels.forward(plan_of(schedule), x, parameters, *rest)
    if y is None:  # perhaps for gaps between the numbers
        y = _kernels.forward(plan_of(schedule), _rows(x), contiguous(parameters), *rest)
        if y is None:
            _refuse(x=x, **parameters._asdict())
        y = y.reshape(*x.shape[:-1], y.shape[-1])
    return y


def backward(
    grad: Tensor,
    x: Tensor,
    parameters: Tensors,
    schedule: DeviceSchedule,
    block: str,
    needs_x: bool,
    needs: Parameters[bool],
) -> tuple[Tensor | None, Tensors]:
    """As `reference.backward`. The gradients have the shapes of the parameters, also without the leading dimension."""
    rotation = block == "rotation"
    maps = parameters.blocks.shape[0] if parameters.blocks.dim() > (2 if rotation else 3) else None
    rest = (rotation, maps, (needs_x, *needs), torch.get_num_threads())
    gradients = _kernels.backward(plan_of(schedule), grad, x, parameters, *rest)
    if gradients is None:
        gradients = _kernels.backward(plan_of(schedule), _rows(grad), _rows(x), contiguous(parameters), *rest)
        if gradients is None:
            _refuse(grad=grad, x=x, **parameters._asdict())
        gx, *others = gradients
        gradients = [None if gx is None else gx.reshape(x.shape), *others]
    return gradients[0], Parameters(*gradients[1:])


def plan_of(schedule: DeviceSchedule) -> Any:
    """How the kernels walk this schedule."""
    plan = schedule.kept.get("cpu")
    if plan is None:
        plan = schedule.kept["cpu"] = _kernels.Plan(schedule.order.numpy())
    return plan


def _refuse(**tensors: Tensor | None) -> NoReturn:
    """Say why the kernels do not take these tensors."""
    _check_storage(**tensors)
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items() if tensor is not None)
    raise ValueError(f"the shapes do not fit: {shapes}")


def _check_storage(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        is_plain = type(tensor) in (Tensor, torch.nn.Parameter)
        if tensor is not None and is_plain and tensor.is_cpu and tensor.numel() and not tensor.data_ptr():
            raise RuntimeError(f"{name} has the shape {tuple(tensor.shape)}, but its storage was freed")


def contiguous(parameters: Tensors) -> Tensors:
    """The same numbers, without gaps between them."""
    return Parameters(*(None if parameter is None else parameter.contiguous() for parameter in parameters))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
