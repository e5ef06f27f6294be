"""One process, or several that `torchrun` has started, each with its rows of every batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Processes:
    """Those that train one model together.

    Attributes:
        rank: the number of this one; the first one writes files and speaks.
        count: how many there are.
    """

    rank: int = 0
    count: int = 1

    @classmethod
    def of_this_run(cls) -> Processes:
        """All that have joined."""
        if not distributed.is_initialized():
            return cls()
        return cls(distributed.get_rank(), distributed.get_world_size())

    @staticmethod
    def launched() -> bool:
        """Whether `torchrun` has started this process."""
        return distributed.is_torchelastic_launched()

    @classmethod
    @contextmanager
    def joined(cls) -> Iterator[Processes]:
        """Join the others if `torchrun` has started this process; over gloo, which works on CPUs."""
        if cls.launched():
            distributed.init_process_group("gloo")
        try:
            yield cls.of_this_run()
        finally:
            if distributed.is_initialized():
                distributed.destroy_process_group()

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes files."""
        return self.rank == 0

    def parallel(self, model: nn.Module) -> nn.Module:
        """The model, with gradients that are averaged over all processes."""
        return model if self.count == 1 else DistributedDataParallel(model)

    def share(self, batch: tuple[Tensor, Tensor], size: int) -> tuple[Tensor, Tensor]:
        """The rows of this process: equally many for all, so that the mean of their means is that over all rows."""
        if size % self.count:
            raise ValueError(f"a batch of {size} rows cannot be shared by {self.count} processes")
        inputs, labels = batch
        return inputs[self.rank :: self.count], labels[self.rank :: self.count]

    def mean(self, value: float) -> float:
        """Of what every process has."""
        return value if self.count == 1 else self._sum(value) / self.count

    def told_by_first(self, message: str | None) -> str | None:
        """What the first process has to say, for all of them."""
        if self.count == 1:
            return message
        messages = [message]
        distributed.broadcast_object_list(messages)
        return messages[0]

    def any(self, flag: bool) -> bool:
        """Whether any process says so: all must stop after the same step."""
        return flag if self.count == 1 else self._sum(float(flag)) > 0

    def _sum(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64)
        distributed.all_reduce(total)
        return float(total)
