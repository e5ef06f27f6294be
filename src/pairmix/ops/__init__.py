"""The operator for torch, and the implementations that compute it."""

from pairmix.ops import cpu, cpu_feed_forward, cpu_recurrence, reference, triton
from pairmix.ops.cells import GATES, unrolled
from pairmix.ops.decomposed import decomposed
from pairmix.ops.feed_forward import ACTIVATIONS, activated, arguments_of, call_block_directly, feed_forward
from pairmix.ops.flops import register_flop_formulas
from pairmix.ops.library import call_directly, spm, with_front
from pairmix.ops.recurrence import can_fuse, recurrence
from pairmix.ops.registry import (
    DIRECT,
    IMPLS,
    FeedForward,
    Impl,
    Map,
    Parameters,
    Recurrence,
    Tensors,
    choose,
    register,
    unregister,
)
from pairmix.ops.torch_internals import is_ordinary

register_flop_formulas()
register(Impl("reference", reference.forward, reference.backward, why_not=lambda device: None))
register(
    Impl(
        "cpu",
        cpu.forward,
        cpu.backward,
        cpu.why_not,
        preferred_on="cpu",
        recurrence=Recurrence(cpu_recurrence.forward, cpu_recurrence.backward, cpu_recurrence.SAVED),
        feed_forward=FeedForward(cpu_feed_forward.forward, cpu_feed_forward.backward, cpu_feed_forward.direct),
        direct=cpu.direct,
        details=cpu.details,
        empty_cache=cpu.empty_cache,
    )
)
register(
    Impl(
        "triton",
        triton.forward,
        triton.backward,
        triton.why_not,
        preferred_on="cuda",
        details=triton.details,
        advice=triton.advice,
    )
)


def empty_cache() -> None:
    """Free the memory that implementations cache for the next call, as `torch.cuda.empty_cache` does on a GPU.

    The compiled kernels cache up to 256 MiB of freed results, and the scratch memory of as many calls as ran at the
    same time. Results that are still in use are not touched. The next calls are a little slower.
    """
    for impl in IMPLS.values():
        impl.empty_cache()


__all__ = [
    "ACTIVATIONS",
    "DIRECT",
    "GATES",
    "IMPLS",
    "FeedForward",
    "Impl",
    "Map",
    "Parameters",
    "Recurrence",
    "Tensors",
    "activated",
    "arguments_of",
    "call_block_directly",
    "call_directly",
    "can_fuse",
    "choose",
    "cpu",
    "decomposed",
    "empty_cache",
    "feed_forward",
    "is_ordinary",
    "recurrence",
    "register",
    "spm",
    "unregister",
    "unrolled",
    "with_front",
]
