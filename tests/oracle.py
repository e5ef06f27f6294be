"""The operator by its definition, in float64, differentiated by autograd; and how far rounding may lead from it.

Nothing of pairmix is used here but the pairing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pairmix import Schedule, SPMLinear

Rotation = Callable[[Tensor], tuple[Tensor, ...]]


@dataclass
class Arguments:
    """The differentiable arguments of one call of the operator, and its schedule."""

    x: Tensor
    blocks: Tensor
    d_in: Tensor | None
    d_out: Tensor | None
    bias: Tensor | None
    residual_scale: Tensor | None
    schedule: Schedule = field(kw_only=True)
    out_features: int = field(kw_only=True)

    @property
    def tensors(self) -> dict[str, Tensor]:
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def absolute(self) -> Arguments:
        """The absolute values of everything, in float64."""
        result = self.to(torch.float64)
        for name, tensor in result.tensors.items():
            if name != "blocks" or tensor.dim() == 3:
                setattr(result, name, tensor.detach().abs().requires_grad_())
        return result

    def to(self, dtype: torch.dtype) -> Arguments:
        """Copies that require gradients of their own."""
        copies = {name: t.detach().to(dtype).requires_grad_() for name, t in self.tensors.items()}
        missing = {f.name: None for f in fields(self) if getattr(self, f.name) is None}
        return Arguments(**copies, **missing, schedule=self.schedule, out_features=self.out_features)


def random_arguments(
    schedule: Schedule,
    block: str = "general",
    *,
    in_features: int | None = None,
    out_features: int | None = None,
    leading: tuple[int, ...] = (5,),
    dtype: torch.dtype = torch.float64,
    residual: str = "scale",
    seed: int = 0,
) -> Arguments:
    """Random values of every argument. General blocks are scaled so that the output neither explodes nor vanishes."""
    generator = torch.Generator().manual_seed(seed)
    n, stages = schedule.n, schedule.stages
    in_features, out_features = in_features or n, out_features or n

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    blocks = random(stages, n // 2) if block == "rotation" else random(stages, 4, n // 2)
    if block == "general":
        blocks = (blocks.detach() * 0.5**0.5).requires_grad_()
    scale = random(stages) if n % 2 and residual == "scale" else None
    return Arguments(
        random(*leading, in_features), blocks, random(n), random(n), random(out_features), scale,
        schedule=schedule, out_features=out_features,
    )  # fmt: skip


def plain_rotation(angle: Tensor) -> tuple[Tensor, ...]:
    return angle.cos(), -angle.sin(), angle.sin(), angle.cos()


def absolute_rotation(angle: Tensor) -> tuple[Tensor, ...]:
    """The absolute values of a rotation's entries, with the absolute values of their derivatives."""
    cos, sin, zero = angle.cos().abs().detach(), angle.sin().abs().detach(), angle - angle.detach()
    return cos + sin * zero, sin + cos * zero, sin + cos * zero, cos + sin * zero


def stage_matrix(arguments: Arguments, l: int) -> Tensor:
    """B_l, `[n, n]`."""
    schedule, blocks = arguments.schedule, arguments.blocks
    first, second = torch.tensor(schedule.pairs[l].astype(int))
    a, b, c, d = blocks[l] if blocks.dim() == 3 else plain_rotation(blocks[l])
    matrix = torch.zeros(schedule.n, schedule.n, dtype=torch.float64)
    matrix[first, first], matrix[first, second], matrix[second, first], matrix[second, second] = a, b, c, d
    left_over = int(schedule.residual[l])
    if left_over >= 0:
        matrix[left_over, left_over] = 1.0 if arguments.residual_scale is None else arguments.residual_scale[l]
    return matrix


def modulo_matrix(rows: int, columns: int) -> Tensor:
    """`[rows, columns]`, one where row mod columns == column: tiling. Its transpose folds."""
    matrix = torch.zeros(rows, columns, dtype=torch.float64)
    matrix[torch.arange(rows), torch.arange(rows) % columns] = 1.0
    return matrix


@torch.no_grad()
def dense(arguments: Arguments) -> Tensor:
    """The matrix `[out_features, in_features]`: that of every stage, multiplied out."""
    a = arguments.to(torch.float64)
    product = modulo_matrix(a.schedule.n, a.x.shape[-1])
    product = product if a.d_in is None else a.d_in[:, None] * product
    for l in range(a.schedule.stages):
        product = stage_matrix(a, l) @ product
    product = product if a.d_out is None else a.d_out[:, None] * product
    return modulo_matrix(a.schedule.n, a.out_features).T @ product


def rows_of_stages(arguments: Arguments, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
    """The matrices of all stages: of every row the entry on the diagonal, the other one, and the other's column."""
    schedule, blocks = arguments.schedule, arguments.blocks
    firsts, seconds = torch.from_numpy(schedule.pairs.astype(np.int64)).unbind(1)
    a, b, c, d = blocks.unbind(1) if blocks.dim() == 3 else rotation(blocks)
    rows, others = torch.cat([firsts, seconds], 1), torch.cat([seconds, firsts], 1)
    diagonal, other = torch.cat([a, d], 1), torch.cat([b, c], 1)
    if schedule.n % 2:
        left_over = torch.from_numpy(schedule.residual.astype(np.int64))[:, None]
        scale = torch.ones(schedule.stages, dtype=torch.float64)
        scale = (scale if arguments.residual_scale is None else arguments.residual_scale)[:, None]
        rows, others = torch.cat([rows, left_over], 1), torch.cat([others, left_over], 1)
        diagonal, other = torch.cat([diagonal, scale], 1), torch.cat([other, torch.zeros_like(scale)], 1)
    in_order = rows.argsort(1)
    return diagonal.gather(1, in_order), other.gather(1, in_order), others.gather(1, in_order)


def output(arguments: Arguments, rotation: Rotation = plain_rotation) -> Tensor:
    """y, one stage after the other: as `dense(arguments)` times x, but O(n L)."""
    a, n = arguments, arguments.schedule.n
    z = a.x[..., torch.arange(n) % a.x.shape[-1]]
    z = z if a.d_in is None else z * a.d_in
    for diagonal, other, column in zip(*rows_of_stages(a, rotation), strict=True):
        z = diagonal * z + other * z.index_select(-1, column)
    z = z if a.d_out is None else z * a.d_out
    y = z.new_zeros(*z.shape[:-1], a.out_features).index_add(-1, torch.arange(n) % a.out_features, z)
    return y if a.bias is None else y + a.bias


def gradients(y: Tensor, arguments: Arguments, grad: Tensor) -> dict[str, Tensor]:
    """The gradients of every argument, by name."""
    tensors = arguments.tensors
    found = torch.autograd.grad(y, list(tensors.values()), grad, allow_unused=True, materialize_grads=True)
    return dict(zip(tensors, found, strict=True))


@dataclass
class Answer:
    """The output, or a gradient: its value, and how exactly it can be computed."""

    value: Tensor
    magnitude: Tensor
    """What it would be if nothing cancelled: the same, of the absolute values of everything."""
    roundings: int
    """How many there are at most on the way to a number."""
    stored: Tensor
    """What is rounded to the dtype in which it is stored, if that is half precision."""

    def __add__(self, other: Answer) -> Answer:
        """The sum of two results that have been rounded already."""
        value = self.value + other.value
        magnitude, roundings = self.magnitude + other.magnitude, max(self.roundings, other.roundings) + 1
        return Answer(value, magnitude, roundings, self.stored + other.stored + value.abs())


def answers(arguments: Arguments, grad: Tensor) -> dict[str, Answer]:
    """What the operator must give for these arguments: the output, and the gradients by name."""
    n, rows = arguments.schedule.n, arguments.x.shape[:-1].numel()
    # For every stage two products, a sum and the coefficients themselves; then the sums of rows, of tile and of fold.
    copies = -(-n // arguments.x.shape[-1]) - (-n // arguments.out_features)
    roundings = 4 * arguments.schedule.stages + rows + copies + 4
    results = []
    for case, rotation, g in (
        (arguments.to(torch.float64), plain_rotation, grad.double()),
        (arguments.absolute(), absolute_rotation, grad.double().abs()),
    ):
        y = output(case, rotation)
        results.append({"output": y.detach(), **gradients(y, case, g)})
    values, magnitudes = results
    return {name: Answer(values[name], magnitudes[name], roundings, values[name].abs()) for name in values}


def of_layer(layer: SPMLinear, x: Tensor) -> Arguments:
    """What a call of this layer hands to the operator."""
    blocks = layer.coeffs if layer.block == "general" else layer.angles
    rest = (layer.d_in, layer.d_out, layer.bias, layer.residual_scale)
    return Arguments(x, blocks, *rest, schedule=layer.schedule, out_features=layer.out_features)


def dense_answer(layer: SPMLinear) -> Answer:
    """What `layer.to_dense()` must give."""
    arguments = of_layer(layer, torch.eye(layer.in_features))
    arguments.bias = None
    columns = answers(arguments, torch.ones(layer.in_features, layer.out_features))["output"]
    return Answer(columns.value.T, columns.magnitude.T, columns.roundings, columns.stored.T)


def assert_matches(actual: Tensor, answer: Answer, what: str = "output") -> None:
    """Equal up to the rounding of actual's dtype.

    A result of so many roundings may be off by so many times eps of what would be there if nothing had cancelled.
    Half precision is computed in float32 and rounded once, at the end.
    """
    computed = torch.promote_types(actual.dtype, torch.float32)
    allowed = answer.roundings * torch.finfo(computed).eps * answer.magnitude
    if actual.dtype != computed:
        stored = torch.finfo(actual.dtype)
        allowed = allowed + stored.eps * answer.stored.clamp_min(stored.smallest_normal)
    assert_within(actual, answer.value, allowed, what)


def rounding_of_rotations(stages: int, dtype: torch.dtype) -> float:
    """How much of a vector's norm rounding may take or add: a stage errs by 4 eps of |B| |z|, and |B| <= sqrt 2."""
    return 4 * 2**0.5 * stages * torch.finfo(dtype).eps


# Of 120,000 results of the tests, with several seeds and on three instruction sets, none came to a quarter of this.
MARGIN = 16
"""How many times as far off as plain PyTorch a result may be."""
ROUNDINGS = 64
"""How many roundings a result may be off even where plain PyTorch happens to be right."""


def assert_agrees(
    actual: Any, plain: Callable[[torch.dtype], Any], rough: torch.dtype = torch.float32, margin: int = MARGIN
) -> None:
    """Equal up to rounding to what plain PyTorch computes, of which the operator is only a part.

    Where not all is linear, the effect of rounding cannot be bounded beforehand, but it can be observed: `plain`
    computes the same in a given dtype, and in `rough` it is as far off as rounding leads there. A result of another
    dtype may be off by as many roundings of its own, a few times over. Tensors of a few numbers can be right by
    chance, hence also by some roundings of its largest number, or of one: numbers are of that size in all these tests
    before they cancel.

    Results are tensors, or lists, tuples and dictionaries of results.
    """
    results, exact, off = (dict(leaves(result)) for result in (actual, plain(torch.float64), plain(rough)))
    assert results.keys() == exact.keys() == off.keys(), f"{list(results)}, expected {list(exact)}"
    for name, tensor in results.items():
        expected = exact[name]
        if not expected.numel():
            assert tensor.shape == expected.shape, name
            continue
        size = expected.abs().max().clamp_min(1)
        seen, eps = (off[name].double() - expected).abs().max(), torch.finfo(off[name].dtype).eps
        assert seen <= eps**0.5 * size, f"{name}: off by {seen} in {off[name].dtype}, which is not rounding"
        computed = torch.promote_types(tensor.dtype, torch.float32)
        allowed = margin * torch.finfo(tensor.dtype).eps / eps * seen + ROUNDINGS * torch.finfo(computed).eps * size
        assert_within(tensor, expected, allowed.expand_as(expected), name)


def leaves(result: Any, name: str = "result") -> Iterator[tuple[str, Tensor]]:
    """All tensors of a nested result, with where they are in it."""
    if isinstance(result, Tensor):
        yield name, result.detach()
    else:
        for key, value in result.items() if isinstance(result, dict) else enumerate(result):
            yield from leaves(value, f"{name}[{key!r}]")


def assert_within(actual: Tensor, expected: Tensor, allowed: Tensor, what: str) -> None:
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    wrong = ~((actual.double() - expected).abs() <= allowed)
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(f"{what}{list(where)} is {actual[where]}, not {expected[where]} +- {allowed[where]:.1e}")
