"""A new experiment is one file and one line in the list: this file, and the line of the fixture `listed`."""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

from pairmix_lab import cli, contenders, experiments, results
from pairmix_lab.bench import steps as bench_steps
from pairmix_lab.experiments.classification import scores
from pairmix_lab.experiments.compared import Compared
from pairmix_lab.experiments.experiment import Experiment, StepCases
from pairmix_lab.experiments.options import Layers, Seeds, Steps, Widths, grid, whole_numbers, words
from pairmix_lab.report import curves
from pairmix_lab.report.cells import spread
from pairmix_lab.report.runs import outcomes
from pairmix_lab.report.schema import NOT_NEGATIVE, SHARE, training
from pairmix_lab.report.tables import NamedTable


@dataclass(frozen=True, kw_only=True)
class Config(Compared):
    experiment: str = "tiny"
    width: int = 8
    noise: float = 0.5
    steps: int = 5
    batch: int = 4
    lr: float = 0.01

    @property
    def name(self):
        return f"{self.kind}-{self.width}-noise-{self.noise}-seed{self.seed}"


class Task:
    """Say which of two coordinates is larger."""

    def __init__(self, config):
        self.config, self.data = config, {}

    def build(self):
        return nn.Sequential(self.config.make(), nn.Linear(self.config.width, 2))

    def groups(self, model):
        return self.config.groups(model)

    def batch(self, step):
        generator = torch.Generator().manual_seed(1000 * self.config.seed + step)
        x = torch.randn(self.config.batch, self.config.width, generator=generator)
        return x + self.config.noise * torch.randn(x.shape, generator=generator), (x[:, 0] > x[:, 1]).long()

    def validate(self, model):
        return scores(model, [self.batch(0)], "valid")

    def conclude(self, model):
        return scores(model, [self.batch(number) for number in range(-3, 0)], "test")


class TinyExperiment(Experiment):
    name = "tiny"
    title = "A tiny experiment"
    help = "Which coordinate is larger?"
    text = "Two coordinates are compared."
    config = Config
    setting, setting_shape = "noise", NOT_NEGATIVE
    fields = training({"noise": NOT_NEGATIVE}, {"test_accuracy": SHARE}, {})
    step_cases = StepCases(widths=(8,), layers=("dense", "spm"))
    table_names = ("tiny-right",)

    def configs(
        self,
        layers: Layers = "dense,spm",
        widths: Widths = "8",
        seeds: Seeds = "0",
        noise: Annotated[float, typer.Option(min=0, help="How much noise there is.")] = Config.noise,
        steps: Steps = Config.steps,
    ):
        return grid(
            Config,
            layer=words("--layers", layers, contenders.TRAINED),
            width=whole_numbers("--widths", widths),
            seed=whole_numbers("--seeds", seeds, least=0),
            noise=noise,
            steps=steps,
        )

    def task(self, config, folder=None):
        return Task(config)

    def in_words(self, outcome):
        return f"{outcome['test_accuracy']:.0%} right"

    def tables(self, runs):
        lines = [
            [self.case_name(case), name, spread(outcomes(runs.of(case, name), "test_accuracy"))]
            for case in runs.cases(self)
            for name in runs.contenders([case])
        ]
        yield NamedTable("tiny-right", "The part that is right.", [["case", "layer", "right"], *lines])

    def pictures(self, runs):
        for case in runs.cases(self):
            yield from curves.losses(runs, self, case, f"tiny-{case.width}")

    def notes(self, runs):
        yield "It is as small as it looks."


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """The command with this experiment in the list; gives a function that runs it in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiments, "EXPERIMENTS", [*experiments.EXPERIMENTS, TinyExperiment()])
    app = cli.make_app()

    def run(command):
        result = CliRunner().invoke(app, shlex.split(command))
        assert result.exit_code == 0, result.output
        return " ".join(re.sub("[│╭╮╰╯─┃━]", " ", result.output).split())

    return run


def test_it_has_a_command_with_its_own_options(listed):
    assert "Which coordinate is larger?" in listed("train --help")
    text = listed("train tiny --help")
    for option in ("--noise", "How much noise there is.", "--layers", "--resume", "--keep-memory", "runs/tiny"):
        assert option in text
    assert "--data" not in text  # it reads no files


def test_it_is_trained_and_reported(listed):
    said = listed("train tiny --noise 0.25 --widths 8,10 --seeds 0,1")
    assert "% right, " in said
    run = results.load(Path("runs/tiny/spm-10-noise-0.25-seed1.json"))
    assert (run["config"]["experiment"], run["config"]["noise"]) == ("tiny", 0.25)
    accuracy = f"{100 * run['outcome']['test_accuracy']:.0f}% right"
    assert f"spm-10-noise-0.25-seed1: {accuracy}" in said

    listed("report runs/tiny -o report.html --pictures pictures")
    page = Path("report.html").read_text()
    for text in ("A tiny experiment", "The part that is right.", "n = 10, 0.25", "It is as small as it looks."):
        assert text in page
    drawn = {f"tiny-{width}-loss-by-{by}" for width in (8, 10) for by in ("step", "seconds")}
    assert {path.stem for path in Path("pictures").iterdir()} == drawn
    assert page.count("<img ") == len(drawn)


def test_its_results_are_checked(listed):
    listed("train tiny")
    path = Path("runs/tiny/spm-8-noise-0.5-seed0.json")
    run = results.load(path)
    run["config"]["noise"] = "much"
    path.write_text(json.dumps(run))
    result = CliRunner().invoke(cli.make_app(), ["report", "runs"])
    assert result.exit_code == 1
    assert 'config.noise must be a number in 0..1e+38, got "much"' in " ".join(result.output.split())


def test_its_steps_are_timed(listed):
    cases = {"tiny": bench_steps.all_cases()["tiny"]}
    rows = list(bench_steps.run(bench_steps.Config(cases=cases, seconds=0, threads=(1,))))
    assert [(row["experiment"], row["layer"]) for row in rows] == [
        *(("tiny", layer) for layer in ("dense", "spm", contenders.REST.key))
    ]
    assert bench_steps.table(rows)[1][0] == "A tiny experiment"


def test_its_tables_are_for_the_documentation_too(listed):
    listed("train tiny")
    (experiment,) = [one for one in experiments.EXPERIMENTS if one.name == "tiny"]
    table = experiment.table("tiny-right", Path("runs"))
    assert [line[:2] for line in table] == [["case", "layer"], ["n = 8, 0.5", "dense"], ["n = 8, 0.5", "SPM"]]
    assert experiment.table("tiny-right", Path("nowhere")) is None
