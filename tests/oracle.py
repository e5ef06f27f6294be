"""The operator by its definition: every stage a dense matrix, in float64, differentiated by autograd.

Nothing of pairmix is used here but the pairing itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from pairmix import Schedule

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


def stage_matrix(
    blocks: Tensor, residual_scale: Tensor | None, schedule: Schedule, l: int, rotation: Rotation = plain_rotation
) -> Tensor:
    """B_l, `[n, n]`."""
    first, second = torch.tensor(schedule.pairs[l].astype(int))
    a, b, c, d = blocks[l] if blocks.dim() == 3 else rotation(blocks[l])
    matrix = torch.zeros(schedule.n, schedule.n, dtype=torch.float64)
    rows = torch.cat([first, first, second, second])
    columns = torch.cat([first, second, first, second])
    matrix = matrix.index_put((rows, columns), torch.cat([a, b, c, d]))
    left_over = int(schedule.residual[l])
    if left_over >= 0:
        unit = torch.zeros_like(matrix)
        unit[left_over, left_over] = 1.0
        matrix = matrix + (1.0 if residual_scale is None else residual_scale[l]) * unit
    return matrix


def modulo_matrix(rows: int, columns: int) -> Tensor:
    """`[rows, columns]`, one where row mod columns == column: tiling. Its transpose folds."""
    matrix = torch.zeros(rows, columns, dtype=torch.float64)
    matrix[torch.arange(rows), torch.arange(rows) % columns] = 1.0
    return matrix


def factors(arguments: Arguments, rotation: Rotation = plain_rotation) -> list[Tensor]:
    """The matrices whose product, the last one leftmost, is the operator without its bias."""
    a = arguments
    n = a.schedule.n
    ones = torch.ones(n, dtype=torch.float64)
    stages = [stage_matrix(a.blocks, a.residual_scale, a.schedule, l, rotation) for l in range(a.schedule.stages)]
    return [
        modulo_matrix(n, a.x.shape[-1]),
        torch.diag(ones if a.d_in is None else a.d_in),
        *stages,
        torch.diag(ones if a.d_out is None else a.d_out),
        modulo_matrix(n, a.out_features).T,
    ]


def dense(arguments: Arguments) -> Tensor:
    """The matrix `[out_features, in_features]`, all factors multiplied out."""
    product = torch.eye(arguments.x.shape[-1], dtype=torch.float64)
    for factor in factors(arguments):
        product = factor @ product
    return product


def output(arguments: Arguments, rotation: Rotation = plain_rotation) -> Tensor:
    """y, one factor after the other."""
    y = arguments.x
    for factor in factors(arguments, rotation):
        y = y @ factor.T
    return y if arguments.bias is None else y + arguments.bias


def gradients(y: Tensor, arguments: Arguments, grad: Tensor) -> dict[str, Tensor]:
    """The gradients of every argument, by name."""
    tensors = arguments.tensors
    found = torch.autograd.grad(y, list(tensors.values()), grad, allow_unused=True, materialize_grads=True)
    return dict(zip(tensors, found, strict=True))


@dataclass
class Answer:
    """The output, or a gradient: its value, and what it would be if nothing cancelled."""

    value: Tensor
    magnitude: Tensor


def answers(arguments: Arguments, grad: Tensor) -> dict[str, Answer]:
    """What the operator must give for these arguments: the output, and the gradients by name."""
    results = []
    for case, rotation, g in (
        (arguments.to(torch.float64), plain_rotation, grad.double()),
        (arguments.absolute(), absolute_rotation, grad.double().abs()),
    ):
        y = output(case, rotation)
        results.append({"output": y.detach(), **gradients(y, case, g)})
    return {name: Answer(results[0][name], results[1][name]) for name in results[0]}


def assert_matches(actual: Tensor, answer: Answer, operations: int, what: str = "output") -> None:
    """Equal up to the rounding of actual's dtype.

    A result of so many operations may be off by so many roundings of what would be there if nothing had cancelled.
    Half precision is computed in float32 and rounded once, at the end.
    """
    expected = answer.value
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    computed = torch.promote_types(actual.dtype, torch.float32)
    allowed = operations * torch.finfo(computed).eps * answer.magnitude
    if actual.dtype != computed:
        stored = torch.finfo(actual.dtype)
        allowed = allowed + stored.eps * expected.abs().clamp_min(stored.smallest_normal)
    error = (actual.double() - expected).abs()
    wrong = ~(error <= allowed)
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(f"{what}{list(where)} is {actual[where]}, not {expected[where]} +- {allowed[where]:.1e}")
