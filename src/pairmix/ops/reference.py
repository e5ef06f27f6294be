"""The operator in plain PyTorch, in the paper's notation: what every other implementation is tested against.

    z_0 = d_in * tile(x)        z_l = B_l z_(l-1)        y = fold(d_out * z_L) + bias

For every map `blocks` is `[L, P]` (angles of rotations) or `[L, 4, P]` (rows a, b, c, d). Everything here is made of
differentiable, out-of-place torch operations, so that torch can differentiate it once more.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from pairmix.ops.registry import Parameters, Tensors
from pairmix.schedule import DeviceSchedule


def forward(x: Tensor, parameters: Tensors, schedule: DeviceSchedule, block: str, out_features: int) -> Tensor:
    """The output y, `[..., M * out_features]`, for x, `[..., in_features]`: those of all M maps, side by side."""
    return torch.cat([_forward(x, of_map, schedule, block, out_features) for of_map in _maps(parameters)], dim=-1)


def backward(
    grad: Tensor,
    x: Tensor,
    parameters: Tensors,
    schedule: DeviceSchedule,
    block: str,
    needs_x: bool,
    needs: Parameters[bool],
) -> tuple[Tensor | None, Tensors]:
    """The gradients of x and of the parameters; None for those that are not needed."""
    of_maps = list(_maps(parameters))
    gradients = [
        _backward(grad_of_map, x, of_map, schedule, block, needs_x, needs)
        for grad_of_map, of_map in zip(grad.chunk(len(of_maps), dim=-1), of_maps, strict=True)
    ]
    of_x, of_parameters = zip(*gradients, strict=True)
    gx = torch.stack(of_x).sum(0) if needs_x else None
    return gx, Parameters(
        *(None if parts[0] is None else torch.stack(parts) for parts in zip(*of_parameters, strict=True))
    )


def _forward(x: Tensor, parameters: Tensors, schedule: DeviceSchedule, block: str, out_features: int) -> Tensor:
    _, d_in, d_out, bias, _ = parameters
    stages = _Stages(x, parameters, schedule, block)
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


def _backward(
    grad: Tensor,
    x: Tensor,
    parameters: Tensors,
    schedule: DeviceSchedule,
    block: str,
    needs_x: bool,
    needs: Parameters[bool],
) -> tuple[Tensor | None, Tensors]:
    blocks, d_in, d_out, _, _ = parameters
    stages = _Stages(x, parameters, schedule, block)
    x_tiled = tile(x.reshape(-1, x.shape[-1]).to(stages.dtype), stages.n)
    gy = grad.reshape(-1, grad.shape[-1]).to(stages.dtype)
    gy_tiled = tile(gy, stages.n)
    z_0 = x_tiled if d_in is None else x_tiled * d_in
    g = gy_tiled if d_out is None else gy_tiled * d_out
    gx = gblocks = gd_in = gd_out = gbias = gresidual = None

    if needs.bias:
        gbias = gy.sum(0)
    if needs.d_out:
        gd_out = (gy_tiled * stages.run(z_0, 0, len(stages))).sum(0)
    if needs.blocks or needs.residual_scale:
        g, of_blocks, of_scales = stages.walk_back(z_0, g, 0, len(stages))
        if needs.blocks:
            gblocks = torch.stack(of_blocks) if of_blocks else torch.zeros_like(blocks)
        if needs.residual_scale:
            gresidual = torch.stack(of_scales) if of_scales else g.new_empty(0)
    elif needs_x or needs.d_in:
        g = stages.run_transposed(g)
    if needs.d_in:
        gd_in = (g * x_tiled).sum(0)
    if needs_x:
        gx = fold(g if d_in is None else g * d_in, x.shape[-1]).reshape(x.shape).to(x.dtype, copy=True)
    gradients = (gblocks, gd_in, gd_out, gbias, gresidual)
    return gx, Parameters(*(None if gradient is None else gradient.to(blocks.dtype) for gradient in gradients))


def _maps(parameters: Tensors) -> Iterator[Tensors]:
    for k in range(len(parameters.blocks)):
        yield Parameters(*(None if parameter is None else parameter[k] for parameter in parameters))


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

    def __init__(self, x: Tensor, parameters: Tensors, schedule: DeviceSchedule, block: str) -> None:
        # Half precision is for storage: the stages are computed in float32.
        self.dtype = torch.promote_types(x.dtype, torch.float32)
        self.n, self.order = schedule.n, schedule.order
        self.inverse = torch.argsort(self.order, dim=1)
        self.is_rotation = block == "rotation"
        self.abcd = parameters.blocks.to(self.dtype)
        if self.is_rotation:
            cos, sin = torch.cos(self.abcd), torch.sin(self.abcd)
            self.abcd = torch.stack([cos, -sin, sin, cos], dim=1)
        scale = parameters.residual_scale
        self.scale = self.order.new_ones(len(self)) if scale is None else scale.to(self.dtype)

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
