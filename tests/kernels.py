"""Which implementation runs, and of the compiled kernels for which instruction set."""

from contextlib import contextmanager

import torch

from pairmix import _kernels


@contextmanager
def running(target, threads=1):
    """The kernels for this instruction set, on so many threads."""
    before = _kernels.target(), torch.get_num_threads()
    _kernels.use_target(target)
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        _kernels.use_target(before[0])
        torch.set_num_threads(before[1])


@contextmanager
def using(build):
    """The impl's name; for `"cpu avx2"` with the kernels for that instruction set in use."""
    impl, _, target = build.partition(" ")
    with running(target or _kernels.target()):
        yield impl
