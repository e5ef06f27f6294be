"""The `pairmix` command."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pairmix import functional, ops, results
from pairmix.bench import init as bench_init
from pairmix.experiments import demo as demo_experiment
from pairmix.report import plots, tables

app = typer.Typer(help="Stagewise Pairwise Mixers for PyTorch.", no_args_is_help=True, add_completion=False)
bench = typer.Typer(help="Answer a question by measuring.", no_args_is_help=True)
app.add_typer(bench, name="bench")
console = Console()

Out = Annotated[Path, typer.Option(help="The folder that the results go to.")]
Steps = Annotated[int, typer.Option(min=1, help="Training steps of each student.")]
Width = Annotated[int, typer.Option(min=1, help="The number of features.")]


@app.command()
def doctor() -> None:
    """Say what would compute an SPM layer here, and why."""
    cpu = torch.device("cpu")
    table = Table(show_header=False, box=None)
    for name, version in results.versions().items():
        table.add_row(name, version)
    table.add_section()
    for name, value in results.machine().items():
        table.add_row(name.replace("_", " "), str(value))
    table.add_section()
    for name, impl in ops.IMPLS.items():
        reason = impl.why_not(cpu)
        build = f", built for {ops.cpu.instruction_set()}" if name == "cpu" and reason is None else ""
        status = f"[green]available{build}" if reason is None else f"[yellow]not available: {reason}"
        table.add_row(f'impl "{name}"', status)
    table.add_row('impl "auto"', f'picks "{functional.choose_impl("auto", cpu)}" for CPU tensors')
    console.print(table)


@app.command()
def demo(
    out: Out = Path("runs/demo"),
    width: Width = demo_experiment.Config.width,
    steps: Steps = demo_experiment.Config.steps,
) -> None:
    """Train a dense and an SPM student on the same task and compare them."""
    config = demo_experiment.Config(width=width, steps=steps)
    console.print(
        f"The teacher labels {width} random numbers by a short chain of pairwise mixings, a ReLU and a dense map.\n"
        f"Two students of its form learn from {steps:,} batches of {config.batch}: nn.Linear and SPMLinear.\n"
    )
    with _progress(TextColumn("loss {task.fields[loss]:.3f}")) as progress:
        bars = {name: progress.add_task(name, total=steps, loss=float("nan")) for name in demo_experiment.LAYERS}
        rows = demo_experiment.run(config, lambda name, loss: progress.update(bars[name], advance=1, loss=loss))
    _print(tables.students(rows))
    _save(out / "demo", "pairmix demo", asdict(config), rows, plots.students)


@bench.command("init")
def bench_init_command(
    out: Out = Path("results"), width: Width = bench_init.Config.width, steps: Steps = bench_init.Config.steps
) -> None:
    """Which initialisation trains best? (about a quarter of an hour)"""
    config = bench_init.Config(width=width, steps=steps)
    with _progress() as progress:
        rows = list(progress.track(bench_init.run(config), total=config.runs, description="training"))
    _print(tables.initialisations(rows))
    _save(out / "init", "pairmix bench init", asdict(config), rows, plots.initialisations)


def _progress(*columns: Any) -> Progress:
    return Progress(
        TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), *columns,
        console=console,
    )  # fmt: skip


def _print(table: tables.Table) -> None:
    header, *lines = table
    printed = Table(*header)
    for line in lines:
        printed.add_row(*line)
    console.print(printed)


def _save(base: Path, command: str, config: dict[str, Any], rows: list[dict[str, Any]], plot: Any) -> None:
    json_path, picture_path = base.with_suffix(".json"), base.with_suffix(".png")
    results.save(json_path, command, config, rows)
    plot(rows, picture_path)
    console.print(f"Wrote {json_path} and {picture_path}")
