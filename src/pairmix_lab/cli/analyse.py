"""`pairmix analyse`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pairmix_lab import analyse as analysis
from pairmix_lab.cli.console import clear_errors, console, progress_bars, show


def analyse(
    checkpoint: Annotated[Path, typer.Argument(help="A safetensors file.", metavar="CHECKPOINT.safetensors")],
    match: Annotated[str, typer.Option(help="Only matrices of such names, as in '*.mlp.*'.")] = "*",
    steps: Annotated[int, typer.Option(min=0, help="Steps of refinement of every fit.")] = 100,
) -> None:
    """Say how well SPM, low rank and their sum of equal size would stand for the matrices of a trained model."""
    with clear_errors():
        matrices = list(analysis.matrices(checkpoint, match))
        found = []
        with progress_bars(transient=True) as bars:
            for name, matrix in bars.track(matrices, description="matrices"):
                found.append(analysis.analysed(name, matrix, steps))
        show(analysis.table(found))
        console.print("Relative errors; above about 0.5 a model has to be trained again. See docs/fitting.md.")
