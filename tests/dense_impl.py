"""An implementation by dense matrices, to show that registering one is all it takes to have it tested:

python tests/dense_impl.py tests/ops tests/test_functional.py --impl dense
"""

from __future__ import annotations

import sys

import pytest
import torch

from pairmix import ops
from pairmix.ops import Parameters


class Stages:
    """The stages of all maps, applied to matrices `[M, n, in_features]` in float64."""

    def __init__(self, parameters, schedule, block):
        self.orders, self.half, self.rotation = schedule.order.long(), schedule.n // 2, block == "rotation"
        blocks, scale = parameters.blocks.double(), parameters.residual_scale
        cos, sin = blocks.cos(), blocks.sin()
        self.blocks = torch.stack([cos, -sin, sin, cos], dim=2) if self.rotation else blocks
        self.scale = torch.ones(blocks.shape[:2], dtype=torch.float64) if scale is None else scale.double()

    def split(self, z, order):
        return z[:, order].split([self.half, self.half, z.shape[1] - 2 * self.half], dim=1)

    def apply(self, l, z, transposed=False):
        a, b, c, d = self.blocks[:, l, :, :, None].unbind(1)
        b, c = (c, b) if transposed else (b, c)
        first, second, rest = self.split(z, self.orders[l])
        mixed = [a * first + b * second, c * first + d * second, self.scale[:, l, None, None] * rest]
        return torch.cat(mixed, dim=1)[:, self.orders[l].argsort()]

    def gradients(self, l, z, g):
        """Of the blocks and of the scale of a stage, from its input and the gradient of its output."""
        (z1, z2, rest), (g1, g2, g_rest) = (self.split(part, self.orders[l]) for part in (z, g))
        abcd = torch.stack([(g1 * z1).sum(-1), (g1 * z2).sum(-1), (g2 * z1).sum(-1), (g2 * z2).sum(-1)], dim=1)
        if self.rotation:
            cos, _, sin, _ = self.blocks[:, l].unbind(1)
            abcd = -sin * abcd[:, 0] - cos * abcd[:, 1] + cos * abcd[:, 2] - sin * abcd[:, 3]
        return abcd, (g_rest * rest).sum((1, 2))


def tiling(n, in_features):
    return torch.eye(in_features, dtype=torch.float64)[torch.arange(n) % in_features]


def mixed(parameters, schedule, block, in_features):
    """The tiling after every stage, from before the first to after the last, without d_out."""
    stages, tiled = Stages(parameters, schedule, block), tiling(schedule.n, in_features)
    d_in = torch.ones(len(parameters.blocks), 1) if parameters.d_in is None else parameters.d_in
    history = [d_in.double()[..., None] * tiled]
    for l in range(schedule.stages):
        history.append(stages.apply(l, history[-1]))
    return stages, history


def forward(x, parameters, schedule, block, out_features):
    _, [*_, last] = mixed(parameters, schedule, block, x.shape[-1])
    last = last if parameters.d_out is None else parameters.d_out.double()[..., None] * last
    w = tiling(schedule.n, out_features).T @ last
    y = torch.einsum("...i,moi->...mo", x.double(), w)
    y = y if parameters.bias is None else y + parameters.bias.double()
    return y.flatten(-2).to(x.dtype)


def backward(grad, x, parameters, schedule, block, needs_x, needs):
    maps, (rows, columns) = len(parameters.blocks), (grad.shape[:-1].numel(), x.shape[-1])
    g = grad.double().reshape(rows, maps, grad.shape[-1] // maps)
    folding = tiling(schedule.n, g.shape[-1])
    stages, history = mixed(parameters, schedule, block, columns)
    of_w = folding @ torch.einsum("rmo,ri->moi", g, x.double().reshape(rows, columns))
    d_out = torch.ones(1, 1) if parameters.d_out is None else parameters.d_out.double()
    w = folding.T @ (d_out[..., None] * history[-1])
    of_z, of_blocks, of_scale = d_out[..., None] * of_w, [], []
    for l in reversed(range(schedule.stages)):
        for gradients, gradient in zip((of_blocks, of_scale), stages.gradients(l, history[l], of_z), strict=True):
            gradients.insert(0, gradient)
        of_z = stages.apply(l, of_z, transposed=True)
    found = Parameters(
        blocks=torch.stack(of_blocks, dim=1) if of_blocks else torch.zeros_like(parameters.blocks),
        d_in=(of_z * tiling(schedule.n, columns)).sum(-1),
        d_out=(of_w * history[-1]).sum(-1),
        bias=g.sum(0),
        residual_scale=torch.stack(of_scale, dim=1) if of_scale else torch.zeros(maps, 0),
    )
    gx = torch.einsum("rmo,moi->ri", g, w).reshape(x.shape).to(x.dtype) if needs_x else None
    dtype = parameters.blocks.dtype
    return gx, Parameters(*(tensor.to(dtype) if needed else None for tensor, needed in zip(found, needs, strict=True)))


def why_not(device):
    return None if device.type == "cpu" else f"the matrices are CPU tensors, not {device.type} tensors"


if __name__ == "__main__":
    ops.register(ops.Impl("dense", forward, backward, why_not))
    sys.exit(pytest.main(sys.argv[1:]))
