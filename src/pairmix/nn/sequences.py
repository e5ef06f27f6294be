"""Sequences as rows, those of the first step, then those of the second, and so on."""

from __future__ import annotations

import torch
from torch import Tensor


class Padded:
    """Sequences of equal length: the rows of a step are those of all sequences."""

    batch_sizes = None

    def __init__(self, steps: int, batch: int) -> None:
        self._steps = (steps, batch)

    def reversed(self, rows: Tensor) -> Tensor:
        """Every sequence back to front."""
        return rows.reshape(*self._steps, rows.shape[-1]).flip(0).flatten(0, 1)

    def last(self, rows: Tensor) -> Tensor:
        """The rows that the sequences end with."""
        return rows.reshape(*self._steps, rows.shape[-1])[-1]


class Packed:
    """Sequences of any length, the longest first: those that have ended have no more rows."""

    def __init__(self, batch_sizes: Tensor, device: torch.device) -> None:
        self.batch_sizes: list[int] = batch_sizes.tolist()
        start = batch_sizes.cumsum(0) - batch_sizes
        step = torch.repeat_interleave(torch.arange(len(batch_sizes)), batch_sizes)
        sequence = torch.arange(len(step)) - start[step]
        length = torch.bincount(sequence)
        self._reversed = (start[length[sequence] - 1 - step] + sequence).to(device)
        self._last = (start[length - 1] + torch.arange(len(length))).to(device)

    def reversed(self, rows: Tensor) -> Tensor:
        """Every sequence back to front."""
        return rows.index_select(0, self._reversed)

    def last(self, rows: Tensor) -> Tensor:
        """The rows that the sequences end with."""
        return rows.index_select(0, self._last)
