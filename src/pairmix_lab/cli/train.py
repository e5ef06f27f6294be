"""`pairmix train`: a command for every experiment of the list."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import TextColumn

from pairmix_lab import experiments, results
from pairmix_lab.cli.console import Data, clear_errors, console, is_out_of_memory, progress_bars, show
from pairmix_lab.experiments.data import Dataset, hashes
from pairmix_lab.experiments.experiment import Experiment
from pairmix_lab.report.runs import collect
from pairmix_lab.training import allocator, runs
from pairmix_lab.training.processes import Processes
from pairmix_lab.training.signals import Stopped

Runs = Annotated[Path, typer.Option(help="The folder for results, checkpoints and TensorBoard.")]
Resume = Annotated[bool, typer.Option("--resume", help="Leave finished runs, go on with others where they stopped.")]
SaveEvery = Annotated[float, typer.Option(min=0, help="Seconds between checkpoints.")]
KeepMemory = Annotated[
    bool, typer.Option("--keep-memory", help="Let glibc keep freed memory for the next step, which saves page faults.")
]
Threads = Annotated[int | None, typer.Option(min=1, max=1024, help="How many threads; torch's if not given.")]


def make_app() -> typer.Typer:
    """A command for every experiment of the list."""
    app = typer.Typer(help="Run an experiment of the paper.", no_args_is_help=True)
    for experiment in experiments.EXPERIMENTS:
        app.command(experiment.name, help=experiment.help)(_command(experiment))
    return app


def _command(experiment: Experiment) -> Callable[..., None]:
    """The command of an experiment: its own options, then those of every training run."""

    def train(
        data: Data = None,
        out: Runs = Path("runs", experiment.name),
        resume: Resume = False,
        save_every: SaveEvery = 60,
        threads: Threads = None,
        keep_memory: KeepMemory = False,
        **own: Any,
    ) -> None:
        configs = experiment.configs(**own)
        run_all(experiment, configs, out, resume, save_every, threads, keep_memory, data)
        _show_results(experiment, configs, out)

    unused = set() if experiment.dataset is not None else {"data"}
    return with_options(train, experiment.configs, unused)


def with_options(
    command: Callable[..., None], own: Callable[..., Any], unused: Collection[str] = ()
) -> Callable[..., None]:
    """The command with the parameters of `own` as its first options, in the place of `**own`; without `unused` ones."""
    shared = inspect.signature(command, eval_str=True).parameters.values()
    kept = [one for one in shared if one.kind is not one.VAR_KEYWORD and one.name not in unused]
    parameters = [*inspect.signature(own, eval_str=True).parameters.values(), *kept]

    @wraps(command)
    def combined(**options: Any) -> None:
        command(**options)

    # Typer makes the options from these two.
    combined.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    combined.__annotations__ = {one.name: one.annotation for one in parameters}
    return combined


def run_all(
    experiment: Experiment,
    configs: Iterable[Any],
    out: Path,
    resume: bool,
    save_every: float = 60,
    threads: int | None = None,
    keep_memory: bool = False,
    data: Path | None = None,
) -> None:
    """Train one after the other, with a progress bar for each; those that are finished already are left alone."""
    if threads is not None:
        torch.set_num_threads(threads)
    if keep_memory:
        allocator.keep_freed_memory()
    with clear_errors(), Processes.joined() as processes:
        console.quiet = not processes.is_first

        @cache
        def data_hashes(dataset: Dataset | None) -> dict[str, str]:
            return {} if dataset is None else hashes(dataset, data)

        missing = [
            config
            for config in configs
            if not runs.is_finished(out, config, resume, partial(data_hashes, experiment.dataset_of(config)))
        ]
        if missing:
            results.check_traceable(out)
        for number, config in enumerate(missing, start=1):
            try:
                title = f"{number}/{len(missing)} {config.name}"
                with _clear_memory_errors(config), _progress(title, config.steps) as on_step:
                    options = {"resume": resume, "save_every": save_every, "on_step": on_step}
                    make = partial(experiment.task, config, data)
                    outcome = runs.run(make, out, config, results.command_line(), **options)
            except Stopped as stopped:
                console.print(f"{config.name}: {stopped}. The same command with --resume goes on from there.")
                raise typer.Exit(130) from stopped
            if processes.is_first:  # the others have no outcome but the time
                words = experiment.in_words(outcome), f"{outcome['ms_per_step']:.3g} ms/step"
                console.print(f"{config.name}: {', '.join(filter(None, words))}", highlight=False)


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


def _show_results(experiment: Experiment, configs: Iterable[Any], out: Path) -> None:
    """A table of the runs of this command, whatever else is in the folder."""
    if console.quiet:
        return
    paths = [runs.result_path(out, config) for config in configs]
    with clear_errors():
        show(next(iter(experiment.tables(collect(paths, [experiment])))).table)
    for path in sorted(set(out.rglob("*.json")) - set(paths)):
        try:
            results.load(path)
        except (OSError, ValueError) as error:
            console.print(f"Not in the table: {error}", markup=False, highlight=False)
    console.print(f"Results are in {out}; a page with tables and curves: pairmix report {out} -o report.html")
