"""The GPU kernels: jitted functions, and nothing that runs on the host.

Names in capitals are known when a kernel is compiled. A tile is `[R, C]`: R rows, and C lanes that hold the coordinates
of a tile of the plan. P is the number of pairs.

    FORM      of the stages; see `stages`
    FIRST     the pass reads x, and not what another pass wrote; LAST likewise for its output
    STRIDES   of the pass's stages; see `plan.Pass`
    ACC       the dtype in which everything is computed
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from pairmix.ops.triton.stages import add, held, keep, run, stage, walk_back


@triton.jit
def forward_pass(
    x, blocks, d_in, d_out, bias, scale, y, memory, columns, members, partners, rows, map_blocks, map_scales,
    IN: tl.constexpr, OUT: tl.constexpr, R: tl.constexpr, C: tl.constexpr, STRIDES: tl.constexpr,
    FORM: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The stages of a pass. A worker takes every `workers`-th tile of rows."""
    N: tl.constexpr = FORM[0]
    SINGLE: tl.constexpr = FORM[2]
    worker, tile, map_ = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    maps = tl.num_programs(2)
    column, real = _columns(columns, tile, C, N, SINGLE)
    own = _own(memory, 1, R, C)
    for row_tile in tl.range(worker, tl.cdiv(rows, R), tl.num_programs(0), disable_licm=True):
        row = (row_tile * R + tl.arange(0, R)).to(tl.int64)
        stages = _tables(blocks, scale, members, partners, own, tile, map_, map_blocks, map_scales, _zero(row_tile), C)
        z = _input(x, d_in, row, rows, column, real, map_, maps, N, IN, FIRST, ACC)
        z = run(z, stages, 0, len(STRIDES), STRIDES, FORM)
        if LAST and d_out is not None:
            z *= _diagonal(d_out, column, real, map_, N, ACC)
        if LAST and SINGLE:
            _store_folded(z, y + map_ * OUT, maps * OUT, bias, map_, own, row, rows, N, OUT)
        else:
            if bias is not None:
                z += _diagonal(bias, column, real, map_, N, ACC)
            _store(z, y + map_ * N, maps * N, row, rows, column, real)


@triton.jit
def backward_pass(
    grad, x, blocks, d_in, d_out, scale, gx, slots, memory, columns, members, partners, rows, map_blocks, map_scales,
    slot, at_blocks, at_scales, at_d_in, at_d_out, at_bias,
    IN: tl.constexpr, OUT: tl.constexpr, R: tl.constexpr, C: tl.constexpr, HELD: tl.constexpr, MAPS: tl.constexpr,
    STRIDES: tl.constexpr, FORM: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, OF_STAGES: tl.constexpr,
    OF_D_IN: tl.constexpr, OF_D_OUT: tl.constexpr, OF_BIAS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The gradient of a pass's input, if `gx` is given; those of parameters are added up in the worker's own slot.

    The inputs of HELD stages at a time are in registers. Those before are computed again, from checkpoints in the
    program's own memory. A single tile takes all maps one after the other, because gx is the sum over them.
    """
    N: tl.constexpr = FORM[0]
    SINGLE: tl.constexpr = FORM[2]
    worker, tile = tl.program_id(0), tl.program_id(1)
    maps = tl.num_programs(2) * MAPS
    L: tl.constexpr = len(STRIDES)
    GROUPS: tl.constexpr = (L + HELD - 1) // HELD
    LAST_GROUP: tl.constexpr = (GROUPS - 1) * HELD if L > 0 else 0
    column, real = _columns(columns, tile, C, N, SINGLE)
    own = _own(memory, GROUPS - 1 if OF_STAGES and GROUPS > 2 else 1, R, C)
    for row_tile in tl.range(worker, tl.cdiv(rows, R), tl.num_programs(0), disable_licm=True):
        row = (row_tile * R + tl.arange(0, R)).to(tl.int64)
        again = row_tile != worker
        of_x = tl.zeros((R, C), ACC)
        for k in tl.range(MAPS, disable_licm=True):
            map_ = tl.program_id(2) + k
            zero = _zero(row_tile)
            stages = _tables(blocks, scale, members, partners, own, tile, map_, map_blocks, map_scales, zero, C)
            sums = slots + (worker.to(tl.int64) * maps + map_) * slot + zero
            of_stages = (sums + at_blocks, sums + at_scales, again)

            if LAST:
                g = _load(grad + map_ * OUT, maps * OUT, row, rows, column, real, N, OUT, ACC)
            else:
                g = _load(grad + map_ * N, maps * N, row, rows, column, real, N, N, ACC)
            if LAST and OF_BIAS:
                add(sums + at_bias + column, tl.sum(g, 0), real & (column < OUT), again)

            if OF_STAGES or OF_D_OUT:
                z = _input(x, d_in, row, rows, column, real, map_, maps, N, IN, FIRST, ACC)
                for group in tl.static_range(GROUPS - 1):
                    if OF_STAGES and group > 0:
                        keep(z, own, group)
                    z = run(z, stages, group * HELD, (group + 1) * HELD, STRIDES, FORM)
                if OF_D_OUT:
                    inputs = held(z, stages, LAST_GROUP, L, STRIDES, FORM)
                    add(sums + at_d_out + column, tl.sum(g * inputs[L - LAST_GROUP], 0), real, again)
                else:
                    inputs = held(z, stages, LAST_GROUP, L - 1, STRIDES, FORM)
            if LAST and d_out is not None:
                g *= _diagonal(d_out, column, real, map_, N, ACC)

            if OF_STAGES:
                g = walk_back(inputs, g, stages, of_stages, LAST_GROUP, L, STRIDES, FORM)
                for i in tl.static_range(2, GROUPS + 1):
                    if i == GROUPS:
                        z = _input(x, d_in, row, rows, column, real, map_, maps, N, IN, FIRST, ACC)
                    else:
                        z = _kept(own, GROUPS - i, R, C)
                    earlier = held(z, stages, (GROUPS - i) * HELD, (GROUPS - i + 1) * HELD - 1, STRIDES, FORM)
                    g = walk_back(
                        earlier, g, stages, of_stages, (GROUPS - i) * HELD, (GROUPS - i + 1) * HELD, STRIDES, FORM
                    )
            elif gx is not None or OF_D_IN:
                for i in tl.static_range(L):
                    g = stage(g, stages, L - 1 - i, STRIDES[L - 1 - i], FORM, TRANSPOSED=True)

            if OF_D_IN:
                tiled = _load(x, IN, row, rows, column, real, N, IN, ACC)
                add(sums + at_d_in + column, tl.sum(g * tiled, 0), real, again)
            if gx is not None:
                if FIRST and d_in is not None:
                    g *= _diagonal(d_in, column, real, map_, N, ACC)
                if FIRST and SINGLE:
                    of_x += g
                else:
                    _store(g, gx + map_ * N, maps * N, row, rows, column, real)
        if gx is not None and FIRST and SINGLE:
            _store_folded(of_x, gx, IN, None, 0, own, row, rows, N, IN)
        tl.debug_barrier()  # the next tile of rows reads the sums, perhaps in other threads


@triton.jit
def reduce_slots(
    slots, of_blocks, of_scale, of_d_in, of_d_out, of_bias, workers, at_scales, at_d_in, at_d_out, at_bias, slot,
    outputs, STAGES: tl.constexpr, WIDTH: tl.constexpr, HALVES: tl.constexpr, N: tl.constexpr, OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of the parameters: the sums over the workers' slots, in the order of the workers.

    A stage has WIDTH gradients of blocks, each in HALVES parts.
    """
    map_, maps = tl.program_id(1), tl.num_programs(1)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_block = e < STAGES * WIDTH
    place = e - STAGES * WIDTH + at_scales
    at = e
    if HALVES == 2 and WIDTH > 0:
        at = e // WIDTH * (2 * WIDTH) + e % WIDTH
    at = tl.where(is_block, at, place)
    is_scale, is_d_in = _is_in(place, at_scales, STAGES) & ~is_block, _is_in(place, at_d_in, N)
    is_d_out, is_bias = _is_in(place, at_d_out, N), _is_in(place, at_bias, OUT)
    wanted = tl.zeros((BLOCK,), tl.int1)
    if of_blocks is not None:
        wanted |= is_block
    if of_scale is not None:
        wanted |= is_scale
    if of_d_in is not None:
        wanted |= is_d_in
    if of_d_out is not None:
        wanted |= is_d_out
    if of_bias is not None:
        wanted |= is_bias
    total = tl.zeros((BLOCK,), slots.dtype.element_ty)
    for worker in range(workers):
        base = slots + (worker * maps + map_).to(tl.int64) * slot
        total += tl.load(base + at, mask=wanted, other=0.0)
        if HALVES == 2:
            total += tl.load(base + at + WIDTH, mask=wanted & is_block, other=0.0)
    if of_blocks is not None:
        tl.store(of_blocks + map_ * (STAGES * WIDTH) + e, total, mask=is_block)
    if of_scale is not None:
        tl.store(of_scale + map_ * STAGES + place - at_scales, total, mask=is_scale)
    if of_d_in is not None:
        tl.store(of_d_in + map_ * N + place - at_d_in, total, mask=is_d_in)
    if of_d_out is not None:
        tl.store(of_d_out + map_ * N + place - at_d_out, total, mask=is_d_out)
    if of_bias is not None:
        tl.store(of_bias + map_ * OUT + place - at_bias, total, mask=is_bias)


@triton.jit
def _is_in(place, start, SIZE: tl.constexpr):
    return (place >= start) & (place < start + SIZE)


@triton.jit
def fold_rows(
    z, bias, y, rows, row_z, row_y, sources, N: tl.constexpr, FEATURES: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """y[o] is the sum of all z[i] with i mod FEATURES == o, of `sources` vectors of N coordinates side by side."""
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    column, map_ = tl.program_id(1) * C + tl.arange(0, C), tl.program_id(2)
    total = tl.zeros((R, C), z.dtype.element_ty)
    for source in range(sources):
        start = z + (map_ * sources + source) * N
        for first in range(0, N, FEATURES):
            mask = (row < rows)[:, None] & ((column < FEATURES) & (first + column < N))[None, :]
            total += tl.load(start + row[:, None] * row_z + (first + column)[None, :], mask=mask, other=0.0)
    if bias is not None:
        total += tl.load(bias + map_ * FEATURES + column, mask=column < FEATURES, other=0.0).to(total.dtype)[None, :]
    mask = (row < rows)[:, None] & (column < FEATURES)[None, :]
    tl.store(y + row[:, None] * row_y + map_ * FEATURES + column[None, :], total, mask=mask)


@triton.jit
def _columns(columns, tile, C: tl.constexpr, N: tl.constexpr, SINGLE: tl.constexpr):
    """The coordinates in the lanes of a tile, and where there is one."""
    column = tl.arange(0, C)
    if SINGLE:
        return column, column < N
    else:
        column = tl.load(columns + tile * C + column)
        return column, column >= 0


@triton.jit
def _own(memory, TILES: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """The memory of this program: the first tile is for exchanges, the others for checkpoints."""
    number = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    return memory + number.to(tl.int64) * (TILES * R * C)


@triton.jit
def _tables(blocks, scale, members, partners, own, tile, map_, map_blocks, map_scales, zero, C: tl.constexpr):
    """What the stages read."""
    start = tile * C + zero
    blocks_of_map, scale_of_map = blocks + map_ * map_blocks + zero, scale + map_ * map_scales
    return blocks_of_map, scale_of_map, members + start, partners + start, tl.num_programs(1) * C, own + zero


@triton.jit
def _zero(row_tile):
    """Zero, which the compiler does not know.

    Without it all addresses of coefficients are computed before the loop over tiles of rows, and there are not enough
    registers to keep them. It is written as a multiple of 16, so that addresses are known to be aligned.
    """
    return (row_tile >> 30) * 16


@triton.jit
def _load(x, row_step, row, rows, column, real, N: tl.constexpr, FEATURES: tl.constexpr, ACC: tl.constexpr):
    """The tile of a matrix of so many features, repeated up to the width."""
    if FEATURES < N:
        column = column % FEATURES
    mask = (row < rows)[:, None] & real[None, :]
    return tl.load(x + row[:, None] * row_step + column[None, :], mask=mask, other=0.0).to(ACC)


@triton.jit
def _input(
    x, d_in, row, rows, column, real, map_, maps, N: tl.constexpr, IN: tl.constexpr, FIRST: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """The input of a pass: z_0 = d_in * tile(x), or what the pass before wrote."""
    if FIRST:
        z = _load(x, IN, row, rows, column, real, N, IN, ACC)
        if d_in is not None:
            z *= _diagonal(d_in, column, real, map_, N, ACC)
        return z
    else:
        return _load(x + map_ * N, maps * N, row, rows, column, real, N, N, ACC)


@triton.jit
def _diagonal(diagonal, column, real, map_, N: tl.constexpr, ACC: tl.constexpr):
    return tl.load(diagonal + map_ * N + column, mask=real, other=0.0).to(ACC)[None, :]


@triton.jit
def _store(z, y, row_step, row, rows, column, real):
    tl.store(y + row[:, None] * row_step + column[None, :], z, mask=(row < rows)[:, None] & real[None, :])


@triton.jit
def _store_folded(z, y, row_step, bias, map_, own, row, rows, N: tl.constexpr, FEATURES: tl.constexpr):
    """Fold a tile that holds all coordinates, and add the bias."""
    R: tl.constexpr = z.shape[0]
    C: tl.constexpr = z.shape[1]
    WIDTH: tl.constexpr = triton.next_power_of_2(FEATURES)
    if FEATURES == N:
        folded = z
    elif C == N and WIDTH == FEATURES:
        folded = tl.sum(tl.reshape(z, (R, C // WIDTH, WIDTH)), 1)
    else:
        keep(z, own, 0)
        tl.debug_barrier()
        folded = tl.zeros((R, WIDTH), z.dtype)
        column = tl.arange(0, WIDTH)
        for first in range(0, N, FEATURES):
            inside = (column < FEATURES) & (first + column < N)
            at = own + tl.arange(0, R)[:, None] * C + (first + column)[None, :]
            folded += tl.load(at, mask=inside[None, :], other=0.0)
    column = tl.arange(0, WIDTH)
    if bias is not None:
        folded += tl.load(bias + map_ * FEATURES + column, mask=column < FEATURES, other=0.0).to(z.dtype)[None, :]
    _store(folded, y, row_step, row, rows, column, column < FEATURES)


@triton.jit
def _kept(own, NUMBER: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    tl.debug_barrier()
    lane = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    return tl.load(own + NUMBER * (R * C) + lane)
