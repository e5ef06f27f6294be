"""Tables of results: a header and lines of text, for a terminal or for Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

Table = list[list[str]]
Rows = Sequence[Mapping[str, Any]]


def students(rows: Rows) -> Table:
    """What each student reached, and what it cost."""
    header = ["layer", "test accuracy", "parameters", "ms per step"]
    return [
        header,
        *(
            [row["layer"], f"{row['accuracy']:.1%}", f"{row['parameters']:,}", f"{row['ms_per_step']:.2f}"]
            for row in rows
        ),
    ]


def initialisations(rows: Rows) -> Table:
    """The mean accuracy over seeds from each initialisation: a column for each teacher and block."""
    columns = _distinct((row["teacher_angle_std"], row["block"]) for row in rows)
    header = ["init", *(f"teacher {std}, {block}" for std, block in columns)]
    lines = []
    for init in _distinct(row["init"] for row in rows):
        cells = [
            mean(
                row["accuracy"] for row in rows if (row["init"], row["teacher_angle_std"], row["block"]) == (init, *key)
            )
            for key in columns
        ]
        lines.append([init, *(f"{cell:.3f}" for cell in cells)])
    return [header, *lines]


def markdown(table: Table) -> str:
    """The table as Markdown has it."""
    header, *lines = table
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *lines])


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
