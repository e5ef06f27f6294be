"""What takes the place of a dense layer of width n, for comparison."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from pairmix.nn import SPMLinear
from pairmix.schedule import Schedule
from pairmix_lab.experiments.layers import LowRank, equal_rank

Build = Callable[[], nn.Module]
"""Makes a layer. It can be pickled, for other processes to make the same one."""

DENSE = "nn.Linear"
SPM = "SPM"
LOW_RANK = "low rank, SPM's size"
LOW_RANK_64 = "low rank 64"


@dataclass(frozen=True)
class Kind:
    """An SPM layer, by what makes it differ from others. Every schedule has as many stages as the butterfly."""

    in_features: int
    out_features: int
    schedule: str = "butterfly"
    block: str = "general"
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """Its size, and what is not as usual."""
        sizes = " -> ".join(map(str, dict.fromkeys((self.in_features, self.out_features))))
        traits, usual = (self.schedule, self.block, self.dtype), ("butterfly", "general", "float32")
        return " ".join([sizes, *(trait for trait in traits if trait not in usual)])

    def layer(self) -> SPMLinear:
        """Such a layer."""
        return SPMLinear(
            self.in_features,
            self.out_features,
            dtype=getattr(torch, self.dtype),
            block=self.block,
            schedule=self.schedule,
            stages=Schedule.butterfly(max(self.in_features, self.out_features)).stages,
        )


def contenders(n: int) -> dict[str, Build]:
    """All that can run here, by name."""
    builds: dict[str, Build] = {
        DENSE: partial(nn.Linear, n, n),
        SPM: partial(SPMLinear, n, n),
        LOW_RANK: partial(LowRank, n, equal_rank(n)),
    }
    if n > 2 * 64:
        builds[LOW_RANK_64] = partial(LowRank, n, 64)
    builds["Monarch"] = partial(Monarch, n)
    if has_torch_structured():
        builds["torch-structured"] = partial(torch_structured_butterfly, n)
    builds["SPM in plain torch"] = partial(SPMLinear, n, n, impl="reference")
    return builds


class Monarch(nn.Module):
    """Two block-diagonal matrices with a transposition between them, by batched matrix products."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.blocks = divisor_near_root(n)
        self.block_size = n // self.blocks
        self.first = nn.Parameter(torch.randn(self.blocks, self.block_size, self.block_size) / self.block_size**0.5)
        self.second = nn.Parameter(torch.randn(self.block_size, self.blocks, self.blocks) / self.blocks**0.5)
        self.bias = nn.Parameter(torch.zeros(n))

    def forward(self, x: Tensor) -> Tensor:
        z = x.view(-1, self.blocks, self.block_size).transpose(0, 1)  # [block, row, place in the block]
        z = torch.bmm(z, self.first).permute(2, 1, 0)  # [place in the block, row, block]
        z = torch.bmm(z, self.second).transpose(0, 1)
        return z.reshape(x.shape) + self.bias


def divisor_near_root(n: int) -> int:
    """The divisor of n that is nearest to its square root."""
    return min((d for d in range(1, n + 1) if n % d == 0), key=lambda d: abs(d - math.sqrt(n)))


def has_torch_structured() -> bool:
    """Whether the extra `structured` is installed, and works."""
    try:
        torch_structured_butterfly(2)
    except ImportError:
        return False
    return True


def torch_structured_butterfly(n: int) -> nn.Module:
    """The butterfly of torch-structured: the same pairs as SPM's; other widths are padded to a power of two."""
    logging.getLogger("torch_structured").setLevel(logging.ERROR)  # it tells at length that there is no CUDA
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch_structured import Butterfly
    layer: nn.Module = Butterfly(n, n)
    return layer
