"""`pairmix bench`: a question, answered by measuring."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.live import Live

from pairmix import ops
from pairmix_lab import results
from pairmix_lab.bench import fit as bench_fit
from pairmix_lab.bench import gpu_static as bench_gpu_static
from pairmix_lab.bench import init as bench_init
from pairmix_lab.bench import kernels as bench_kernels
from pairmix_lab.bench import modules as bench_modules
from pairmix_lab.bench import onnx as bench_onnx
from pairmix_lab.bench import operator as bench_operator
from pairmix_lab.bench import steps as bench_steps
from pairmix_lab.bench.benchmarks import BENCHMARKS
from pairmix_lab.bench.jobs import Finished
from pairmix_lab.cli.console import Data, Out, clear_errors, console, progress_bars, rendered, save, show
from pairmix_lab.experiments import options
from pairmix_lab.experiments.options import whole_numbers
from pairmix_lab.report import tables
from pairmix_lab.training import allocator

app = typer.Typer(help="Answer a question by measuring.", no_args_is_help=True)

Threads = Annotated[str | None, typer.Option(help="The numbers of threads, such as 1,2; torch's if not given.")]
InstructionSet = Annotated[
    str | None,
    typer.Option(
        help="The kernels to measure: avx512, avx2 or baseline; the best ones if not given. torch chooses its own."
    ),
]


@app.command("init")
def bench_init_command(
    data: Data = None,
    out: Out = Path("results"),
    cases: Annotated[str | None, typer.Option(help="Only these cases, such as AG News,GRU.")] = None,
    widths: Annotated[
        str | None, typer.Option(help="The widths, such as 256,1024; those of the case if not given.")
    ] = None,
    seeds: options.Seeds = "0,1,2",
    blocks: options.Blocks = "general",
    jobs: Annotated[int, typer.Option(min=1, help="How many runs at once, each on one thread.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where this command was stopped.")] = False,
) -> None:
    """Which start trains best, on what people train? (about an hour and a half, less with --jobs)"""
    known = bench_init.all_cases()
    names = [case.name for _, case in known]
    chosen = names if cases is None else options.words("--cases", cases, names)
    config = bench_init.Config(
        cases=tuple((experiment, case) for experiment, case in known if case.name in chosen),
        widths=_optional_numbers("--widths", widths),
        seeds=tuple(dict.fromkeys(whole_numbers("--seeds", seeds, least=0))),
        blocks=tuple(dict.fromkeys(options.words("--blocks", blocks, options.BLOCKS))),
    )
    with _measuring_for(out):
        finished = Finished(out / "init.part.jsonl", resume)
        with progress_bars() as progress, _stoppable():
            bar = progress.add_task("training", total=config.runs)
            rows = list(bench_init.run(config, finished, data, jobs, lambda: progress.advance(bar)))
        show(bench_init.table(rows))
        save(out / "init", config.as_dict(), rows, bench_init.picture, bench_init.hashes(config, data))
        finished.discard()


@app.command("operator")
def bench_operator_command(
    out: Out = Path("results"),
    grid: Annotated[
        bool, typer.Option("--grid", help="Over widths, batches and schedules: where does SPM win?")
    ] = False,
    conditions: Annotated[
        bool, typer.Option("--conditions", help="Between other layers, beside other programs: how long does it take?")
    ] = False,
    latency: Annotated[bool, typer.Option("--latency", help="One vector: how long does it take?")] = False,
    scaling: Annotated[bool, typer.Option("--scaling", help="SPM up to a width of 65,536: how does it grow?")] = False,
    variants: Annotated[bool, typer.Option("--variants", help="What do other kinds of SPM layer cost?")] = False,
    device: Annotated[str, typer.Option(help="cpu, or cuda for a GPU: then without the questions above.")] = "cpu",
    widths: Annotated[str | None, typer.Option(help="The widths, such as 256,1024.")] = None,
    batch: Annotated[int | None, typer.Option(help="The number of rows.")] = None,
    seconds: Annotated[float | None, typer.Option(help="How long to measure each width, or each variant.")] = None,
    threads: Threads = None,
    instruction_set: InstructionSet = None,
) -> None:
    """How fast is the operator? Against nn.Linear, other structured layers and the machine (about ten minutes)."""
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"must be cpu or cuda; got {device!r}", param_hint="--device")
    flags = {"grid": grid, "conditions": conditions, "latency": latency, "scaling": scaling, "variants": variants}
    modes = [mode for mode, is_set in flags.items() if is_set]
    if len(modes) > 1:
        raise typer.BadParameter(f"choose one of {' and '.join('--' + mode for mode in modes)}")
    if device == "cuda" and (modes or instruction_set is not None):
        raise typer.BadParameter(f"--device cuda does not accept --{modes[0] if modes else 'instruction-set'}")
    if batch is not None:
        _check_sizes("--batch", [batch])
    _check_seconds(seconds)
    name = "-".join(["operator", *modes, *([device] if device == "cuda" else [])])
    benchmark = BENCHMARKS[name]
    options = {
        "widths": _optional_numbers("--widths", widths),
        "batch": batch,
        "seconds": seconds,
        "threads": _optional_numbers("--threads", threads),
    }
    given = {option: value for option, value in options.items() if value is not None}
    config = _config(benchmark.Config, given, "--device cuda" if device == "cuda" else name)
    reason = ops.cpu.why_not(torch.device("cpu"))
    if reason is not None and device == "cpu":
        console.print(f"[yellow]SPM is measured as plain torch, and the bound of arithmetic not at all: {reason}")
    with _measuring_for(out, instruction_set):
        rows = _live(benchmark.run(config), benchmark.table)
        if benchmark is bench_operator:
            show(bench_operator.memory_table(rows))
            reached = bench_operator.bounds_table(rows)
            show(reached)
            if tables.is_disturbed(reached):
                console.print(tables.DISTURBED_NOTE)
        save(out / name, asdict(config), rows, benchmark.picture)


@app.command("fit")
def bench_fit_command(
    out: Out = Path("results"),
    steps: Annotated[int, typer.Option(min=0, help="Steps of refinement of every fit.")] = bench_fit.Config.steps,
) -> None:
    """Which matrices have an SPM near them? (about five minutes)"""
    config = bench_fit.Config(steps=steps)
    with _measuring_for(out):
        rows = _live(bench_fit.run(config), bench_fit.table)
        save(out / "fit", asdict(config), rows, bench_fit.picture)


@app.command("gpu-static")
def bench_gpu_static_command(
    out: Out = Path("results"),
    widths: Annotated[str | None, typer.Option(help="The widths of butterflies, such as 256,1024.")] = None,
    random_widths: Annotated[str | None, typer.Option(help="The widths of random pairs, such as 1024.")] = None,
    dtypes: Annotated[str, typer.Option(help="The dtypes of rows.")] = "float32,bfloat16,float16",
    blocks: options.Blocks = "general,rotation",
    targets: Annotated[str, typer.Option(help="What to compile for.")] = "sm_80,sm_90,gfx942",
    batch: Annotated[int, typer.Option(help="The number of rows.")] = bench_gpu_static.Config.batch,
    jobs: Annotated[int, typer.Option(min=1, help="How many processes compile at once.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where this command was stopped.")] = False,
) -> None:
    """What can be known of the GPU kernels without a GPU? (more than an hour, less with --jobs)"""
    _check_sizes("--batch", [batch])
    lists = {
        "widths": _optional_numbers("--widths", widths),
        "random_widths": _optional_numbers("--random-widths", random_widths),
    }
    config = bench_gpu_static.Config(
        **{name: numbers for name, numbers in lists.items() if numbers is not None},
        dtypes=options.words("--dtypes", dtypes, bench_gpu_static.DTYPES),
        blocks=options.words("--blocks", blocks, options.BLOCKS),
        targets=options.words("--targets", targets, bench_gpu_static.Config.targets),
        batch=batch,
    )
    with _measuring_for(out):
        finished = Finished(out / "gpu-static.part.jsonl", resume)
        with progress_bars() as progress, _stoppable():
            bar = progress.add_task("compiling", total=len(config.cases))
            rows = list(bench_gpu_static.run(config, finished, jobs, lambda: progress.advance(bar)))
        for table in bench_gpu_static.TABLES.values():
            show(table(rows))
        for spilled in bench_gpu_static.spilling(rows):
            console.print(f"[bold red]spills:[/] {spilled}")
        save(out / "gpu-static", asdict(config), rows, bench_gpu_static.picture)
        finished.discard()


@app.command("kernels")
def bench_kernels_command(
    out: Out = Path("results"),
    caches: Annotated[
        bool, typer.Option("--caches", help="With tiles for other caches: would they be faster?")
    ] = False,
    widths: Annotated[str | None, typer.Option(help="The widths, such as 256,1024.")] = None,
    stage_width: Annotated[
        int | None, typer.Option(help="The width at which single stages are measured: a power of two.")
    ] = None,
    batch: Annotated[int, typer.Option(help="The number of rows.")] = bench_kernels.Config.batch,
    blocks: Annotated[str | None, typer.Option(help="The blocks of SPM: general, rotation or both.")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="How long to measure each width, and each kind of stage.")
    ] = None,
    threads: Threads = None,
    instruction_set: InstructionSet = None,
) -> None:
    """How much of the machine's arithmetic do the compiled kernels reach? (about three minutes)"""
    if stage_width is not None:
        _check_sizes("--stage-width", [stage_width])
    _check_sizes("--batch", [batch])
    _check_seconds(seconds)
    all_options: dict[str, Any] = {
        "widths": _optional_numbers("--widths", widths),
        "stage_width": stage_width,
        "batch": batch,
        "blocks": blocks and tuple(dict.fromkeys(options.words("--blocks", blocks, options.BLOCKS))),
        "seconds": seconds,
        "threads": _optional_numbers("--threads", threads),
    }
    given = {option: value for option, value in all_options.items() if value is not None}
    name = "kernels-caches" if caches else "kernels"
    benchmark = BENCHMARKS[name]
    config = _config(benchmark.Config, given, name)
    with _measuring_for(out, instruction_set):
        rows = _live(benchmark.run(config), benchmark.table)
        if not caches:
            of_stages = bench_kernels.stages_table(rows)
            show(of_stages)
            if tables.is_disturbed(of_stages) or tables.is_disturbed(bench_kernels.table(rows)):
                console.print(tables.DISTURBED_NOTE)
        save(out / name, asdict(config), rows, benchmark.picture)


@app.command("modules")
def bench_modules_command(
    out: Out = Path("results"),
    kind: Annotated[str | None, typer.Option(help="Only this kind of module, such as GRU.")] = None,
    seconds: Annotated[float, typer.Option(help="How long to measure each module.")] = bench_modules.Config.seconds,
    threads: Threads = None,
    instruction_set: InstructionSet = None,
) -> None:
    """How fast are recurrent networks, attention and feed-forward blocks, beside torch's? (about four minutes)"""
    _check_seconds(seconds)
    kinds = list(dict.fromkeys(case.kind for case in bench_modules.Config.cases))
    if kind not in (None, *kinds):
        raise typer.BadParameter(f"must be one of {', '.join(kinds)}; got {kind!r}", param_hint="--kind")
    cases = tuple(case for case in bench_modules.Config.cases if kind in (None, case.kind))
    config = bench_modules.Config(cases=cases, seconds=seconds)
    numbers = _optional_numbers("--threads", threads)
    if numbers is not None:
        config = replace(config, threads=numbers)
    with _measuring_for(out, instruction_set):
        rows = _live(bench_modules.run(config), bench_modules.table)
        show(bench_modules.memory_table(rows))
        save(out / "modules", asdict(config), rows, bench_modules.picture)


@app.command("onnx")
def bench_onnx_command(
    out: Out = Path("results"),
    widths: Annotated[str | None, typer.Option(help="The widths, such as 256,1024.")] = None,
    batches: Annotated[str | None, typer.Option(help="The numbers of rows, such as 1,64.")] = None,
    seconds: Annotated[float, typer.Option(help="How long to measure each size.")] = bench_onnx.Config.seconds,
    threads: Threads = None,
) -> None:
    """How fast is a layer in onnxruntime, stage by stage and merged? (about two minutes)"""
    _check_seconds(seconds)
    options = {
        "widths": _optional_numbers("--widths", widths),
        "batches": _optional_numbers("--batches", batches),
        "threads": _optional_numbers("--threads", threads),
    }
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    config = bench_onnx.Config(seconds=seconds, **given)
    with _measuring_for(out):
        rows = _live(bench_onnx.run(config), bench_onnx.table)
        save(out / "onnx", asdict(config), rows, bench_onnx.picture)


@app.command("steps")
def bench_steps_command(
    experiment: Annotated[
        str | None,
        typer.Option(help="Only this one; the result is then called steps-NAME.", show_default="all of them"),
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Its layers; the usual ones if not given.")] = None,
    widths: Annotated[str | None, typer.Option(help="Its widths; the usual ones if not given.")] = None,
    data: Data = None,
    out: Out = Path("results"),
    seconds: Annotated[float, typer.Option(help="How long to measure each width.")] = bench_steps.Config.seconds,
    threads: Threads = None,
    keep_memory: Annotated[
        bool, typer.Option("--keep-memory", help="Keep freed memory in the process, as training with --keep-memory.")
    ] = False,
    instruction_set: InstructionSet = None,
) -> None:
    """How long is a training step of each experiment? (about ten minutes)"""
    _check_seconds(seconds)
    numbers = _optional_numbers("--threads", threads)
    config = bench_steps.Config(seconds=seconds)
    if experiment not in (None, *config.cases):
        names = ", ".join(config.cases)
        raise typer.BadParameter(f"must be one of {names}; got {experiment!r}", param_hint="--experiment")
    if experiment is None and (layers or widths):
        raise typer.BadParameter("--layers and --widths are of one --experiment")
    if experiment is not None:
        chosen: dict[str, Any] = {} if layers is None else {"layers": options.words("--layers", layers)}
        chosen |= {} if widths is None else {"widths": whole_numbers("--widths", widths)}
        config = replace(config, cases={experiment: replace(config.cases[experiment], **chosen)})
    if numbers is not None:
        config = replace(config, threads=numbers)
    settings = {"experiment": "steps", "keep_memory": keep_memory, **config.as_dict()}
    if keep_memory:
        allocator.keep_freed_memory()
    with _measuring_for(out, instruction_set):
        rows = _live(bench_steps.run(config, data), bench_steps.table)
        name = "steps" if experiment is None else f"steps-{experiment}"
        save(out / name, settings, rows, bench_steps.picture, bench_steps.hashes(config, data))


@contextmanager
def _measuring_for(out: Path, instruction_set: str | None = None) -> Iterator[None]:
    """Refuse results that could not be traced to their code; errors, also while measuring, are one sentence.

    Args:
        out: where results go.
        instruction_set: the build of the kernels to measure; None for the best one.
    """
    with clear_errors():
        results.check_traceable(out)
        with nullcontext() if instruction_set is None else _kernels_of(instruction_set):
            yield


@contextmanager
def _kernels_of(instruction_set: str) -> Iterator[None]:
    reason = ops.cpu.why_not(torch.device("cpu"))
    if reason is not None:
        raise typer.BadParameter(f"there are no kernels to choose from: {reason}", param_hint="--instruction-set")
    runnable = ops.cpu.instruction_sets()
    if instruction_set not in runnable:
        message = f"must be one of {', '.join(runnable)}, which this machine can run; got {instruction_set!r}"
        raise typer.BadParameter(message, param_hint="--instruction-set")
    before = ops.cpu.instruction_set()
    ops.cpu.use_instruction_set(instruction_set)
    try:
        yield
    finally:
        ops.cpu.use_instruction_set(before)


@contextmanager
def _stoppable() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as interrupt:
        console.print("Stopped. The same command with --resume goes on from there.")
        raise typer.Exit(130) from interrupt


def _check_seconds(seconds: float | None) -> None:
    if seconds is not None and not 0 <= seconds < math.inf:
        raise typer.BadParameter(f"must be a number of seconds, got {seconds}", param_hint="--seconds")


def _optional_numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    numbers = whole_numbers(option, text)
    _check_sizes(option, numbers)
    return numbers


def _check_sizes(option: str, sizes: Iterable[int]) -> None:
    """Not more than the indices of a schedule, which are int32, can count."""
    for size in sizes:
        if not 1 <= size < 2**31:
            raise typer.BadParameter(f"must be in 1..2^31-1, got {size}", param_hint=option)


def _config(config: type[Any], options: dict[str, Any], name: str) -> Any:
    for option in options.keys() - {field.name for field in fields(config)}:
        mode = name.replace("operator-", "--").replace("kernels-", "--")
        raise typer.BadParameter(f"{mode} does not accept --{option.replace('_', '-')}")
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
            live.update(rendered([header, *lines[-max(1, console.height - 8) :]]))
    show(table(rows))
    return rows
