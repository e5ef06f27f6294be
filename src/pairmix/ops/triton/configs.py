"""How large the tiles are, and how many programs share the work.

There is a default for every width. With PAIRMIX_AUTOTUNE=1 in the environment a few others are measured, once for
every width, depth, dtype and kind of block, and the fastest is taken. Results differ by the order of sums only.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from pairmix.ops.triton.plan import NARROWEST, WIDEST


class Config(NamedTuple):
    """How a kernel is launched.

    Attributes:
        rows: how many rows a tile has, a power of two.
        threads: how many threads a program has.
        held: of how many stages backward has the inputs in registers at a time.
    """

    rows: int
    threads: int
    held: int = 1


CACHED_BYTES = 32 << 20
"""As much memory the workers' sums of gradients and checkpoints take at most, as long as there is more than one worker:
they are used again and again, and this fits into the cache of a GPU for servers."""
_FORWARD = Config(rows=16_384, threads=512)
_BACKWARD = Config(rows=8_192, threads=512, held=2)
"""For one lane in float32; tiles of more lanes have fewer rows. 16,384 numbers are 64 KiB, the shared memory of small
GPUs. With these, butterflies of 256 to 4,096 coordinates spill no registers on sm_80, sm_90 and gfx942."""
_MOST_ROWS = 64


def forward_configs(lanes: int, dtype: torch.dtype, rotation: bool, exchanges: bool) -> list[Config]:
    """For a tile of so many lanes, computed in this dtype: the default, and what else is to be tried.

    Cosines and sines take registers, and so do addresses of exchanges through memory: tiles are smaller then.
    """
    best = _fitted(_FORWARD, lanes, dtype)
    best = best._replace(rows=max(1, best.rows // 2)) if rotation else best
    best = _halved(best) if exchanges else best
    return _tried([best, _halved(best), best._replace(threads=best.threads // 2), _halved(_halved(best))])


def backward_configs(lanes: int, dtype: torch.dtype, reads_tables: bool, exchanges: bool) -> list[Config]:
    """As `forward_configs`, for backward; where a tile does not hold all coordinates, places are read from tables."""
    best = _fitted(_BACKWARD, lanes, dtype)
    best = _halved(best) if reads_tables else best
    best = _halved(_halved(best))._replace(held=1) if exchanges else best
    small = _halved(best)
    others = [small, small._replace(held=4), small._replace(threads=best.threads, held=4), _halved(small)]
    return _tried([best, best._replace(held=3 - best.held), *others])


def _fitted(config: Config, lanes: int, dtype: torch.dtype) -> Config:
    rows = max(1, min(_MOST_ROWS, config.rows * 4 // (lanes * dtype.itemsize)))
    numbers_of_a_thread = config.rows // config.threads
    return config._replace(rows=rows, threads=max(64, min(config.threads, rows * lanes // numbers_of_a_thread)))


def _halved(config: Config) -> Config:
    return config._replace(rows=max(1, config.rows // 2), threads=max(64, config.threads // 2))


def _tried(configs: list[Config]) -> list[Config]:
    return list(dict.fromkeys(configs)) if _autotunes() else configs[:1]


def _autotunes() -> bool:
    return os.environ.get("PAIRMIX_AUTOTUNE") == "1"


_PREFERS_NARROW: dict[Hashable, bool] = {}


def tunes_width_of_tiles(n: int) -> bool:
    """Whether it is to be measured if narrow tiles are faster than one that holds all coordinates.

    One pass moves the fewest bytes of rows. But a wide tile has few rows, and backward adds to all sums for every tile.
    """
    return _autotunes() and NARROWEST < n <= WIDEST


def prefers_narrow_tiles(call: Hashable, run: Callable[[bool], object]) -> bool:
    """Whether several passes over narrow tiles are faster than one.

    Args:
        call: all that the time depends on; what was measured for it is kept.
        run: computes it, in narrow tiles or not.
    """
    if call not in _PREFERS_NARROW:
        _PREFERS_NARROW[call] = milliseconds(lambda: run(True)) < milliseconds(lambda: run(False))
    return _PREFERS_NARROW[call]


def milliseconds(run: Callable[[], object]) -> float:
    """How long the GPU takes."""
    from triton.testing import do_bench

    return float(do_bench(run, return_mode="median"))


class Device(NamedTuple):
    """What of a device decides how kernels are launched."""

    multiprocessors: int = 2
    warp_size: int = 32


@functools.lru_cache
def device_of(device: torch.device) -> Device:
    """The properties of a GPU; the interpreter is taken for a small one."""
    if device.type != "cuda":
        return Device()
    properties = torch.cuda.get_device_properties(device)
    return Device(properties.multi_processor_count, getattr(properties, "warp_size", 32))


def options(config: Config, kernel: Any, device: torch.device) -> dict[str, Any]:
    """A configuration as a kernel takes it."""
    constants = {"R": config.rows, "HELD": config.held}
    taken = {name: value for name, value in constants.items() if name in kernel.arg_names}
    # The loops over tiles of rows are not pipelined: their registers are full.
    return {**taken, "num_warps": max(1, config.threads // device_of(device).warp_size), "num_stages": 1}


@functools.lru_cache
def tuned(kernel: Any, configs: tuple[Config, ...], device: torch.device) -> Any:
    """The kernel, of which Triton measures all configurations at the first call with these sizes."""
    import triton

    choices = []
    for config in configs:
        constants = options(config, kernel, device)
        launched = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
        choices.append(triton.Config(constants, **launched))
    # Larger tiles of rows may leave workers without any, and their sums as another configuration left them.
    sums = [name for name in ("slots",) if name in kernel.arg_names]
    key = ["FORM", "STRIDES", "IN", "OUT", "FIRST", "LAST"]
    return triton.autotune(choices, key=key, reset_to_zero=sums, cache_results=True)(kernel)


def workers(row_tiles: int, others: int, config: Config, device: torch.device, own_bytes: int = 0) -> int:
    """How many programs share the tiles of rows.

    It depends on shapes and on the device alone, so that the same sums are added in the same order in every run.

    Args:
        row_tiles: how many tiles of rows there are.
        others: how many programs work on the same rows: tiles of coordinates and maps.
        config: how they are launched.
        device: where.
        own_bytes: how much memory each of them needs for itself.
    """
    at_once = device_of(device).multiprocessors * max(1, 512 // config.threads)
    fitting = CACHED_BYTES // own_bytes if own_bytes else at_once
    most = max(1, min(row_tiles, -(-at_once // others), fitting))
    rounds = -(-row_tiles // most)
    return -(-row_tiles // rounds)  # no more than take as long: each costs memory
