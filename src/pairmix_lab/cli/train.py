"""`pairmix train`: the paper's experiments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import TextColumn

from pairmix_lab import results
from pairmix_lab.cli.console import (
    Data,
    clear_errors,
    console,
    is_out_of_memory,
    progress_bars,
    show,
    whole_numbers,
    words,
)
from pairmix_lab.experiments import agnews, shakespeare, teacher
from pairmix_lab.experiments.data import AGNEWS, SHAKESPEARE, hashes
from pairmix_lab.experiments.language_models import CELLS
from pairmix_lab.experiments.layers import LAYERS
from pairmix_lab.report import experiments as experiment_tables
from pairmix_lab.report.runs import collect
from pairmix_lab.training import allocator, runs
from pairmix_lab.training.processes import Processes
from pairmix_lab.training.signals import Stopped

app = typer.Typer(help="Run an experiment of the paper.", no_args_is_help=True)

BLOCKS = ("general", "rotation")

Layers = Annotated[str, typer.Option(help=f"Which layers to compare, of {', '.join(LAYERS)}.")]
Models = Annotated[str, typer.Option(help=f"Which models to compare, of {', '.join(agnews.MODELS)}.")]
Widths = Annotated[str, typer.Option(help="The widths, such as 256,1024.")]
Seeds = Annotated[str, typer.Option(help="The seeds, such as 0,1,2: each is a run of its own.")]
Blocks = Annotated[str, typer.Option(help="The blocks of SPM: general, rotation or both.")]
Stages = Annotated[int, typer.Option(min=0, help="The stages of SPM.")]
Steps = Annotated[int, typer.Option(help="Training steps.")]
BatchSize = Annotated[int, typer.Option(help="Rows of a step, over all processes.")]
Rate = Annotated[float, typer.Option(help="The learning rate of Adam.")]
Runs = Annotated[Path, typer.Option(help="The folder for results, checkpoints and TensorBoard.")]
Resume = Annotated[bool, typer.Option("--resume", help="Leave finished runs, go on with others where they stopped.")]
SaveEvery = Annotated[float, typer.Option(min=0, help="Seconds between checkpoints.")]
KeepMemory = Annotated[
    bool, typer.Option("--keep-memory", help="Let glibc keep freed memory for the next step, which saves page faults.")
]
Threads = Annotated[int | None, typer.Option(min=1, max=1024, help="How many threads; torch's if not given.")]


@app.command("teacher")
def train_teacher(
    layers: Layers = "dense,spm,lowrank",
    widths: Widths = "256,512,1024,2048",
    seeds: Seeds = "0,1,2",
    angle_stds: Annotated[
        str, typer.Option(help="How far the teacher is from the identity: spreads of its angles, or uniform.")
    ] = "0.1",
    blocks: Blocks = "general",
    pairings: Annotated[str, typer.Option(help="The pairs of SPM: same as the teacher's, other, or both.")] = "same",
    steps: Steps = teacher.Config.steps,
    batch: BatchSize = teacher.Config.batch,
    lr: Rate = teacher.Config.lr,
    out: Runs = Path("runs/teacher"),
    resume: Resume = False,
    save_every: SaveEvery = 60,
    threads: Threads = None,
    keep_memory: KeepMemory = False,
) -> None:
    """Section 9.1: students learn the labels that an SPM, a ReLU and a dense map decide."""
    configs = grid(
        teacher.Config,
        width=whole_numbers("--widths", widths),
        angle_std=tuple(map(_angle_std, words("--angle-stds", angle_stds))),
        layer=words("--layers", layers, LAYERS),
        block=words("--blocks", blocks, BLOCKS),
        pairing=words("--pairings", pairings, teacher.PAIRINGS),
        seed=whole_numbers("--seeds", seeds, least=0),
        steps=steps,
        batch=batch,
        lr=lr,
    )
    run_all(configs, teacher.Task, out, resume, save_every, threads, keep_memory)
    _show_results(configs, out, partial(experiment_tables.accuracy, experiment="teacher"))


@app.command("agnews")
def train_agnews(
    layers: Models = "dense,spm,lowrank,softmax",
    widths: Widths = "2048,4096",
    seeds: Seeds = "0,1,2",
    blocks: Blocks = "general",
    stages: Stages = agnews.Config.stages,
    steps: Steps = agnews.Config.steps,
    batch: BatchSize = agnews.Config.batch,
    lr: Rate = agnews.Config.lr,
    data: Data = None,
    out: Runs = Path("runs/agnews"),
    resume: Resume = False,
    save_every: SaveEvery = 60,
    threads: Threads = None,
    keep_memory: KeepMemory = False,
) -> None:
    """Section 9.2: the topic of a news item, from hashed words."""
    configs = grid(
        agnews.Config,
        width=whole_numbers("--widths", widths),
        layer=words("--layers", layers, agnews.MODELS),
        block=words("--blocks", blocks, BLOCKS),
        seed=whole_numbers("--seeds", seeds, least=0),
        stages=stages,
        steps=steps,
        batch=batch,
        lr=lr,
    )
    make, data_hashes = partial(agnews.Task, folder=data), partial(hashes, AGNEWS, data)
    run_all(configs, make, out, resume, save_every, threads, keep_memory, data_hashes)
    _show_results(configs, out, partial(experiment_tables.accuracy, experiment="agnews"))


@app.command("shakespeare")
def train_shakespeare(
    layers: Layers = "spm",
    cell: Annotated[str, typer.Option(help=f"What mixes the text: {', '.join(CELLS)}.")] = shakespeare.Config.cell,
    widths: Widths = str(shakespeare.Config.width),
    seeds: Seeds = "0",
    blocks: Blocks = "general",
    length: Annotated[int, typer.Option(min=1, help="Bytes of a sequence.")] = shakespeare.Config.length,
    stages: Stages = shakespeare.Config.stages,
    steps: Steps = shakespeare.Config.steps,
    batch: BatchSize = shakespeare.Config.batch,
    lr: Rate = shakespeare.Config.lr,
    data: Data = None,
    out: Runs = Path("runs/shakespeare"),
    resume: Resume = False,
    save_every: SaveEvery = 60,
    threads: Threads = None,
    keep_memory: KeepMemory = False,
) -> None:
    """Section 9.3: predict the next byte of Shakespeare. The dense side, --layers dense, takes hours."""
    configs = grid(
        shakespeare.Config,
        cell=cell,
        width=whole_numbers("--widths", widths),
        layer=words("--layers", layers, LAYERS),
        block=words("--blocks", blocks, BLOCKS),
        seed=whole_numbers("--seeds", seeds, least=0),
        length=length,
        stages=stages,
        steps=steps,
        batch=batch,
        lr=lr,
    )
    make, data_hashes = partial(shakespeare.Task, folder=data), partial(hashes, SHAKESPEARE, data)
    run_all(configs, make, out, resume, save_every, threads, keep_memory, data_hashes)
    _show_results(configs, out, experiment_tables.shakespeare)


def grid(config: type[Any], **options: Any) -> list[Any]:
    """A config for every combination of the options that have several values."""
    configs = []
    for values in product(*(value if isinstance(value, tuple) else (value,) for value in options.values())):
        chosen = dict(zip(options, values, strict=True))
        if chosen["layer"] != "spm":  # the others have no kinds
            chosen = {name: value for name, value in chosen.items() if name not in ("block", "pairing")}
        try:
            configs.append(config(**chosen))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    return list(dict.fromkeys(configs))


def run_all(
    configs: Iterable[Any],
    make: Callable[[Any], Any],
    out: Path,
    resume: bool,
    save_every: float = 60,
    threads: int | None = None,
    keep_memory: bool = False,
    data_hashes: Callable[[], Mapping[str, str]] = dict,
) -> None:
    """Train one after the other, with a progress bar for each; those that are finished already are left alone."""
    if threads is not None:
        torch.set_num_threads(threads)
    if keep_memory:
        allocator.keep_freed_memory()
    with clear_errors(), Processes.joined() as processes:
        console.quiet = not processes.is_first
        data_hashes = cache(data_hashes)
        missing = [config for config in configs if not runs.is_finished(out, config, resume, data_hashes)]
        if missing:
            results.check_traceable(out)
        for number, config in enumerate(missing, start=1):
            try:
                title = f"{number}/{len(missing)} {config.name}"
                with _clear_memory_errors(config), _progress(title, config.steps) as on_step:
                    options = {"resume": resume, "save_every": save_every, "on_step": on_step}
                    outcome = runs.run(partial(make, config), out, config, results.command_line(), **options)
            except Stopped as stopped:
                console.print(f"{config.name}: {stopped}. The same command with --resume goes on from there.")
                raise typer.Exit(130) from stopped
            console.print(f"{config.name}: {_in_words(outcome)}", highlight=False)


@contextmanager
def _clear_memory_errors(config: Any) -> Iterator[None]:
    """Say which sizes were too large."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        sizes = f"a width of {config.width} and a batch of {config.batch}"
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{config.name} needs more memory than there is, with {sizes}: {reason}") from error


@contextmanager
def _progress(name: str, steps: int) -> Iterator[Callable[[int, float, float], None]]:
    """A line with a bar, the loss, milliseconds a step and the time left, which goes away at the end."""
    columns = TextColumn("loss {task.fields[loss]:.3f}"), TextColumn("{task.fields[ms]:.3g} ms/step")
    with progress_bars(*columns, transient=True) as progress:
        bar = progress.add_task(name, total=steps, loss=float("nan"), ms=float("nan"))
        yield lambda step, loss, ms: progress.update(bar, completed=step, loss=loss, ms=ms)


def _in_words(outcome: dict[str, Any]) -> str:
    speed = f"{outcome['ms_per_step']:.3g} ms/step"
    if "test_accuracy" in outcome:
        return f"{outcome['test_accuracy']:.1%} of the test set right, {speed}"
    if "valid_bpc" in outcome:
        return f"{outcome['valid_bpc']:.3f} bits a byte of the validation part, {speed}"
    return speed


def _show_results(configs: Iterable[Any], out: Path, table: Callable[[Any], Any]) -> None:
    """A table of the runs of this command, whatever else is in the folder."""
    if console.quiet:
        return
    paths = [runs.result_path(out, config) for config in configs]
    with clear_errors():
        show(table(collect(paths)))
    for path in sorted(set(out.rglob("*.json")) - set(paths)):
        try:
            results.load(path)
        except (OSError, ValueError) as error:
            console.print(f"Not in the table: {error}", markup=False, highlight=False)
    console.print(f"Results are in {out}; a page with tables and curves: pairmix report {out} -o report.html")


def _angle_std(word: str) -> float | str:
    try:
        return word if word == teacher.UNIFORM else float(word)
    except ValueError as error:
        raise typer.BadParameter(
            f"must be numbers of radians or {teacher.UNIFORM}, got {word!r}", param_hint="--angle-stds"
        ) from error
