"""The operator, and recurrences of it, as functions: check the arguments, choose the implementation, call it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from pairmix import ops
from pairmix.ops import Parameters, Tensors, activated
from pairmix.ops.reference import fold, tile
from pairmix.schedule import Schedule

__all__ = [
    "ACTIVATIONS",
    "GATES",
    "Parameters",
    "Tensors",
    "activated",
    "add_low_rank",
    "choose_impl",
    "feed_forward",
    "fold",
    "mix",
    "recurrence",
    "spm",
    "tile",
]

ACTIVATIONS = tuple(ops.ACTIVATIONS)
"""Of `feed_forward`, by name."""

GATES = ops.GATES
"""How many gates each cell of `recurrence` has."""

_BLOCKS = {True: "general", False: "rotation"}
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def spm(
    x: Tensor,
    blocks: Tensor,
    schedule: Schedule,
    *,
    d_in: Tensor | None = None,
    d_out: Tensor | None = None,
    bias: Tensor | None = None,
    residual_scale: Tensor | None = None,
    down: Tensor | None = None,
    up: Tensor | None = None,
    out_features: int | None = None,
    block: str | None = None,
    maps: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """Mix the last dimension of `x` in stages of 2x2 blocks.

        z_0 = d_in * tile(x)        z_l = B_l z_(l-1)        y = fold(d_out * z_L) + bias

    With `in_features < n`, `tile` reads `x[i mod in_features]`; with `out_features < n`, `fold` sums the
    coordinates `i` with equal `i mod out_features`. For a square operator both are the identity.

    Half precision is computed in float32. Under autocast `x` is cast and the parameters stay as they are.

    Args:
        x: the input.
        blocks: one angle per pair for rotations `[[cos, -sin], [sin, cos]]`, or the coefficients a, b, c, d of
            general blocks `[[a, b], [c, d]]`.
        schedule: which coordinates are paired at which stage; its `n` is the width.
        d_in: scales the tiled input; None for ones.
        d_out: scales the mixed coordinates; None for ones.
        bias: added to the output; None for zeros.
        residual_scale: for odd `n`, what the coordinate left over at each stage is multiplied by; None for one.
        down: with `up`, a low-rank map beside the mixing: `up (down x)` is added to the output; None for none.
        up: see `down`.
        out_features: the size of the output; None for `n`.
        block: `"rotation"` or `"general"`; None for what the shape of `blocks` says.
        maps: for several operators that read the same `x`, how many. Their parameters then have one more dimension in
            front, and their outputs are side by side. None for one operator.
        impl: which implementation computes it: `"auto"` chooses, and one asked for by name never falls back to another.

    Shape:
        - x: `(*, in_features)`, any number of leading dimensions, `1 <= in_features <= n`
        - blocks: `(L, n // 2)` or `(L, 4, n // 2)`
        - d_in, d_out: `(n,)`; bias: `(out_features,)`; residual_scale: `(L,)`
        - down: `(rank, in_features)`; up: `(out_features, rank)`
        - output: `(*, out_features)`, or `(*, maps * out_features)`

    Raises:
        ValueError: for a shape or a device that does not fit, or an `impl` that does not exist.
        TypeError: for a dtype that does not fit.
        RuntimeError: for an `impl` that exists but cannot run here.

    Examples:
        >>> quarter_turns = torch.full((1, 2), torch.pi / 2)
        >>> schedule = Schedule.from_pairs(4, [[(0, 1), (2, 3)]])
        >>> spm(torch.tensor([1.0, 2.0, 3.0, 4.0]), quarter_turns, schedule)
        tensor([-2.0000,  1.0000, -4.0000,  3.0000])
    """
    if out_features is None:
        out_features = schedule.n
    if block is None:
        block = "general" if blocks.dim() == (3 if maps is None else 4) else "rotation"
    parameters = Parameters(blocks, d_in, d_out, bias, residual_scale)
    y = mix(x, parameters, schedule, block, out_features, maps, impl)
    return y if down is None and up is None else add_low_rank(y, x, down, up)


def mix(
    x: Tensor,
    parameters: Tensors,
    schedule: Schedule,
    block: str,
    out_features: int,
    maps: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """`spm`, for callers that have the parameters as one value."""
    if ops.is_ordinary(x) and not torch.is_autocast_enabled("cpu"):
        direct = ops.DIRECT.get(impl)
        if direct is not None:
            y = ops.call_directly(direct, x, parameters, schedule._on_cpu, block, out_features, maps)
            if y is not None:
                return y

    ops.choose(impl, x.device)  # a name that cannot run here is an error here, but it is chosen where the graph runs
    x = _checked(x, parameters, schedule, block, out_features, maps)
    if maps is None:
        parameters = ops.with_front(parameters)
    if torch.onnx.is_in_onnx_export():  # which does not know the operator
        return ops.decomposed(x, parameters, schedule, block, out_features)
    result: Tensor = ops.spm(x, schedule.on(x.device).order, *parameters, block, out_features, impl)
    return result


def add_low_rank(y: Tensor, x: Tensor, down: Tensor | None, up: Tensor | None) -> Tensor:
    """`y + up (down x)`, for one map or, with one more dimension in front of `down` and `up`, several side by side.

    Raises:
        ValueError: for shapes that do not fit.
    """
    if down is None or up is None:
        raise ValueError(f"down and up belong together, got {'up' if down is None else 'down'} alone")
    (*front, rank, in_features), (*up_front, out_features, up_rank) = down.shape, up.shape
    outputs = math.prod(front) * out_features
    if front != up_front or len(front) > 1 or (rank, in_features, outputs) != (up_rank, x.shape[-1], y.shape[-1]):
        raise ValueError(
            f"down and up of shapes {tuple(down.shape)} and {tuple(up.shape)} do not map {x.shape[-1]} features onto "
            f"{y.shape[-1]}"
        )
    if not front:
        hidden = F.linear(x, down)
        # One pass over the output: the sum comes for free with the product.
        return torch.addmm(y.flatten(0, -2), hidden.flatten(0, -2), up.T).view_as(y) if x.dim() > 1 else y + up @ hidden
    hidden = F.linear(x, down.flatten(0, 1)).unflatten(-1, (*front, rank))
    return y + torch.einsum("...mr,mor->...mo", hidden, up).flatten(-2)


def _checked(
    x: Tensor, parameters: Tensors, schedule: Schedule, block: str, out_features: int, maps: int | None
) -> Tensor:
    """`x`, cast as autocast wants it, if all arguments fit together."""
    n, stages, blocks = schedule.n, schedule.stages, parameters.blocks
    if block not in ("general", "rotation"):
        raise ValueError(f"block must be 'general' or 'rotation', got {block!r}")
    if not 1 <= out_features <= n:
        raise ValueError(f"out_features must be in 1..{n}, the width of the schedule, got {out_features}")
    if x.is_nested:
        raise ValueError(f"x is a nested tensor of the layout {x.layout}; SPMLinear takes those of layout=torch.jagged")
    if x.dim() == 0 or not 1 <= x.shape[-1] <= n:
        raise ValueError(f"x must have a last dimension of 1..{n}, the width of the schedule, got {tuple(x.shape)}")
    if maps is not None and maps < 1:
        raise ValueError(f"maps must be at least 1, or None for one operator, got {maps}")
    front = () if maps is None else (maps,)
    of_angles, of_coeffs = (*front, stages, n // 2), (*front, stages, 4, n // 2)
    if blocks.shape != (of_angles if block == "rotation" else of_coeffs):
        raise ValueError(
            f"blocks must be angles of shape {of_angles} or coefficients of shape {of_coeffs} for {schedule}, "
            f"got {tuple(blocks.shape)} for block={block!r}"
        )
    if x.dtype not in _DTYPES:
        raise TypeError(f"x must be float32, float64, bfloat16 or float16, got {x.dtype}")
    device, dtype = x.device, blocks.dtype
    fits = dtype == x.dtype
    if device.type != "meta" and torch.is_autocast_enabled(device.type) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(device.type))
        fits = dtype in (x.dtype, torch.float32)
    if not fits:
        raise TypeError(f"blocks are {dtype} and x is {x.dtype}: cast them alike")
    if blocks.device != device:
        raise ValueError(f"blocks are on {blocks.device} and x is on {device}: move them together")
    shapes = {"d_in": n, "d_out": n, "bias": out_features, "residual_scale": stages}
    for name, parameter in parameters._asdict().items():
        if name == "blocks" or parameter is None:
            continue
        shape = (*front, shapes[name])
        if parameter.shape != shape:
            raise ValueError(f"{name} must have the shape {shape}, got {tuple(parameter.shape)}")
        if parameter.dtype != dtype:
            raise TypeError(f"{name} is {parameter.dtype} and blocks are {dtype}: cast them alike")
        if parameter.device != device:
            raise ValueError(f"{name} is on {parameter.device} and x is on {device}: move them together")
    if parameters.residual_scale is not None and n % 2 == 0:
        raise ValueError(f"residual_scale is for odd widths, where a coordinate is left over; this width is {n}")
    return x


def recurrence(
    cell: str,
    gates: Tensor,
    h: Tensor,
    c: Tensor | None,
    blocks: Tensor,
    schedule: Schedule,
    *,
    batch_sizes: Sequence[int] | None = None,
    d_in: Tensor,
    d_out: Tensor,
    bias: Tensor | None = None,
    residual_scale: Tensor | None = None,
    down: Tensor | None = None,
    up: Tensor | None = None,
    block: str | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Run a recurrent cell over all steps of a batch of sequences.

    Half precision is computed in float32.

    Args:
        cell: `"tanh"`, `"relu"`, `"linear"`, `"gru"`, `"gru_reset_after"` or `"lstm"`.
        gates: what the inputs of all steps contribute to the gates, which are side by side: r, z, candidate for a GRU,
            i, f, g, o for an LSTM. Its rows are those of the first step, then those of the second, and so on.
        h: the state of every sequence before the first step.
        c: for an LSTM, its cell state.
        blocks: those of the operators that read the state, one operator for every gate: see `spm` with `maps`.
        schedule: the schedule of these operators.
        batch_sizes: how many sequences have a row at each step, never more than at the step before; None if all have
            one at every step.
        d_in: see `spm`.
        d_out: see `spm`.
        bias: see `spm`.
        residual_scale: see `spm`.
        down: see `spm`. With a low-rank map the steps are computed one by one, which takes longer.
        up: see `spm`.
        block: see `spm`.
        impl: see `spm`.

    Shape:
        - gates: `(N, G * H)` for G gates, where N is the sum of the batch sizes
        - h, c: `(B, H)`
        - output: h and c after each step, `(N, H)` each; without a cell state the second one has no rows

    Raises:
        ValueError: for a cell that does not exist or shapes that do not fit.
    """
    if cell not in GATES:
        raise ValueError(f"cell must be one of {list(GATES)}, got {cell!r}")
    batch, size = h.shape
    maps = GATES[cell]
    if size != schedule.n or gates.dim() != 2 or gates.shape[1] != maps * size:
        raise ValueError(
            f"a {cell} of width {schedule.n} needs gates of shape (N, {maps * schedule.n}) and states of shape "
            f"(B, {schedule.n}), got {tuple(gates.shape)} and {tuple(h.shape)}"
        )
    if (c is None) == (cell == "lstm") or (c is not None and c.shape != h.shape):
        raise ValueError(f"a {cell} and c={None if c is None else tuple(c.shape)}, h={tuple(h.shape)} do not fit")
    if batch_sizes is None:
        if batch and gates.shape[0] % batch:
            raise ValueError(f"{gates.shape[0]} rows of gates cannot be steps of {batch} sequences")
    elif sum(batch_sizes) != gates.shape[0] or any(b > a for a, b in pairwise([batch, *batch_sizes])):
        raise ValueError(f"batch_sizes {list(batch_sizes)} do not fit {gates.shape[0]} rows of {batch} sequences")

    dtype = gates.dtype
    wide = torch.promote_types(dtype, torch.float32)
    c = h.new_empty(0) if c is None else c
    gates, h, c = gates.to(wide), h.to(wide), c.to(wide)
    given = (blocks, d_in, d_out, bias, residual_scale)
    parameters: Tensors = Parameters(*(None if parameter is None else parameter.to(wide) for parameter in given))
    if block is None:
        block = "general" if blocks.dim() == 4 else "rotation"
    sizes = None if batch_sizes is None else list(batch_sizes)
    has_recurrence = ops.choose(impl, gates.device).recurrence is not None
    is_low_rank = down is not None or up is not None
    if has_recurrence and not is_low_rank and ops.can_fuse(gates, h, c, *parameters):
        order = schedule.on(gates.device).order
        all_h, all_c, _ = ops.recurrence(gates, h, c, sizes, order, *parameters, block, cell, impl)
    else:

        def mix_some(x: Tensor, first: int, last: int) -> Tensor:
            y = mix(x, parameters.of_maps(first, last), schedule, block, size, last - first, impl)
            if not is_low_rank:
                return y
            return add_low_rank(y, x, *(None if part is None else part[first:last].to(wide) for part in (down, up)))

        all_h, all_c = ops.unrolled(cell, gates, h, c, sizes, mix_some)
    return all_h.to(dtype), all_c.to(dtype)


def feed_forward(
    x: Tensor, up: Mapping[str, Any], down: Mapping[str, Any], activation: str = "gelu", *, out_features: int
) -> Tensor:
    """A feed-forward block: a wide map, an activation, a narrow map.

        y = down(activation(up x))        or, of two maps,        y = down(activation(gate x) * (up x))

    The compiled kernels take a few rows at a time all the way, so that the hidden layer is never in memory, and keep
    nothing but x for backward. They do so where both maps are as wide as the hidden layer, have no low-rank map beside
    them, and have schedules of the same kind; otherwise the parts run one after the other.

    Args:
        x: the input.
        up: the arguments of `spm` for the first map; with `maps=2` they are the gate and what it is multiplied with.
        down: the arguments of `spm` for the second map.
        activation: of `ACTIVATIONS`.
        out_features: the size of the output.

    Shape:
        - x: `(*, in_features)`; output: `(*, out_features)`

    Raises:
        ValueError: for an activation that does not exist, more than two maps up, or as `spm` does.
    """
    if activation not in ops.ACTIVATIONS:
        raise ValueError(f"activation must be one of {list(ops.ACTIVATIONS)}, got {activation!r}")
    maps = up.get("maps")
    if maps not in (None, 1, 2) or down.get("maps") is not None:
        raise ValueError(f"a block has one or two maps up and one map down, got maps={maps} and {down.get('maps')}")
    impl = up.get("impl", "auto")
    if _fit_together(up, down):
        wide, narrow = _map(up), _map(down)
        y: Tensor | None
        if ops.is_ordinary(x) and not torch.is_autocast_enabled("cpu") and impl in ops.DIRECT:
            y = ops.call_block_directly(ops.DIRECT[impl], x, wide, narrow, activation, out_features)
            if y is not None:
                return y
        tensors = [tensor for tensor in (*wide.parameters, *narrow.parameters) if tensor is not None]
        if ops.choose(impl, x.device).feed_forward is not None and not x.is_nested and ops.can_fuse(x, *tensors):
            hidden = x.new_empty((0, wide.schedule.n))
            _, narrow = _checked_map(hidden, narrow, down, out_features)
            x, wide = _checked_map(x, wide, up, wide.schedule.n)
            y = ops.feed_forward(x, *ops.arguments_of(wide, narrow), activation, out_features, impl)
            return cast(Tensor, y)
    return spm(activated(spm(x, **up), activation, maps), **down, out_features=out_features)


def _fit_together(up: Mapping[str, Any], down: Mapping[str, Any]) -> bool:
    """Whether the hidden layer is as wide as both maps, and nothing is beside them."""
    n = up["schedule"].n
    return (
        down["schedule"].n == n
        and up.get("out_features") in (None, n)
        and down.get("impl", "auto") == up.get("impl", "auto")
        and up.get("up") is None
        and down.get("up") is None
    )


def _map(given: Mapping[str, Any]) -> ops.Map:
    """The arguments of `spm` for one map, as they are."""
    parameters: Tensors = Parameters(*(given.get(name) for name in Parameters._fields))
    is_general = parameters.blocks.dim() == (3 if given.get("maps") is None else 4)
    schedule: Schedule = given["schedule"]
    return ops.Map(parameters, schedule.on(parameters.blocks.device), given.get("block") or _BLOCKS[is_general])


def _checked_map(x: Tensor, one: ops.Map, given: Mapping[str, Any], out_features: int) -> tuple[Tensor, ops.Map]:
    """x as autocast wants it, and the map as operators take it: several maps, and float32 for half precision."""
    x = _checked(x, one.parameters, given["schedule"], one.block, out_features, given.get("maps"))
    parameters = one.parameters if given.get("maps") is not None else ops.with_front(one.parameters)
    wide = torch.promote_types(parameters.blocks.dtype, torch.float32)
    return x, one._replace(parameters=Parameters(*(None if one is None else one.to(wide) for one in parameters)))


def choose_impl(impl: str, device: torch.device) -> str:
    """The name of the implementation that runs on this device; see `spm` for the errors."""
    return ops.choose(impl, device).name
