"""The `pairmix` command."""

from __future__ import annotations

import typer

from pairmix import doctor as library_doctor
from pairmix_lab.cli import bench, report, train

app = typer.Typer(help="Stagewise Pairwise Mixers for PyTorch.", no_args_is_help=True, add_completion=False)
app.add_typer(train.app, name="train")
app.add_typer(bench.app, name="bench")
app.command("report")(report.report)
app.command("demo")(report.demo)


@app.command()
def doctor() -> None:
    """Say what would compute an SPM layer here, and why."""
    print(library_doctor.report())
