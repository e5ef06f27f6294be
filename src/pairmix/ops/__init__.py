"""The operator for torch, and who computes it."""

from pairmix.ops import reference
from pairmix.ops.library import IMPLS, Impl, spm

IMPLS["reference"] = Impl(reference.forward, reference.backward, why_not=lambda device: None)

__all__ = ["IMPLS", "Impl", "spm"]
