"""Stages multiplied out into a few block-diagonal matrices, for inference where there are no kernels of pairmix."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pairmix import functional
from pairmix.nn.attention import SPMMultiheadAttention
from pairmix.nn.linear import SPMLinear
from pairmix.nn.rnn_base import Recurrent
from pairmix.places import Place, outermost
from pairmix.schedule import Schedule

# What a factor costs besides its products, in multiply-adds a coordinate. A compromise: for 4,096 coordinates in
# onnxruntime two factors of 64 were faster than three of 16 for one row, and slower for 64 rows.
_OVERHEAD = 96
# These read the parameters of their layers, and do not call them.
_READERS = (Recurrent, SPMMultiheadAttention)


class Factor(NamedTuple):
    """Consecutive stages that mix `size` coordinates, `stride` apart, with each other and with no others."""

    start: int
    stop: int
    size: int
    stride: int


class MergedStages(nn.Module):
    """The map of an `SPMLinear` as a product of a few block-diagonal matrices, in plain operations of torch.

        y = fold(W_k ... W_1 tile(x)) + up (down x) + bias

    A butterfly of 1,024 coordinates becomes two factors of 32 matrices of 32x32. The compiled kernels are faster, so
    this is for where they are not: ONNX, and processes without Python. The factors are those with the fewest
    operations; where one dense matrix has fewer still, as for odd widths and random schedules, it is that. They are
    buffers: the layer cannot be trained any more.

    Args:
        layer: the layer, which is not changed.

    Shape:
        - input: `(*, in_features)`; output: `(*, out_features)`, or `(*, maps * out_features)`

    Examples:
        >>> layer = SPMLinear(1024, 1024)
        >>> merged = MergedStages(layer)
        >>> merged
        MergedStages(in_features=1024, out_features=1024, factors=32x32 32x32)
        >>> x = torch.randn(8, 1024)
        >>> torch.allclose(merged(x), layer(x), atol=1e-5)
        True
    """

    bias: Tensor | None
    down: Tensor | None
    up: Tensor | None
    dense: Tensor | None

    @torch.no_grad()
    def __init__(self, layer: SPMLinear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.width, self.maps = layer.width, layer.maps or 1
        factors = cheapest_factors(layer.schedule)
        of_factors = sum(factor.size + _OVERHEAD for factor in factors) * layer.width
        of_dense = layer.in_features * layer.out_features + _OVERHEAD * layer.width
        self.factors = factors if factors and of_factors < of_dense else []
        is_dense = not self.factors
        bias = None if layer.bias is None else layer.bias.flatten()
        held = {"bias": bias, "down": None, "up": None, "dense": layer.to_dense() if is_dense else None}
        if not is_dense:
            held |= {"down": layer.down, "up": layer.up}
            held |= {f"factor{i}": _multiplied_out(layer, factor) for i, factor in enumerate(self.factors)}
        for name, tensor in held.items():
            self.register_buffer(name, None if tensor is None else tensor.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"expected an input of shape (*, {self.in_features}), got {tuple(x.shape)}")
        if self.dense is not None:
            return nn.functional.linear(x, self.dense, self.bias)
        y = self._mixed(x.reshape(-1, self.in_features)).reshape(*x.shape[:-1], self.maps * self.out_features)
        if self.bias is not None:
            y = y + self.bias
        return y if self.down is None else functional.add_low_rank(y, x, self.down, self.up)

    def _mixed(self, rows: Tensor) -> Tensor:
        count = rows.shape[0]
        z = functional.tile(rows, self.width).T.expand(self.maps, self.width, count)
        for i, (_, _, size, stride) in enumerate(self.factors):
            # The rows are inside, so that coordinates come together by moving whole rows.
            z = z.reshape(-1, size, stride, count).transpose(1, 2).reshape(-1, size, count)
            z = torch.matmul(getattr(self, f"factor{i}"), z)
            z = z.reshape(-1, stride, size, count).transpose(1, 2)
        z = z.reshape(self.maps, self.width, count).permute(2, 0, 1)
        return functional.fold(z, self.out_features)

    def extra_repr(self) -> str:
        sizes = " ".join(f"{factor.size}x{factor.size}" for factor in self.factors) or "one dense matrix"
        return f"in_features={self.in_features}, out_features={self.out_features}, factors={sizes}"


def merge_stages_(model: nn.Module) -> list[str]:
    """Replace the SPM layers of a model by `MergedStages`, in place, for export to where pairmix is not.

    Layers inside `SPMRNN`, `SPMGRU`, `SPMLSTM`, their cells and `SPMMultiheadAttention` stay as they are.

    Args:
        model: a model whose training is done.

    Returns:
        The names of the replaced layers.

    Raises:
        ValueError: if the model itself is an SPM layer: `MergedStages(layer)` is what replaces it.

    Examples:
        >>> model = nn.Sequential(SPMLinear(768, 3072), nn.GELU(), SPMLinear(3072, 768))
        >>> merge_stages_(model)
        ['0', '2']
        >>> model[0]
        MergedStages(in_features=768, out_features=3072, factors=64x64 48x48)
    """
    if isinstance(model, SPMLinear):
        raise ValueError(f"an SPM layer cannot replace itself, use MergedStages(layer): {model}")
    merged: dict[SPMLinear, MergedStages] = {}  # a layer that occurs twice stays one layer
    names = []
    for place in list(outermost(model, _is_called)):
        layer = place.found
        assert isinstance(layer, SPMLinear)
        if layer not in merged:
            merged[layer] = MergedStages(layer)
        place.put(merged[layer])
        names.append(place.name)
    return names


def _is_called(place: Place) -> bool:
    return isinstance(place.found, SPMLinear) and not isinstance(place.parent, _READERS)


def cheapest_factors(schedule: Schedule) -> list[Factor]:
    """The stages in consecutive groups, with the fewest multiply-adds and the overhead of every group counted."""
    n = schedule.n
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    strides, within = [], []
    for first, second in schedule.pairs:
        distances = abs(second - first).tolist()
        strides.append(math.gcd(n, *distances))
        within.append([bool((first // d == second // d).all()) for d in divisors])
    best: list[tuple[float, list[Factor]]] = [(0.0, [])]
    for stop in range(1, schedule.stages + 1):
        options = []
        stride, spans = n, list(range(len(divisors)))
        for start in reversed(range(stop)):
            stride = math.gcd(stride, strides[start])
            spans = [i for i in spans if within[start][i]]
            size = next(divisors[i] for i in spans if divisors[i] % stride == 0) // stride
            cost, before = best[start]
            options.append((cost + size + _OVERHEAD, start, size, stride, before))
        cost, start, size, stride, before = min(options, key=lambda option: option[0])
        best.append((cost, [*before, Factor(start, stop, size, stride)]))
    return best[-1][1]


def _multiplied_out(layer: SPMLinear, factor: Factor) -> Tensor:
    """The matrices of a factor, `[M * n / size, size, size]`, with the diagonals in the first and the last one."""
    start, stop, size, stride = factor
    n, maps, own = layer.width, layer.maps or 1, layer.operator()
    stages = slice(start, stop) if layer.maps is None else (slice(None), slice(start, stop))
    scale = own["residual_scale"]
    # Input j of every matrix at once: they do not mix.
    inputs = torch.eye(size, dtype=layer.d_in.dtype, device=layer.d_in.device)
    inputs = inputs[:, None, :, None].expand(size, n // (size * stride), size, stride).reshape(size, n)
    outputs = functional.spm(
        inputs,
        own["blocks"][stages],
        layer.schedule.only(range(start, stop)),
        d_in=layer.d_in if start == 0 else None,
        d_out=layer.d_out if stop == layer.stages else None,
        residual_scale=None if scale is None else scale[stages],
        block=layer.block,
        maps=layer.maps,
        impl=layer.impl,
    )
    of_matrices = outputs.reshape(size, maps, n // (size * stride), size, stride).permute(1, 2, 4, 3, 0)
    return of_matrices.reshape(-1, size, size)
