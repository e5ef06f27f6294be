"""The `pairmix` command."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from pairmix import functional, ops, results
from pairmix.bench import init as bench_init
from pairmix.bench import modules as bench_modules
from pairmix.bench import operator as bench_operator
from pairmix.bench import operator_grid, operator_latency, operator_scaling, operator_variants
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


OPERATOR_MODES: dict[str, tuple[Any, Callable[[tables.Rows], tables.Table], Callable[[tables.Rows, Path], None]]] = {
    "operator": (bench_operator, tables.operator, plots.operator),
    "operator-grid": (operator_grid, tables.operator_grid, plots.operator_grid),
    "operator-latency": (operator_latency, tables.operator_latency, plots.operator_latency),
    "operator-scaling": (operator_scaling, tables.operator_scaling, plots.operator_scaling),
    "operator-variants": (operator_variants, tables.operator_variants, plots.operator_variants),
}


@bench.command("operator")
def bench_operator_command(
    out: Out = Path("results"),
    grid: Annotated[
        bool, typer.Option("--grid", help="Over widths, batches and schedules: where does SPM win?")
    ] = False,
    latency: Annotated[bool, typer.Option("--latency", help="One vector: how long does it take?")] = False,
    scaling: Annotated[bool, typer.Option("--scaling", help="SPM up to a width of 65,536: how does it grow?")] = False,
    variants: Annotated[bool, typer.Option("--variants", help="What do other kinds of SPM layer cost?")] = False,
    widths: Annotated[str | None, typer.Option(help="The widths, such as 256,1024.")] = None,
    batch: Annotated[int | None, typer.Option(help="The number of rows.")] = None,
    seconds: Annotated[float | None, typer.Option(help="How long to measure each width, or each variant.")] = None,
    threads: Annotated[
        str | None, typer.Option(help="The numbers of threads, such as 1,2; torch's if not given.")
    ] = None,
) -> None:
    """How fast is the operator? Against nn.Linear, other structured layers and the machine (about ten minutes)."""
    flags = {"grid": grid, "latency": latency, "scaling": scaling, "variants": variants}
    modes = [mode for mode, is_set in flags.items() if is_set]
    if len(modes) > 1:
        raise typer.BadParameter(f"choose one of {' and '.join('--' + mode for mode in modes)}")
    if batch is not None and batch < 1:
        raise typer.BadParameter(f"must be at least 1, got {batch}", param_hint="--batch")
    _check_seconds(seconds)
    name = "-".join(["operator", *modes])
    module, table, plot = OPERATOR_MODES[name]
    options = {
        "widths": _whole_numbers("--widths", widths),
        "batch": batch,
        "seconds": seconds,
        "threads": _whole_numbers("--threads", threads),
    }
    config = _config(module.Config, {option: value for option, value in options.items() if value is not None}, name)
    reason = ops.cpu.why_not(torch.device("cpu"))
    if reason is not None:
        console.print(f"[yellow]SPM is measured as plain torch, and the bound of arithmetic not at all: {reason}")
    rows = _live(module.run(config), table)
    if name == "operator":
        _print(tables.operator_memory(rows))
        _print(tables.operator_bounds(rows))
    given = {"widths": widths, "batch": batch, "seconds": seconds, "threads": threads}
    chosen = [f"--{mode}" for mode in modes] + [
        f"--{option} {value}" for option, value in given.items() if value is not None
    ]
    command = " ".join(["pairmix bench operator", *chosen])
    _save(out / name, command, asdict(config), rows, plot)


@bench.command("modules")
def bench_modules_command(
    out: Out = Path("results"),
    kind: Annotated[str | None, typer.Option(help="Only this kind of module, such as GRU.")] = None,
    seconds: Annotated[float, typer.Option(help="How long to measure each module.")] = bench_modules.Config.seconds,
    threads: Annotated[
        str | None, typer.Option(help="The numbers of threads, such as 1,2; torch's if not given.")
    ] = None,
) -> None:
    """How fast are recurrent networks and attention, beside torch's own? (about three minutes)"""
    _check_seconds(seconds)
    kinds = list(dict.fromkeys(case.kind for case in bench_modules.Config.cases))
    if kind not in (None, *kinds):
        raise typer.BadParameter(f"must be one of {', '.join(kinds)}; got {kind!r}", param_hint="--kind")
    cases = tuple(case for case in bench_modules.Config.cases if kind in (None, case.kind))
    config = bench_modules.Config(cases=cases, seconds=seconds)
    numbers = _whole_numbers("--threads", threads)
    if numbers is not None:
        config = replace(config, threads=numbers)
    rows = _live(bench_modules.run(config), tables.modules)
    _print(tables.modules_memory(rows))
    given = {"kind": kind and f'"{kind}"', "seconds": seconds, "threads": threads}
    command = ["pairmix bench modules", *(f"--{name} {value}" for name, value in given.items() if value is not None)]
    _save(out / "modules", " ".join(command), asdict(config), rows, plots.modules)


def _check_seconds(seconds: float | None) -> None:
    if seconds is not None and not 0 <= seconds < math.inf:
        raise typer.BadParameter(f"must be a number of seconds, got {seconds}", param_hint="--seconds")


def _whole_numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    for word in text.split(","):
        if not word.strip().isdecimal() or int(word) < 1:
            raise typer.BadParameter(
                f"must be whole numbers of at least 1, such as 1,2; got {word!r}", param_hint=option
            )
    return tuple(map(int, text.split(",")))


def _config(config: type[Any], options: dict[str, Any], name: str) -> Any:
    for option in options.keys() - {field.name for field in fields(config)}:
        mode = name.replace("operator-", "--")
        raise typer.BadParameter(f"{mode} takes none: it has its own", param_hint=f"--{option}")
    try:
        return config(**options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _live(measured: Iterable[dict[str, Any]], table: Callable[[tables.Rows], tables.Table]) -> list[dict[str, Any]]:
    """Show the newest lines of the table as the rows come in, and in the end the whole."""
    rows: list[dict[str, Any]] = []
    with Live("measuring ...", console=console, transient=True) as live:
        for row in measured:
            rows.append(row)
            header, *lines = table(rows)
            live.update(_rendered([header, *lines[-max(1, console.height - 8) :]]))
    _print(table(rows))
    return rows


def _progress(*columns: Any) -> Progress:
    return Progress(
        TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), *columns,
        console=console,
    )  # fmt: skip


def _print(table: tables.Table) -> None:
    console.print(_rendered(table))


def _rendered(table: tables.Table) -> Table:
    header, *lines = table
    rendered = Table(*(Column(title, overflow="fold") for title in header))  # never cut off a number
    for line in lines:
        rendered.add_row(*line)
    return rendered


def _save(base: Path, command: str, config: dict[str, Any], rows: list[dict[str, Any]], plot: Any) -> None:
    json_path, picture_path = base.with_suffix(".json"), base.with_suffix(".png")
    results.save(json_path, command, config, rows)
    plot(rows, picture_path)
    console.print(f"Wrote {json_path} and {picture_path}")
