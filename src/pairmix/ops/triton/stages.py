"""The stages of a pass on a tile, as jitted functions for the kernels.

A stage is computed in one of two ways. Where lane i meets lane i ^ S, the tile is split into the firsts and the seconds
of all pairs, `[R, C / 2S, S]` each. Elsewhere every lane reads its partner through memory:

    z'_i = own_i z_i + other_i z_partner(i)        own, other = a, b for the first of a pair; d, c for the second

The residual coordinate of an odd width has its scale as `own`, and no partner: a product with zero could be NaN.

    stages    what the stages read: blocks and scales of the map, members and partners of the tile, how far apart two
              stages are in these tables, and memory of the program's own
    sums      what they add to: the worker's sums of the gradients of blocks and scales, and whether there are any yet.
              The gradient of an angle is in two parts, `[L, 2, P]`, from the first and the second of the pair
    FORM      the width, whether blocks are rotations, whether lane i of a single tile is coordinate i, whether
              residuals have scales
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

import triton
import triton.language as tl


@triton.jit
def run(
    z, stages, START: tl.constexpr, STOP: tl.constexpr, STRIDES: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """z_STOP from z_START."""
    for l in tl.static_range(START, STOP):
        z = stage(z, stages, l, STRIDES[l], FORM)
    return z


@triton.jit
def held(
    z, stages, START: tl.constexpr, STOP: tl.constexpr, STRIDES: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """z_START ... z_STOP, from the first of them."""
    all_z = (z,)
    for l in tl.static_range(START, STOP):
        z = stage(z, stages, l, STRIDES[l], FORM)
        all_z = all_z + (z,)  # noqa: RUF005 - Triton has no starred expressions
    return all_z


@triton.jit
def walk_back(
    inputs, g, stages, sums, START: tl.constexpr, STOP: tl.constexpr, STRIDES: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """The gradient of z_START from that of z_STOP and the stages' inputs; adds the gradients of the stages."""
    for i in tl.static_range(STOP - START):
        g = _stage_back(inputs[STOP - START - 1 - i], g, stages, sums, STOP - 1 - i, STRIDES[STOP - 1 - i], FORM)
    return g


@triton.jit
def stage(z, stages, l: tl.constexpr, S: tl.constexpr, FORM: tl.constexpr, TRANSPOSED: tl.constexpr = False):
    """The output of a stage from its input; transposed, the gradient of its input from that of its output."""
    N: tl.constexpr = FORM[0]
    if S > 0:
        pair, a, b, c, d = _abcd(z, stages, l, S, FORM)
        if TRANSPOSED:
            b, c = c, b
        z1, z2 = _split(z, S)
        return _joined(a * z1 + b * z2, _unless(pair == N // 2, c * z1 + d * z2, N), z)
    else:
        member, own, other = _own_and_other(z, stages, l, FORM, TRANSPOSED)
        z_other = _exchanged(z, stages, l)
        return own * z + _unless(member == N - 1, other * z_other, N)


@triton.jit
def _stage_back(z, g, stages, sums, l: tl.constexpr, S: tl.constexpr, FORM: tl.constexpr):
    """The gradient of a stage's input from that of its output; adds the gradients of its blocks and scale."""
    N: tl.constexpr = FORM[0]
    P: tl.constexpr = N // 2
    of_blocks, of_scales, again = sums
    if S > 0:
        pair, a, b, c, d = _abcd(g, stages, l, S, FORM)
        z1, z2 = _split(z, S)
        g1, g2 = _split(g, S)
        is_pair = (pair >= 0) & (pair < P)
        if FORM[1]:
            at = of_blocks + l * (2 * P) + pair
            add(at, _over_rows(g1 * (b * z1 - a * z2)), is_pair, again)
            add(at + P, _over_rows(g2 * (a * z1 + b * z2)), is_pair, again)
        else:
            at = of_blocks + l * (4 * P) + pair
            add(at, _over_rows(g1 * z1), is_pair, again)
            add(at + P, _over_rows(g1 * z2), is_pair, again)
            add(at + 2 * P, _over_rows(g2 * z1), is_pair, again)
            add(at + 3 * P, _over_rows(g2 * z2), is_pair, again)
        if N % 2 == 1:
            add(of_scales + l + 0 * pair, _over_rows(g1 * z1), pair == P, again)
        return _joined(a * g1 + c * g2, _unless(pair == P, b * g1 + d * g2, N), g)
    else:
        member, own, other = _own_and_other(g, stages, l, FORM, True)
        z_other = _exchanged(z, stages, l)
        g_other = _exchanged(g, stages, l)
        of_own, of_other = _over_rows(g * z), _over_rows(g * z_other)
        is_pair = (member >= 0) & (member < 2 * P)
        if FORM[1]:
            sign = tl.where(member < P, -1.0, 1.0).to(g.dtype)
            add(of_blocks + l * (2 * P) + member, sign * (own * of_other + other * of_own), is_pair, again)
        else:
            at = of_blocks + l * (4 * P) + member
            add(at + tl.where(member < P, 0, 2 * P), of_own, is_pair, again)
            add(at + P, of_other, is_pair, again)
        if N % 2 == 1:
            add(of_scales + l + 0 * member, of_own, member == 2 * P, again)
        return own * g + _unless(member == 2 * P, other * g_other, N)


@triton.jit
def _over_rows(value):
    # Not [0] of it: for a tensor of another shape the compiler no longer knows that addresses are contiguous.
    return tl.sum(value, 0, keep_dims=True)


@triton.jit
def add(sums, value, mask, again):
    """Add to sums that only this program writes. The first time there is nothing to add to."""
    before = tl.load(sums, mask=mask & again, other=0.0)
    tl.store(sums, before + value, mask=mask)


@triton.jit
def keep(z, own, NUMBER: tl.constexpr):
    """Write a tile into the program's own memory, when all threads have read what was there."""
    tl.debug_barrier()
    R: tl.constexpr = z.shape[0]
    C: tl.constexpr = z.shape[1]
    place = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(own + NUMBER * (R * C) + place, z)


@triton.jit
def _exchanged(z, stages, l: tl.constexpr):
    """The value of every lane's partner.

    Through memory, which stays in the cache: `tl.gather` keeps a row in one warp, at (C / 32)^2 shuffles a row, and for
    some thousand lanes takes minutes to compile.
    """
    R: tl.constexpr = z.shape[0]
    C: tl.constexpr = z.shape[1]
    _, _, _, partners, step, own = stages
    partner = tl.load(partners + l * step + tl.arange(0, C))
    keep(z, own, 0)
    tl.debug_barrier()
    return tl.load(own + tl.arange(0, R)[:, None] * C + partner[None, :])


@triton.jit
def _split(z, S: tl.constexpr):
    """The firsts and the seconds of the pairs of lanes that are S apart."""
    R: tl.constexpr = z.shape[0]
    C: tl.constexpr = z.shape[1]
    return tl.split(tl.permute(tl.reshape(z, (R, C // (2 * S), 2, S)), (0, 1, 3, 2)))


@triton.jit
def _joined(z1, z2, like):
    """The inverse of `_split`."""
    return tl.reshape(tl.permute(tl.join(z1, z2), (0, 1, 3, 2)), like.shape)


@triton.jit
def _unless(is_residual, value, N: tl.constexpr):
    """The value, or zero where there is a residual."""
    if N % 2 == 0:
        return value
    else:
        return tl.where(is_residual, 0.0, value)


@triton.jit
def _abcd(like, stages, l: tl.constexpr, S: tl.constexpr, FORM: tl.constexpr):
    """The numbers of the pairs of lanes that are S apart, P for the residual, and their coefficients."""
    C: tl.constexpr = like.shape[1]
    N: tl.constexpr = FORM[0]
    P: tl.constexpr = N // 2
    blocks, scales, members, _, step, _ = stages
    group, lane = tl.arange(0, C // (2 * S))[None, :, None], tl.arange(0, S)[None, None, :]
    pair = group * S + lane if FORM[2] else tl.minimum(tl.load(members + l * step + group * (2 * S) + lane), P)
    is_pair = (pair >= 0) & (pair < P)
    if FORM[1]:
        a, c = _cos_and_sin(tl.load(blocks + l * P + pair, mask=is_pair, other=0.0).to(like.dtype))
        b, d = -c, a
    else:
        at = blocks + l * (4 * P) + pair
        a = tl.load(at, mask=is_pair, other=0.0).to(like.dtype)
        b = tl.load(at + P, mask=is_pair, other=0.0).to(like.dtype)
        c = tl.load(at + 2 * P, mask=is_pair, other=0.0).to(like.dtype)
        d = tl.load(at + 3 * P, mask=is_pair, other=0.0).to(like.dtype)
    if N % 2 == 1:
        a = tl.where(pair == P, _scale(scales, l, FORM, like.dtype), a)
    return pair, a, b, c, d


@triton.jit
def _own_and_other(like, stages, l: tl.constexpr, FORM: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Where in the stage's order the coordinate of every lane stands, and its two coefficients."""
    N: tl.constexpr = FORM[0]
    P: tl.constexpr = N // 2
    blocks, scales, members, _, step, _ = stages
    member = tl.load(members + l * step + tl.arange(0, like.shape[1])[None, :])
    is_pair, is_first = (member >= 0) & (member < 2 * P), member < P
    if FORM[1]:
        at = blocks + l * P + tl.where(is_first, member, member - P)
        own, sin = _cos_and_sin(tl.load(at, mask=is_pair, other=0.0).to(like.dtype))
        other = tl.where(is_first == TRANSPOSED, sin, -sin)
    else:
        at = blocks + l * (4 * P) + member
        own = tl.load(at + tl.where(is_first, 0, 2 * P), mask=is_pair, other=0.0).to(like.dtype)
        at_other = at + tl.where(is_first, 2 * P, 0) if TRANSPOSED else at + P
        other = tl.load(at_other, mask=is_pair, other=0.0).to(like.dtype)
    if N % 2 == 1:
        own = tl.where(member == 2 * P, _scale(scales, l, FORM, like.dtype), own)
    return member, own, other


@triton.jit
def _cos_and_sin(angle):
    """The cosines and the sines of angles.

    In float32 to about a unit in the last place. Triton's own would be thousands of instructions, most of them for
    angles that no layer has: from 8,192 on, these are off by as much as rounding the angle makes a difference.
    """
    if angle.dtype == tl.float64:
        return tl.cos(angle), tl.sin(angle)
    else:
        # Reduced to a quarter turn: pi / 2 in three parts, of which the first two are multiplied exactly.
        quarters = tl.floor(angle * 0.636619772 + 0.5)
        r = ((angle - quarters * 1.5703125) - quarters * 4.837512969970703125e-4) - quarters * 7.549789948768648e-8
        r = tl.minimum(tl.maximum(r, -0.8, propagate_nan=tl.PropagateNan.ALL), 0.8, propagate_nan=tl.PropagateNan.ALL)
        z = r * r
        s = r + r * z * (-1.6666654611e-1 + z * (8.3321608736e-3 - z * 1.9515295891e-4))
        c = 1.0 - 0.5 * z + z * z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5))
        quadrant = quarters.to(tl.int32)
        is_odd = (quadrant & 1) != 0
        return _signed(tl.where(is_odd, s, c), quadrant + 1), _signed(tl.where(is_odd, c, s), quadrant)


@triton.jit
def _signed(value, quadrant):
    """The value, or its negative in the second half of a turn."""
    return (value.to(tl.int32, bitcast=True) ^ ((quadrant & 2) << 30)).to(tl.float32, bitcast=True)


@triton.jit
def _scale(scales, l: tl.constexpr, FORM: tl.constexpr, ACC: tl.constexpr):
    """The factor of the residual of a stage."""
    if FORM[3]:
        return tl.load(scales + l).to(ACC)
    else:
        return tl.full((), 1.0, ACC)
