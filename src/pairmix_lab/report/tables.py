"""Tables of results: a header and lines of text, for a terminal or for Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import mean
from typing import Any

Table = list[list[str]]
Row = Mapping[str, Any]
Rows = Sequence[Row]
Columns = Sequence[tuple[str, Callable[[Row], str]]]

TASKS = {"train": "forward + backward", "inference": "forward"}
DISTURBED = "disturbed"
"""In the place of a share of a bound that was measured while other processes were running."""
DISTURBED_NOTE = (
    f"{DISTURBED}: SPM seems to be faster than the machine, or the machine was not equally fast all the time; other "
    "processes must have been running."
)


def initialisations(rows: Rows) -> Table:
    """The mean accuracy over seeds from each initialisation: a column for each teacher and block."""
    columns = distinct((row["teacher_angle_std"], row["block"]) for row in rows)
    header = ["init", *(f"teacher {std}, {block}" for std, block in columns)]
    lines = []
    for init in distinct(row["init"] for row in rows):
        cells = [
            mean(
                row["accuracy"] for row in rows if (row["init"], row["teacher_angle_std"], row["block"]) == (init, *key)
            )
            for key in columns
        ]
        lines.append([init, *(f"{cell:.3f}" for cell in cells)])
    return [header, *lines]


def operator(rows: Rows) -> Table:
    """The time of every layer, and its ratio to that of `nn.Linear`."""
    return _table(
        rows,
        [
            ("n", lambda row: f"{row['n']:,}"),
            ("layer", lambda row: row["layer"]),
            ("forward + backward, ms", lambda row: _spread(row["train"], "ms")),
            ("times as fast as nn.Linear", lambda row: _spread(row["train"], "speedup")),
            ("forward, ms", lambda row: _spread(row["inference"], "ms")),
            ("times as fast as nn.Linear", lambda row: _spread(row["inference"], "speedup")),
        ],
    )


def operator_summary(rows: Rows) -> Table:
    """SPM beside `nn.Linear` and a low rank of the same size, by width."""
    at = {(row["n"], row["layer"]): row for row in rows}

    def time(task: str, layer: str) -> Callable[[Row], str]:
        return lambda row: number(at[row["n"], layer][task]["ms"])

    def speedup(task: str) -> Callable[[Row], str]:
        return lambda row: f"**{number(row[task]['speedup'])}**"

    return _table(
        [row for row in rows if row["layer"] == "SPM"],
        [
            ("n", lambda row: f"{row['n']:,}"),
            *(
                column
                for task, name in TASKS.items()
                for column in (
                    (f"{name}, ms: nn.Linear", time(task, "nn.Linear")),
                    ("low rank of SPM's size", time(task, "low rank, SPM's size")),
                    ("SPM", time(task, "SPM")),
                    ("**times as fast as nn.Linear**", speedup(task)),
                )
            ),
        ],
    )


def steps(rows: Rows) -> Table:
    """The time of a training step of every model, and its ratio to that of the dense one."""
    return _table(
        rows,
        [
            ("experiment", lambda row: row["experiment"]),
            ("n", lambda row: f"{row['width']:,}"),
            ("layer", lambda row: row["layer"]),
            ("ms per step", lambda row: _spread(row, "ms")),
            ("times as fast as dense", lambda row: _spread(row, "speedup") if "speedup" in row else "-"),
        ],
    )


def steps_summary(rows: Rows) -> Table:
    """The time of a training step by experiment and width, and what is left of it if the layer cost nothing."""
    at = {(row["experiment"], row["width"], row["threads"], row["layer"]): row for row in rows}

    def time(layer: str) -> Callable[[Row], str]:
        def of(row: Row) -> str:
            found = at.get((row["experiment"], row["width"], row["threads"], layer))
            return "-" if found is None else number(found["ms"])

        return of

    return _table(
        [row for row in rows if row["layer"] == "spm"],
        [
            ("experiment", lambda row: row["experiment"]),
            ("n", lambda row: f"{row['width']:,}"),
            ("dense, ms", time("dense")),
            ("low rank", time("lowrank")),
            ("SPM", time("spm")),
            ("all but the layer", time("all but the layer")),
            ("**dense / SPM**", lambda row: f"**{number(row['speedup'])}**" if "speedup" in row else "-"),
        ],
    )


def operator_memory(rows: Rows) -> Table:
    """What every layer needs memory for."""
    return _table(
        rows,
        [
            ("n", lambda row: f"{row['n']:,}"),
            ("layer", lambda row: row["layer"]),
            ("parameters", lambda row: f"{row['parameters']:,}"),
            ("kept for backward", lambda row: _mebibytes(row["bytes_kept"])),
            ("peak of training", lambda row: _mebibytes(row["peak_bytes"])),
        ],
    )


def operator_bounds(rows: Rows) -> Table:
    """How near SPM comes to what the machine could do."""

    def share(task: str, bound: str) -> Callable[[Row], str]:
        def of(row: Row) -> str:
            if bound in row[task].get("disturbed_bounds", ()):
                return DISTURBED
            value = row[task][f"of_{bound}"]
            return "-" if value is None else f"{value:.0%}"

        return of

    return _table(
        [row for row in rows if "of_bandwidth" in row["train"]],
        [
            ("n", lambda row: f"{row['n']:,}"),
            ("10^9 multiply-adds/s", lambda row: number(row["train"]["multiply_adds_per_second"], 1e-9)),
            ("copied GB/s", lambda row: number(row["train"]["bytes_per_second"], 1e-9)),
            *(
                (f"{name}, of the {bound}", share(task, bound))
                for task, name in TASKS.items()
                for bound in ("arithmetic", "bandwidth")
            ),
        ],
    )


def operator_grid(rows: Rows) -> Table:
    """How many times as fast as `nn.Linear` SPM is: a line for each width, a column for each batch."""
    at = {(row["threads"], row["schedule"], row["n"], row["batch"]): row for row in rows}
    lines = {(task, *key[:-1]): {**row, "task": task} for task in TASKS for key, row in at.items()}

    def speedup(batch: int, line: Row) -> str:
        row = at.get((line["threads"], line["schedule"], line["n"], batch))
        return number(row[line["task"]]["speedup"] if row and row[line["task"]] else None)

    return _table(
        list(lines.values()),
        [
            ("", lambda line: TASKS[line["task"]]),
            ("schedule", lambda line: line["schedule"]),
            ("n", lambda line: f"{line['n']:,}"),
            *((f"batch {batch:,}", partial(speedup, batch)) for batch in distinct(row["batch"] for row in rows)),
        ],
    )


def operator_latency(rows: Rows) -> Table:
    """The time that one vector takes."""
    return _table(
        rows,
        [
            ("n", lambda row: f"{row['n']:,}"),
            ("layer", lambda row: row["layer"]),
            ("µs", lambda row: _spread(row["inference"], "ms", 1e3)),
            ("times as fast as nn.Linear", lambda row: _spread(row["inference"], "speedup")),
        ],
    )


def operator_scaling(rows: Rows) -> Table:
    """The time of training at growing widths, and the exponent of its growth."""
    return _table(
        rows,
        [
            ("n", lambda row: f"{row['n']:,}"),
            ("stages", lambda row: str(row["stages"])),
            ("parameters", lambda row: f"{row['parameters']:,}"),
            ("forward + backward, ms", lambda row: _spread(row["train"], "ms")),
            ("peak", lambda row: _mebibytes(row["peak_bytes"])),
            ("exponent over all n", lambda row: f"{row['exponent']:.2f}"),
        ],
    )


def operator_variants(rows: Rows) -> Table:
    """What other kinds of SPM layer cost beside the plain one."""

    def cost(task: str) -> Callable[[Row], str]:
        return lambda row: _spread(row[task], "cost")

    return _table(
        rows,
        [
            ("layer", lambda row: row["variant"]),
            ("beside", lambda row: row["base"]),
            *((f"{name}, times as long", cost(task)) for task, name in TASKS.items()),
        ],
    )


def modules(rows: Rows) -> Table:
    """The time of recurrent networks and of attention, and its ratio to that of torch's own module."""
    return _table(
        rows,
        [
            *_MODULE,
            ("forward + backward, ms", lambda row: _spread(row["train"], "ms")),
            ("times as fast", lambda row: _spread(row["train"], "speedup")),
            ("forward, ms", lambda row: _spread(row["inference"], "ms")),
            ("times as fast", lambda row: _spread(row["inference"], "speedup")),
        ],
    )


def modules_memory(rows: Rows) -> Table:
    """What recurrent networks and attention need memory for."""
    return _table(
        rows,
        [
            *_MODULE,
            ("parameters", lambda row: f"{row['parameters']:,}"),
            ("kept for backward", lambda row: _mebibytes(row["bytes_kept"])),
            ("peak of training", lambda row: _mebibytes(row["peak_bytes"])),
        ],
    )


_MODULE: Columns = [
    ("module", lambda row: row["module"]),
    ("size", lambda row: f"{row['size']:,}"),
    ("steps", lambda row: str(row["steps"])),
    ("batch", lambda row: str(row["batch"])),
]


def of_kinds(table: Callable[[Rows], Table], *kinds: str) -> Callable[[Rows], Table]:
    """A table of modules, with these kinds of them only."""
    return lambda rows: table([row for row in rows if row["kind"] in kinds])


def markdown(table: Table) -> str:
    """The table as Markdown has it, with what a reader must know of it below."""
    header, *lines = table
    text = "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *lines])
    return f"{text}\n\n{DISTURBED_NOTE}" if is_disturbed(table) else text


def is_disturbed(table: Table) -> bool:
    """Whether it needs `DISTURBED_NOTE`."""
    return any(DISTURBED in line for line in table)


def _table(rows: Rows, columns: Columns) -> Table:
    """A line for every row; with its number of threads if there are several."""
    if len({row["threads"] for row in rows}) > 1:
        columns = [("threads", lambda row: str(row["threads"])), *columns]
    return [[title for title, _ in columns], *([cell(row) for _, cell in columns] for row in rows)]


def _spread(measured: Row, name: str, unit: float = 1) -> str:
    low, high = measured[f"{name}_iqr"]
    return f"{number(measured[name], unit)} ({number(low, unit)} to {number(high, unit)})"


def number(value: float | None, unit: float = 1) -> str:
    """With three digits, more only for a whole number; a dash for what could not be measured."""
    if value is None:
        return "-"
    return f"{value * unit:,.0f}" if value * unit >= 999.5 else f"{value * unit:#.3g}".rstrip(".")


def _mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{number(size, 2**-20)} MiB"


def distinct(values: Iterable[Any]) -> list[Any]:
    """Each value once, in the order of its first."""
    return list(dict.fromkeys(values))
