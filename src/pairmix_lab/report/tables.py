"""Tables of results: a header and lines of text, for a terminal, for Markdown or for the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Table = list[list[str]]
Row = Mapping[str, Any]
Rows = Sequence[Row]
Columns = Sequence[tuple[str, Callable[[Row], str]]]

DISTURBED = "disturbed"
"""In the place of a share of a bound that was measured while other processes were running."""
DISTURBED_NOTE = (
    f"{DISTURBED}: SPM seems to be faster than the machine, or the machine was not equally fast all the time; other "
    "processes must have been running."
)


class NamedTable(NamedTuple):
    """A table with the name under which pages ask for it, and a caption."""

    name: str
    caption: str
    table: Table


def table(rows: Rows, columns: Columns) -> Table:
    """A line for every row; with its number of threads if there are several."""
    if len({row["threads"] for row in rows}) > 1:
        columns = [("threads", lambda row: str(row["threads"])), *columns]
    return [[title for title, _ in columns], *([cell(row) for _, cell in columns] for row in rows)]


def markdown(table: Table) -> str:
    """The table in Markdown, with what a reader must know of it below."""
    header, *lines = table
    text = "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *lines])
    return f"{text}\n\n{DISTURBED_NOTE}" if is_disturbed(table) else text


def is_disturbed(table: Table) -> bool:
    """Whether it needs `DISTURBED_NOTE`."""
    return any(DISTURBED in line for line in table)


def with_quartiles(measured: Row, name: str, unit: float = 1) -> str:
    """A median, and the quartiles in parentheses."""
    low, high = measured[f"{name}_iqr"]
    return f"{number(measured[name], unit)} ({number(low, unit)} to {number(high, unit)})"


def number(value: float | None, unit: float = 1) -> str:
    """With three digits, more only for a whole number; a dash for what could not be measured."""
    if value is None:
        return "-"
    return f"{value * unit:,.0f}" if value * unit >= 999.5 else f"{value * unit:#.3g}".rstrip(".")


def mebibytes(size: int | None) -> str:
    """A size in memory; a dash for what could not be measured."""
    return "-" if size is None else f"{number(size, 2**-20)} MiB"


def distinct(values: Iterable[Any]) -> list[Any]:
    """Each value once, in the order of its first."""
    return list(dict.fromkeys(values))
