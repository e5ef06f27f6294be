"""Section 9.3: predict the next byte of Shakespeare's plays.

The paper's "single large linear projection" is read as the map that a recurrent network applies to its state at every
step. A byte adds its row of a table to that, and a dense map reads the next byte off the state. Only the recurrent map
differs between the models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from torch import nn

from pairmix_lab import contenders
from pairmix_lab.contenders import TRAINED, count_parameters
from pairmix_lab.experiments import data, options
from pairmix_lab.experiments.experiment import Experiment, StartCase, StepCases
from pairmix_lab.experiments.language_models import CELLS, LanguageModel, TorchRNN, generate
from pairmix_lab.experiments.texts import TextConfig, TextTask
from pairmix_lab.report import curves
from pairmix_lab.report.cells import in_cell, spread
from pairmix_lab.report.experiment import Case, Headline
from pairmix_lab.report.pictures import Picture
from pairmix_lab.report.runs import Runs, outcomes, validated
from pairmix_lab.report.schema import LOSS, NAME, training
from pairmix_lab.report.summary import headline, headline_case, spm_contender
from pairmix_lab.report.tables import NamedTable, Table, number
from pairmix_lab.report.timing import speedup, step_time

DENSE, SPM = contenders.DENSE.label, contenders.SPM.label
SHAKESPEARE = data.Dataset(
    "shakespeare",
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare",
    {"input.txt": "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"},
)
# Of short runs, with which starts are compared. Clipped gradients bear larger rates.
SHORT = {"length": 64, "stages": None, "decay": "cosine", "warmup": 20, "clip": 1.0}
SHORT_LRS = (3e-3, 1e-2, 3e-2, 1e-1)


class Evaluated(NamedTuple):
    """One row of the paper's table: losses in nats, and bits per character."""

    step: int
    train_nll: float
    valid_nll: float
    valid_bpc: float
    ms: float


PAPER_WIDTH, PAPER_STAGES = 4096, 12
PAPER = {
    DENSE: [
        Evaluated(1, 5.56, 6.54, 9.44, 22828),
        Evaluated(200, 2.20, 2.28, 3.30, 23130),
        Evaluated(400, 2.10, 2.26, 3.26, 23052),
        Evaluated(600, 2.11, 2.17, 3.13, 22216),
        Evaluated(800, 2.02, 2.14, 3.08, 21884),
    ],
    SPM: [
        Evaluated(1, 5.53, 4.23, 6.10, 4901),
        Evaluated(200, 3.21, 3.19, 4.61, 5725),
        Evaluated(400, 2.90, 2.87, 4.14, 5729),
        Evaluated(600, 2.71, 2.64, 3.81, 5730),
        Evaluated(800, 2.57, 2.58, 3.03, 5736),
        Evaluated(1000, 1.59, 2.09, 2.98, 5738),
    ],
}


def inconsistent() -> list[tuple[str, Evaluated]]:
    """The rows of the paper in which bits per character are not the loss in bits, by more than rounding explains."""
    rounding = 0.005 / math.log(2) + 0.005
    return [
        (layer, row)
        for layer, rows in PAPER.items()
        for row in rows
        if abs(row.valid_nll / math.log(2) - row.valid_bpc) > rounding + 1e-9
    ]


@dataclass(frozen=True, kw_only=True)
class Config(TextConfig):
    """The paper's settings.

    Attributes:
        layer: which map, of `TRAINED`.
        width: of the state.
        cell: `"rnn"` (Elman), `"gru"` or `"attention"`.
    """

    experiment: str = "shakespeare"
    width: int = 4096
    cell: str = "rnn"
    stages: int | None = PAPER_STAGES
    steps: int = 2000
    batch: int = 32
    lr: float = 1e-3
    decay: str = "constant"
    validate_every: int = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("layer", TRAINED)
        self._check_choice("cell", CELLS)

    @property
    def name(self) -> str:
        """What its files are called."""
        return f"{self.cell}-{self.kind}-{self.width}-seed{self.seed}"


class Task(TextTask):
    """Sequences of bytes from random places of the text; its last tenth is for validation."""

    def __init__(self, config: Config, folder: Path | None = None) -> None:
        text = read_shakespeare(data.fetch(SHAKESPEARE, "input.txt", folder))
        self.data = {"shakespeare/input.txt": data.sha256(text)}
        super().__init__(config, *split(text))

    def build(self) -> nn.Module:
        return build(self.config)

    def conclude(self, model: nn.Module) -> dict[str, Any]:
        assert isinstance(model, LanguageModel)
        return {
            **self.validate_all(model),
            "mixer_parameters": count_parameters(model.mixer),
            "data": "tiny Shakespeare",
            "samples": [generate(model, b"\n", 500, seed).decode("latin-1") for seed in range(2)],
        }


def build(config: Config) -> LanguageModel:
    """The model of a config."""
    return LanguageModel(config.make, config.width, config.cell)


def _also_timed(config: Config) -> Mapping[str, Callable[[], nn.Module]]:
    """More stages, and the Elman cell of torch, which has no other cell that computes the same as ours."""
    several = [one for one in contenders.SPM_STAGES if one.settings["stages"] % PAPER_STAGES == 0]
    found: dict[str, Callable[[], nn.Module]] = {
        one.aliases[0]: partial(build, replace(config, layer=one.key, **one.settings)) for one in several
    }
    return found | ({contenders.TORCH_RNN.key: partial(TorchRNN, config.width)} if config.cell == "rnn" else {})


class ShakespeareExperiment(Experiment):
    """Language models with one recurrent map or another."""

    name = "shakespeare"
    title = "Shakespeare"
    help = "Section 9.3: predict the next byte of Shakespeare. The dense side, --layers dense, takes hours."
    text = (
        "A model of the next character. NLL is the negative log-likelihood of the validation part in nats, "
        "BPC the same in bits per character; less is better."
    )
    config = Config
    dataset = SHAKESPEARE
    setting, setting_shape, setting_order = "cell", NAME, tuple(CELLS)
    fields = training({"cell": NAME}, {"valid_loss": LOSS, "valid_bpc": LOSS}, {})
    measure = ("valid_bpc", 1)
    in_short = {  # noqa: RUF012
        "recurrent network, 600 steps: bits per byte (less is better)": ("elman", Case(name, 1024, "rnn"))
    }

    # A dense step takes seconds.
    step_cases = StepCases(widths=(PAPER_WIDTH,), settings={"cell": "rnn"}, seconds=4, others=_also_timed)
    start_cases = (
        StartCase("Elman", {**SHORT, "steps": 300}, SHORT_LRS),
        # Fewer steps: a dense one takes three times as long.
        StartCase("GRU", {**SHORT, "cell": "gru", "steps": 150}, SHORT_LRS),
    )

    def configs(
        self,
        layers: options.Layers = "spm",
        cell: Annotated[str, typer.Option(help=f"What mixes the text: {', '.join(CELLS)}.")] = Config.cell,
        widths: options.Widths = str(Config.width),
        seeds: options.Seeds = "0",
        blocks: options.Blocks = "general",
        length: Annotated[int, typer.Option(min=1, help="Bytes of a sequence.")] = Config.length,
        stages: options.Stages = Config.stages,
        steps: options.Steps = Config.steps,
        batch: options.BatchSize = Config.batch,
        lr: options.Rate = Config.lr,
        decay: options.Decay = Config.decay,
        warmup: options.Warmup = Config.warmup,
        clip: options.Clip = Config.clip,
        inits: options.Inits = Config.init,
        rank: options.Rank = Config.rank,
        layer_rate: options.LayerRate = Config.layer_rate,
        embedding_rate: options.EmbeddingRate = Config.embedding_rate,
    ) -> list[Config]:
        return options.grid(
            Config,
            cell=cell,
            width=options.whole_numbers("--widths", widths),
            layer=options.words("--layers", layers, TRAINED),
            block=options.words("--blocks", blocks, options.BLOCKS),
            seed=options.whole_numbers("--seeds", seeds, least=0),
            length=length,
            stages=stages,
            steps=steps,
            batch=batch,
            lr=lr,
            decay=decay,
            warmup=warmup,
            clip=clip,
            init=options.words("--inits", inits, options.INITS),
            rank=rank,
            layer_rate=layer_rate,
            embedding_rate=embedding_rate,
        )

    def task(self, config: Config, folder: Path | None = None) -> Task:
        return Task(config, folder)

    def in_words(self, outcome: Mapping[str, Any]) -> str:
        return f"{outcome['valid_bpc']:.3f} bits a byte of the validation part"

    @property
    def table_names(self) -> Sequence[str]:
        return [self.name, f"{self.name}-steps"]

    def notes(self, runs: Runs) -> Iterable[str]:
        rows = [
            f"{layer} at step {row.step:,}: {row.valid_nll:.2f} nats are {row.valid_nll / math.log(2):.2f} bits, "
            f"printed is {row.valid_bpc:.2f}"
            for layer, row in inconsistent()
        ]
        yield (
            "The paper does not say which kind of network its Shakespeare model is. "
            f"Its columns of nats and bits disagree in places ({'; '.join(rows)})."
        )

    def tables(self, runs: Runs) -> Iterator[NamedTable]:
        yield NamedTable(self.name, "Where training ended, on the whole validation part.", self.ends(runs))
        main = self.headline_case(runs)
        for case in runs.cases(self):
            name = f"{self.name}-steps" if case == main else f"{self.name}-steps-{case.setting}-{case.width}"
            yield NamedTable(name, f"As training went on: {self.case_name(case)}.", self.by_step(runs, case))

    def pictures(self, runs: Runs) -> Iterator[Picture]:
        for case in runs.cases(self):
            yield from curves.losses(runs, self, case, f"{self.name}-{case.setting}-{case.width}")

    def headline_case(self, runs: Runs) -> Case:
        """The case that says most."""
        return headline_case(runs, runs.cases(self), {PAPER_WIDTH})

    def headline(self, runs: Runs) -> Headline:
        case = self.headline_case(runs)
        dense, spm = (PAPER[name][-1] for name in (DENSE, SPM))
        reported = {name: [{row.step: row.valid_bpc for row in rows}] for name, rows in PAPER.items()}
        theirs = [f"{dense.valid_bpc:.2f}", f"{spm.valid_bpc:.2f}", f"{dense.step:,}; {spm.step:,}"]
        theirs += [_gap_at_equal_step(reported), number(dense.ms / spm.ms)]
        own = spm_contender(runs, [case])
        chosen = {DENSE: runs.of(case, DENSE), SPM: runs.of(case, own)}
        ours = [spread(outcomes(many, "valid_bpc")) for many in chosen.values()]
        ours.append("; ".join(f"{many[0]['config']['steps']:,}" if many else "-" for many in chosen.values()))
        histories = {
            name: [{step: row["valid_loss"] / math.log(2) for step, row in validated(run).items()} for run in many]
            for name, many in chosen.items()
        }
        gap = _gap_at_equal_step(histories)
        names = [f"{DENSE}, BPC", f"{own}, BPC", "after steps", "gap, equal steps", "times as fast"]
        unit = (gap, "bits per character")
        return headline(runs, self, case, gap=unit, names=names, theirs=theirs, ours=[*ours, gap])

    def ends(self, runs: Runs) -> Table:
        """The losses of every layer in the end on the whole validation part, and what it cost."""
        header = ["layer", "cell", "n", "steps", "seeds", "NLL", "BPC", "ms per step", "dense / this", "parameters"]
        lines = []
        for name, rows in PAPER.items():
            last, dense = rows[-1], PAPER[DENSE][-1]
            losses = [f"{last.valid_nll:.2f}", f"{last.valid_bpc:.2f}"]
            line = [f"{name}, paper", "-", f"{PAPER_WIDTH:,}", f"{last.step:,}", "-", *losses]
            lines.append([*line, number(last.ms), number(dense.ms / last.ms), "-"])
        for case in runs.cases(self):
            for name in runs.contenders([case]):
                chosen = runs.of(case, name)
                steps = f"{chosen[0]['config']['steps']:,}"
                line = [name, str(case.setting), f"{case.width:,}", steps, str(len(chosen))]
                losses = [spread(outcomes(chosen, key), digits=3) for key in ("valid_loss", "valid_bpc")]
                ratio = in_cell(speedup(runs, case, name), quartiles=name != DENSE)
                size = f"{chosen[0]['outcome']['parameters']:,}"
                lines.append([*line, *losses, in_cell(step_time(runs, case, name)), ratio, size])
            for name in runs.only_timed(case):
                times = [in_cell(step_time(runs, case, name)), in_cell(speedup(runs, case, name), quartiles=True)]
                lines.append([name, str(case.setting), f"{case.width:,}", *["-"] * 4, *times, "-"])
        return [header, *lines]

    def by_step(self, runs: Runs, case: Case) -> Table:
        """The validation loss by step, in nats and in bits: the mean over seeds; beside the paper's at its width."""
        reported = PAPER if case.width == PAPER_WIDTH else {}
        theirs = {name: {row.step: row for row in rows} for name, rows in reported.items()}
        ours = {name: [validated(run) for run in runs.of(case, name)] for name in runs.contenders([case])}
        header = ["step"]
        header += [f"paper, {name}: {column}" for name in theirs for column in ("NLL", "BPC", "ms")]
        header += [f"ours, {name}: {column}" for name in ours for column in ("NLL", "BPC")]
        steps = {step for rows in theirs.values() for step in rows}
        steps |= {step for histories in ours.values() for history in histories for step in history}
        lines = []
        for step in sorted(steps):
            line = [f"{step:,}"]
            for rows in theirs.values():
                row = rows.get(step)
                line += [f"{row.valid_nll:.2f}", f"{row.valid_bpc:.2f}", number(row.ms)] if row else ["-"] * 3
            for histories in ours.values():
                losses = [history[step]["valid_loss"] for history in histories if step in history]
                line += [f"{np.mean(losses):.3f}", f"{np.mean(losses) / math.log(2):.3f}"] if losses else ["-"] * 2
            lines.append(line)
        return [header, *lines]


EXPERIMENT = ShakespeareExperiment()


def read_shakespeare(path: Path) -> bytes:
    """The whole text."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise data.DataError(f"{path} cannot be read: {error}") from error
    if not text:
        raise data.DataError(f"{path} is empty")
    return text


def split(text: bytes) -> tuple[bytes, bytes]:
    """The part to learn from, and the last tenth."""
    place = int(0.9 * len(text))
    return text[:place], text[place:]


def _gap_at_equal_step(histories: Mapping[str, list[dict[int, float]]]) -> str:
    """Bits per character of SPM less those of dense, at the last step that all have been evaluated at."""
    steps = [set(history) for runs in histories.values() for history in runs]
    common = set.intersection(*steps) if all(histories.values()) else set()
    if not common:
        return "-"
    last = max(common)
    dense, spm = (np.mean([history[last] for history in histories[name]]) for name in (DENSE, SPM))
    return f"{spm - dense:+.2f} at {last:,}"
