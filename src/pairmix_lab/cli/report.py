"""`pairmix report` and `pairmix demo`: what came out, on a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pairmix_lab.cli.console import Out, clear_errors, console, show
from pairmix_lab.cli.train import run_all
from pairmix_lab.experiments import teacher
from pairmix_lab.report import experiments, page
from pairmix_lab.report.runs import collect
from pairmix_lab.training import runs


def report(
    results: Annotated[list[Path], typer.Argument(help="Results, or folders of them.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    pictures: Annotated[Path | None, typer.Option(help="A folder for the pictures, as SVG and PNG.")] = None,
) -> None:
    """Put the results of the experiments beside the paper's, on one page that needs no network."""
    with clear_errors():
        page.write(collect(results), out, pictures)
    console.print(f"Wrote {out}" + ("" if pictures is None else f" and the pictures in {pictures}"))


def demo(
    out: Out = Path("runs/demo"),
    width: Annotated[int, typer.Option(min=1, help="The number of features.")] = 256,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each student.")] = teacher.Config.steps,
) -> None:
    """Train a dense and an SPM student on the same task and compare them."""
    configs = [teacher.Config(layer=layer, width=width, steps=steps) for layer in ("dense", "spm")]
    console.print(
        f"The teacher labels {width} random numbers by a short chain of pairwise mixings, a ReLU and a dense map.\n"
        f"Two students of its form learn from {steps:,} batches of {configs[0].batch}: nn.Linear and SPMLinear.\n"
    )
    with clear_errors():
        for config in configs:
            runs.discard(out, config)  # those of an earlier demo
    run_all(configs, teacher.Task, out, resume=False)
    with clear_errors():
        found = collect([runs.result_path(out, config) for config in configs])
        show(experiments.accuracy(found, "teacher"))
        page.write(found, out / "report.html")
    console.print(f"Wrote {out / 'report.html'}: open it in a browser.")
