"""The gradients: pass by pass from the last to the first, then the sums over the workers."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from torch import Tensor

from pairmix.ops.registry import Parameters, Tensors
from pairmix.ops.triton import configs, kernels
from pairmix.ops.triton.configs import Config
from pairmix.ops.triton.launch import Operator, folds_through_memory
from pairmix.ops.triton.plan import Pass

_ALIGNED = 16
"""Sums of each kind begin at a multiple of this: kernels load several at a time."""


class Slot(NamedTuple):
    """How a worker's sums of the gradients of one map are laid out; where nothing is needed, nothing is there.

    Attributes:
        parts: into how many sums the gradient of a block's coefficient falls: that of an angle into those of the first
            and of the second of its pair.
        width: how many coefficients the blocks of a stage have.
        scales, d_in, d_out, bias: where each kind begins, after those of the blocks.
        size: how many sums there are.
    """

    parts: int
    width: int
    scales: int
    d_in: int
    d_out: int
    bias: int
    size: int

    @staticmethod
    def of(operator: Operator, needs: Parameters[bool]) -> Slot:
        """The layout for the gradients that are needed."""
        n, half = operator.n, operator.n // 2
        parts, width = (2, half) if operator.rotation else (1, 4 * half)
        stages = operator.stages if needs.blocks or needs.residual_scale else 0
        scales = stages if n % 2 else 0
        sizes = [stages * width * parts, scales, n * needs.d_in, n * needs.d_out, operator.out_features * needs.bias]
        ends = itertools.accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes)
        return Slot(parts, width, *ends)


class Backward:
    """One call of the operator's backward.

    Args:
        operator: the call whose gradients these are.
        grad: `[rows, maps * out_features]`.
        needs_x: whether the gradient of x is needed.
        needs: which gradients of parameters are needed.
    """

    def __init__(self, operator: Operator, grad: Tensor, needs_x: bool, needs: Parameters[bool]) -> None:
        self.operator, self.grad, self.needs_x, self.needs = operator, grad, needs_x, needs
        self.of_stages = needs.blocks or needs.residual_scale
        self.slot = Slot.of(operator, needs)
        tiles = max(of_pass.plan.tiles for of_pass in operator.passes)
        exchanges = any(0 in of_pass.plan.strides for of_pass in operator.passes)
        self.tried = configs.backward_configs(operator.passes[0].plan.lanes, operator.dtype, tiles > 1, exchanges)
        others = 1 if tiles == 1 else tiles * operator.maps
        own = operator.maps * self.slot.size + others * max(self._own_numbers(one.plan) for one in operator.passes)
        row_tiles = -(-operator.rows // min(config.rows for config in self.tried))
        self.workers = configs.workers(
            row_tiles, others, self.tried[0], grad.device, own_bytes=own * operator.dtype.itemsize
        )
        self.slots = operator.empty(self.workers, operator.maps, self.slot.size)
        if len(self.tried) > 1:  # larger tiles of rows may leave workers without any
            self.slots.zero_()

    def run(self) -> tuple[Tensor | None, Tensors]:
        """The gradients of x, `[rows, in_features]`, and of the parameters; None for those that are not needed."""
        gx = self._walk_back(self.operator.x, self.grad, 0, len(self.operator.passes))
        return gx, self._reduced()

    def _walk_back(self, z: Tensor, g: Tensor | None, start: int, stop: int) -> Tensor | None:
        """The gradient of the input of the pass `start`, from the input and the gradient of the output of the last.

        The inputs of passes are computed again, halving the way: a few of them are alive at a time, not all.
        """
        if stop - start == 1:
            return self._backward_pass(z, g, start)
        middle = (start + stop) // 2
        between = z
        if self.of_stages or (self.needs.d_out and stop == len(self.operator.passes)):
            between = self.operator.run(z, start, middle)
        g = self._walk_back(between, g, middle, stop)
        return g if g is None else self._walk_back(z, g, start, middle)

    def _backward_pass(self, z: Tensor, g: Tensor | None, index: int) -> Tensor | None:
        op, slot = self.operator, self.slot
        plan, tables = op.passes[index].plan, op.passes[index][1:]
        is_first, is_last, is_single = index == 0, index == len(op.passes) - 1, plan.tiles == 1
        folds_apart = is_first and not is_single and (op.in_features < op.n or op.maps > 1)
        gx = None
        if self.needs_x if is_first else self.needs_x or self.needs.d_in or self.of_stages:
            gx = op.empty(op.rows, op.maps * op.n)
            if is_first and not folds_apart:
                gx = op.x.new_empty(op.rows, op.in_features)
        folds = is_first and is_single and self.needs_x and folds_through_memory(plan, op.n, op.in_features)
        memory = self._memory(plan, z, folds)
        blocks, d_in, d_out, _, scale = op.of_pass(plan)
        op.launch_pass(
            kernels.backward_pass, self.tried, (self.workers, plan.tiles, 1 if is_single else op.maps), index,
            g, z, blocks, d_in, d_out, scale, gx, self.slots, memory, *tables, op.rows, *op.map_steps(),
            slot.size, plan.first * slot.width * slot.parts, slot.scales + plan.first, slot.d_in, slot.d_out, slot.bias,
            MAPS=op.maps if is_single else 1, OF_STAGES=self.of_stages, OF_D_IN=is_first and self.needs.d_in,
            OF_D_OUT=is_last and self.needs.d_out, OF_BIAS=is_last and self.needs.bias,
        )  # fmt: skip
        return op.folded(gx, None, op.in_features, 1) if gx is not None and folds_apart else gx

    def _memory(self, plan: Pass, z: Tensor, folds: bool) -> Tensor:
        """What the programs of a pass need for themselves: a tile to exchange values through, and checkpoints."""
        op = self.operator
        if 0 not in plan.strides and not folds and all(self._checkpoints(plan, config) <= 1 for config in self.tried):
            return z  # which is not read, but the kernel takes an address
        programs = self.workers if plan.tiles == 1 else self.workers * plan.tiles * op.maps
        return op.empty(programs, self._own_numbers(plan))

    def _own_numbers(self, plan: Pass) -> int:
        """As many numbers a program of this pass keeps in memory of its own."""
        tiles = (max(1, self._checkpoints(plan, config)) * config.rows for config in self.tried)
        return max(tiles) * plan.lanes

    def _checkpoints(self, plan: Pass, config: Config) -> int:
        """As many inputs of stages a pass writes to memory; the first of these places is for exchanges."""
        return -(-len(plan.strides) // config.held) - 1 if self.of_stages else 1

    def _reduced(self) -> Tensors:
        """The gradients of the parameters, from the sums of all workers."""
        op, slot, needs = self.operator, self.slot, self.needs
        blocks = op.parameters.blocks
        n, stages = op.n, op.stages
        shapes = Parameters(blocks.shape, (n,), (n,), (op.out_features,), (stages,))
        found: Tensors = Parameters(
            *(
                blocks.new_empty(shape if name == "blocks" else (op.maps, *shape)) if needed else None
                for name, shape, needed in zip(Parameters._fields, shapes, needs, strict=True)
            )
        )
        if not self.slot.size:
            return found
        of_blocks, of_d_in, of_d_out, of_bias, of_scale = found
        summed = stages if self.of_stages else 0
        outputs, block = summed * slot.width + slot.size - slot.scales, 256
        op.launch(
            kernels.reduce_slots,
            (-(-outputs // block), op.maps, 1),
            self.slots, of_blocks, of_scale, of_d_in, of_d_out, of_bias, self.workers, *slot[2:], outputs,
            STAGES=summed, WIDTH=slot.width, HALVES=slot.parts, N=n, OUT=op.out_features, BLOCK=block,
        )  # fmt: skip
        return found
