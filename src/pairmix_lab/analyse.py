"""How well the matrices of a trained model would be replaced by SPM, by low rank, and by their sum."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pairmix import SPMLinear, fit
from pairmix_lab.report.tables import Table

SMALLEST, LARGEST = 16, 8192
"""Features of a matrix that is looked at: there is nothing to gain in smaller ones, and larger ones are embeddings."""


class Analysis(NamedTuple):
    """What could stand for a matrix, at one number of parameters. Errors are relative, in the Frobenius norm.

    Attributes:
        name: in the checkpoint.
        shape: `[out_features, in_features]`.
        parameters: of each of the three.
        spm: the error of an SPM with twice the fewest stages.
        low_rank: that of the best map of low rank.
        both: that of an SPM with the fewest stages, and a low-rank map beside it.
        flatness: how even the singular values are, from 0 to 1: exp of the entropy of their squares, by their number.
    """

    name: str
    shape: tuple[int, int]
    parameters: int
    spm: float
    low_rank: float
    both: float
    flatness: float


def matrices(path: Path, pattern: str = "*") -> Iterator[tuple[str, Tensor]]:
    """The matrices of a safetensors file that are worth a look, one after the other.

    Raises:
        ValueError: if the file is none, or nothing in it matches.
    """
    try:
        with safe_open(path, framework="pt") as file:
            chosen = [name for name in file.keys() if fnmatchcase(name, pattern)]  # noqa: SIM118
            chosen = [name for name in chosen if _is_worth_it(file.get_slice(name).get_shape())]
            if not chosen:
                raise ValueError(f"{path} has no matrix of {SMALLEST} to {LARGEST:,} features that matches {pattern!r}")
            for name in chosen:
                tensor = file.get_tensor(name)
                if tensor.is_floating_point():
                    yield name, tensor.float()
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from error


def analysed(name: str, matrix: Tensor, steps: int) -> Analysis:
    """What could stand for a matrix."""
    out_features, in_features = matrix.shape
    fewest = SPMLinear(in_features, out_features, bias=False, device="meta")
    deep = SPMLinear(in_features, out_features, bias=False, device="meta", stages=2 * fewest.stages)
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in (fewest, deep)]
    rank, rank_beside = (size // (out_features + in_features) for size in (sizes[1], sizes[1] - sizes[0]))
    squares = torch.linalg.svdvals(matrix.double()).square()
    shares = squares / squares.sum()
    entropy = -(shares * shares.clamp(min=1e-300).log()).sum()
    return Analysis(
        name,
        (out_features, in_features),
        sizes[1],
        fit(matrix, stages=deep.stages, steps=steps).error,
        (squares[rank:].sum() / squares.sum()).sqrt().item(),
        fit(matrix, rank=rank_beside, steps=steps).error,
        (entropy.exp() / len(squares)).item(),
    )


def table(found: list[Analysis]) -> Table:
    """One line for every matrix."""
    header = ["matrix", "shape", "size", "SPM", "low rank", "both", "flatness"]
    return [header, *([one.name, *cells(one)] for one in found)]


def cells(one: Analysis) -> list[str]:
    """Shape, parameters by those of the matrix, the three errors and the flatness."""
    out_features, in_features = one.shape
    errors = (f"{error:.2g}" if error < 0.01 else f"{error:.3f}" for error in (one.spm, one.low_rank, one.both))
    share = f"{one.parameters / (out_features * in_features):.1%}"
    return [f"{out_features}x{in_features}", share, *errors, f"{one.flatness:.2f}"]


def _is_worth_it(shape: list[int]) -> bool:
    return len(shape) == 2 and min(shape) >= SMALLEST and max(shape) <= LARGEST
