"""Recurrent networks whose dense maps are SPM operators."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from pairmix.nn.linear import SPMOptions
from pairmix.nn.rnn_base import Recurrent, check_nonlinearity
from pairmix.nn.sequences import Packed, Padded


class _SPMRNN(Recurrent):
    """Layers and directions, as `torch.nn.RNNBase` has them."""

    def __init__(
        self,
        cell: str,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
        **options: Any,
    ) -> None:
        super().__init__(cell, input_size, hidden_size, bias, **options)
        if num_layers < 1:
            raise ValueError(f"num_layers must be at least 1, got {num_layers}")
        if isinstance(dropout, bool) or not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be a probability, in 0..1, got {dropout}")
        if dropout > 0 and num_layers == 1:
            warnings.warn(f"dropout={dropout} is between layers, and num_layers is 1: nothing is dropped", stacklevel=3)
        self.num_layers = num_layers
        self.batch_first = batch_first
        self.dropout = dropout
        self.bidirectional = bidirectional
        for layer in range(num_layers):
            for suffix in self._suffixes(layer):
                self._add_maps(suffix, input_size if layer == 0 else hidden_size * self._directions)

    @property
    def _directions(self) -> int:
        return 2 if self.bidirectional else 1

    def _suffixes(self, layer: int) -> list[str]:
        return [f"_l{layer}", f"_l{layer}_reverse"][: self._directions]

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> tuple[Any, Any]:
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, hx)
        if input.dim() not in (2, 3):
            raise ValueError(f"expected an input of 2 or 3 dimensions, got {input.dim()}: {tuple(input.shape)}")
        is_batched = input.dim() == 3
        x = input if is_batched else input.unsqueeze(1)
        if is_batched and self.batch_first:
            x = x.transpose(0, 1)
        steps, batch, size = x.shape
        if size != self.input_size:
            raise ValueError(f"expected an input of size {self.input_size}, got {size}: {tuple(input.shape)}")
        if steps == 0:
            raise ValueError(f"expected a sequence of at least one step, got the shape {tuple(input.shape)}")
        shape = (self.num_layers * self._directions, *([batch] if is_batched else []), self.hidden_size)
        states = self._initial_states(hx, shape, x)
        if not is_batched:
            states = [state.unsqueeze(1) for state in states]

        rows, finals = self._run_layers(x.flatten(0, 1), states, Padded(steps, batch))
        y = rows.reshape(steps, batch, rows.shape[-1])
        if not is_batched:
            return y.squeeze(1), self._as_given([final.squeeze(1) for final in finals])
        return y.transpose(0, 1) if self.batch_first else y, self._as_given(finals)

    def _forward_packed(self, input: PackedSequence, hx: Any) -> tuple[PackedSequence, Any]:
        rows, batch_sizes, sorted_indices, unsorted_indices = input
        if rows.dim() != 2 or rows.shape[1] != self.input_size:
            raise ValueError(f"expected packed data of shape (*, {self.input_size}), got {tuple(rows.shape)}")
        shape = (self.num_layers * self._directions, int(batch_sizes[0]), self.hidden_size)
        states = self._initial_states(hx, shape, rows)
        if hx is not None and sorted_indices is not None:
            states = [state.index_select(1, sorted_indices) for state in states]
        rows, finals = self._run_layers(rows, states, Packed(batch_sizes, rows.device))
        if unsorted_indices is not None:
            finals = [final.index_select(1, unsorted_indices) for final in finals]
        return PackedSequence(rows, batch_sizes, sorted_indices, unsorted_indices), self._as_given(finals)

    def _run_layers(
        self, rows: Tensor, states: Sequence[Tensor], sequences: Padded | Packed
    ) -> tuple[Tensor, list[Tensor]]:
        """The rows of the last layer, and the states that all layers and directions end with."""
        finals: list[list[Tensor]] = []
        for layer in range(self.num_layers):
            outputs = []
            for reverse, suffix in enumerate(self._suffixes(layer)):
                x = sequences.reversed(rows) if reverse else rows
                after = self._run(suffix, x, [state[len(finals)] for state in states], sequences.batch_sizes)
                finals.append([sequences.last(state) for state in after])
                outputs.append(sequences.reversed(after[0]) if reverse else after[0])
            rows = torch.cat(outputs, dim=-1) if self.bidirectional else outputs[0]
            if self.dropout and layer < self.num_layers - 1:
                rows = F.dropout(rows, self.dropout, self.training)
        return rows, [torch.stack(parts) for parts in zip(*finals, strict=True)]

    def extra_repr(self) -> str:
        options = {
            "num_layers": (self.num_layers, 1),
            "bias": (self.bias, True),
            "batch_first": (self.batch_first, False),
            "dropout": (self.dropout, 0.0),
            "bidirectional": (self.bidirectional, False),
        }
        changed = "".join(f", {name}={value}" for name, (value, usual) in options.items() if value != usual)
        return f"{self.input_size}, {self.hidden_size}, cell={self.cell}{changed}"


class SPMRNN(_SPMRNN):
    """An Elman network, in place of `torch.nn.RNN`, with an SPM operator for each of its two dense maps.

        h_t = tanh(W x_t + U h_(t-1) + b)

    Arguments, shapes and return values are those of `torch.nn.RNN`. There is one bias, not two that are added.

    Args:
        input_size: size of the input at each step.
        hidden_size: size of the state.
        num_layers: how many networks are stacked, each reading the states of the one below.
        nonlinearity: `"tanh"`, `"relu"`, or `"linear"` for none.
        bias: whether there is a bias, which starts at zero.
        batch_first: whether the batch is the first dimension of input and output, and not the second.
        dropout: what fraction of the states between layers is dropped in training.
        bidirectional: whether a second network reads the sequence from its end.
        device: where the parameters live.
        dtype: their dtype.
        **options: `block`, `stages`, `schedule`, `residual`, `init`, `rank` and `impl` of every map, as `SPMLinear` has
            them. A `Schedule` must have the width of every map; a name fits all. With a `rank` steps are computed one
            by one, which takes longer.

    Attributes:
        ih_l[k]: the map of the input, an `SPMLinear`; with `_reverse` that of the second direction. `to_dense()` gives
            what torch calls `weight_ih_l[k]`.
        hh_l[k]: likewise the map of the state, `weight_hh_l[k]` in torch.

    Examples:
        >>> rnn = SPMRNN(100, 256, num_layers=2)
        >>> output, h_n = rnn(torch.randn(35, 8, 100))
        >>> output.shape, h_n.shape
        (torch.Size([35, 8, 256]), torch.Size([2, 8, 256]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[SPMOptions],
    ) -> None:
        check_nonlinearity(nonlinearity)
        super().__init__(
            nonlinearity, input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
            device=device, dtype=dtype, **options,
        )  # fmt: skip
        self.nonlinearity = nonlinearity


class SPMGRU(_SPMRNN):
    """A gated recurrent unit, in place of `torch.nn.GRU`, with an SPM operator for each of its six dense maps.

        r_t = sigmoid(W_r x_t + U_r h_(t-1) + b_r)
        z_t = sigmoid(W_z x_t + U_z h_(t-1) + b_z)
        k_t = tanh(W_h x_t + U_h (r_t * h_(t-1)) + b_h)
        h_t = (1 - z_t) * h_(t-1) + z_t * k_t

    Arguments, shapes and return values are those of `torch.nn.GRU`, and the gates have the same order: r, z and
    the candidate k. With `reset_after=True` the equations are torch's too:

        k_t = tanh(W_h x_t + b_h + r_t * (U_h h_(t-1) + c_h))
        h_t = (1 - z_t) * k_t + z_t * h_(t-1)

    Args:
        input_size: size of the input at each step.
        hidden_size: size of the state.
        num_layers: how many networks are stacked.
        bias: whether there are biases.
        batch_first: whether the batch is the first dimension of input and output.
        dropout: what fraction of the states between layers is dropped in training.
        bidirectional: whether a second network reads the sequence from its end.
        device: where the parameters live.
        dtype: their dtype.
        reset_after: whether to compute torch's arrangement instead of the paper's.
        **options: those of every map, as in `SPMRNN`.

    Examples:
        >>> gru = SPMGRU(64, 64, batch_first=True, bidirectional=True)
        >>> output, h_n = gru(torch.randn(8, 35, 64))
        >>> output.shape, h_n.shape
        (torch.Size([8, 35, 128]), torch.Size([2, 8, 64]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        reset_after: bool = False,
        **options: Unpack[SPMOptions],
    ) -> None:
        super().__init__(
            "gru_reset_after" if reset_after else "gru",
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
            device=device, dtype=dtype, **options,
        )  # fmt: skip
        self.reset_after = reset_after


class SPMLSTM(_SPMRNN):
    """A long short-term memory, in place of `torch.nn.LSTM`, with an SPM operator for each of its eight dense maps.

        i_t, f_t, o_t = sigmoid(W x_t + U h_(t-1) + b), each with its own W, U and b
        g_t = tanh(W_g x_t + U_g h_(t-1) + b_g)
        c_t = f_t * c_(t-1) + i_t * g_t
        h_t = o_t * tanh(c_t)

    Arguments, shapes and return values are those of `torch.nn.LSTM`, and the gates have the same order: i, f, g, o.

    Args:
        input_size: size of the input at each step.
        hidden_size: size of the state.
        num_layers: how many networks are stacked.
        bias: whether there are biases.
        batch_first: whether the batch is the first dimension of input and output.
        dropout: what fraction of the states between layers is dropped in training.
        bidirectional: whether a second network reads the sequence from its end.
        proj_size: must be 0; a projected state is not supported.
        device: where the parameters live.
        dtype: their dtype.
        **options: those of every map, as in `SPMRNN`.

    Examples:
        >>> lstm = SPMLSTM(64, 64)
        >>> output, (h_n, c_n) = lstm(torch.randn(35, 8, 64))
        >>> output.shape, c_n.shape
        (torch.Size([35, 8, 64]), torch.Size([1, 8, 64]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[SPMOptions],
    ) -> None:
        if proj_size:
            raise ValueError(f"a projected state is not supported: proj_size must be 0, got {proj_size}")
        super().__init__(
            "lstm", input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
            device=device, dtype=dtype, **options,
        )  # fmt: skip
        self.proj_size = proj_size
