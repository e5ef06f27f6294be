"""The `pairmix` command."""

from __future__ import annotations

import torch
import typer
from rich.table import Table

from pairmix import functional, ops, results
from pairmix.cli import bench, report, train
from pairmix.cli.console import console

app = typer.Typer(help="Stagewise Pairwise Mixers for PyTorch.", no_args_is_help=True, add_completion=False)
app.add_typer(train.app, name="train")
app.add_typer(bench.app, name="bench")
app.command("report")(report.report)
app.command("demo")(report.demo)


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
