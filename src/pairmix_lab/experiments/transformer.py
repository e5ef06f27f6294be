"""A small GPT around the maps that are to be compared."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pairmix.nn.feed_forward import feed_forward
from pairmix_lab.contenders import LowRank, Monarch, SideBySide, count_parameters
from pairmix_lab.experiments.language_models import HEAD, SYMBOLS, Make

STD = 0.02
"""Of what starts random in GPT-2: its embeddings and the entries of its matrices."""
MAPS = {"qkv": (1, 1, 3), "out": (1, 1, 1), "up": (1, 4, 1), "down": (4, 1, 1)}
"""The maps of a block: the features that they take and give, in widths, and how many are side by side."""
BRANCH_ENDS = ("out", "down")
"""Those whose output is added to the residual stream."""


def branch_gain(depth: int) -> float:
    """What the last map of each residual branch starts multiplied by: that of GPT-2, for `depth` blocks."""
    return 1 / math.sqrt(2 * depth)


class GPT(nn.Module):
    """Pre-norm blocks of causal attention and a feed-forward network, between a table of bytes and a dense head.

    Args:
        make: makes a map that is compared, as `Compared.make`.
        width: of the residual stream, a multiple of 64, the features of an attention head.
        depth: the number of blocks.
        length: the most bytes that it reads at once.
        tied: whether the head is the table of bytes.
        dense_maps: those of `MAPS` that are dense whatever `make` makes.
        gain: what the last map of each residual branch starts multiplied by; None for `branch_gain`.
    """

    def __init__(
        self,
        make: Make,
        width: int,
        depth: int,
        length: int,
        *,
        tied: bool = False,
        dense_maps: Collection[str] = (),
        gain: float | None = None,
    ) -> None:
        super().__init__()
        if width % HEAD:
            raise ValueError(f"width must be a multiple of {HEAD}, the features of an attention head, got {width}")
        gain = branch_gain(depth) if gain is None else gain
        self.table = nn.Embedding(SYMBOLS, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(make, width, dense_maps, gain) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = None if tied else nn.Linear(width, SYMBOLS, bias=False)
        for matrix in (self.table.weight, self.places.weight, self.head_weight):
            nn.init.normal_(matrix, std=STD)

    @property
    def head_weight(self) -> Tensor:
        """The matrix that reads the next byte off."""
        return self.table.weight if self.head is None else self.head.weight

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the byte after each of `[batch, length]`."""
        if text.shape[1] > self.places.num_embeddings:
            raise ValueError(f"the model reads at most {self.places.num_embeddings} bytes at once, got {text.shape[1]}")
        x = self.table(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.head_weight)

    def count_in_maps(self) -> int:
        """The number of parameters in the maps of all blocks."""
        return sum(count_parameters(block.get_submodule(name)) for block in self.blocks for name in MAPS)


class Block(nn.Module):
    """`x + out(attention(qkv(norm x)))`, then `x + down(gelu(up(norm x)))`."""

    qkv: nn.Module
    out: nn.Module
    up: nn.Module
    down: nn.Module

    def __init__(self, make: Make, width: int, dense_maps: Collection[str], gain: float) -> None:
        super().__init__()
        self.norm_attention, self.norm_feed_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        for name, (taken, given, maps) in MAPS.items():
            own_gain = gain if name in BRANCH_ENDS else 1.0
            if name in dense_maps:
                layer: nn.Module = nn.Linear(taken * width, maps * given * width)
            else:
                layer = make(given * width, taken * width, maps=maps, gain=own_gain)
            start_(layer, STD * own_gain)
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_attention(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in qkv)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + feed_forward(self.norm_feed_forward(x), self.up, self.down, "gelu")


@torch.no_grad()
def start_(layer: nn.Module, std: float) -> None:
    """Start a map so that the entries of the matrix that it stands for have this spread, and its bias is zero.

    SPM keeps the start of the library, which has no such spread: its `gain` is an option.
    """
    if isinstance(layer, SideBySide):
        for part in layer:
            start_(part, std)
    elif isinstance(layer, LowRank):
        down, up = layer
        assert isinstance(down, nn.Linear)
        assert isinstance(up, nn.Linear)
        # Of the products with an entry of this spread, the one whose factors have the same norm: they learn alike.
        spread, ratio = std / math.sqrt(up.in_features), math.sqrt(down.in_features / up.out_features)
        nn.init.normal_(up.weight, std=math.sqrt(spread * ratio))
        nn.init.normal_(down.weight, std=math.sqrt(spread / ratio))
        nn.init.zeros_(up.bias)
    elif isinstance(layer, Monarch):
        # An entry is a product of two numbers, and its own start gives it the variance 1 / in_features.
        for factor in (layer.first, layer.second):
            factor.mul_(math.sqrt(std * math.sqrt(layer.in_features)))
    elif isinstance(layer, nn.Linear):
        nn.init.normal_(layer.weight, std=std)
        nn.init.zeros_(layer.bias)


@torch.inference_mode()
def generate(
    model: GPT, prompt: bytes, size: int, samples: int, seed: int = 0, temperature: float = 0.8
) -> list[bytes]:
    """Let the model write, a byte at a time, from the last ones that it can read at once.

    Args:
        model: what writes.
        prompt: what all samples begin with.
        size: how many bytes it adds.
        samples: how many texts, which are written together.
        seed: of the random choices.
        temperature: what the logits are divided by.
    """
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(prompt)] * samples)
    for _ in range(size):
        logits = model(text[:, -model.places.num_embeddings :])[:, -1]
        new = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        text = torch.cat([text, new], dim=1)
    return [bytes(row) for row in text.tolist()]
