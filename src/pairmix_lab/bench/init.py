"""Which start trains best, on what people train?

Short runs of every experiment that has some. Each start of SPM is trained with every learning rate of the case from the
first seed; the rate with the least validation loss is its own, and the other seeds are trained with that. So all starts
get the same effort, and so does a dense layer, to compare with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pairmix.nn.init import DEFAULT, INITS
from pairmix_lab import contenders, experiments
from pairmix_lab.bench.jobs import Finished, processes, submitted
from pairmix_lab.bench.pictures import column
from pairmix_lab.contenders import DENSE, SPM
from pairmix_lab.experiments import data
from pairmix_lab.experiments.compared import OWN, Compared
from pairmix_lab.experiments.experiment import Experiment, StartCase
from pairmix_lab.report.cells import spread
from pairmix_lab.report.pictures import legend_below, styled
from pairmix_lab.report.tables import Row, Rows, Table, distinct
from pairmix_lab.training.loop import DivergenceError, Run
from pairmix_lab.training.processes import Processes

Outcome = dict[str, float | None]
"""What a run came to: `first_loss`, `valid_loss` and, if it classifies, `valid_accuracy`; None if it diverged."""


def all_cases() -> tuple[tuple[Experiment, StartCase], ...]:
    """What every experiment wants starts to be compared on."""
    return tuple((one, case) for one in experiments.EXPERIMENTS for case in one.start_cases)


@dataclass(frozen=True)
class Candidate:
    """A layer that starts in some way, in a case: what gets a learning rate of its own."""

    experiment: Experiment
    case: StartCase
    width: int
    start: Mapping[str, str]

    @property
    def lrs(self) -> list[float]:
        """The learning rates to try."""
        return self.case.lrs_at(self.width)

    def config(self, lr: float, seed: int) -> Compared:
        """Of a run, which is validated after its first step and after its last."""
        config: Compared = self.experiment.config(
            **self.case.settings, **self.start, width=self.width, lr=lr, seed=seed
        )
        return replace(config, validate_every=config.steps)

    def row(self, lr: float, seed: int, outcome: Outcome, chosen: bool) -> dict[str, Any]:
        """What the result says of a run."""
        about = {"case": self.case.name, "width": self.width, **self.start}
        return {**about, "seed": seed, "lr": lr, **outcome, "chosen": chosen}


@dataclass(frozen=True)
class Config:
    """The grid.

    Attributes:
        cases: with their experiments.
        widths: in the place of those of the cases; None for those.
        seeds: the rate is chosen with the first.
        blocks: of SPM.
    """

    cases: tuple[tuple[Experiment, StartCase], ...] = field(default_factory=all_cases)
    widths: tuple[int, ...] | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    blocks: tuple[str, ...] = ("general",)

    @cached_property
    def candidates(self) -> list[Candidate]:
        """All that are compared, in the order of the tables."""
        starts = [{"layer": SPM.key, "init": init, "block": block} for block, init in product(self.blocks, INITS)]
        starts.append({"layer": DENSE.key, "init": OWN, "block": "general"})
        return [
            Candidate(experiment, case, width, start)
            for experiment, case in self.cases
            for width in self.widths or case.widths
            for start in starts
        ]

    @property
    def runs(self) -> int:
        """How many runs there are, if no candidate diverges with every rate."""
        return sum(len(one.lrs) + len(self.seeds) - 1 for one in self.candidates)

    def as_dict(self) -> dict[str, Any]:
        """The settings for the result."""
        cases = [
            {"experiment": experiment.name, **asdict(case), "widths": self.widths or case.widths}
            for experiment, case in self.cases
        ]
        return {"experiment": "init", "cases": cases, "seeds": self.seeds, "blocks": self.blocks, "threads": 1}


def hashes(config: Config, folder: Path | None = None) -> dict[str, str]:
    """The hashes of the files that the experiments read."""
    return {name: value for read in _read(config, folder).values() for name, value in read.items()}


def _read(config: Config, folder: Path | None) -> dict[str, dict[str, str]]:
    """The hashes of the files that each experiment reads, by its name."""
    chosen = {experiment.name: experiment.dataset for experiment, _ in config.cases}
    return {name: {} if one is None else data.hashes(one, folder) for name, one in chosen.items()}


def run(
    config: Config,
    finished: Finished,
    folder: Path | None = None,
    jobs: int = 1,
    on_run: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """Train the whole grid; the rows of the result.

    Args:
        config: the grid.
        finished: has the outcomes of runs that are not to be run again, and gets those of the others.
        folder: where the data is; without it the originals are downloaded.
        jobs: how many runs at once.
        on_run: called for every run when its outcome is known.

    Raises:
        ValueError: if one of the processes was killed.
    """
    first, *others = config.seeds
    read = _read(config, folder)
    outcomes: dict[Compared, Outcome] = {}

    def train(pool: ProcessPoolExecutor, runs: Iterable[tuple[Experiment, Compared]]) -> None:
        missing = []
        for experiment, one in runs:
            described = {"config": asdict(one), "data": read[experiment.name]}
            if described in finished:
                outcomes[one] = finished[described]
                on_run()
            else:
                missing.append((experiment, one, described))
        futures = submitted(pool, trained, ((experiment, one, folder) for experiment, one, _ in missing))
        waiting = dict(zip(futures, missing, strict=True))
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                _, one, described = waiting.pop(future)
                outcomes[one] = future.result()
                finished.add(described, outcomes[one])
                on_run()

    def losses(one: Candidate) -> dict[float, float | None]:
        return {lr: outcomes[one.config(lr, first)]["valid_loss"] for lr in one.lrs}

    try:
        with processes(jobs) as pool:
            train(pool, ((one.experiment, one.config(lr, first)) for one in config.candidates for lr in one.lrs))
            rates = [best_rate(losses(one)) for one in config.candidates]
            chosen = [(one, rate) for one, rate in zip(config.candidates, rates, strict=True) if rate is not None]
            train(pool, ((one.experiment, one.config(rate, seed)) for one, rate in chosen for seed in others))
    except BrokenProcessPool as error:
        raise ValueError(
            "a process that trained was killed, for lack of memory perhaps: --resume goes on, also with fewer --jobs"
        ) from error
    return [
        one.row(lr, seed, outcomes[one.config(lr, seed)], lr == rate)
        for one, rate in zip(config.candidates, rates, strict=True)
        for seed in config.seeds
        for lr in one.lrs
        if seed == first or lr == rate
    ]


def trained(experiment: Experiment, config: Compared, folder: Path | None = None) -> Outcome:
    """Train a model and validate it."""
    run = Run(experiment.task(config, folder), Processes(), None, resume=False)
    last: dict[str, float] = {}
    try:
        for _ in range(config.steps):
            run.advance()
        last = run.rows[-1]
    except DivergenceError:
        pass
    first = run.rows[0] if run.rows else {}
    outcome = {"first_loss": _finite(first.get("valid_loss")), "valid_loss": _finite(last.get("valid_loss"))}
    return outcome | ({"valid_accuracy": last.get("valid_accuracy")} if "valid_accuracy" in first else {})


def best_rate(losses: Mapping[float, float | None]) -> float | None:
    """The learning rate with the least loss, of equal ones the smallest; None if it diverged with all of them."""
    known = [(loss, lr) for lr, loss in losses.items() if _finite(loss) is not None]
    return min(known)[1] if known else None


def _finite(loss: float | None) -> float | None:
    """A loss that JSON can hold; None for one that diverged."""
    return loss if loss is not None and math.isfinite(loss) else None


def _label(row: Row) -> str:
    """What a start is called."""
    if row["layer"] != SPM.key:
        return contenders.named(row["layer"]).label
    return f"{row['init']}, rotation" if row["block"] == "rotation" else str(row["init"])


def _lines(rows: Rows) -> dict[tuple[str, int], dict[str, Rows]]:
    """The rows of every start, by its label, for each case and width."""
    labels = distinct(map(_label, rows))
    found: dict[tuple[str, int], dict[str, Rows]] = {}
    for case in distinct((row["case"], row["width"]) for row in rows):
        own = [row for row in rows if (row["case"], row["width"]) == case]
        found[case] = {label: [row for row in own if _label(row) == label] for label in labels}
    return found


def _by_start(rows: Rows, cells: Callable[[Mapping[str, Rows]], Mapping[str, str]]) -> Table:
    """A line for every case and width, a column for every start.

    Args:
        rows: of the result.
        cells: gives those of a line by the labels of the starts, from their rows.
    """
    lines = [[case, f"{width:,}", *cells(line).values()] for (case, width), line in _lines(rows).items()]
    return [["case", "n", *distinct(map(_label, rows))], *lines]


def _each(cell: Callable[[Rows], str]) -> Callable[[Mapping[str, Rows]], Mapping[str, str]]:
    """The cells of a line, if each has to do with its own start alone."""
    return lambda line: {label: cell(own) for label, own in line.items()}


def _measured(rows: Rows, key: str, unit: float = 1, digits: int = 3) -> str:
    """The mean and the spread over the seeds with the chosen rate, and how many of them diverged."""
    if not any(key in row for row in rows):
        return "-"
    values = [row.get(key) for row in rows if row["chosen"]]
    known = [value for value in values if value is not None]
    if not known:
        return "diverged"
    lost = len(values) - len(known)
    return spread(known, unit=unit, digits=digits) + f", {lost} diverged" * (lost > 0)


def _accuracy(rows: Rows) -> str:
    return _measured(rows, "valid_accuracy", unit=100, digits=1)


def _rate(rows: Rows) -> str:
    """The chosen learning rate; marked if it is the smallest or the largest that was tried."""
    chosen = next((row["lr"] for row in rows if row["chosen"]), None)
    if chosen is None:
        return "diverged" if rows else "-"
    tried = {row["lr"] for row in rows}
    at_edge = {min(tried): " (smallest)", max(tried): " (largest)"} if len(tried) > 1 else {}
    return f"{chosen:g}{at_edge.get(chosen, '')}"


def _average(rows: Rows) -> float:
    """The validation loss with the chosen rate, infinite if one of the seeds diverged."""
    losses = [row["valid_loss"] for row in rows if row["chosen"]]
    return math.fsum(losses) / len(losses) if losses and None not in losses else math.inf


def table(rows: Rows) -> Table:
    """Every start of every case, with its own rate: where it began and where it came to."""
    lines = [
        [
            case,
            f"{width:,}",
            label,
            _rate(own),
            *(_measured(own, key) for key in ("first_loss", "valid_loss")),
            _accuracy(own),
        ]
        for (case, width), by_label in _lines(rows).items()
        for label, own in by_label.items()
        if own
    ]
    return [["case", "n", "start", "rate", "first loss", "loss", "accuracy, %"], *lines]


def summary(rows: Rows) -> Table:
    """The validation loss from every start with its own rate; the best start of SPM is bold."""

    def cells(line: Mapping[str, Rows]) -> Mapping[str, str]:
        written = {label: _measured(own, "valid_loss") for label, own in line.items()}
        averages = {label: _average(own) for label, own in line.items() if own and own[0]["layer"] == SPM.key}
        best = min(averages.values(), default=math.inf)
        bold = [label for label, average in averages.items() if average == best < math.inf]
        return written | {label: f"**{written[label]}**" for label in bold}

    return _by_start(rows, cells)


def accuracies(rows: Rows) -> Table:
    """The validation accuracy in percent, of the cases that classify."""
    classify = {row["case"] for row in rows if "valid_accuracy" in row}
    return _by_start([row for row in rows if row["case"] in classify], _each(_accuracy))


def transfer(rows: Rows) -> Table:
    """How SPM, from its default start, does with the best rate of the dense layer, beside its own best rate."""
    header = ["case", "n", "rate: dense", "rate: SPM", "loss of SPM: dense's rate", "loss of SPM: own rate", "ratio"]
    lines = []
    for (case, width), by_label in _lines(rows).items():
        dense = [row for own in by_label.values() for row in own if row["layer"] == DENSE.key]
        spm = [row for own in by_label.values() for row in own if _is_default(row)]
        chosen = next((row for row in spm if row["chosen"]), None)
        best = next((row["lr"] for row in dense if row["chosen"]), None)
        at_dense = next((row for row in spm if chosen and (row["lr"], row["seed"]) == (best, chosen["seed"])), None)
        if chosen is None or at_dense is None or at_dense["valid_loss"] is None:
            continue
        losses = at_dense["valid_loss"], chosen["valid_loss"]
        cells = [f"{best:g}", f"{chosen['lr']:g}", *(f"{loss:.3f}" for loss in losses), f"{losses[0] / losses[1]:.3f}"]
        lines.append([case, f"{width:,}", *cells])
    return [header, *lines]


def _is_default(row: Row) -> bool:
    return bool((row["layer"], row["init"], row["block"]) == (SPM.key, DEFAULT, "general"))


def rates(rows: Rows) -> Table:
    """The learning rate of every start."""
    return _by_start(rows, _each(_rate))


@styled
def picture(rows: Rows) -> Figure:
    """The validation loss from every start with its own rate: a panel for each case, a point for each seed."""
    cases, labels, widths = column(rows, "case"), distinct(map(_label, rows)), column(rows, "width")
    columns = min(3, len(cases))
    lines = math.ceil(len(cases) / columns)
    figure = Figure(figsize=(4.2 * columns, 0.8 + (0.4 * len(labels) + 0.9) * lines))
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for axes, case in zip(panels, cases, strict=False):
        for number, width in enumerate(widths):
            own = [row for row in rows if (row["case"], row["width"]) == (case, width) and row["chosen"]]
            shown = [row for row in own if row["valid_loss"] is not None]
            places = [labels.index(_label(row)) + 0.25 * (number - (len(widths) - 1) / 2) for row in shown]
            losses = [row["valid_loss"] for row in shown]
            axes.plot(losses, places, "o", color=f"C{number}", alpha=0.7, label=f"n = {width:,}")
        axes.set(title=case, xlabel="validation loss")
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.5, -0.5)
    for axes in list(figure.axes)[len(cases) :]:
        axes.remove()
    legend_below(figure)
    return figure


TABLES = {
    "init": summary,
    "init-accuracy": accuracies,
    "init-rates": rates,
    "init-starts": table,
    "init-transfer": transfer,
}
