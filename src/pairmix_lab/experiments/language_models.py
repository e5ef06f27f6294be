"""Models that predict the next byte, around the maps that are to be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pairmix.functional import recurrence
from pairmix.nn import SPMLinear

SYMBOLS = 256
CELLS = {"rnn": 1, "gru": 3, "attention": 3}  # and how many maps read the same input
HEAD = 64  # features of an attention head
Make = Callable[..., nn.Module]
"""Makes the map that is compared, as `Compared.make`."""


class LanguageModel(nn.Module):
    """A table of bytes, a cell that mixes what was read so far, and a dense map that reads the next byte off."""

    def __init__(self, make: Make, width: int, cell: str, **of_cell: int) -> None:
        super().__init__()
        cells: dict[str, type[Elman | GRU | Attention]] = {"rnn": Elman, "gru": GRU, "attention": Attention}
        self.mixer: Elman | GRU | Attention = cells[cell](make, width, **of_cell)
        self.table = nn.Embedding(SYMBOLS, self.mixer.input_size)
        self.head = nn.Linear(width, SYMBOLS)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the byte after each of `[batch, length]`."""
        return self.read(text, None)[0]

    def read(self, text: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Go on from a state, None at the beginning: the logits, and the state after the text."""
        rows, state = self.mixer(self.table(text.T), state)
        logits: Tensor = self.head(rows)
        return logits.transpose(0, 1), state


class Elman(nn.Module):
    """`h = tanh(input + U h)`."""

    def __init__(self, make: Make, width: int) -> None:
        super().__init__()
        self.input_size = width
        self.u = make()

    def forward(self, inputs: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
        h = inputs.new_zeros(inputs.shape[1:]) if h is None else h
        if isinstance(self.u, SPMLinear):
            states = _spm_recurrence("tanh", inputs, h, self.u)
        elif isinstance(self.u, nn.Linear):
            states = cast(Tensor, DenseElman.apply(inputs + self.u.bias, h, self.u.weight))
        else:
            rows = []
            for x in inputs:
                h = torch.tanh(x + self.u(h))
                rows.append(h)
            states = torch.stack(rows)
        return states, states[-1]


class GRU(nn.Module):
    """As `torch.nn.GRU` has it: the reset gate is applied to what the map gives."""

    def __init__(self, make: Make, width: int) -> None:
        super().__init__()
        self.input_size = 3 * width
        self.u = make(maps=3)

    def forward(self, inputs: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
        h = inputs.new_zeros(*inputs.shape[1:-1], inputs.shape[-1] // 3) if h is None else h
        if isinstance(self.u, SPMLinear):
            states = _spm_recurrence("gru_reset_after", inputs, h, self.u)
        else:
            rows = []
            for x in inputs:
                (x_r, x_z, x_n), (h_r, h_z, h_n) = x.chunk(3, -1), self.u(h).chunk(3, -1)
                z = torch.sigmoid(x_z + h_z)
                h = torch.lerp(torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n), h, z)
                rows.append(h)
            states = torch.stack(rows)
        return states, states[-1]


class Attention(nn.Module):
    """A layer of causal self-attention; its state is what it has read."""

    def __init__(self, make: Make, width: int, longest: int = 1024) -> None:
        super().__init__()
        if width % HEAD:
            raise ValueError(f"attention needs a width that is a multiple of {HEAD}, got {width}")
        self.input_size = width
        self.places = nn.Parameter(0.02 * torch.randn(longest, 1, width))
        self.norm_in, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = make(maps=3)
        self.out = make()

    def forward(self, inputs: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        if len(inputs) > len(self.places):
            raise ValueError(f"attention reads at most {len(self.places)} bytes at once, got {len(inputs)}")
        x = inputs if before is None else torch.cat([before, inputs])
        x = x[-len(self.places) :]
        y = x + self.places[: len(x)]
        q, k, v = (
            part.unflatten(-1, (-1, HEAD)).permute(1, 2, 0, 3) for part in self.qkv(self.norm_in(y)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.norm_out(y + self.out(mixed.permute(2, 0, 1, 3).flatten(2)))
        return y[-len(inputs) :], x


class TorchRNN(nn.Module):
    """What `LanguageModel` is with a dense Elman cell, by torch's own module: a byte is a one-hot vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rnn = nn.RNN(SYMBOLS, width)
        self.head = nn.Linear(width, SYMBOLS)

    def forward(self, text: Tensor) -> Tensor:
        one_hot = F.one_hot(text.T, SYMBOLS).to(self.head.weight.dtype)
        logits: Tensor = self.head(self.rnn(one_hot)[0])
        return logits.transpose(0, 1)


class DenseElman(torch.autograd.Function):
    """All steps of `h = tanh(x + W h)`, with the gradient of W as one product instead of one for every step.

    That is faster than `torch.nn.RNN`, which gives the same to rounding.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, h: Tensor, weight: Tensor) -> Tensor:
        states = inputs.new_empty(len(inputs) + 1, *h.shape)
        states[0] = h
        for step, x in enumerate(inputs):
            torch.addmm(x, states[step], weight.T, out=states[step + 1]).tanh_()
        ctx.save_for_backward(states, weight)
        return states[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        states, weight = ctx.saved_tensors
        before_tanh = torch.empty_like(grad)
        grad_h = torch.zeros_like(grad[0])
        for step in reversed(range(len(grad))):
            before_tanh[step] = (grad[step] + grad_h) * (1 - states[step + 1].square())
            grad_h = before_tanh[step] @ weight
        return before_tanh, grad_h, before_tanh.flatten(0, 1).T @ states[:-1].flatten(0, 1)


def _spm_recurrence(cell: str, inputs: Tensor, h: Tensor, u: SPMLinear) -> Tensor:
    operator = u.operator()
    if u.maps is None:
        operator |= {name: value[None] for name, value in operator.items() if isinstance(value, Tensor)}
    states, _ = recurrence(cell, inputs.flatten(0, 1), h, None, **operator)
    return states.view(*inputs.shape[:2], -1)


@torch.inference_mode()
def generate(model: LanguageModel, prompt: bytes, length: int, seed: int, temperature: float = 0.8) -> bytes:
    """Let the model write, a byte at a time."""
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    new, state = torch.tensor([text]), None
    for _ in range(length):
        logits, state = model.read(new, state)
        new = torch.multinomial((logits[:, -1] / temperature).softmax(-1), 1, generator=generator)
        text.append(int(new))
    return bytes(text)
