"""Section 9.1: students learn the labels of a compositional teacher, argmax(W relu(SPM(x))).

How far the teacher's SPM is from the identity is the axis of the experiment: the paper reports one point of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn

from pairmix.nn import SPMLinear
from pairmix.nn.init import near_identity_
from pairmix.schedule import Schedule
from pairmix_lab import contenders
from pairmix_lab.contenders import TRAINED, count_parameters
from pairmix_lab.experiments import epochs, options, teacher_axis, teacher_studies
from pairmix_lab.experiments.classification import (
    DENSE,
    SPM,
    Classification,
    Classified,
    fields,
    scores,
)
from pairmix_lab.experiments.compared import Compared
from pairmix_lab.experiments.experiment import Demo, StartCase, StepCases
from pairmix_lab.experiments.norms import layer_norms
from pairmix_lab.experiments.residual import residual_network
from pairmix_lab.experiments.teacher_axis import UNIFORM
from pairmix_lab.report.experiment import Case
from pairmix_lab.report.pictures import Picture
from pairmix_lab.report.runs import Runs, collect
from pairmix_lab.report.schema import NOT_NEGATIVE, Value
from pairmix_lab.report.tables import NamedTable, Row, Table
from pairmix_lab.training.loop import LARGEST_SIZE, Batch

PAIRINGS = {"same": "the teacher's", "other": "random ones"}
MODELS = ("plain", "residual")
ANGLE = Value(f'"{UNIFORM}" or {NOT_NEGATIVE.words}', lambda value: value == UNIFORM or NOT_NEGATIVE.holds(value))


@dataclass(frozen=True, kw_only=True)
class Config(Compared):
    """A student and its teacher.

    Attributes:
        layer: the student's, of `TRAINED`.
        width: of the input.
        classes: how many labels there are.
        angle_std: how far the teacher is from the identity: the spread of its angles in radians, or `"uniform"` for
            angles from the whole circle.
        pairing: of an SPM student: `"same"`, the teacher's pairs, or `"other"`, random ones.
        rows: of the training set, which is visited in a new random order every epoch; None for fresh rows at every
            step.
        norms: whether the norms of the layer are measured at every validation.
        model: the student: `"plain"`, of the teacher's form, or `"residual"`, branches of several layers.
    """

    experiment: str = "teacher"
    width: int = 256
    classes: int = 10
    angle_std: float | str = 0.1
    pairing: str = "same"
    rows: int | None = None
    norms: bool = False
    model: str = MODELS[0]
    steps: int = 1200
    batch: int = 256
    lr: float = 3e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("layer", TRAINED)
        self._check_choice("pairing", PAIRINGS)
        self._check_choice("model", MODELS)
        if self.angle_std != UNIFORM and not (isinstance(self.angle_std, float) and 0 <= self.angle_std < math.inf):
            raise ValueError(f"angle_std must be a number of radians or {UNIFORM!r}, got {self.angle_std!r}")
        if self.rows is not None:
            if self.rows < 1:
                raise ValueError(f"rows must be at least 1, or None, got {self.rows}")
            self._check_at_most("rows", LARGEST_SIZE)

    @property
    def name(self) -> str:
        """What its files are called."""
        kind = f"spm-{self.block}-{self.pairing}" if self.layer == contenders.SPM.key else self.layer
        model = "" if self.model == MODELS[0] else f"{self.model}-"
        rows = f"-rows{self.rows}" if self.rows is not None else ""
        decay = f"-wd{self.weight_decay:g}" if self.weight_decay else ""
        extras = rows + decay + "-norms" * self.norms
        return f"{model}{kind}{self.variant}-{self.width}-std-{self.angle_std}{extras}-seed{self.seed}"

    @classmethod
    def completed(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"rows": None, "norms": False, "model": MODELS[0], **super().completed(config)}


@dataclass(frozen=True)
class Teacher:
    """A random labelling rule of the form argmax(W relu(SPM(x))), x normal.

    Attributes:
        width: of x.
        classes: how many labels there are.
        angle_std: how far the SPM is from the identity; see `Config`.
        seed: which rule, and which x.
    """

    width: int
    classes: int = 10
    angle_std: float | str = 0.1
    seed: int = 0

    def batch(self, size: int, number: int) -> Batch:
        """Inputs and labels, the same ones for the same number, others for another."""
        # Not torch's generator: of a seed it takes the lowest 32 bits alone, which cannot hold a pair.
        normal = np.random.default_rng((self.seed, number)).standard_normal((size, self.width), np.float32)
        x = torch.from_numpy(normal)
        with torch.no_grad():
            return x, self.rule(x).argmax(-1)

    @cached_property
    def rule(self) -> nn.Module:
        """What gives every label its score."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2**31 + self.seed)  # a student's is below: it must not start as a copy of the rule
            init: Any = (
                "random_rotation" if self.angle_std == UNIFORM else partial(near_identity_, std=float(self.angle_std))
            )
            mixer = SPMLinear(self.width, self.width, bias=False, init=init)
            head = nn.Linear(self.width, self.classes, bias=False)
        with torch.no_grad():
            # All coordinates have the same mean after the ReLU, so now all classes are equally likely. Otherwise some
            # rules would give half of all x the same label, and a constant guess would be half right.
            head.weight -= head.weight.mean(1, keepdim=True)
        return nn.Sequential(mixer, nn.ReLU(), head)


class Task:
    """Fresh batches without end, so that nothing can be learnt by heart; or a set of so many rows, over and over."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.data: dict[str, str] = {}  # the teacher makes it all
        self.teacher = Teacher(config.width, config.classes, config.angle_std, config.seed)

    def build(self) -> nn.Module:
        width, classes = self.config.width, self.config.classes
        if self.config.model == "residual":
            return residual_network(self.layer, width, classes)
        return nn.Sequential(self.layer(), nn.ReLU(), nn.Linear(width, classes))

    def layer(self, **options: Any) -> nn.Module:
        """The one that is compared."""
        config = self.config
        schedule: str | Schedule = "butterfly"
        if config.pairing == "other":
            stages = config.stages or Schedule.butterfly(config.width).stages
            schedule = Schedule.random(config.width, stages, seed=config.seed)
        return config.make(schedule=schedule, **options)

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return self.config.groups(model)

    def batch(self, step: int) -> Batch:
        config = self.config
        if config.rows is None:
            return self.teacher.batch(config.batch, step)
        inputs, labels = self._training_set
        chosen = torch.from_numpy(epochs.batch(config.rows, config.batch, step, config.seed))
        return inputs[chosen], labels[chosen]

    @cached_property
    def _training_set(self) -> Batch:
        """A larger one begins with the rows of a smaller one: sizes are compared on nothing but the rows added."""
        assert self.config.rows is not None
        return self.teacher.batch(self.config.rows, 1)

    @cached_property
    def _validation_set(self) -> Batch:
        with torch.inference_mode(False):  # autograd does not take inference tensors
            return self.teacher.batch(2048, 0)

    def validate(self, model: nn.Module) -> dict[str, float]:
        found = scores(model, [self._validation_set], "valid")
        if self.config.norms:
            found |= layer_norms(model, model[0], self.config.width, self._validation_set)  # type: ignore[index]
        return found

    def conclude(self, model: nn.Module) -> dict[str, Any]:
        test_set = (self.teacher.batch(1000, (1 << 31) + number) for number in range(10))
        return {**scores(model, test_set, "test"), "mixer_parameters": count_parameters(model[0])}  # type: ignore[index]


class TeacherExperiment(Classification):
    """Students with one layer or another learn from the same teacher."""

    name = "teacher"
    title = "Compositional teacher"
    help = "Section 9.1: students learn the labels that an SPM, a ReLU and a dense map decide."
    text = (
        "A random SPM, a ReLU and a dense map label normally distributed inputs with one of ten classes. "
        "Students of that form learn the labels, with one layer or another in the place of the SPM."
    )
    config = Config
    setting, setting_shape = "angle_std", ANGLE
    fields = fields(angle_std=ANGLE)
    main_setting = Config.angle_std
    keeps_variants = False  # they have a table of their own
    in_short = {  # noqa: RUF012
        "teacher near the identity: accuracy, %": ("teacher-own", Case(name, 1024, main_setting)),
        "teacher far from the identity: accuracy, %": ("teacher-own", Case(name, 1024, UNIFORM)),
    }
    step_cases = StepCases(widths=(256, 512, 1024, 2048))
    start_cases = (
        StartCase("teacher near the identity", {"steps": 800}),
        StartCase("teacher far from the identity", {"steps": 800, "angle_std": UNIFORM}),
        StartCase("MLP with residual branches", {"steps": 200, "angle_std": UNIFORM, "model": "residual"}),
    )
    paper = {  # noqa: RUF012
        256: {DENSE: Classified(0.7730, 2.775), SPM: Classified(0.9941, 5.396)},
        512: {DENSE: Classified(0.8103, 9.793), SPM: Classified(0.9750, 9.147)},
        1024: {DENSE: Classified(0.8920, 33.603), SPM: Classified(0.9426, 18.529)},
        2048: {DENSE: Classified(0.5744, 125.109), SPM: Classified(0.8165, 36.561)},
    }

    def configs(
        self,
        layers: options.Layers = "dense,spm,lowrank",
        widths: options.Widths = "256,512,1024,2048",
        seeds: options.Seeds = "0,1,2",
        angle_stds: Annotated[
            str, typer.Option(help="How far the teacher is from the identity: spreads of its angles, or uniform.")
        ] = "0.1",
        blocks: options.Blocks = "general",
        pairings: Annotated[
            str, typer.Option(help="The pairs of SPM: same as the teacher's, other, or both.")
        ] = "same",
        inits: options.Inits = Config.init,
        rows: Annotated[
            str, typer.Option(help="Rows of the training set, such as 300,1000; 0 for fresh rows at every step.")
        ] = "0",
        steps: options.Steps = Config.steps,
        batch: options.BatchSize = Config.batch,
        lr: options.Rate = Config.lr,
        layer_rate: options.LayerRate = None,
        weight_decay: options.WeightDecay = Config.weight_decay,
        norms: Annotated[bool, typer.Option("--norms", help="Measure the norms of the layer at validations.")] = False,
    ) -> list[Config]:
        return options.grid(
            Config,
            width=options.whole_numbers("--widths", widths),
            angle_std=tuple(map(_angle_std, options.words("--angle-stds", angle_stds))),
            layer=options.words("--layers", layers, TRAINED),
            block=options.words("--blocks", blocks, options.BLOCKS),
            pairing=options.words("--pairings", pairings, PAIRINGS),
            init=options.words("--inits", inits, options.INITS),
            rows=tuple(count or None for count in options.whole_numbers("--rows", rows, least=0)),
            seed=options.whole_numbers("--seeds", seeds, least=0),
            steps=steps,
            batch=batch,
            lr=lr,
            layer_rate=layer_rate,
            weight_decay=weight_decay,
            norms=norms,
        )

    def task(self, config: Config, folder: Path | None = None) -> Task:
        return Task(config)

    def demo(
        self,
        width: Annotated[int, typer.Option(min=1, help="The number of features.")] = 256,
        steps: Annotated[int, typer.Option(min=1, help="Training steps of each student.")] = Config.steps,
    ) -> Demo:
        configs = [
            Config(layer=contenders.DENSE.key, width=width, steps=steps),
            # The teacher is near the identity, and so is the start that is chosen for it.
            Config(layer=contenders.SPM.key, width=width, steps=steps, init="near_identity"),
        ]
        text = (
            f"The teacher labels {width} random numbers by a short chain of pairwise mixings, a ReLU and a dense map.\n"
            f"Two students of its form learn from {steps:,} batches of {configs[0].batch}: nn.Linear and SPMLinear.\n"
        )
        return Demo(configs, text)

    @property
    def table_names(self) -> Sequence[str]:
        return [*super().table_names, f"{self.name}-axis", *self.study_folders]

    @property
    def study_folders(self) -> Sequence[str]:
        """Where the results of studies are, each for the table of that name; it may have folders by learning rate."""
        return [f"{self.name}-{study}" for study in (teacher_studies.ROWS, teacher_studies.NORMS)]

    def table(self, name: str, results: Path) -> Table | None:
        if name not in self.study_folders:
            return super().table(name, results)
        found = list((results / name).rglob("*.json"))
        runs = collect(found, [self]) if found else None
        return next((one.table for one in self.tables(runs) if one.name == name), None) if runs else None

    def case(self, row: Row) -> Case:
        return super().case(row)._replace(study=teacher_studies.study(row))

    def case_name(self, case: Case) -> str:
        angles = f", angles {case.setting}" if case.setting not in (None, self.main_setting) else ""
        study = "" if case.study is None else f", {case.study.words}"
        return f"n = {case.width:,}{angles}{study}"  # the main teacher goes without saying

    def notes(self, runs: Runs) -> Iterable[str]:
        yield (
            "The paper does not say how far from the identity its teacher is, how the students start, nor the learning "
            f"rate. Ours is {self.main_setting} radians from the identity where nothing else is said."
        )

    def tables(self, runs: Runs) -> Iterator[NamedTable]:
        yield from super().tables(runs)
        yield from teacher_axis.tables(self, runs)
        yield from teacher_studies.tables(self, runs)

    def pictures(self, runs: Runs) -> Iterator[Picture]:
        yield from super().pictures(runs)
        yield from teacher_axis.pictures(self, runs)
        yield from teacher_studies.pictures(self, runs)


EXPERIMENT = TeacherExperiment()


def _angle_std(word: str) -> float | str:
    try:
        return word if word == UNIFORM else float(word)
    except ValueError as error:
        raise typer.BadParameter(
            f"must be numbers of radians or {UNIFORM}, got {word!r}", param_hint="--angle-stds"
        ) from error
