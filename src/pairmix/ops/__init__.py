"""The operator for torch, and who computes it."""

from pairmix.ops import cpu, reference
from pairmix.ops.library import IMPLS, Impl, call_directly, spm
from pairmix.ops.recurrence import can_recur, recurrence
from pairmix.ops.steps import GATES, unrolled
from pairmix.ops.torch_internals import is_ordinary

IMPLS["cpu"] = Impl(cpu.forward, cpu.backward, cpu.why_not, cpu.fits)
IMPLS["reference"] = Impl(reference.forward, reference.backward, why_not=lambda device: None)


def empty_cache() -> None:
    """Free the memory that implementations keep for the next call, as `torch.cuda.empty_cache` does on a GPU.

    The compiled kernels keep up to 256 MiB of dead results, and the working memory of as many calls as ran at the same
    time. Results that are still in use stay as they are. The next calls are a little slower.
    """
    cpu.empty_cache()


__all__ = [
    "GATES",
    "IMPLS",
    "Impl",
    "call_directly",
    "can_recur",
    "cpu",
    "empty_cache",
    "is_ordinary",
    "recurrence",
    "spm",
    "unrolled",
]
