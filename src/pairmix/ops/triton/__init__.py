"""The operator on GPUs, by kernels in Triton: for NVIDIA and AMD, whose tensors torch both calls "cuda".

Triton is an optional package and takes a while to import, so nothing of it is imported before the first call. Under
torch.compile the operator stays one opaque node, because there is nothing left in it that Inductor could fuse.

    plan        which stages are computed together, on which coordinates
    stages      the stages on a tile, and kernels, which load and store tiles: jitted functions
    launch      forward, and gradients: backward
    configs     how many rows a tile has, and how many programs there are
"""

from __future__ import annotations

import os
import re
from importlib import metadata, util

import torch
from torch import Tensor

from pairmix.ops.registry import Parameters, Tensors
from pairmix.schedule import DeviceSchedule

_OLDEST = (3, 5)
"""Without `tl.range(disable_licm=True)` the kernels spill registers."""


def _version() -> str:
    """Triton's version, without an import; torch for ROCm brings it under another name."""
    names = ("triton", "triton-rocm", "pytorch-triton-rocm")
    found = (distribution.version for name in names for distribution in metadata.distributions(name=name))
    return next(found, "of unknown version")


def _missing() -> str | None:
    if util.find_spec("triton") is None:
        return "Triton is not installed: pip install 'pairmix[gpu]'"
    numbers = re.match(r"(\d+)\.(\d+)", _version())
    if numbers is not None and tuple(map(int, numbers.groups())) < _OLDEST:
        return f"Triton {_version()} is too old, it must be {'.'.join(map(str, _OLDEST))} or newer: upgrade torch"
    return None


_MISSING = _missing()


def why_not(device: torch.device) -> str | None:
    """Why the kernels cannot run on tensors of this device; None if they can."""
    if device.type == "cpu" and not _interprets():
        return "the Triton kernels are for GPUs; with TRITON_INTERPRET=1 they are interpreted on CPU tensors, for tests"
    if device.type not in ("cpu", "cuda"):
        return f"the Triton kernels are for CUDA tensors, not for {device.type} tensors"
    if _MISSING is not None:
        return _MISSING
    if device.type == "cuda" and not torch.cuda.is_available():
        return "torch finds no GPU"
    return None


def advice(device: torch.device) -> str | None:
    """What to install so that the kernels can run on tensors of this device; None if that would not help."""
    return _MISSING if device.type == "cuda" and torch.cuda.is_available() else None


def details() -> str:
    """Triton's version, and the devices that its kernels run on."""
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    if _interprets():
        names.append("its interpreter on CPU tensors")
    return f"Triton {_version()} for {', '.join(names)}"


def forward(x: Tensor, parameters: Tensors, schedule: DeviceSchedule, block: str, out_features: int) -> Tensor:
    """As `reference.forward`."""
    shape = (*x.shape[:-1], len(parameters.blocks) * out_features)
    if not x.numel():
        return x.new_empty(shape)
    from pairmix.ops.triton.launch import Operator, in_fastest_tiles

    def run(narrow: bool) -> Tensor:
        operator = Operator(x, parameters, schedule, block, out_features, narrow)
        return operator.run(operator.x, 0, len(operator.passes))

    with torch.cuda.device_of(x):
        return in_fastest_tiles(x, schedule, ("forward", block, shape[-1]), run).view(shape)


def backward(
    grad: Tensor,
    x: Tensor,
    parameters: Tensors,
    schedule: DeviceSchedule,
    block: str,
    needs_x: bool,
    needs: Parameters[bool],
) -> tuple[Tensor | None, Tensors]:
    """As `reference.backward`."""
    maps = len(parameters.blocks)
    out_features = grad.shape[-1] // maps
    if not x.numel():
        blocks, n, stages = parameters.blocks, schedule.n, schedule.stages
        shapes = blocks.shape, (maps, n), (maps, n), (maps, out_features), (maps, stages)
        zeros = (blocks.new_zeros(shape) if needed else None for shape, needed in zip(shapes, needs, strict=True))
        return torch.empty_like(x) if needs_x else None, Parameters(*zeros)
    from pairmix.ops.triton.gradients import Backward
    from pairmix.ops.triton.launch import Operator, in_fastest_tiles

    def run(narrow: bool) -> tuple[Tensor | None, Tensors]:
        operator = Operator(x, parameters, schedule, block, out_features, narrow)
        return Backward(operator, grad.reshape(operator.rows, -1).contiguous(), needs_x, needs).run()

    with torch.cuda.device_of(x):
        gx, gradients = in_fastest_tiles(x, schedule, ("backward", block, maps, needs_x, needs), run)
    return None if gx is None else gx.view(x.shape), gradients


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
