"""The C library's allocator, told what training is like."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
KEPT = 1 << 30


def keep_freed_memory() -> None:
    """Let this process keep memory that is freed, up to `KEPT` bytes, instead of giving it back to the system.

    Activations and gradients of megabytes come and go with every step. A page that was given back costs a fault when it
    is touched again, which shows in a step of a few milliseconds. Only glibc's allocator has to be told.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library; Windows has no CDLL(None)
        return
    mallopt(M_TRIM_THRESHOLD, KEPT)
    mallopt(M_MMAP_MAX, 0)  # what has a mapping of its own goes back at once, however large it is
