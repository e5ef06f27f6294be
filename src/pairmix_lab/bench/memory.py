"""What a layer needs memory for: what it keeps for backward, and the peak of a few training steps."""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor, nn

from pairmix.nn import SPMLinear
from pairmix_lab.bench.timing import training_step
from pairmix_lab.contenders import Build, has_torch_structured

STEPS = 3


def bytes_kept(layer: nn.Module, x: Tensor) -> int:
    """The bytes that a forward keeps for backward: x if it is kept, and what was computed; not what the layer owns."""
    x = x.detach().requires_grad_()
    first, _graph = _kept(layer, x)
    second, _other_graph = _kept(layer, x)
    owned = second.keys() & first.keys() - {x.untyped_storage().data_ptr()}  # the same in every forward
    return sum(size for address, size in first.items() if address not in owned)


def _kept(layer: nn.Module, x: Tensor) -> tuple[dict[int, int], Tensor]:
    kept = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        return kept, layer(x)


def peak_of_training(build: Build, *shape: int) -> int | None:
    """By how many bytes building the layer and `STEPS` training steps raise the peak of a fresh process' memory.

    None where the system does not tell.

    Raises:
        MemoryError: if the system killed that process.
    """
    if sys.platform != "linux":
        return None
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        try:
            return process.submit(_growth_of_peak, build, shape, torch.get_num_threads()).result()
        except BrokenProcessPool as error:
            raise MemoryError(
                f"a process was to do {STEPS} training steps on an input of shape {shape} and was killed"
            ) from error


def _growth_of_peak(build: Build, shape: tuple[int, ...], threads: int) -> int:
    torch.set_num_threads(threads)
    for tiny in (nn.Linear(2, 2), SPMLinear(2, 2)):
        training_step(tiny, torch.randn(2, 2))()  # what every layer needs once is not this one's
    has_torch_structured()  # imported here, if at all, so that this is not counted either
    x = torch.randn(shape)
    before = _peak()
    step = training_step(build(), x)
    for _ in range(STEPS):
        step()
    return _peak() - before


def _peak() -> int:
    # Not resource.getrusage: a new process starts with its parent's peak there.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
