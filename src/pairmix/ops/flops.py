"""What the operator costs, for `torch.utils.flop_counter`: two operations for every multiply-add, as torch counts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula


def _operations(x_shape: Any, blocks_shape: Any, n: int) -> int:
    """Of one application: four multiply-adds for every pair, stage and map, and those of the two diagonals."""
    maps, stages, pairs = blocks_shape[0], blocks_shape[1], blocks_shape[-1]
    return int(2 * math.prod(x_shape[:-1]) * maps * (4 * stages * pairs + 2 * n))


def _forward(x_shape: Any, order_shape: Any, blocks_shape: Any, *rest: Any, **out: Any) -> int:
    return _operations(x_shape, blocks_shape, order_shape[-1])


def _backward(grad_shape: Any, x_shape: Any, order_shape: Any, blocks_shape: Any, *rest: Any, **out: Any) -> int:
    # The gradient of the input and those of the blocks, as torch counts a linear layer; what is computed again to save
    # memory is not counted, there as here.
    return 2 * _forward(x_shape, order_shape, blocks_shape)


def _recurrence(
    gates_shape: Any, h: Any, c: Any, sizes: Any, order_shape: Any, blocks_shape: Any, *rest: Any, **out: Any
) -> int:
    return _forward(gates_shape, order_shape, blocks_shape)


def _recurrence_backward(*shapes: Any, **out: Any) -> int:
    order_shape, blocks_shape, states_shape = shapes[5], shapes[6], shapes[12]
    return 2 * _forward(states_shape, order_shape, blocks_shape)


def _feed_forward(x_shape: Any, *shapes: Any, **out: Any) -> int:
    up_order, up_blocks, down_order, down_blocks = (shapes[i] for i in (0, 1, 6, 7))
    return _operations(x_shape, up_blocks, up_order[-1]) + _operations(x_shape, down_blocks, down_order[-1])


def _feed_forward_backward(grad_shape: Any, x_shape: Any, *shapes: Any, **out: Any) -> int:
    return 2 * _feed_forward(x_shape, *shapes)


def register_flop_formulas() -> None:
    """Let `FlopCounterMode` count the operators, which are defined by then."""
    ops = torch.ops.pairmix
    formulas: dict[Any, Any] = {
        ops.spm: _forward,
        ops.spm_backward: _backward,
        ops.recurrence: _recurrence,
        ops.recurrence_backward: _recurrence_backward,
        ops.feed_forward: _feed_forward,
        ops.feed_forward_backward: _feed_forward_backward,
    }
    for op, formula in formulas.items():
        register_flop_formula(op)(formula)
