"""An SPM layer that is close to a given matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pairmix.dense import matrix_of
from pairmix.fit.factors import factorise
from pairmix.fit.stages import CAREFUL, EXACT, Limits
from pairmix.nn import SPMLinear
from pairmix.schedule import Schedule

_EXACT = 1e-6
"""A relative error below which nothing is left to refine."""
_TRIAL = 20
"""Steps after which the best of several starts is known well enough."""
_AT_ONCE = 10
"""Steps between two looks at the error."""
_TOLERANCE = 1e-4
"""Relative gain of the error in so many steps, below which refinement ends."""
_WIDE = 1024
"""Wider layers are refined with fewer steps, unless the caller says how many."""
_FLOAT64_UP_TO = 512
"""Wider layers are refined in float32: twice as fast, and far from exact anyway."""


class Fitted(NamedTuple):
    """An SPM layer in place of a matrix.

    Attributes:
        layer: with the dtype and the device of the matrix.
        error: `|W - SPM| / |W|` in the Frobenius norm; with inputs that of the outputs, `|X W^T - SPM(X)| / |X W^T|`.
    """

    layer: SPMLinear
    error: float


def fit(
    weight: Tensor | nn.Module,
    *,
    bias: Tensor | None = None,
    block: str = "general",
    stages: int | None = None,
    schedule: str | Schedule = "butterfly",
    rank: int = 0,
    inputs: Tensor | None = None,
    steps: int | None = None,
    progress: bool = False,
    **options: Any,
) -> Fitted:
    """An `SPMLinear` close to a matrix, which is factorised stage by stage and then refined by gradients.

    Few matrices are close to an SPM of few stages: Hadamard and Fourier-like ones, what is near the identity, products
    of sparse mixings. A random matrix is not, and neither are most of those that were trained without SPM in mind:
    look at the error, and see docs/fitting.md.

    Args:
        weight: a matrix `[out_features, in_features]`, an `nn.Linear`, or a `Conv1D` of transformers.
        bias: that of the layer; None for that of the module, if it has one.
        block: as in `SPMLinear`; so are all options that follow but those of the fit.
        stages: more of them come closer.
        schedule: which coordinates meet. The factorisation is exact for square butterflies with the fewest stages.
        rank: that of a low-rank map beside the stages, which is fitted with them.
        inputs: typical inputs `(*, in_features)`: the error of the layer on these is minimised, and not that of its
            matrix.
        steps: the most steps of refinement, by L-BFGS; 0 for the factorisation alone; None for 300, or 100 for layers
            wider than 1,024, which take longer and gain less.
        progress: whether to show a progress bar, by `tqdm`.
        **options: of `SPMLinear`: `residual`, `impl`.

    Raises:
        ValueError: for a weight that is no matrix of finite numbers, or inputs that do not fit it.

    Examples:
        >>> hadamard = torch.tensor([[1.0]])
        >>> for _ in range(6):
        ...     hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), hadamard)
        >>> layer, error = fit(hadamard)
        >>> error < 1e-5, layer.stages
        (True, 6)
    """
    if isinstance(weight, nn.Module):
        bias = getattr(weight, "bias", None) if bias is None else bias
        weight = matrix_of(weight)
    _check(weight, inputs, steps)
    out_features, in_features = weight.shape
    layer = SPMLinear(
        in_features, out_features, bias is not None, weight.device, weight.dtype, block=block, stages=stages,
        schedule=schedule, rank=rank, **options,
    )  # fmt: skip
    error = fit_(layer, weight, inputs=inputs, steps=steps, progress=progress)
    if layer.bias is not None and bias is not None:
        with torch.no_grad():
            layer.bias.copy_(bias)
    return Fitted(layer, error)


def fit_(
    layer: SPMLinear, weight: Tensor, *, inputs: Tensor | None = None, steps: int | None = None, progress: bool = False
) -> float:
    """Fill a layer with what comes close to a matrix, in place; its bias stays as it is.

    Args:
        layer: of any kind. Several maps are fitted one by one, each to its rows of the matrix.
        weight: the matrix `[out_features, in_features]`, or `[maps * out_features, in_features]`.
        inputs: see `fit`.
        steps: see `fit`.
        progress: see `fit`.

    Returns:
        The relative error, as in `Fitted`.
    """
    _check(weight, inputs, steps)
    shape = ((layer.maps or 1) * layer.out_features, layer.in_features)
    if weight.shape != shape:
        raise ValueError(f"the layer stands for a matrix of shape {shape}, got {tuple(weight.shape)}")
    if steps is None:
        steps = 300 if layer.width <= _WIDE else 100
    root = _root(inputs)
    squares = sizes = 0.0
    for number, rows in enumerate(weight.detach().double().cpu().split(layer.out_features)):
        target = _Target(rows, root)
        best = _refined(_starts(target, layer), target, steps, progress)
        with torch.no_grad():
            for name, parameter in best.named_parameters():
                of_layer = layer.get_parameter(name)
                (of_layer if layer.maps is None else of_layer[number]).copy_(parameter)
        squares += target.loss(best).item() * target.size.item()
        sizes += target.size.item()
    return math.sqrt(squares / sizes) if sizes else 0.0


class _Target:
    """A matrix, and the inputs on which a layer should do what it does; None for the unit vectors."""

    def __init__(self, matrix: Tensor, inputs: Tensor | None) -> None:
        self.matrix = matrix
        self.inputs = torch.eye(matrix.shape[1], dtype=matrix.dtype) if inputs is None else inputs
        self.outputs = self.inputs @ matrix.T
        self.size = self.outputs.square().sum()

    def loss(self, layer: SPMLinear) -> Tensor:
        """The squared relative error."""
        dtype = layer.d_in.dtype
        difference = layer(self.inputs.to(dtype)) - self.outputs.to(dtype)
        squared: Tensor = difference.square().sum()
        return squared / (self.size.to(dtype) if self.size > 0 else 1)

    @torch.no_grad()
    def error(self, layer: SPMLinear) -> float:
        """The relative error."""
        return self.loss(layer).sqrt().item()


def _check(weight: Tensor, inputs: Tensor | None, steps: int | None) -> None:
    if weight.dim() != 2 or not weight.numel():
        raise ValueError(f"weight must be a matrix [out_features, in_features], got the shape {tuple(weight.shape)}")
    for name, tensor in (("weight", weight), ("inputs", inputs)):
        if tensor is not None and not (tensor.is_floating_point() and tensor.isfinite().all()):
            raise ValueError(f"{name} must be finite floating-point numbers, got {tensor}")
    if inputs is not None and (inputs.dim() < 2 or inputs.shape[-1] != weight.shape[1] or not inputs.numel()):
        raise ValueError(f"inputs must have the shape (*, {weight.shape[1]}), got {tuple(inputs.shape)}")
    if steps is not None and steps < 0:
        raise ValueError(f"steps must be at least 0, got {steps}")


def _root(inputs: Tensor | None) -> Tensor | None:
    """At most as many rows as features, on which every linear map has the same error as on the inputs."""
    if inputs is None:
        return None
    rows = inputs.detach().double().cpu().flatten(0, -2)
    return torch.linalg.qr(rows, mode="r").R if rows.shape[0] > rows.shape[1] else rows


@torch.no_grad()
def _starts(target: _Target, layer: SPMLinear) -> list[SPMLinear]:
    """Layers to refine, of one map of this layer: one alone if it is exact."""

    def make() -> SPMLinear:
        return SPMLinear(
            layer.in_features, layer.out_features, bias=False, dtype=torch.float64, block=layer.block,
            schedule=layer.schedule, residual=layer.residual, init="random_rotation", rank=layer.rank,
            width=layer.width, impl=layer.impl,
        )  # fmt: skip

    with torch.random.fork_rng(devices=[]):  # the same layer in every run
        torch.manual_seed(0)
        factorised = []
        for limits in (EXACT, CAREFUL):
            start = _factorised(target.matrix, make(), limits)
            if target.error(start) < _EXACT:
                return [start]
            factorised.append(start)
        rotated = make()
        beside = make() if layer.rank else None
    # Rotations keep the size of their input; this one is to have outputs of the right size.
    rotated.d_out.mul_(target.outputs.norm() / rotated(target.inputs).norm().clamp(min=1e-30))
    starts = [_with_low_rank(start, target.matrix - start.to_dense()) for start in (*factorised, rotated)]
    if beside is not None:  # the other way round: the stages for what the low-rank map leaves
        beside.d_out.zero_()
        _with_low_rank(beside, target.matrix)
        _factorised(target.matrix - beside.to_dense(), beside, CAREFUL)
        starts.append(beside)
    return starts


def _factorised(matrix: Tensor, layer: SPMLinear, limits: Limits) -> SPMLinear:
    coeffs, d_in, d_out = factorise(matrix, layer.schedule, limits)
    if layer.block == "general":
        layer.coeffs.copy_(coeffs)
    else:  # the nearest rotation to each block
        a, b, c, d = coeffs.unbind(1)
        layer.angles.copy_(torch.atan2(c - b, a + d))
    layer.d_in.copy_(d_in)
    layer.d_out.copy_(d_out)
    return layer


def _with_low_rank(layer: SPMLinear, matrix: Tensor) -> SPMLinear:
    """Let the low-rank map be the one that is closest to a matrix."""
    if layer.down is not None and layer.up is not None:
        left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
        roots = sizes[: layer.rank].sqrt()
        layer.up[:, : len(roots)] = left[:, : layer.rank] * roots
        layer.down[: len(roots)] = right[: layer.rank] * roots[:, None]
    return layer


def _refined(layers: list[SPMLinear], target: _Target, steps: int, progress: bool) -> SPMLinear:
    """The closest layer after some steps from every start, and then all steps from the best."""
    done = 0
    with _bar(progress, steps) as advance:
        refinements = [_Refinement(layer, target) for layer in layers]
        while len(refinements) > 1 and done < min(steps, _TRIAL):
            for one in refinements:
                one.advance(min(_AT_ONCE, steps - done))
            done += advance(min(_AT_ONCE, steps - done))
        best = min(refinements, key=lambda one: one.error)
        while done < steps and best.error > _EXACT:
            before = best.error
            best.advance(min(_AT_ONCE, steps - done))
            done += advance(min(_AT_ONCE, steps - done))
            if best.error > (1 - _TOLERANCE) * before:
                break
    return best.layer


class _Refinement:
    """L-BFGS on the parameters of a layer."""

    def __init__(self, layer: SPMLinear, target: _Target) -> None:
        self.layer = layer if layer.width <= _FLOAT64_UP_TO else layer.float()
        self.target = target
        self.error = target.error(layer)
        self.optimizer = torch.optim.LBFGS(
            layer.parameters(), history_size=20, line_search_fn="strong_wolfe", tolerance_grad=0, tolerance_change=0
        )

    def advance(self, steps: int) -> None:
        """So many steps; a layer that gets worse is as it was before."""
        kept = {name: value.clone() for name, value in self.layer.state_dict().items()}
        self.optimizer.param_groups[0].update(max_iter=steps, max_eval=2 * steps)
        self.optimizer.step(self._loss)
        error = self.target.error(self.layer)
        if error <= self.error:
            self.error = error
        else:  # not a number, or a failed line search
            self.layer.load_state_dict(kept)

    def _loss(self) -> float:
        self.optimizer.zero_grad()
        with torch.enable_grad():
            loss = self.target.loss(self.layer)
            loss.backward()
        return loss.item()


@contextmanager
def _bar(shown: bool, steps: int) -> Iterator[Callable[[int], int]]:
    """A function that tells the progress bar of some steps, and gives them back."""
    if not shown:
        yield lambda done: done
        return
    from tqdm.auto import tqdm

    with tqdm(total=steps, unit="step", desc="fit", leave=False) as bar:

        def advance(done: int) -> int:
            bar.update(done)
            return done

        yield advance
