"""Which start is compared with which, and how the rate of each is chosen."""

import json
import math
from dataclasses import replace

import pytest
from small_grids import NEAR, TEXT, TINY, grid

from pairmix.nn.init import INITS
from pairmix_lab.bench import init
from pairmix_lab.bench.init import Config, best_rate, trained
from pairmix_lab.bench.jobs import Finished
from pairmix_lab.experiments import shakespeare, teacher
from pairmix_lab.experiments.experiment import StartCase

STARTS = [*INITS, "dense"]


@pytest.fixture
def data(tmp_path):
    (tmp_path / "data" / "shakespeare").mkdir(parents=True)
    (tmp_path / "data" / "shakespeare" / "input.txt").write_bytes(bytes(range(256)) * 10)
    return tmp_path / "data"


def test_every_experiment_has_cases_with_names_of_their_own():
    cases = init.all_cases()
    names = [case.name for _, case in cases]
    assert {"teacher near the identity", "MLP with residual branches", "AG News", "Elman", "GRU"} <= set(names)
    assert len(set(names)) == len(names)
    assert not any("," in name for name in names)  # --cases is a list with commas
    for candidate in Config().candidates:
        assert candidate.width in (256, 1024)
        config = candidate.config(candidate.lrs[0], seed=0)
        assert config.stages is None  # the library's own default
        assert config.validate_every == config.steps  # no time is lost on more


def test_wide_models_are_trained_with_smaller_rates():
    case = StartCase("any", lrs=(1e-3, 3e-3))
    assert case.lrs_at(256) == [1e-3, 3e-3]
    assert case.lrs_at(1024) == [2.5e-4, 7.5e-4]


def test_a_whole_grid_in_two_processes(part, data):
    config = grid((teacher.EXPERIMENT, NEAR), (shakespeare.EXPERIMENT, TEXT))
    calls = []
    rows = init.run(config, Finished(part), data, jobs=2, on_run=lambda: calls.append("run"))
    expected = {("near", 8, lr) for lr in NEAR.lrs_at(8)} | {("text", 8, 0.032), ("text", 12, 0.021)}
    for start in STARTS:
        own = [row for row in rows if start in (row["layer"], row["init"])]
        assert {(row["case"], row["width"], row["lr"]) for row in own if row["seed"] == 0} == expected
        for case in {("near", 8), ("text", 8), ("text", 12)}:
            chosen = [row for row in own if (row["case"], row["width"]) == case and row["chosen"]]
            assert [row["seed"] for row in chosen] == [0, 1]  # and both with the same rate
            assert len({row["lr"] for row in chosen}) == 1
    assert len(rows) == len(calls) == config.runs == 5 * (2 + 1) + 2 * 5 * (1 + 1)
    assert all(("valid_accuracy" in row) == (row["case"] == "near") for row in rows)
    assert all(math.isfinite(row[key]) for row in rows for key in ("first_loss", "valid_loss"))
    assert {row["block"] for row in rows} == {"general"}
    # In the order of the grid, whichever run was finished first.
    assert [row["case"] for row in rows] == sorted(row["case"] for row in rows)


def test_an_outcome_is_that_of_training_here():
    config = grid().candidates[0].config(1e-2, seed=1)
    outcome = trained(teacher.EXPERIMENT, config)
    run = init.Run(teacher.EXPERIMENT.task(config), init.Processes(), None, resume=False)
    run.advance()
    model, task = run.state.model, run.task
    assert outcome["first_loss"] == task.validate(model)["valid_loss"]
    run.advance()
    run.advance()
    assert outcome["valid_loss"] == task.validate(model)["valid_loss"]
    assert outcome["valid_accuracy"] == task.validate(model)["valid_accuracy"]


@pytest.mark.parametrize(
    ("losses", "rate"),
    [
        ({1e-3: 2.0, 1e-2: 1.0, 1e-1: 3.0}, 1e-2),
        ({1e-1: 1.0, 1e-3: 1.0, 1e-2: 1.0}, 1e-3),
        ({1e-3: 2.0, 1e-2: None}, 1e-3),
        ({1e-3: math.nan, 1e-2: 7.0, 1e-1: math.inf}, 1e-2),
        ({1e-3: None, 1e-2: math.nan}, None),
    ],
    ids=["least", "tie", "diverged", "not finite", "all diverged"],
)
def test_the_rate_with_the_least_loss_is_chosen(losses, rate):
    assert best_rate(losses) == rate


def test_the_rate_is_chosen_with_the_first_seed_on_validation(part, here, monkeypatch):
    small, large = NEAR.lrs_at(8)

    def outcome(experiment, config, folder):  # by the other numbers, or with the other seed, it would be the other rate
        is_best = config.lr == (large if config.init == "hadamard" else small)
        loss = 1.0 if is_best == (config.seed == 0) else 2.0
        return {"first_loss": 5.0 + is_best, "valid_loss": loss, "valid_accuracy": 0.5 - 0.1 * is_best}

    monkeypatch.setattr(init, "trained", outcome)
    rows = init.run(grid(), Finished(part))
    for row in rows:
        assert row["chosen"] == (row["lr"] == (large if row["init"] == "hadamard" else small))
    assert [row["lr"] for row in rows if (row["init"], row["seed"]) == ("hadamard", 1)] == [large]
    assert len(here) == len(rows) == 5 * 3


def test_a_start_that_diverges_with_every_rate_is_not_run_with_other_seeds(part, here, monkeypatch):
    def outcome(experiment, config, folder):
        return {"first_loss": 5.0, "valid_loss": None if config.init == "identity" else config.lr}

    monkeypatch.setattr(init, "trained", outcome)
    rows = init.run(grid(), Finished(part))
    lost = [row for row in rows if row["init"] == "identity"]
    assert [(row["seed"], row["lr"], row["chosen"]) for row in lost] == [(0, lr, False) for lr in NEAR.lrs_at(8)]
    assert len(rows) == len(here) == 5 * 3 - 1


@pytest.mark.parametrize("lr", [1e38, 1e-3])
def test_a_run_that_diverges_is_infinitely_bad_and_no_error(lr):
    case = StartCase("wild", lrs=(lr,), settings={**TINY, "steps": 20, "decay": "constant"}, widths=(8,))
    (candidate, *_) = grid((teacher.EXPERIMENT, case)).candidates
    outcome = trained(teacher.EXPERIMENT, candidate.config(lr, seed=0))
    assert (outcome["valid_loss"] is None) == (lr == 1e38)
    json.dumps(outcome, allow_nan=False)


class Failing(teacher.Task):
    """The last of its three batches is bad."""

    def batch(self, step):
        inputs, labels = super().batch(step)
        if step == 3:
            return self.last_batch(inputs, labels)
        return inputs, labels


class NotANumber(Failing):
    def last_batch(self, inputs, labels):
        return inputs * math.nan, labels


class NoBatch(Failing):
    def last_batch(self, inputs, labels):
        raise ValueError("there is no such batch")


def test_a_run_that_diverges_late_has_begun_well(monkeypatch):
    monkeypatch.setattr(teacher, "Task", NotANumber)
    outcome = trained(teacher.EXPERIMENT, grid().candidates[0].config(1e-3, seed=0))
    assert outcome == {"first_loss": pytest.approx(2.3, abs=0.5), "valid_loss": None, "valid_accuracy": None}


def test_other_errors_of_a_run_are_errors(monkeypatch):
    monkeypatch.setattr(teacher, "Task", NoBatch)
    with pytest.raises(ValueError, match="there is no such batch"):
        trained(teacher.EXPERIMENT, grid().candidates[0].config(1e-3, seed=0))


def test_finished_runs_are_not_run_again(part, here):
    config = grid(seeds=(0,))
    rows = init.run(config, Finished(part))
    assert len(part.read_text().splitlines()) == len(here) == config.runs == 10
    assert init.run(config, Finished(part, resume=True)) == rows
    assert len(here) == 10
    with pytest.raises(ValueError, match="is of an earlier command: --resume goes on"):
        Finished(part)
    # A run with another setting is another run.
    longer = replace(NEAR, settings={**TINY, "steps": 4})
    init.run(grid((teacher.EXPERIMENT, longer), seeds=(0,)), Finished(part, resume=True))
    assert len(here) == 20


def test_other_data_makes_another_run(part, data, here):
    config = grid((shakespeare.EXPERIMENT, replace(TEXT, widths=(8,))), seeds=(0,))
    for _ in range(2):
        init.run(config, Finished(part, resume=True), data)
    assert len(here) == 5
    (data / "shakespeare" / "input.txt").write_bytes(bytes(range(255, -1, -1)) * 10)
    init.run(config, Finished(part, resume=True), data)
    assert len(here) == 10
    more = grid((teacher.EXPERIMENT, NEAR), *config.cases, seeds=(0,))  # which read other files, or none
    init.run(more, Finished(part, resume=True), data)
    assert len(here) == 20
    init.run(grid(seeds=(0,)), Finished(part, resume=True))
    assert len(here) == 20


@pytest.mark.parametrize("tail", ['{"run": {"n": 2}, "outc', '{"run": {"n": 2}}', "[]", "\udcff"])
def test_a_line_that_was_cut_off_is_left_out(part, tail):
    Finished(part).add({"n": 1}, 0.5)
    with part.open("ab") as file:
        file.write(tail.encode("utf-8", "surrogateescape"))
    finished = Finished(part, resume=True)
    assert {"n": 1} in finished
    assert {"n": 2} not in finished
    finished.add({"n": 2, "seed": 0}, 0.25)
    again = Finished(part, resume=True)
    assert (again[{"n": 1}], again[{"seed": 0, "n": 2}]) == (0.5, 0.25)
