"""Beyond the paper: a trained GPT learns another text, with rotations, LoRA, OFT or BOFT, or all of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from matplotlib.figure import Figure
from torch import nn

from pairmix_lab import contenders
from pairmix_lab.experiments import data, options
from pairmix_lab.experiments.adapters_task import LAYERS, OF_PEFT, Config, Task, base_model, tune
from pairmix_lab.experiments.experiment import Experiment, StepCases
from pairmix_lab.experiments.gpt_task import TEXTS
from pairmix_lab.report import curves
from pairmix_lab.report.cells import in_cell, spread
from pairmix_lab.report.experiment import Case
from pairmix_lab.report.pictures import Picture, legend_below, look, styled
from pairmix_lab.report.runs import Runs, outcomes
from pairmix_lab.report.schema import AT_LEAST_ONE, COUNT, LOSS, NAME, training
from pairmix_lab.report.tables import NamedTable, Rows, Table, mebibytes, number, with_quartiles
from pairmix_lab.report.timing import Measured, measured_steps, step_time

LORA, UNTUNED = contenders.LORA.label, "no fine-tuning"
STEPS = "adapters-steps"
"""The table of step times, which needs no training run."""
RATES = {
    contenders.ROTATIONS.key: 1e-1,
    contenders.LORA.key: 1e-2,
    contenders.OFT.key: 3e-2,
    contenders.BOFT.key: 1e-1,
    contenders.FULL.key: 3e-3,
}
"""The learning rates, unless one is given: for each the best on validation of 0.001, 0.003, 0.01, 0.03 and 0.1, in runs
of 200 steps with one seed, n = 128 and two blocks; 0.3 was worse for those that are at 0.1."""


def _variants(config: Config) -> Mapping[str, Callable[[], nn.Module]]:
    """The models with other numbers of stages, by the names of their step times."""

    def build(layer: str, stages: int) -> nn.Module:
        model = base_model(config)
        tune(model, layer, stages)
        return model

    return {
        one.aliases[0]: partial(build, one.key, one.settings["stages"])
        for one in contenders.ADAPTER_STAGES
        if _can_run(one.key)
    }


def _can_run(layer: str) -> bool:
    return layer not in OF_PEFT or find_spec("peft") is not None


class AdaptersExperiment(Experiment):
    """Ways to train a small part of a trained model."""

    name = "adapters"
    title = "Adapters"
    help = "Beyond the paper: fine-tuning of a small GPT by rotations, compared with LoRA, OFT and BOFT of PEFT."
    text = (
        "A small dense GPT has learned plays, a byte at a time, and now learns news. Its weights are frozen, and what "
        "is trained are rotations before every map of its blocks, or one of PEFT's adapters of about their size; or "
        "all of its weights. Losses are of the validation part of the news, in bits per byte; less is better."
    )
    config = Config
    dataset = TEXTS[Config.text]
    fields = training(
        {"text": NAME, "depth": AT_LEAST_ONE, "length": AT_LEAST_ONE, "base_text": NAME, "base_steps": COUNT},
        {
            "valid_loss": LOSS,
            "valid_bpc": LOSS,
            "untuned_bpc": LOSS,
            "trained_parameters": COUNT,
            "training_bytes": COUNT,
        },
        {},
    )
    measure = ("valid_bpc", 1)
    step_cases = StepCases(
        widths=(Config.width,),
        layers=tuple(filter(_can_run, LAYERS)),
        settings={"base_steps": 0},
        others=_variants,
    )

    def configs(
        self,
        layers: Annotated[str, typer.Option(help=f"What to compare, of {', '.join(LAYERS)}.")] = ",".join(LAYERS),
        widths: options.Widths = str(Config.width),
        seeds: options.Seeds = "0",
        stages: Annotated[
            str, typer.Option(help="The stages of rotations, and of those whose size LoRA has; own for the fewest.")
        ] = "own,4,16",
        depth: Annotated[int, typer.Option(min=1, help="Transformer blocks.")] = Config.depth,
        length: Annotated[int, typer.Option(min=1, help="Bytes of a sequence.")] = Config.length,
        batch: Annotated[int, typer.Option(help="Sequences of a step, over all processes.")] = Config.batch,
        steps: options.Steps = Config.steps,
        base_steps: Annotated[
            int, typer.Option(min=0, help="Steps in which the base model learns first; 0 for random weights.")
        ] = Config.base_steps,
        lr: Annotated[float | None, typer.Option(help="The learning rate; chosen for each if not given.")] = None,
    ) -> list[Config]:
        chosen: list[Config] = options.grid(
            Config,
            width=options.whole_numbers("--widths", widths),
            layer=options.words("--layers", layers, LAYERS),
            stages=tuple(
                None if word == "own" else options.whole_numbers("--stages", word)[0]
                for word in options.words("--stages", stages)
            ),
            seed=options.whole_numbers("--seeds", seeds, least=0),
            depth=depth,
            length=length,
            batch=batch,
            steps=steps,
            base_steps=base_steps,
            warmup=round(0.05 * steps),
            validate_every=max(1, steps // 10),
        )
        return [replace(config, lr=RATES[config.layer] if lr is None else lr) for config in chosen]

    def task(self, config: Config, folder: Path | None = None) -> Task:
        return Task(config, folder)

    def dataset_of(self, config: Config) -> data.Dataset:
        return TEXTS[config.text]

    def in_words(self, outcome: Mapping[str, Any]) -> str:
        return f"{outcome['valid_bpc']:.3f} bits a byte, {outcome['untuned_bpc']:.3f} before"

    @property
    def table_names(self) -> Sequence[str]:
        return [self.name, STEPS]

    def table(self, name: str, results: Path) -> Table | None:
        if name != STEPS:
            return super().table(name, results)
        path = results / f"steps-{self.name}.json"
        return steps_table(measured_steps(path)) if path.exists() else None

    def notes(self, runs: Runs) -> Iterable[str]:
        yield (
            "Memory is what a training step holds beside the weights when backward begins: what the forward keeps for "
            "it, and gradients and moments of what is trained."
        )
        yield "Without a GPU, PEFT's BOFT has one butterfly factor: its rotations are block-diagonal."

    def tables(self, runs: Runs) -> Iterator[NamedTable]:
        yield NamedTable(self.name, "Where fine-tuning ended, on the whole validation part.", self.ends(runs))

    def ends(self, runs: Runs) -> Table:
        """The losses in the end, and what they cost."""
        header = ["n", "trained", "parameters", "seeds", "rate", "bits per byte", "ms per step", "times LoRA", "memory"]
        lines = []
        for case in runs.cases(self):
            untuned = next(iter(runs.at[case].values()))[0]["outcome"]["untuned_bpc"]
            lines.append([f"{case.width:,}", UNTUNED, "0", *["-"] * 2, f"{untuned:.3f}", *["-"] * 3])
            for name in runs.contenders([case]):
                chosen = runs.of(case, name)
                outcome = chosen[0]["outcome"]
                cost = [in_cell(step_time(runs, case, name)), in_cell(_times_lora(runs, case, name))]
                line = [f"{case.width:,}", name, f"{outcome['trained_parameters']:,}", str(len(chosen))]
                line += [f"{chosen[0]['config']['lr']:g}", spread(outcomes(chosen, "valid_bpc"), digits=3)]
                lines.append([*line, *cost, mebibytes(outcome["training_bytes"])])
        return [header, *lines]

    def pictures(self, runs: Runs) -> Iterator[Picture]:
        for case in runs.cases(self):
            title = f"{self.title}, {self.case_name(case)}: loss against trained parameters"
            yield Picture(f"{self.name}-{case.width}", title, by_size(runs, case, title))
            yield from curves.losses(runs, self, case, f"{self.name}-{case.width}")


@styled
def by_size(runs: Runs, case: Case, title: str) -> Figure:
    """The loss in the end against the number of trained parameters; a line for all sizes of a contender."""
    figure = Figure()
    axes = figure.subplots()
    axes.set_xscale("log")
    points: dict[str, list[tuple[int, float]]] = {}
    for name in runs.contenders([case]):
        chosen = runs.of(case, name)
        of_key = contenders.named(contenders.labelled(name).key).label
        loss = float(np.mean(outcomes(chosen, "valid_bpc")))
        points.setdefault(of_key, []).append((chosen[0]["outcome"]["trained_parameters"], loss))
    for name, found in points.items():
        axes.plot(*zip(*sorted(found), strict=True), label=name, **look(name))
    axes.set(xlabel="trained parameters", ylabel="validation loss, bits per byte", title=title)
    legend_below(figure)
    return figure


def _times_lora(runs: Runs, case: Case, name: str) -> Measured | None:
    """How many times as long as that of LoRA, of the size of the fewest stages, a step takes."""
    own, lora = (step_time(runs, case, one) for one in (name, LORA))
    if own is None or lora is None or (own.quartiles is None) != (lora.quartiles is None):
        return None
    quartiles = None if own.quartiles is None else (own.quartiles[0] / lora.value, own.quartiles[1] / lora.value)
    return Measured(own.value / lora.value, quartiles)


def steps_table(rows: Rows) -> Table:
    """The time of a training step of each, and how many times as long it is as that of LoRA of the same size."""
    at = {row["layer"]: row for row in rows}
    lines = []
    for row in rows:
        _, _, stages = row["layer"].partition("-")
        lora = at.get(f"{contenders.LORA.key}-{stages}" if stages else contenders.LORA.key)
        ratio = "-" if lora is None else number(row["ms"] / lora["ms"])
        label = contenders.named(row["layer"]).label
        lines.append([f"{row['width']:,}", label, with_quartiles(row, "ms"), ratio])
    return [["n", "trained", "ms per step", "times LoRA of its size"], *lines]


EXPERIMENT = AdaptersExperiment()
