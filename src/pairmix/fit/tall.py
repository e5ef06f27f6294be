"""Tall matrices as products of a butterfly's stages: several mixers read the same input, and a network combines them.

Write the `n = r in` coordinates as m blocks of g, where g is the largest power of two whose strides come first and that
divides `in`. The first stages mix each block alone: block b is a butterfly M_b that reads the segment `b mod (in / g)`
of the input, so r of them read the same segment. The later stages meet at equal positions in their blocks: for each
position j a small network C_j of the m blocks. The rows of all blocks at position j, on a segment, are

    W_j = C_j N_j        N_j: the rows j of the r butterflies of this segment

which singular vectors give up to an unknown r x r matrix G_j. The butterflies fix it: the rows j and j + g/2 of each
are multiples of each other on the first half of the segment, and on the second, so that

    (Y_j Y_k^+ on the first half) (Y_j Y_k^+ on the second half)^-1 = G_j D G_j^-1        k = j + g/2, D diagonal

and G_j are eigenvectors. What is left is to tell which of them belongs to which block.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from pairmix.fit.stages import peeled, product

_REAL = 1e-3
"""How large the imaginary parts of eigenvectors may be, which rounding alone causes."""
_RANK = 1e-4
"""How large a singular value may be, against the largest, that should be zero."""
_PARALLEL = 1e-2
"""How far the cosine between two multiples of each other may be from one."""


class Split(NamedTuple):
    """How the coordinates of a tall butterfly are divided.

    Attributes:
        size: g, of a block.
        blocks: m, how many there are.
        segments: how many the input has; block b reads the segment b mod segments.
        stages: how many mix blocks alone.
        network: `[later stages, m]`, how blocks meet, as the order of a schedule.
    """

    size: int
    blocks: int
    segments: int
    stages: int
    network: Tensor

    @property
    def repeats(self) -> int:
        """r, how many blocks read the same segment."""
        return self.blocks // self.segments


def split(order: Tensor, in_features: int) -> Split | None:
    """The division for a schedule; None if it is no butterfly of an even width that repeats its input."""
    stages, n = order.shape
    if n % 2 or n % in_features or n == in_features:
        return None
    coordinates, size, alone = torch.arange(n), 1, 0
    while (
        alone < stages
        and in_features % (2 * size) == 0
        and torch.equal(order[alone], coordinates.view(-1, 2, size).transpose(0, 1).reshape(-1))
    ):
        size, alone = 2 * size, alone + 1
    blocks = n // size
    network = order[alone:].view(stages - alone, 2, -1)
    # Coordinates of equal position meet, in all positions alike: pairs are sorted by block and position.
    by_block = network.view(stages - alone, 2, blocks // 2, -1) if blocks % 2 == 0 else network[:, :, :0]
    if by_block.shape[-1] != size or not torch.equal(by_block % size, torch.arange(size).expand_as(by_block)):
        return None
    found = Split(size, blocks, in_features // size, alone, (by_block[..., 0] // size).flatten(1))
    return found if size // 2 >= max(2, found.repeats) else None


def mixers(matrix: Tensor, parts: Split) -> tuple[Tensor, Tensor] | None:
    """The network of every position, and the rows of all butterflies, up to scales between them.

    Returns:
        C, `[g, m, m]`, and N, `[g, m, g]`, with `W_j = C_j N_j` on every segment; None if there are no such.
    """
    size, blocks, segments, repeats = parts.size, parts.blocks, parts.segments, parts.repeats
    rows = matrix.view(blocks, size, segments, size).permute(1, 2, 0, 3)  # [g, segments, m, g]
    left, values, right = torch.linalg.svd(rows, full_matrices=False)
    if (values[..., repeats:] > _RANK * values[..., :1]).any():
        return None
    networks, butterflies = left[..., :repeats] * values[..., None, :repeats], right[..., :repeats, :]
    try:
        turned = _eigenvectors(butterflies)
        butterflies = torch.linalg.solve(turned, butterflies)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # there is no such product
        return None
    networks = networks @ turned
    for stride in _powers_below(size // 2):
        if not _match_(networks, butterflies, stride):
            return None
    networks = networks.permute(0, 2, 3, 1).flatten(2)  # block b = repeat * segments + segment
    butterflies = butterflies.transpose(1, 2).flatten(1, 2)
    for parity in range(2):  # butterflies of odd and even rows have nothing in common, so their order is free
        chosen = _labelled(networks[parity], parts)
        if chosen is None:
            return None
        networks[parity::2] = networks[parity::2][..., chosen]
        butterflies[parity::2] = butterflies[parity::2][:, chosen]
    return networks, butterflies


def _eigenvectors(rows: Tensor) -> Tensor:
    """The matrices G of all positions and segments, `[g, segments, r, r]`, from rows `[g, segments, r, g]`."""
    upper, lower = rows.chunk(2)
    between = [a @ torch.linalg.pinv(b) for a, b in zip(upper.chunk(2, -1), lower.chunk(2, -1), strict=True)]
    vectors = torch.linalg.eig(between[0] @ torch.linalg.inv(between[1])).eigenvectors
    if (vectors.imag.abs() > _REAL).any():
        raise torch.linalg.LinAlgError("the eigenvectors are not real")  # type: ignore[attr-defined]
    return torch.cat([vectors.real, torch.linalg.solve(between[0], vectors.real)])


def _powers_below(end: int) -> list[int]:
    """The powers of two from end / 2 down to 2."""
    return [2**k for k in range(end.bit_length() - 2, 0, -1)]


def _match_(networks: Tensor, rows: Tensor, stride: int) -> bool:
    """Give butterflies at positions that differ by a stride the same order, in place; whether that is possible.

    The rows j and j + stride of one butterfly are multiples of each other on each run of so many columns.
    """
    size, segments = rows.shape[:2]
    runs = rows[: 2 * stride].unflatten(-1, (-1, stride))  # [2 stride, segments, r, runs, stride]
    products = torch.einsum("psxrc,psyrc->psxyr", runs[:stride], runs[stride:]).abs().sum(-1)
    sizes = torch.einsum("psxr,psyr->psxy", *runs.norm(dim=-1).chunk(2))
    closeness, order = (products / sizes.clamp(min=1e-30)).max(-1)
    if (closeness < 1 - _PARALLEL).any() or (order.sort(-1).values != torch.arange(order.shape[-1])).any():
        return False
    for position, segment in itertools.product(range(stride), range(segments)):
        same = slice(position + stride, size, 2 * stride)
        networks[same, segment] = networks[same, segment][..., order[position, segment]]
        rows[same, segment] = rows[same, segment][:, order[position, segment]]
    return True


def _labelled(network: Tensor, parts: Split) -> Tensor | None:
    """Which column of C belongs to which block, `[m]`; None if no order makes it a product of the network's stages."""
    half = parts.blocks // 2
    first, second = parts.network[0].view(2, half).tolist()
    reached = _outputs(parts.network[1:], parts.blocks)
    alone = [reached[first] & ~reached[second], reached[second] & ~reached[first]]  # [m / 2, m] each
    chosen = [-1] * parts.blocks

    def columns(block: int) -> list[int]:
        """Those of its segment that no other block has yet."""
        return [
            column for column in range(block % parts.segments, parts.blocks, parts.segments) if column not in chosen
        ]

    def fits(pair: int, a: int, b: int) -> bool:
        return all(_parallel(network[only[pair], a], network[only[pair], b]) for only in alone)

    def assign(pair: int) -> bool:
        if pair == half:
            return _is_product(network[:, chosen], parts.network)
        for a, b in itertools.product(columns(first[pair]), columns(second[pair])):
            if a != b and fits(pair, a, b):
                chosen[first[pair]], chosen[second[pair]] = a, b
                if assign(pair + 1):
                    return True
                chosen[first[pair]] = chosen[second[pair]] = -1
        return False

    return torch.tensor(chosen) if assign(0) else None


def _outputs(order: Tensor, n: int) -> Tensor:
    """Which outputs each input of some stages reaches: bool `[n, n]`."""
    reached = torch.eye(n, dtype=torch.bool)
    for stage in order.flip(0):
        first, second = stage[: n - n % 2].view(2, -1)
        reached[first] = reached[second] = reached[first] | reached[second]
    return reached


def _parallel(a: Tensor, b: Tensor) -> bool:
    return bool((a @ b).abs() > (1 - _PARALLEL) * a.norm() * b.norm())


def _is_product(network: Tensor, order: Tensor) -> bool:
    coeffs, diagonal = peeled(network, order)
    return bool((product(coeffs, diagonal, order, len(network)) - network).norm() < _PARALLEL * network.norm())


def peeled_tall(matrix: Tensor, order: Tensor) -> tuple[Tensor, Tensor] | None:
    """As `stages.peeled`, for a tall matrix that is a product of a butterfly's stages; None for any other."""
    parts = split(order, matrix.shape[1])
    found = None if parts is None else mixers(matrix, parts)
    if parts is None or found is None:
        return None
    networks, butterflies = found
    coeffs = matrix.new_empty(len(order), 4, order.shape[1] // 2)
    later = coeffs[parts.stages :].unflatten(-1, (-1, parts.size))  # [later stages, 4, m / 2, g]
    rows = torch.zeros_like(matrix).view(parts.blocks, parts.size, parts.segments, parts.size)
    segments = torch.arange(parts.blocks) % parts.segments
    for position, (network, butterfly) in enumerate(zip(networks, butterflies, strict=True)):
        later[..., position], scales = peeled(network, parts.network)
        rows[torch.arange(parts.blocks), position, segments] = scales[:, None] * butterfly
    coeffs[: parts.stages], diagonal = peeled(rows.view_as(matrix), order[: parts.stages])
    return coeffs, diagonal
