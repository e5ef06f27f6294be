"""The operator in plain PyTorch, in the paper's notation: what every other implementation is tested against.

    z_0 = d_in * tile(x)        z_l = B_l z_(l-1)        y = fold(d_out * z_L) + bias

`blocks` is `[L, P]` (angles of rotations) or `[L, 4, P]` (rows a, b, c, d); `order` is `Schedule.order`. Everything
here is made of differentiable, out-of-place torch operations, so that torch can differentiate it once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def forward(
    x: Tensor,
    blocks: Tensor,
    order: Tensor,
    d_in: Tensor | None,
    d_out: Tensor | None,
    bias: Tensor | None,
    residual_scale: Tensor | None,
    out_features: int,
    maps: int | None = None,
) -> Tensor:
    """The output y, `[..., out_features]`, for x, `[..., in_features]`.

    Of several `maps` of x, all parameters have one more dimension in front, and the outputs are side by side.
    """
    if maps is not None:
        of_maps = _one_by_one(maps, blocks, d_in, d_out, bias, residual_scale)
        return torch.cat([forward(x, b, order, i, o, c, r, out_features) for b, i, o, c, r in of_maps], dim=-1)
    stages = _Stages(x, blocks, order, residual_scale)
    z = tile(x.to(stages.dtype), stages.n)
    if d_in is not None:
        z = z * d_in
    z = stages.run(z, 0, len(stages))
    if d_out is not None:
        z = z * d_out
    y = fold(z, out_features)
    if bias is not None:
        y = y + bias
    return y.to(x.dtype, copy=True)  # without stages and diagonals y would still be x itself


def backward(
    grad: Tensor,
    x: Tensor,
    blocks: Tensor,
    order: Tensor,
    d_in: Tensor | None,
    d_out: Tensor | None,
    residual_scale: Tensor | None,
    maps: int | None,
    needs: Sequence[bool],
) -> Gradients:
    """The gradients of x, blocks, d_in, d_out, bias, residual_scale; those that are not needed are left empty."""
    if maps is not None:
        of_maps = zip(grad.chunk(maps, dim=-1), _one_by_one(maps, blocks, d_in, d_out, residual_scale), strict=True)
        gradients = [backward(part, x, b, order, i, o, r, None, needs) for part, (b, i, o, r) in of_maps]
        gx, gblocks, gd_in, gd_out, gbias, gresidual = (torch.stack(parts) for parts in zip(*gradients, strict=True))
        return gx.sum(0), gblocks, gd_in, gd_out, gbias, gresidual
    needs_x, needs_blocks, needs_d_in, needs_d_out, needs_bias, needs_residual = needs
    stages = _Stages(x, blocks, order, residual_scale)
    x_tiled = tile(x.reshape(-1, x.shape[-1]).to(stages.dtype), stages.n)
    gy = grad.reshape(-1, grad.shape[-1]).to(stages.dtype)
    gy_tiled = tile(gy, stages.n)
    z_0 = x_tiled if d_in is None else x_tiled * d_in
    g = gy_tiled if d_out is None else gy_tiled * d_out
    gx, gblocks, gd_in, gd_out, gbias, gresidual = (gy.new_empty(0) for _ in needs)

    if needs_bias:
        gbias = gy.sum(0)
    if needs_d_out:
        gd_out = (gy_tiled * stages.run(z_0, 0, len(stages))).sum(0)
    if needs_blocks or needs_residual:
        g, of_blocks, of_scales = stages.walk_back(z_0, g, 0, len(stages))
        if needs_blocks:
            gblocks = torch.stack(of_blocks) if of_blocks else torch.zeros_like(blocks)
        if needs_residual and of_scales:
            gresidual = torch.stack(of_scales)
    elif needs_x or needs_d_in:
        g = stages.run_transposed(g)
    if needs_d_in:
        gd_in = (g * x_tiled).sum(0)
    if needs_x:
        gx = fold(g if d_in is None else g * d_in, x.shape[-1]).reshape(x.shape)

    gblocks, gd_in, gd_out, gbias, gresidual = (
        gradient.to(blocks.dtype) for gradient in (gblocks, gd_in, gd_out, gbias, gresidual)
    )
    return gx.to(x.dtype, copy=True), gblocks, gd_in, gd_out, gbias, gresidual


def _one_by_one(maps: int, *parameters: Tensor | None) -> Iterator[Any]:
    for k in range(maps):
        yield [None if parameter is None else parameter[k] for parameter in parameters]


def tile(x: Tensor, n: int) -> Tensor:
    """`[..., n]` whose coordinate i is x[i mod m], for x of `[..., m]`. Its transpose is `fold`."""
    if x.shape[-1] == n:
        return x
    return torch.cat([x] * -(-n // x.shape[-1]), dim=-1)[..., :n]


def fold(z: Tensor, m: int) -> Tensor:
    """`[..., m]` whose coordinate o is the sum of all z[i] with i mod m == o. Its transpose is `tile`."""
    if z.shape[-1] == m:
        return z
    copies = -(-z.shape[-1] // m)
    return F.pad(z, (0, copies * m - z.shape[-1])).reshape(*z.shape[:-1], copies, m).sum(-2)


class _Stages:
    """The stages B_1 ... B_L, in the precision in which they are computed."""

    def __init__(self, x: Tensor, blocks: Tensor, order: Tensor, residual_scale: Tensor | None) -> None:
        # Half precision is for storage: the stages are computed in float32.
        self.dtype = torch.promote_types(x.dtype, torch.float32)
        self.n = order.shape[1]
        self.order = order
        self.inverse = torch.argsort(order, dim=1)
        self.is_rotation = blocks.dim() == 2
        self.abcd = blocks.to(self.dtype)
        if self.is_rotation:
            cos, sin = torch.cos(self.abcd), torch.sin(self.abcd)
            self.abcd = torch.stack([cos, -sin, sin, cos], dim=1)
        self.scale = order.new_ones(len(self)) if residual_scale is None else residual_scale.to(self.dtype)

    def __len__(self) -> int:
        return self.order.shape[0]

    def run(self, z: Tensor, start: int, stop: int) -> Tensor:
        """z_stop from z_start."""
        for l in range(start, stop):
            a, b, c, d = self.abcd[l].unbind()
            x1, x2, rest = self._split(z, l)
            z = self._join(a * x1 + b * x2, c * x1 + d * x2, self.scale[l] * rest, l)
        return z

    def run_transposed(self, g: Tensor) -> Tensor:
        """The gradient of z_0 from that of z_L."""
        for l in reversed(range(len(self))):
            g = self._stage_transposed(g, l)
        return g

    def walk_back(self, z: Tensor, g: Tensor, start: int, stop: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """From z_start and the gradient of z_stop: that of z_start, and those of the blocks and scales between.

        The stages' inputs are computed again, halving the way: O(log L) of them are alive at a time, not L.
        """
        if stop == start:
            return g, [], []
        if stop - start == 1:
            of_blocks, of_scale = self._stage_gradients(z, g, start)
            return self._stage_transposed(g, start), [of_blocks], [of_scale]
        middle = (start + stop) // 2
        g, later_blocks, later_scales = self.walk_back(self.run(z, start, middle), g, middle, stop)
        g, blocks, scales = self.walk_back(z, g, start, middle)
        return g, blocks + later_blocks, scales + later_scales

    def _stage_transposed(self, g: Tensor, l: int) -> Tensor:
        a, b, c, d = self.abcd[l].unbind()
        g1, g2, rest = self._split(g, l)
        return self._join(a * g1 + c * g2, b * g1 + d * g2, self.scale[l] * rest, l)

    def _stage_gradients(self, z: Tensor, g: Tensor, l: int) -> tuple[Tensor, Tensor]:
        x1, x2, x_rest = self._split(z, l)
        g1, g2, g_rest = self._split(g, l)
        if self.is_rotation:
            cos, _, sin, _ = self.abcd[l].unbind()
            of_blocks = (g1 * (-sin * x1 - cos * x2) + g2 * (cos * x1 - sin * x2)).sum(0)
        else:
            of_blocks = torch.stack([(g1 * x1).sum(0), (g1 * x2).sum(0), (g2 * x1).sum(0), (g2 * x2).sum(0)])
        return of_blocks, (g_rest * x_rest).sum()

    def _split(self, z: Tensor, l: int) -> tuple[Tensor, Tensor, Tensor]:
        half = self.n // 2
        first, second, rest = z.index_select(-1, self.order[l]).split([half, half, self.n % 2], dim=-1)
        return first, second, rest

    def _join(self, first: Tensor, second: Tensor, rest: Tensor, l: int) -> Tensor:
        return torch.cat([first, second, rest], dim=-1).index_select(-1, self.inverse[l])
