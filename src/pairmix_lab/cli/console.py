"""What the commands share: tables, progress, options and errors."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from pairmix_lab import results
from pairmix_lab.experiments.data import DataError
from pairmix_lab.report import tables
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
    plot: Any,
    data: Mapping[str, str] | None = None,
) -> None:
    """Write what was measured, and a picture of it beside it."""
    json_path, picture_path = base.with_suffix(".json"), base.with_suffix(".png")
    results.save(json_path, results.command_line(), config, rows, data=data)
    plot(rows, picture_path)
    console.print(f"Wrote {json_path} and {picture_path}")


def words(option: str, text: str, choices: Any = None) -> tuple[str, ...]:
    """The parts of a list such as dense,spm."""
    parts = tuple(part.strip() for part in text.split(","))
    for part in parts:
        if not part or (choices is not None and part not in choices):
            expected = "names with commas between them" if choices is None else ", ".join(choices)
            raise typer.BadParameter(f"must be of {expected}; got {part!r}", param_hint=option)
    return parts


def whole_numbers(option: str, text: str, least: int = 1) -> tuple[int, ...]:
    """The numbers of a list such as 256,1024."""
    numbers = []
    for word in text.split(","):
        try:
            number = int(word) if word.strip().isdecimal() else None
        except ValueError:  # Python reads no more than 4,300 digits
            number = None
        if number is None or number < least:
            raise typer.BadParameter(
                f"must be whole numbers of at least {least}, such as 1,2; got {reprlib.repr(word)}", param_hint=option
            )
        numbers.append(number)
    return tuple(numbers)


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
