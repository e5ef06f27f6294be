"""Beyond the paper: a small GPT on bytes, in which every map but the head is one layer or another.

A wide model with cheap layers has to compete with a narrow dense one. So contenders are compared at equal training
time, each at its best width, and each starts and learns as suits it best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from torch import nn

from pairmix_lab import contenders
from pairmix_lab.experiments import data, equal_time, options
from pairmix_lab.experiments.equal_time import SECONDS, STEPS, Setting
from pairmix_lab.experiments.experiment import Experiment, StartCase, StepCases
from pairmix_lab.experiments.gpt_task import EXTENSIONS, LAYERS, TEXTS, Config, Task, build, is_list_of_maps, usual_but
from pairmix_lab.experiments.transformer import MAPS
from pairmix_lab.report import curves
from pairmix_lab.report.cells import in_cell, spread
from pairmix_lab.report.experiment import Case, Headline
from pairmix_lab.report.pictures import Picture
from pairmix_lab.report.runs import Runs, outcomes
from pairmix_lab.report.schema import AT_LEAST_ONE, FLAG, LOSS, NAME, POSITIVE, Value, nullable, training
from pairmix_lab.report.summary import headline_case, spm_contender
from pairmix_lab.report.tables import NamedTable, Row, Rows, Table, number
from pairmix_lab.report.timing import measured_steps, speedup, step_time

DENSE, SPM = contenders.DENSE.label, contenders.SPM.label
HYBRIDS = (contenders.SPM_DENSE_ATTENTION, contenders.SPM_DENSE_FEED_FORWARD)
WIDTHS = (128, 256, 512, 1024)
RATES = {
    contenders.DENSE.key: {128: 2e-3, 256: 1e-3, 512: 5e-4, 1024: 2.5e-4},
    contenders.SPM.key: {128: 4e-3, 256: 4e-3, 512: 1e-3, 1024: 5e-4},
    contenders.COMPANION.key: {128: 4e-3, 256: 4e-3, 512: 1e-3, 1024: 5e-4},
    contenders.LOW_RANK.key: {128: 4e-3, 256: 4e-3, 512: 1e-3, 1024: 5e-4},
    contenders.MONARCH.key: {128: 2e-3, 256: 1e-3, 512: 5e-4, 1024: 2.5e-4},
}
"""The learning rates by layer and width: what was best on validation in runs of 30 seconds, where there are some."""


def _hybrids(config: Config) -> Mapping[str, Callable[[], nn.Module]]:
    """The models of SPM in which some maps are dense, by the names of their step times."""
    spm = replace(config, layer=contenders.SPM.key)
    return {one.aliases[0]: partial(build, replace(spm, dense_maps=one.settings["dense_maps"])) for one in HYBRIDS}


class GPTExperiment(Experiment):
    """Transformers with one kind of map or another."""

    name = "gpt"
    title = "GPT"
    help = "Beyond the paper: a small GPT on bytes, all of whose maps are compared, at equal steps or equal time."
    text = (
        "A small GPT that predicts the next byte. Every map of its blocks is one layer or another; embeddings and head "
        "are dense. Losses are of the validation part, in nats and in bits per byte; less is better."
    )
    config = Config
    dataset = TEXTS[Config.text]
    fields = training(
        {
            "text": NAME,
            "depth": AT_LEAST_ONE,
            "length": AT_LEAST_ONE,
            "tied": FLAG,
            "dense_maps": Value(f"some of {','.join(MAPS)} in this order", is_list_of_maps),
            "budget": nullable(POSITIVE),
        },
        {"valid_loss": LOSS, "valid_bpc": LOSS},
        {},
    )
    measure = ("valid_bpc", 1)
    in_short = {  # noqa: RUF012
        "small GPT, 30 s of training: bits per byte (less is better)": (
            name,
            Case(name, 512, str(Setting("shakespeare", 30, SECONDS))),
        )
    }
    step_cases = StepCases(widths=WIDTHS, layers=LAYERS, seconds=2, others=_hybrids)
    start_cases = (StartCase("GPT", {"depth": 2, "steps": 200, "warmup": 10}, (5e-4, 1e-3, 2e-3, 4e-3)),)

    def configs(
        self,
        text: Annotated[str, typer.Option(help=f"What to learn from: {' or '.join(TEXTS)}.")] = Config.text,
        layers: Annotated[
            str, typer.Option(help=f"Which layers to compare, of {', '.join((*LAYERS, *EXTENSIONS))}.")
        ] = "dense,spm,lowrank",
        widths: options.Widths = str(Config.width),
        seeds: options.Seeds = "0",
        blocks: options.Blocks = "general",
        stages: options.Stages = Config.stages,
        dense_maps: Annotated[
            str, typer.Option(help=f"Maps that stay dense in models with SPM, of {', '.join(MAPS)}.")
        ] = Config.dense_maps,
        depth: Annotated[int, typer.Option(min=1, help="Transformer blocks.")] = Config.depth,
        tied: Annotated[bool, typer.Option("--tied", help="Let the head be the table of bytes.")] = Config.tied,
        length: Annotated[int, typer.Option(min=1, help="Bytes of a sequence.")] = Config.length,
        batch: Annotated[int, typer.Option(help="Sequences of a step, over all processes.")] = Config.batch,
        steps: Annotated[int, typer.Option(help="Training steps, unless --seconds is given.")] = Config.steps,
        seconds: Annotated[
            str | None,
            typer.Option(help="Seconds of training, such as 60,600: each is as many steps as fit by --times."),
        ] = None,
        times: Annotated[Path, typer.Option(help="The times of a step, from pairmix bench steps.")] = Path(
            "results", "steps-gpt.json"
        ),
        lr: Annotated[
            float | None,
            typer.Option(help="The learning rate; without it, one chosen on validation for the layer and width."),
        ] = None,
        embedding_rate: options.EmbeddingRate = Config.embedding_rate,
    ) -> list[Config]:
        chosen = options.grid(
            Config,
            text=text,
            width=options.whole_numbers("--widths", widths),
            layer=options.words("--layers", layers, (*LAYERS, *EXTENSIONS)),
            block=options.words("--blocks", blocks, options.BLOCKS),
            seed=options.whole_numbers("--seeds", seeds, least=0),
            stages=stages,
            dense_maps=_in_order(dense_maps),
            depth=depth,
            tied=tied,
            length=length,
            batch=batch,
            steps=steps,
            budget=(None,) if seconds is None else options.positive_numbers("--seconds", seconds),
            lr=Config.lr if lr is None else lr,
            embedding_rate=embedding_rate,
        )
        try:
            rows = [] if seconds is None else measured_steps(times)
            return [planned(config, lr, rows, times) for config in chosen]
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=None if seconds is None else "--seconds") from error

    def task(self, config: Config, folder: Path | None = None) -> Task:
        return Task(config, folder)

    def dataset_of(self, config: Config) -> data.Dataset:
        return TEXTS[config.text]

    def in_words(self, outcome: Mapping[str, Any]) -> str:
        return f"{outcome['valid_loss']:.3f} nats, {outcome['valid_bpc']:.3f} bits a byte of the validation part"

    def case(self, row: Row) -> Case:
        if "steps" not in row:  # the time of a step, which depends neither on the text nor on how many there are
            return Case(self.name, row["width"])
        shape = usual_but(row)
        if row["dense_maps"] and "dense_maps" not in contenders.of_config(row).settings:
            shape += (f"dense {row['dense_maps'].replace(',', ' ')}",)
        budget = row["budget"]
        trained = (row["steps"], STEPS) if budget is None else (budget, SECONDS)
        return Case(self.name, row["width"], str(Setting(row["text"], *trained, shape)))

    def timed_as(self, case: Case) -> Case:
        return case._replace(setting=", ".join(Setting.of(case).shape) or None)

    def order(self, case: Case) -> tuple[object, ...]:
        setting = Setting.of(case)
        return setting.text, setting.shape, setting.unit, setting.amount, case.width

    @property
    def table_names(self) -> Sequence[str]:
        return [self.name, f"{self.name}-frontier", f"{self.name}-time-to-dense"]

    def notes(self, runs: Runs) -> Iterable[str]:
        yield (
            "A budget of seconds is as many steps as fit into it by the median time that `pairmix bench steps` "
            "measured, with all contenders in turns; validation is not counted."
        )

    def tables(self, runs: Runs) -> Iterator[NamedTable]:
        yield NamedTable(self.name, "Where training ended, on the whole validation part.", self.ends(runs))
        cases, (_, frontier, to_dense) = runs.cases(self), self.table_names
        if equal_time.by_budget(cases):
            caption = "At equal training time: the best width of each layer."
            yield NamedTable(frontier, caption, equal_time.frontier_table(runs, cases))
        reached = equal_time.time_to_dense(runs, cases)
        if len(reached) > 1:
            caption = "Seconds of training until a model is as good as the dense one of its width is in the end."
            yield NamedTable(to_dense, caption, reached)

    def pictures(self, runs: Runs) -> Iterator[Picture]:
        cases = runs.cases(self)
        for name, budgets in equal_time.by_budget(cases).items():
            title = f"{self.title}, {name}: loss at the best width against training time"
            figure = equal_time.frontier_picture(runs, title, budgets)
            yield Picture(f"{self.name}-frontier-{_in_file_name(name)}", title, figure)
        for case in equal_time.longest(cases):
            name = f"{self.name}-{_in_file_name(str(case.setting))}-{case.width}"
            yield from curves.losses(runs, self, case, name)

    def headline(self, runs: Runs) -> Headline:
        case = headline_case(runs, equal_time.longest(runs.cases(self)), {512})
        own = spm_contender(runs, [case])
        dense, spm = (runs.of(case, name) for name in (DENSE, own))
        bits = [outcomes(chosen, "valid_bpc") for chosen in (dense, spm)]
        gap = f"{np.mean(bits[1]) - np.mean(bits[0]):+.2f}" if all(bits) else "-"
        steps = "; ".join(f"{chosen[0]['config']['steps']:,}" if chosen else "-" for chosen in (dense, spm))
        measured = speedup(runs, case, own)
        names = [f"{DENSE}, bits per byte", f"{own}, bits per byte", "after steps", "gap", "times as fast"]
        cells = [*(spread(values, digits=3) for values in bits), steps, gap, in_cell(measured)]
        table = [["", "ours"], *(list(line) for line in zip(names, cells, strict=True))]
        ratio = number(measured.value if measured else None)
        return Headline(f"{self.title}, {self.case_name(case)}", (gap, "bits per byte"), ratio, table)

    def ends(self, runs: Runs) -> Table:
        """The losses of every layer in the end, and what it cost."""
        header = ["layer", "text", "budget", "n", "steps", "seeds", "nats", "bits"]
        lines = []
        for case in runs.cases(self):
            setting = Setting.of(case)
            budget = f"{setting.amount:,g} s" if setting.unit == SECONDS else "-"
            for name in runs.contenders([case]):
                chosen = runs.of(case, name)
                steps = f"{chosen[0]['config']['steps']:,}"
                losses = [spread(outcomes(chosen, key), digits=3) for key in ("valid_loss", "valid_bpc")]
                ratio = in_cell(speedup(runs, case, name), quartiles=name != DENSE)
                size = f"{chosen[0]['outcome']['parameters']:,}"
                line = [name, setting.model_and_text, budget, f"{case.width:,}", steps, str(len(chosen)), *losses]
                lines.append([*line, in_cell(step_time(runs, case, name)), ratio, size])
        return [[*header, "ms per step", "dense / this", "parameters"], *lines]


EXPERIMENT = GPTExperiment()


def rate(layer: str, width: int) -> float:
    """The learning rate of the nearest width, by their ratio, that was tried."""
    rates = RATES.get(layer, RATES[contenders.SPM.key])
    return rates[min(rates, key=lambda tried: abs(math.log(tried / width)))]


def planned(config: Config, lr: float | None, rows: Rows, path: Path) -> Config:
    """The config with what follows from the others: steps from the budget, warm-up, rate, and when it is validated.

    Args:
        config: as it was asked for.
        lr: the learning rate; None for that of the layer and width.
        rows: times of training steps, for a budget.
        path: where they come from.
    """
    steps = config.steps if config.budget is None else _steps_within(config.budget, config, rows, path)
    return replace(
        config,
        steps=steps,
        lr=rate(config.layer, config.width) if lr is None else lr,
        warmup=round(0.05 * steps),
        validate_every=max(20, math.ceil(steps / 40)),
    )


def _steps_within(budget: float, config: Config, rows: Rows, path: Path) -> int:
    contender = contenders.of_config(asdict(config)).label
    # What the times are not of: they are of the default model, but for the layer and the width.
    others = [f"{name} {value}" for name in ("stages", "rank") if (value := getattr(config, name)) is not None]
    others += Setting.of(EXPERIMENT.case(asdict(config))).shape
    steps = equal_time.steps_within(budget, rows, config.experiment, contender, config.width, config.batch)
    if steps is None or others:
        what = ", ".join([contender, f"width {config.width}", f"batch {config.batch}", *others])
        raise ValueError(f"{path} has no time of a step of {config.experiment} with {what}; --steps needs none")
    return steps


def _in_order(dense_maps: str) -> str:
    chosen = options.words("--dense-maps", dense_maps, MAPS) if dense_maps else ()
    return ",".join(name for name in MAPS if name in chosen)


def _in_file_name(words: str) -> str:
    return words.replace(", ", "-").replace(" ", "").replace(",", "")
