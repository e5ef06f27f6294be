"""Single steps of recurrent networks whose dense maps are SPM operators."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from pairmix.nn.linear import SPMOptions
from pairmix.nn.rnn_base import Recurrent, check_nonlinearity


class _SPMCell(Recurrent):
    """A single step, as `torch.nn.RNNCellBase` has it."""

    def __init__(self, cell: str, input_size: int, hidden_size: int, bias: bool, **options: Any) -> None:
        super().__init__(cell, input_size, hidden_size, bias, **options)
        self._add_maps("", input_size)

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        if input.dim() not in (1, 2) or input.shape[-1] != self.input_size:
            raise ValueError(f"expected an input of shape (batch, {self.input_size}), got {tuple(input.shape)}")
        shape = (*input.shape[:-1], self.hidden_size)
        states = self._initial_states(hx, shape, input)
        if input.dim() == 2:
            return self._as_given(self._run("", input, states))
        after = self._run("", input.unsqueeze(0), [state.unsqueeze(0) for state in states])
        return self._as_given([state.squeeze(0) for state in after])

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, cell={self.cell}" + ("" if self.bias else ", bias=False")


class SPMRNNCell(_SPMCell):
    """One step of `SPMRNN`, in place of `torch.nn.RNNCell`, with the same options.

    Examples:
        >>> SPMRNNCell(10, 20)(torch.randn(3, 10)).shape
        torch.Size([3, 20])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[SPMOptions],
    ) -> None:
        check_nonlinearity(nonlinearity)
        super().__init__(nonlinearity, input_size, hidden_size, bias, device=device, dtype=dtype, **options)
        self.nonlinearity = nonlinearity


class SPMGRUCell(_SPMCell):
    """One step of `SPMGRU`, in place of `torch.nn.GRUCell`, with the same options.

    Examples:
        >>> SPMGRUCell(10, 20)(torch.randn(3, 10), torch.zeros(3, 20)).shape
        torch.Size([3, 20])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        reset_after: bool = False,
        **options: Unpack[SPMOptions],
    ) -> None:
        cell = "gru_reset_after" if reset_after else "gru"
        super().__init__(cell, input_size, hidden_size, bias, device=device, dtype=dtype, **options)
        self.reset_after = reset_after


class SPMLSTMCell(_SPMCell):
    """One step of `SPMLSTM`, in place of `torch.nn.LSTMCell`, with the same options.

    Examples:
        >>> h, c = SPMLSTMCell(10, 20)(torch.randn(3, 10))
        >>> h.shape, c.shape
        (torch.Size([3, 20]), torch.Size([3, 20]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[SPMOptions],
    ) -> None:
        super().__init__("lstm", input_size, hidden_size, bias, device=device, dtype=dtype, **options)
