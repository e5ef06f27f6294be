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
from matplotlib.figure import Figure
from torch import nn

from pairmix.nn import SPMLinear
from pairmix.nn.init import near_identity_
from pairmix.schedule import Schedule
from pairmix_lab import contenders
from pairmix_lab.contenders import TRAINED, count_parameters
from pairmix_lab.experiments import options
from pairmix_lab.experiments.classification import (
    DENSE,
    SPM,
    Classification,
    Classified,
    accuracies,
    fields,
    scores,
)
from pairmix_lab.experiments.compared import Compared
from pairmix_lab.experiments.experiment import Demo, StartCase, StepCases
from pairmix_lab.experiments.residual import residual_network
from pairmix_lab.report.cells import seeds as seeds_cell
from pairmix_lab.report.cells import spread
from pairmix_lab.report.experiment import Case
from pairmix_lab.report.pictures import WIDE, Picture, legend_below, mean_line, styled
from pairmix_lab.report.runs import Runs
from pairmix_lab.report.schema import NOT_NEGATIVE, Value
from pairmix_lab.report.tables import NamedTable, Table, distinct
from pairmix_lab.training.loop import Batch

UNIFORM = "uniform"
PAIRINGS = {"same": "the teacher's", "other": "random ones"}
MODELS = ("plain", "residual")
ANGLE = Value(f'"{UNIFORM}" or {NOT_NEGATIVE.words}', lambda value: value == UNIFORM or NOT_NEGATIVE.holds(value))
# What the table of teachers shows, and under which heading.
AXIS = {
    DENSE: DENSE,
    contenders.LOW_RANK.label: contenders.LOW_RANK.label,
    SPM: "SPM, teacher's pairs: general",
    contenders.SPM_ROTATION.label: "SPM, teacher's pairs: rotation",
    contenders.SPM_OTHER_PAIRS.label: "SPM, other pairs: general",
    contenders.SPM_ROTATION_OTHER_PAIRS.label: "SPM, other pairs: rotation",
}


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
        model: the student: `"plain"`, of the teacher's form, or `"residual"`, branches of several layers.
    """

    experiment: str = "teacher"
    width: int = 256
    classes: int = 10
    angle_std: float | str = 0.1
    pairing: str = "same"
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

    @property
    def name(self) -> str:
        """What its files are called."""
        kind = f"spm-{self.block}-{self.pairing}" if self.layer == contenders.SPM.key else self.layer
        model = "" if self.model == MODELS[0] else f"{self.model}-"
        return f"{model}{kind}{self.variant}-{self.width}-std-{self.angle_std}-seed{self.seed}"

    @classmethod
    def completed(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": MODELS[0], **super().completed(config)}


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
    """Fresh batches without end, so that nothing can be learnt by heart."""

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
        return self.teacher.batch(self.config.batch, step)

    @cached_property
    def _validation_set(self) -> Batch:
        return self.teacher.batch(2048, 0)

    def validate(self, model: nn.Module) -> dict[str, float]:
        return scores(model, [self._validation_set], "valid")

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
        "teacher near the identity: accuracy, %": Case(name, 2048, main_setting),
        "teacher far from the identity: accuracy, %": Case(name, 256, UNIFORM),
    }
    step_cases = StepCases(widths=(256, 512, 1024, 2048))
    start_cases = (
        StartCase("teacher near the identity", {"steps": 800}),
        StartCase("teacher far from the identity", {"steps": 800, "angle_std": UNIFORM}),
        StartCase("MLP with residual branches", {"steps": 300, "angle_std": UNIFORM, "model": "residual"}),
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
        steps: options.Steps = Config.steps,
        batch: options.BatchSize = Config.batch,
        lr: options.Rate = Config.lr,
    ) -> list[Config]:
        return options.grid(
            Config,
            width=options.whole_numbers("--widths", widths),
            angle_std=tuple(map(_angle_std, options.words("--angle-stds", angle_stds))),
            layer=options.words("--layers", layers, TRAINED),
            block=options.words("--blocks", blocks, options.BLOCKS),
            pairing=options.words("--pairings", pairings, PAIRINGS),
            seed=options.whole_numbers("--seeds", seeds, least=0),
            steps=steps,
            batch=batch,
            lr=lr,
        )

    def task(self, config: Config, folder: Path | None = None) -> Task:
        return Task(config)

    def demo(
        self,
        width: Annotated[int, typer.Option(min=1, help="The number of features.")] = 256,
        steps: Annotated[int, typer.Option(min=1, help="Training steps of each student.")] = Config.steps,
    ) -> Demo:
        configs = [Config(layer=layer.key, width=width, steps=steps) for layer in (contenders.DENSE, contenders.SPM)]
        text = (
            f"The teacher labels {width} random numbers by a short chain of pairwise mixings, a ReLU and a dense map.\n"
            f"Two students of its form learn from {steps:,} batches of {configs[0].batch}: nn.Linear and SPMLinear.\n"
        )
        return Demo(configs, text)

    @property
    def table_names(self) -> Sequence[str]:
        return [*super().table_names, f"{self.name}-axis"]

    def case_name(self, case: Case) -> str:
        angles = f", angles {case.setting}" if case.setting not in (None, self.main_setting) else ""
        return f"n = {case.width:,}{angles}"  # the main teacher goes without saying

    def notes(self, runs: Runs) -> Iterable[str]:
        yield (
            "The paper does not say how far from the identity its teacher is, how the students start, nor the learning "
            f"rate. Ours is {self.main_setting} radians from the identity where nothing else is said."
        )

    def tables(self, runs: Runs) -> Iterator[NamedTable]:
        yield from super().tables(runs)
        if self.axis_cases(runs):
            caption = (
                "Test accuracy in percent by the teacher's distance from the identity: "
                "the standard deviation of its angles in radians."
            )
            yield NamedTable(f"{self.name}-axis", caption, self.axis(runs))

    def pictures(self, runs: Runs) -> Iterator[Picture]:
        yield from super().pictures(runs)
        for width in sorted({case.width for case in self.axis_cases(runs)}):
            alt = f"{self.title}, n = {width:,}: test accuracy against the teacher's distance from the identity"
            yield Picture(f"{self.name}-axis-{width}", alt, self.axis_picture(runs, width))

    def axis_cases(self, runs: Runs) -> list[Case]:
        """The teachers of every width at which there is more than the main comparison."""
        cases = runs.cases(self)
        more = {
            case.width
            for case in cases
            if case.setting != self.main_setting or any(contenders.labelled(name).settings for name in runs.at[case])
        }
        return [case for case in cases if case.width in more]

    def axis(self, runs: Runs) -> Table:
        """The test accuracy in percent by the teacher's distance from the identity, with other blocks and pairs too."""
        cases = self.axis_cases(runs)
        names = distinct([*AXIS, *runs.contenders(cases)])
        lines = [
            [
                f"{case.width:,}",
                str(case.setting),
                *(spread(accuracies(runs, case, name), unit=100) for name in names),
                seeds_cell(runs, case, names),
            ]
            for case in cases
        ]
        return [["n", "angles, std", *(AXIS.get(name, name) for name in names), "seeds"], *lines]

    @styled
    def axis_picture(self, runs: Runs, width: int) -> Figure:
        """Test accuracy against the teacher's distance from the identity; uniformly random angles are the last tick."""
        figure = Figure(figsize=WIDE)
        axes = figure.subplots()
        cases = [case for case in self.axis_cases(runs) if case.width == width]
        places = _places([case.setting for case in cases])
        for name in runs.contenders(cases):
            own = [case for case in cases if runs.of(case, name)]
            mean_line(
                axes, [places[case.setting] for case in own], [accuracies(runs, case, name) for case in own], name
            )
        if UNIFORM in places and len(places) > 1:
            axes.axvline(places[UNIFORM] - 0.5, color="grey", linewidth=0.8, linestyle=":")
        title = f"Teachers of n = {width:,}: test accuracy by distance from the identity"
        axes.set(xlabel="standard deviation of the teacher's angles, radians", title=title)
        axes.set_xticks(list(places.values()), [str(angle) for angle in places])
        axes.yaxis.set_major_formatter("{x:.0%}")
        legend_below(figure)
        return figure


EXPERIMENT = TeacherExperiment()


def _angle_std(word: str) -> float | str:
    try:
        return word if word == UNIFORM else float(word)
    except ValueError as error:
        raise typer.BadParameter(
            f"must be numbers of radians or {UNIFORM}, got {word!r}", param_hint="--angle-stds"
        ) from error


def _places(angles: Iterable[Any]) -> dict[Any, float]:
    """Where an angle stands: a step for every doubling; no angle at all and uniform ones a step beyond the others."""
    angles = list(angles)
    doublings = {angle: math.log2(angle) for angle in angles if not isinstance(angle, str) and angle > 0}
    first, last = (min(doublings.values()), max(doublings.values())) if doublings else (0.0, 0.0)
    beyond = {angle: last + 1 if isinstance(angle, str) else first - 1 for angle in angles if angle not in doublings}
    return {angle: (doublings | beyond)[angle] for angle in angles}
