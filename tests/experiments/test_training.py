import json
import math
import os
import signal
import time
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from statistics import mean, median

import pytest
import torch
from safetensors import safe_open
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import tensorboard

from pairmix import results
from pairmix.experiments import runs, teacher
from pairmix.experiments.checkpoints import CheckpointError
from pairmix.experiments.signals import Stopped
from pairmix.experiments.training import Recipe, train

CONFIG = teacher.Config(width=16, steps=40, batch=32, lr=1e-2, log_every=7, validate_every=15)
LOGGED = [1, 7, 14, 15, 21, 28, 30, 35, 40]
VALIDATED = [1, 15, 30, 40]
CONFIGS = {
    "dense": replace(CONFIG, layer="dense"),
    "spm general": CONFIG,
    "spm rotation": replace(CONFIG, block="rotation"),
    "lowrank": replace(CONFIG, layer="lowrank"),
}


class WithDropout(teacher.Experiment):
    """Draws from torch's random state in every step."""

    def build(self):
        return nn.Sequential(*super().build(), nn.Dropout(0.1))


class NotANumber(teacher.Experiment):
    """Has one bad batch."""

    def batch(self, step):
        inputs, labels = super().batch(step)
        return inputs * (math.nan if step == 20 else 1), labels


class Doing(teacher.Experiment):
    """Calls a function before one of its methods."""

    def __init__(self, method, action):
        super().__init__(CONFIG)
        then = getattr(self, method)
        setattr(self, method, lambda *arguments: (action(), then(*arguments))[1])


EXPERIMENTS = {name: partial(teacher.Experiment, config) for name, config in CONFIGS.items()}
EXPERIMENTS["with dropout"] = partial(WithDropout, CONFIG)


class Crash(Exception):  # noqa: N818
    pass


def crash():
    raise Crash


def interrupt(number=signal.SIGINT):
    os.kill(os.getpid(), number)


def at_step(number, *actions):
    def on_step(step, loss, milliseconds):
        if step == number:
            for action in actions:
                action()

    return on_step


def stop_at(step, experiment, folder, **options):
    with pytest.raises(Stopped, match=f"stopped after step {step}") as stopped:
        train(experiment, folder, on_step=at_step(step, interrupt), **options)
    assert stopped.value.step == step


def stored_step(folder):
    with safe_open(folder / "checkpoint.safetensors", framework="pt") as file:
        return json.loads(file.metadata()["about"])["step"]


def names(folder):
    return sorted(path.name for path in folder.rglob("*"))


def without_times(rows):
    return [{name: value for name, value in row.items() if name != "ms_per_step"} for row in rows]


def assert_same(trained, expected):
    """The same weights, history and outcome, to the bit."""
    weights, wanted = trained.model.state_dict(), expected.model.state_dict()
    assert weights.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(weights[name], value), name
    assert without_times(trained.rows) == without_times(expected.rows)
    assert without_times([trained.outcome]) == without_times([expected.outcome])


# What a run comes to.


@pytest.mark.parametrize("name", CONFIGS)
def test_it_learns(name):
    trained = train(EXPERIMENTS[name]())
    first, last = trained.rows[0], trained.rows[-1]
    assert last["train_loss"] < 0.9 * first["train_loss"]
    assert last["valid_loss"] < 0.9 * first["valid_loss"]
    assert trained.outcome["test_loss"] == pytest.approx(last["valid_loss"], rel=0.1)


def test_the_history_sums_up_the_steps_since_the_row_before():
    losses, times = [], []
    trained = train(
        teacher.Experiment(CONFIG), on_step=lambda step, loss, ms: (losses.append((step, loss)), times.append(ms))
    )
    assert [step for step, _ in losses] == list(range(1, 41))
    assert [row["step"] for row in trained.rows] == LOGGED
    for before, row in zip([0, *LOGGED], trained.rows, strict=False):
        validation = {"valid_loss", "valid_accuracy"} if row["step"] in VALIDATED else set()
        assert row.keys() == {"step", "train_loss", "ms_per_step"} | validation
        assert row["train_loss"] == mean(loss for _, loss in losses[before : row["step"]])
        assert row["ms_per_step"] == pytest.approx(median(times[before : row["step"]]), abs=1e-4)


def test_the_outcome_is_complete():
    trained = train(teacher.Experiment(CONFIG))
    measured = {"ms_per_step", "test_loss", "test_accuracy", "mixer_parameters"}
    assert {name: value for name, value in trained.outcome.items() if name not in measured} == {
        "step": 40,
        "processes": 1,
        "parameters": sum(weight.numel() for weight in trained.model.parameters()),
    }
    assert measured < trained.outcome.keys()


def test_the_same_seed_gives_the_same_run_and_another_another():
    first, again = (train(teacher.Experiment(CONFIG)) for _ in range(2))
    assert_same(again, first)
    other = train(teacher.Experiment(replace(CONFIG, seed=1)))
    assert not torch.equal(other.model[2].weight, first.model[2].weight)


def test_cosine_decay_goes_from_the_rate_to_zero():
    recipe = Recipe(steps=10, batch=1, lr=0.2)
    rates = [recipe.lr_at(step) for step in range(1, 12)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 0.2
    assert rates[5] == pytest.approx(0.1)  # half of the steps are done
    assert rates[9] > 0
    assert rates[10] == pytest.approx(0)


def test_constant_decay_is_none():
    recipe = Recipe(steps=10, batch=1, lr=0.2, decay="constant")
    assert {recipe.lr_at(step) for step in range(1, 11)} == {0.2}


def test_every_step_is_taken_with_its_rate_also_after_a_stop(tmp_path):
    rates = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    try:
        stop_at(17, teacher.Experiment(CONFIG), tmp_path)
        train(teacher.Experiment(CONFIG), tmp_path, resume=True)
    finally:
        hook.remove()
    assert rates == [CONFIG.lr_at(step) for step in range(1, 41)]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("steps", 0, "steps must be at least 1, got 0"),
        ("batch", -1, "batch must be at least 1, got -1"),
        ("log_every", 0, "log_every must be at least 1, got 0"),
        ("validate_every", 0, "validate_every must be at least 1, got 0"),
        ("lr", 0.0, "lr must be above 0, got 0.0"),
        ("lr", -1e-3, "lr must be above 0, got -0.001"),
        ("lr", math.inf, "lr must be above 0, got inf"),
        ("lr", math.nan, "lr must be above 0, got nan"),
        ("decay", "linear", "decay must be 'cosine' or 'constant', got 'linear'"),
        ("seed", -1, "seed must be in 0..2^31-1, got -1"),
        ("seed", 2**31, "seed must be in 0..2^31-1, got 2147483648"),
    ],
)
def test_bad_recipes_are_refused(name, value, message):
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        Recipe(**{"steps": 1, "batch": 1, "lr": 1e-3, name: value})
    assert str(refused.value) == message


# Stopping and going on.


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(tmp_path, name):
    expected = train(EXPERIMENTS[name]())
    stop_at(17, EXPERIMENTS[name](), tmp_path)
    assert stored_step(tmp_path) == 17
    torch.manual_seed(12345)
    assert_same(train(EXPERIMENTS[name](), tmp_path, resume=True), expected)


def test_a_run_may_be_stopped_again_and_again(tmp_path):
    for step in (1, 14, 15, 16, 39, 40):  # the first, about a validation, the last
        stop_at(step, teacher.Experiment(CONFIG), tmp_path, resume=True)
        assert stored_step(tmp_path) == step
    assert_same(train(teacher.Experiment(CONFIG), tmp_path, resume=True), train(teacher.Experiment(CONFIG)))


def test_sigterm_stops_too(tmp_path):
    before = signal.signal(signal.SIGTERM, lambda *_: crash())  # so that a failure does not end the tests
    try:
        with pytest.raises(Stopped):
            train(teacher.Experiment(CONFIG), tmp_path, on_step=at_step(17, partial(interrupt, signal.SIGTERM)))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stored_step(tmp_path) == 17


@pytest.mark.parametrize(("method", "step"), [("build", 1), ("batch", 1), ("validate", 1), ("conclude", 40)])
def test_a_signal_at_any_moment_stops_the_run(tmp_path, method, step):
    with pytest.raises(Stopped):
        train(Doing(method, interrupt), tmp_path)
    assert stored_step(tmp_path) == step
    assert_same(train(teacher.Experiment(CONFIG), tmp_path, resume=True), train(teacher.Experiment(CONFIG)))


def test_the_second_signal_acts_as_usual(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(teacher.Experiment(CONFIG), tmp_path, on_step=at_step(17, interrupt, interrupt))
    assert not (tmp_path / "checkpoint.safetensors").exists()


@pytest.mark.parametrize("action", [lambda: None, interrupt, crash], ids=["finished", "stopped", "crashed"])
def test_the_handlers_of_signals_are_put_back(action):
    def handlers():
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    before, during = handlers(), []
    on_step = at_step(17, lambda: during.extend(handlers()), action)
    with suppress(Stopped, Crash):
        train(teacher.Experiment(CONFIG), on_step=on_step)
    assert handlers() == before
    assert len(during) == 2
    assert not set(during) & set(before)


def test_without_resume_an_earlier_run_is_left_alone(tmp_path):
    stop_at(17, teacher.Experiment(CONFIG), tmp_path)
    before, files = (tmp_path / "checkpoint.safetensors").read_bytes(), names(tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoint\.safetensors is of an earlier run: --resume goes on"):
        train(teacher.Experiment(CONFIG), tmp_path)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before
    assert names(tmp_path) == files


def test_a_run_with_other_settings_is_not_gone_on_with(tmp_path):
    stop_at(17, teacher.Experiment(CONFIG), tmp_path)
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"is of another run: lr is 0\.01 there and 0\.02 here"):
        train(teacher.Experiment(replace(CONFIG, lr=0.02)), tmp_path, resume=True)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before


def test_with_nothing_to_resume_a_run_starts(tmp_path):
    assert_same(train(teacher.Experiment(CONFIG), tmp_path, resume=True), train(teacher.Experiment(CONFIG)))


def test_a_finished_run_is_only_concluded_again(tmp_path):
    expected = train(teacher.Experiment(CONFIG), tmp_path)
    assert_same(train(teacher.Experiment(CONFIG), tmp_path, resume=True, on_step=lambda *_: crash()), expected)


def test_checkpoints_are_written_as_often_as_asked(tmp_path):
    seen = []
    folder = tmp_path / "often"
    train(
        teacher.Experiment(CONFIG),
        folder,
        save_every=0,
        on_step=lambda step, *_: seen.append(step == 1 or stored_step(folder) == step - 1),
    )
    assert seen == [True] * 40
    folder = tmp_path / "seldom"
    train(
        teacher.Experiment(CONFIG),
        folder,
        save_every=3600,
        on_step=lambda *_: seen.append((folder / "checkpoint.safetensors").exists()),
    )
    assert not any(seen[40:])
    assert stored_step(folder) == 40


def test_a_loss_that_is_no_number_ends_the_run_and_leaves_the_checkpoint_before(tmp_path):
    with pytest.raises(ValueError, match=r"the loss is nan at step 20: a smaller learning rate than 0\.01 may help"):
        train(NotANumber(CONFIG), tmp_path, save_every=0)
    assert stored_step(tmp_path) == 19
    assert_same(train(teacher.Experiment(CONFIG), tmp_path, resume=True), train(teacher.Experiment(CONFIG)))


def test_an_interrupted_write_is_swept_away(tmp_path):
    stop_at(17, teacher.Experiment(CONFIG), tmp_path)
    (tmp_path / "checkpoint.safetensorsabc.part").write_bytes(b"half")
    train(teacher.Experiment(CONFIG), tmp_path, resume=True)
    assert not list(tmp_path.glob("*.part"))


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stop_at(17, teacher.Experiment(CONFIG), None, save_every=0)
    train(teacher.Experiment(CONFIG), save_every=0)
    assert names(tmp_path) == []


# TensorBoard.


def scalars(folder):
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def as_scalars(rows):
    """The rows as TensorBoard has them, in single precision."""
    tags = {tag for row in rows for tag in row}
    return {tag: [(row["step"], torch.tensor(float(row[tag])).item()) for row in rows if tag in row] for tag in tags}


@pytest.fixture
def slow_disk(monkeypatch):
    """TensorBoard's writes, which a thread of its own does, come late."""
    write = RecordWriter.write
    monkeypatch.setattr(RecordWriter, "write", lambda *arguments: (time.sleep(0.02), write(*arguments)))


def test_tensorboard_shows_the_history(tmp_path):
    trained = train(teacher.Experiment(CONFIG), tmp_path)
    shown = scalars(tmp_path)
    assert [step for step, _ in shown["train_loss"]] == LOGGED
    assert [step for step, _ in shown["valid_accuracy"]] == VALIDATED
    assert shown == as_scalars(trained.rows)


@pytest.mark.usefixtures("slow_disk")
def test_tensorboard_has_all_up_to_a_stop(tmp_path):
    stop_at(17, teacher.Experiment(CONFIG), tmp_path)
    assert [step for step, _ in scalars(tmp_path)["train_loss"]] == [1, 7, 14, 15]


@pytest.mark.usefixtures("slow_disk")
def test_tensorboard_has_all_up_to_the_checkpoint_after_a_crash(tmp_path):
    with pytest.raises(Crash):
        train(teacher.Experiment(CONFIG), tmp_path, save_every=0, on_step=at_step(18, crash))
    assert stored_step(tmp_path) == 17
    assert [step for step, _ in scalars(tmp_path)["train_loss"]] == [1, 7, 14, 15]


def test_tensorboard_goes_on_after_a_stop(tmp_path):
    stop_at(17, teacher.Experiment(CONFIG), tmp_path)
    resumed = train(teacher.Experiment(CONFIG), tmp_path, resume=True)
    assert scalars(tmp_path) == as_scalars(resumed.rows)


def test_tensorboard_shows_no_step_twice_that_was_taken_twice(tmp_path, monkeypatch):
    writers = []

    class Noted(tensorboard.SummaryWriter):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            writers.append(self)

    monkeypatch.setattr(tensorboard, "SummaryWriter", Noted)
    stop_at(17, teacher.Experiment(CONFIG), tmp_path)
    with pytest.raises(Crash):
        train(teacher.Experiment(CONFIG), tmp_path, resume=True, on_step=at_step(33, crash))
    for writer in writers:
        writer.flush()
    assert scalars(tmp_path)["train_loss"][-1][0] == 30  # past the checkpoint
    resumed = train(teacher.Experiment(CONFIG), tmp_path, resume=True)
    assert scalars(tmp_path) == as_scalars(resumed.rows)


# Runs on the disk.


def run(out, config=CONFIG, **options):
    return runs.run(partial(teacher.Experiment, config), out, config, "the command", **options)


def test_a_run_leaves_its_result(tmp_path):
    outcome = run(tmp_path)
    result = results.load(tmp_path / f"{CONFIG.name}.json")
    expected = train(teacher.Experiment(CONFIG))
    assert result["command"] == "the command"
    assert result["config"] == asdict(CONFIG)
    assert result["outcome"] == outcome
    assert without_times([outcome]) == without_times([expected.outcome])
    assert without_times(result["rows"]) == without_times(expected.rows)


def test_a_finished_run_is_skipped_only_with_resume(tmp_path):
    assert not runs.is_finished(tmp_path, CONFIG, resume=False)
    assert not runs.is_finished(tmp_path, CONFIG, resume=True)
    run(tmp_path)
    path = runs.result_path(tmp_path, CONFIG)
    before = path.read_bytes()
    assert runs.is_finished(tmp_path, CONFIG, resume=True)
    with pytest.raises(CheckpointError, match=r"seed0\.json is of an earlier run: --resume leaves it as it is"):
        runs.is_finished(tmp_path, CONFIG, resume=False)
    assert path.read_bytes() == before


def test_a_stopped_run_is_not_finished(tmp_path):
    with pytest.raises(Stopped):
        run(tmp_path, on_step=at_step(17, interrupt))
    assert not runs.is_finished(tmp_path, CONFIG, resume=True)
    run(tmp_path, resume=True)
    assert runs.is_finished(tmp_path, CONFIG, resume=True)


def test_a_finished_run_with_other_settings_is_refused_with_the_differences(tmp_path):
    run(tmp_path)
    other = replace(CONFIG, steps=50, lr=0.02)
    assert runs.result_path(tmp_path, other) == runs.result_path(tmp_path, CONFIG)
    with pytest.raises(CheckpointError) as refused:
        runs.is_finished(tmp_path, other, resume=True)
    differences = "steps is 40 there and 50 here; lr is 0.01 there and 0.02 here"
    assert f"{CONFIG.name}.json is of another run: {differences}" in str(refused.value)


@pytest.mark.parametrize("content", ["", '{"config": {"steps"', "[]", "{}", "3"])
def test_a_result_that_cannot_be_read_is_named(tmp_path, content):
    path = runs.result_path(tmp_path, CONFIG)
    path.write_text(content)
    with pytest.raises(CheckpointError) as refused:
        runs.is_finished(tmp_path, CONFIG, resume=True)
    assert str(path) in str(refused.value)
    assert path.read_text() == content


def test_discard_removes_a_run_and_no_other(tmp_path):
    other = replace(CONFIG, seed=1)
    run(tmp_path)
    with pytest.raises(Stopped):
        run(tmp_path, other, on_step=at_step(17, interrupt))
    runs.discard(tmp_path, CONFIG)
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name]
    assert stored_step(tmp_path / other.name) == 17
    runs.discard(tmp_path, other)
    runs.discard(tmp_path, other)  # nothing is there
    assert names(tmp_path) == []
