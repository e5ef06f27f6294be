"""The operator for torch, and who computes it."""

from pairmix.ops import cpu, reference
from pairmix.ops.library import IMPLS, Impl, call_directly, is_ordinary, spm
from pairmix.ops.recurrence import can_recur, recurrence
from pairmix.ops.steps import GATES, unrolled

IMPLS["cpu"] = Impl(cpu.forward, cpu.backward, cpu.why_not, cpu.fits)
IMPLS["reference"] = Impl(reference.forward, reference.backward, why_not=lambda device: None)

__all__ = [
    "GATES",
    "IMPLS",
    "Impl",
    "call_directly",
    "can_recur",
    "cpu",
    "is_ordinary",
    "recurrence",
    "spm",
    "unrolled",
]
