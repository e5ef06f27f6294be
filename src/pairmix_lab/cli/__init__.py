"""The `pairmix` command."""

from __future__ import annotations

import typer

from pairmix import doctor as library_doctor
from pairmix_lab.cli import analyse, bench, report, train


def make_app() -> typer.Typer:
    """The command, with the experiments that are in the list now."""
    app = typer.Typer(help="Stagewise Pairwise Mixers for PyTorch.", no_args_is_help=True, add_completion=False)
    app.add_typer(train.make_app(), name="train")
    app.add_typer(bench.app, name="bench")
    app.command("report")(report.report)
    app.command("analyse")(analyse.analyse)
    app.command("demo")(report.make_demo())
    app.command("doctor")(doctor)
    return app


def doctor() -> None:
    """Say what would compute an SPM layer here, and why."""
    print(library_doctor.report())


app = make_app()
