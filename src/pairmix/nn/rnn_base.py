"""What recurrent networks and their single cells have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pairmix import functional
from pairmix.nn.linear import SPMLinear

_NONLINEARITIES = ("tanh", "relu", "linear")


class Recurrent(nn.Module):
    """For every gate a map of the input and one of the state."""

    def __init__(self, cell: str, input_size: int, hidden_size: int, bias: bool, **options: Any) -> None:
        super().__init__()
        for name, size in (("input_size", input_size), ("hidden_size", hidden_size)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        self.cell = cell
        self.gates = functional.GATES[cell]
        self.states = ("h", "c") if cell == "lstm" else ("h",)
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.bias = bias
        self._options = options

    def _add_maps(self, suffix: str, input_size: int) -> None:
        # One bias a gate is enough, unless the state's maps are scaled before they are added.
        state_bias = self.bias and self.cell == "gru_reset_after"
        make = {"maps": self.gates, **self._options}
        self.add_module(f"ih{suffix}", SPMLinear(input_size, self.hidden_size, self.bias, **make))
        self.add_module(f"hh{suffix}", SPMLinear(self.hidden_size, self.hidden_size, state_bias, **make))

    def _run(
        self, suffix: str, rows: Tensor, states: Sequence[Tensor], batch_sizes: Sequence[int] | None = None
    ) -> list[Tensor]:
        """The states after every step, for the rows of all steps."""
        ih, hh = self._maps(suffix)
        h, c = states if len(states) == 2 else (states[0], None)
        after = functional.recurrence(self.cell, ih(rows), h, c, batch_sizes=batch_sizes, **hh.operator())
        return list(after[: len(self.states)])

    def _maps(self, suffix: str) -> tuple[SPMLinear, SPMLinear]:
        ih, hh = getattr(self, f"ih{suffix}"), getattr(self, f"hh{suffix}")
        return ih, hh

    def reset_parameters(self) -> None:
        """Fill the parameters anew, as `init` says."""
        for module in self.children():
            if isinstance(module, SPMLinear):
                module.reset_parameters()

    def _initial_states(self, hx: Any, shape: tuple[int, ...], like: Tensor) -> list[Tensor]:
        """Those that the caller gives, or zeros."""
        if hx is None:
            return [like.new_zeros(shape) for _ in self.states]
        given = list(hx) if isinstance(hx, tuple | list) else [hx]
        if len(given) != len(self.states) or not all(isinstance(state, Tensor) for state in given):
            got = ", ".join(type(state).__name__ for state in given)
            raise ValueError(f"expected the initial states ({', '.join(self.states)}) as tensors, got ({got})")
        for name, state in zip(self.states, given, strict=True):
            if tuple(state.shape) != shape:
                raise ValueError(f"expected an initial {name} of shape {shape}, got {tuple(state.shape)}")
            if state.dtype != like.dtype and not torch.is_autocast_enabled(like.device.type):
                raise TypeError(f"the initial {name} is {state.dtype} and the input is {like.dtype}: cast them alike")
        return given

    def _as_given(self, states: Sequence[Tensor]) -> Any:
        return states[0] if len(self.states) == 1 else tuple(states)


def check_nonlinearity(nonlinearity: str) -> None:
    """Raise if an Elman network has none of this name."""
    if nonlinearity not in _NONLINEARITIES:
        raise ValueError(f"nonlinearity must be one of {list(_NONLINEARITIES)}, got {nonlinearity!r}")
