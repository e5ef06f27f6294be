"""What the commands share: tables, progress, options and errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from pairmix_lab import files, results
from pairmix_lab.experiments.data import DataError
from pairmix_lab.report import tables
from pairmix_lab.report.pictures import as_file
from pairmix_lab.training.checkpoints import CheckpointError

console = Console()

Out = Annotated[Path, typer.Option(help="The folder that the results go to.")]
Data = Annotated[Path | None, typer.Option(help="A folder with the data; without it the originals are downloaded.")]


def progress_bars(*columns: Any, transient: bool = False) -> Progress:
    """A bar for every task, with what is left of it, and more columns."""
    usual = TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn()
    for column in (*usual, *columns):
        column.get_table_column().no_wrap = True
    return Progress(*usual, *columns, console=console, transient=transient, expand=True)


def show(table: tables.Table) -> None:
    """Print a table."""
    console.print(rendered(table))


def rendered(table: tables.Table) -> Table:
    """A table for the terminal."""
    header, *lines = table
    rendered = Table(*(Column(title, overflow="fold") for title in header))  # never cut off a number
    for line in lines:
        rendered.add_row(*line)
    return rendered


def save(
    base: Path,
    config: dict[str, Any],
    rows: list[dict[str, Any]],
    picture: Callable[[tables.Rows], Figure],
    data: Mapping[str, str] | None = None,
) -> None:
    """Write what was measured, and a picture of it beside it."""
    json_path, picture_path = base.with_suffix(".json"), base.with_suffix(".png")
    results.save(json_path, results.command_line(), config, rows, data=data)
    with files.atomic(picture_path) as file:
        file.write(as_file(picture(rows), "png"))
    console.print(f"Wrote {json_path} and {picture_path}")


def is_out_of_memory(error: Exception) -> bool:
    """Whether it says that a size was too large; torch has no exception of its own for that on a CPU."""
    return isinstance(error, MemoryError) or bool(re.search("allocate|not enough memory|overflow", str(error)))


@contextmanager
def clear_errors() -> Iterator[None]:
    """What a user can do something about is said in a sentence, without a traceback."""
    try:
        yield
    except (CheckpointError, DataError, OSError, ValueError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise
        Console(stderr=True).print(f"[bold red]Error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise typer.Exit(1) from error
