"""Where the GPU kernels are tested, and in which tiles: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch

import oracle
from pairmix import Schedule
from pairmix.ops.triton import configs, launch, plan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Tiles(NamedTuple):
    """How many lanes a tile has at most, how many rows, and of how many stages backward holds the inputs."""

    widest: int = plan.WIDEST
    forward_rows: int = 16
    backward_rows: int = 8
    held: int = 2


def random_tiles(rng: random.Random, stages: int) -> Tiles:
    """Mostly a single tile, and always for many stages: several tiles are slow in the interpreter."""
    widest = rng.choice([plan.WIDEST, plan.WIDEST, 256, 64]) if stages <= 6 else plan.WIDEST
    return Tiles(widest, rng.choice([4, 16, 64]), rng.choice([4, 16, 32]), rng.choice([1, 2, 3, 16]))


def _patch_once() -> None:
    """Let Triton's interpreter patch its language once a launch.

    It does so in every call of a jitted function, which would be most of the time of these tests.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, {}

    def restore() -> None:
        for scope in reversed(patched.values()):
            scope.restore()
        patched.clear()

    def patch_once(function):
        names = frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
        if names not in patched:
            patched[names] = patch(function)
        return SimpleNamespace(restore=restore)

    interpreter._patch_lang = patch_once


if os.environ.get("TRITON_INTERPRET") == "1":
    _patch_once()


@contextmanager
def using(tiles: Tiles) -> Iterator[None]:
    """Compute in these tiles, and check that nothing is written beside the memory that is there for it.

    A schedule keeps its plan: it must be one that nobody else uses.
    """
    make_plan = partial(plan.make_plan, widest=tiles.widest, narrowest=max(1, tiles.widest // 2))
    forward, backward = configs.Config(tiles.forward_rows, 128), configs.Config(tiles.backward_rows, 128, tiles.held)
    fences: list[torch.Tensor] = []
    with (
        mock.patch.object(launch, "make_plan", make_plan),
        mock.patch.object(configs, "forward_configs", return_value=[forward]),
        mock.patch.object(configs, "backward_configs", return_value=[backward]),
        mock.patch.object(launch.Operator, "empty", partialmethod(_fenced, fences)),
    ):
        yield
    assert all((fence == FENCE).all() for fence in fences), "written beside the memory of a kernel"


FENCE, FENCED = 12_345, 1 << 15


def _fenced(operator: launch.Operator, fences: list[torch.Tensor], *shape: int) -> torch.Tensor:
    size = math.prod(shape)
    memory = torch.full((2 * FENCED + size,), torch.nan, dtype=operator.dtype, device=DEVICE)
    fences.extend(fence.fill_(FENCE) for fence in (memory[:FENCED], memory[FENCED + size :]))
    return memory[FENCED : FENCED + size].view(shape)


def on_device(arguments: oracle.Arguments) -> oracle.Arguments:
    """The same arguments on the device, with a schedule of their own and gradients of their own."""
    tensors = {
        name: tensor.detach().to(DEVICE).requires_grad_(tensor.requires_grad)
        for name, tensor in arguments.tensors.items()
    }
    named = {name: tensors.get(name) for name in ("x", "blocks", "d_in", "d_out", "bias", "residual_scale")}
    schedule = Schedule(arguments.schedule.order, "from_pairs")
    return oracle.Arguments(**named, schedule=schedule, out_features=arguments.out_features)
