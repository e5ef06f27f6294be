"""`pairmix train`: a command for every experiment of the list."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial, wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.progress import TextColumn

from pairmix_lab import experiments, results
from pairmix_lab.cli.console import Data, clear_errors, console, is_out_of_memory, progress_bars, show
from pairmix_lab.experiments.data import Dataset, hashes
from pairmix_lab.experiments.experiment import Experiment
from pairmix_lab.experiments.options import positive_numbers
from pairmix_lab.report.runs import collect
from pairmix_lab.training import allocator, runs
from pairmix_lab.training.loop import DivergenceError
from pairmix_lab.training.processes import Processes
from pairmix_lab.training.signals import Stopped

Runs = Annotated[Path, typer.Option(help="The folder for results, checkpoints and TensorBoard.")]
Resume = Annotated[bool, typer.Option("--resume", help="Leave finished runs, go on with others where they stopped.")]
SaveEvery = Annotated[float, typer.Option(min=0, help="Seconds between checkpoints.")]
KeepMemory = Annotated[
    bool, typer.Option("--keep-memory", help="Let glibc keep freed memory for the next step, which saves page faults.")
]
Rates = Annotated[
    str | None,
    typer.Option(
        help="Learning rates to try, such as 0.001,0.003: each model is trained with all of them from its first seed, "
        "and from the others with the one that is best on validation. Results are in OUT/lrRATE."
    ),
]
Threads = Annotated[int | None, typer.Option(min=1, max=1024, help="How many threads; torch's if not given.")]


class Planned(NamedTuple):
    """A run, and the folder that its result goes to."""

    config: Any
    out: Path

    @property
    def result(self) -> Path:
        """Its file."""
        return runs.result_path(self.out, self.config)

    @property
    def is_there(self) -> bool:
        """Whether it has finished."""
        return self.result.exists()


def make_app() -> typer.Typer:
    """A command for every experiment of the list."""
    app = typer.Typer(help="Run an experiment of the paper.", no_args_is_help=True)
    for experiment in experiments.EXPERIMENTS:
        app.command(experiment.name, help=experiment.help)(_command(experiment))
    return app


def _command(experiment: Experiment) -> Callable[..., None]:
    """The command of an experiment: its own options, then those of every training run."""

    def command(
        lrs: Rates = None,
        data: Data = None,
        out: Runs = Path("runs", experiment.name),
        resume: Resume = False,
        save_every: SaveEvery = 60,
        threads: Threads = None,
        keep_memory: KeepMemory = False,
        **own: Any,
    ) -> None:
        configs = experiment.configs(**own)
        options: Any = {"save_every": save_every, "threads": threads, "keep_memory": keep_memory, "data": data}

        def train(planned: Iterable[Planned], may_diverge: bool = False) -> None:
            run_all(experiment, planned, may_diverge, resume=resume, **options)

        if lrs is None:
            planned = [Planned(config, out) for config in configs]
            train(planned)
        else:
            planned = with_own_rates(train, experiment, configs, positive_numbers("--lrs", lrs), out)
        _show_results(experiment, [one.result for one in planned], out)

    unused = set() if experiment.dataset is not None else {"data"}
    return with_options(command, experiment.configs, unused)


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


def with_own_rates(
    train: Callable[[list[Planned], bool], None],
    experiment: Experiment,
    configs: Iterable[Any],
    lrs: Sequence[float],
    out: Path,
) -> list[Planned]:
    """Train each model with every rate from its first seed, and from the others with the best; those that finished.

    Args:
        train: trains some; the second argument says whether they may diverge.
        experiment: what is trained.
        configs: for all seeds, with any rate.
        lrs: the rates.
        out: the folder for all results; each rate has its own in it.
    """
    if Processes.launched():
        raise typer.BadParameter("the rates are tried in one process, without torchrun", param_hint="--lrs")

    def at(config: Any, lr: float) -> Planned:
        return Planned(replace(config, lr=lr), out / f"lr{lr:g}")

    models: dict[Any, list[Any]] = {}
    for config in configs:
        models.setdefault(replace(config, seed=0), []).append(config)
    tried = [[at(first, lr) for lr in lrs] for first, *_ in models.values()]
    train([one for several in tried for one in several], True)
    others = []
    for several, (_, *seeds) in zip(tried, models.values(), strict=True):
        scores = {
            one.config.lr: experiment.validation_score(results.load(one.result)) for one in several if one.is_there
        }
        if scores:
            best = max(scores, key=lambda lr: -math.inf if math.isnan(scores[lr]) else scores[lr])
            others += [at(config, best) for config in seeds]
    train(others, True)
    return [one for one in [*(one for several in tried for one in several), *others] if one.is_there]


def run_all(
    experiment: Experiment,
    planned: Iterable[Planned],
    may_diverge: bool = False,
    *,
    resume: bool,
    save_every: float = 60,
    threads: int | None = None,
    keep_memory: bool = False,
    data: Path | None = None,
) -> None:
    """Train one after the other, with a progress bar for each; those that are finished already are left alone.

    A run that may diverge has no result then; of any other it is an error.
    """
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
            (config, out)
            for config, out in planned
            if not runs.is_finished(out, config, resume, partial(data_hashes, experiment.dataset_of(config)))
        ]
        for out in {out for _, out in missing}:
            results.check_traceable(out)
        for number, (config, out) in enumerate(missing, start=1):
            try:
                title = f"{number}/{len(missing)} {config.name}"
                with _clear_memory_errors(config), _progress(title, config.steps) as on_step:
                    options = {"resume": resume, "save_every": save_every, "on_step": on_step}
                    make = partial(experiment.task, config, data)
                    outcome = runs.run(make, out, config, results.command_line(), **options)
            except Stopped as stopped:
                console.print(f"{config.name}: {stopped}. The same command with --resume goes on from there.")
                raise typer.Exit(130) from stopped
            except DivergenceError as error:
                if not may_diverge:
                    raise
                console.print(f"{config.name}: {error}", highlight=False)
                continue
            if processes.is_first:  # the others have no outcome but the time
                words = experiment.in_words(outcome), f"{outcome['ms_per_step']:.3g} ms/step"
                rate = f" at {config.lr:g}" if may_diverge else ""
                console.print(f"{config.name}{rate}: {', '.join(filter(None, words))}", highlight=False)


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


def _show_results(experiment: Experiment, paths: Sequence[Path], out: Path) -> None:
    """A table of the runs of this command, whatever else is in the folder."""
    if console.quiet:
        return
    with clear_errors():
        show(next(iter(experiment.tables(collect(paths, [experiment])))).table)
    for path in sorted(set(out.rglob("*.json")) - set(paths)):
        try:
            results.load(path)
        except (OSError, ValueError) as error:
            console.print(f"Not in the table: {error}", markup=False, highlight=False)
    console.print(f"Results are in {out}; a page with tables and curves: pairmix report {out} -o report.html")
