"""Recurrent networks step by step, in plain PyTorch: what the fused recurrences are tested against.

Sequences are rows, step after step: those of step t belong to the first `batch_sizes[t]` sequences. `gates` has what
the inputs of all steps contribute, side by side for every gate; what the state contributes is computed by maps, SPM
operators of which each gate has one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Mix = Callable[[Tensor, int, int], Tensor]
"""`mix(x, first, last)`: the maps first ... last - 1 of x, side by side."""

Step = Callable[[Tensor, Tensor, Tensor, Mix], tuple[Tensor, Tensor]]
"""`step(gates, h, c, mix)`: the next h and c. Networks without a c hand it on as it is."""


def _simple(activation: Callable[[Tensor], Tensor]) -> Step:
    def step(gates: Tensor, h: Tensor, c: Tensor, mix: Mix) -> tuple[Tensor, Tensor]:
        return activation(gates + mix(h, 0, 1)), c

    return step


def _gru(gates: Tensor, h: Tensor, c: Tensor, mix: Mix) -> tuple[Tensor, Tensor]:
    """The paper's form: the reset gate acts on the state, before it is mixed."""
    size = h.shape[-1]
    r, z = torch.sigmoid(gates[..., : 2 * size] + mix(h, 0, 2)).chunk(2, dim=-1)
    candidate = torch.tanh(gates[..., 2 * size :] + mix(r * h, 2, 3))
    return (1 - z) * h + z * candidate, c


def _gru_reset_after(gates: Tensor, h: Tensor, c: Tensor, mix: Mix) -> tuple[Tensor, Tensor]:
    """torch's arrangement: the reset gate acts on the mixed state, and z keeps instead of replacing."""
    r, z, candidate = gates.chunk(3, dim=-1)
    u_r, u_z, u = mix(h, 0, 3).chunk(3, dim=-1)
    r, z = torch.sigmoid(r + u_r), torch.sigmoid(z + u_z)
    return (1 - z) * torch.tanh(candidate + r * u) + z * h, c


def _lstm(gates: Tensor, h: Tensor, c: Tensor, mix: Mix) -> tuple[Tensor, Tensor]:
    i, f, g, o = (gates + mix(h, 0, 4)).chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


STEPS: dict[str, Step] = {
    "tanh": _simple(torch.tanh),
    "relu": _simple(torch.relu),
    "linear": _simple(lambda a: a),
    "gru": _gru,
    "gru_reset_after": _gru_reset_after,
    "lstm": _lstm,
}

GATES = {"tanh": 1, "relu": 1, "linear": 1, "gru": 3, "gru_reset_after": 3, "lstm": 4}
"""How many gates a cell has."""


def sizes_of(batch_sizes: Sequence[int] | None, rows: Tensor, h0: Tensor) -> list[int]:
    """How many sequences have each step; without `batch_sizes` all of them have all steps."""
    batch = h0.shape[0]
    return [batch] * (rows.shape[0] // max(batch, 1)) if batch_sizes is None else list(batch_sizes)


def unrolled(
    cell: str, gates: Tensor, h: Tensor, c: Tensor, batch_sizes: Sequence[int] | None, mix: Mix
) -> tuple[Tensor, Tensor]:
    """All h and all c, a row for every row of `gates`; `h` and `c` are those before the first step."""
    sizes = sizes_of(batch_sizes, gates, h)
    if not sizes:
        return gates[:, : h.shape[-1]], gates[:, : c.shape[-1]]  # no rows
    all_h, all_c = [], []
    for rows in gates.split(sizes):
        count = rows.shape[0]
        h, c = STEPS[cell](rows, h[:count], c[:count], mix)
        all_h.append(h)
        all_c.append(c)
    return torch.cat(all_h), torch.cat(all_c) if cell == "lstm" else c
