"""Stopping, and going on to the same end."""

import signal
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

import pytest
import torch
from small_runs import (
    CONFIG,
    EXPERIMENTS,
    Crash,
    Doing,
    NotANumber,
    assert_same,
    at_step,
    crash,
    interrupt,
    names,
    stop_at,
    stored_step,
)

from pairmix_lab.experiments import teacher
from pairmix_lab.training.checkpoints import CheckpointError
from pairmix_lab.training.loop import train
from pairmix_lab.training.signals import Stopped


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(tmp_path, name):
    expected = train(EXPERIMENTS[name]())
    stop_at(17, EXPERIMENTS[name](), tmp_path)
    assert stored_step(tmp_path) == 17
    torch.manual_seed(12345)
    assert_same(train(EXPERIMENTS[name](), tmp_path, resume=True), expected)


def test_a_run_may_be_stopped_again_and_again(tmp_path):
    for step in (1, 14, 15, 16, 39, 40):  # the first, about a validation, the last
        stop_at(step, teacher.Task(CONFIG), tmp_path, resume=True)
        assert stored_step(tmp_path) == step
    assert_same(train(teacher.Task(CONFIG), tmp_path, resume=True), train(teacher.Task(CONFIG)))


@contextmanager
def handled(number, handler):
    """A signal that is handled in some way before the training starts."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_stop_too_however_often_they_come(tmp_path, number, times):
    with handled(number, lambda *_: crash()), pytest.raises(Stopped):  # so that a failure does not end the tests
        train(teacher.Task(CONFIG), tmp_path, on_step=at_step(17, *[partial(interrupt, number)] * times))
    assert stored_step(tmp_path) == 17


def test_a_hangup_that_is_ignored_stays_so(tmp_path):
    with handled(signal.SIGHUP, signal.SIG_IGN):  # as nohup does
        trained = train(teacher.Task(CONFIG), tmp_path, on_step=at_step(17, partial(interrupt, signal.SIGHUP)))
    assert trained.rows[-1]["step"] == 40


def test_torchrun_passes_every_signal_on_a_second_time(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.distributed.is_torchelastic_launched", lambda: True)
    with handled(signal.SIGINT, lambda *_: crash()), pytest.raises(Stopped):
        train(teacher.Task(CONFIG), tmp_path, on_step=at_step(17, interrupt, interrupt))
    assert stored_step(tmp_path) == 17


@pytest.mark.parametrize(("method", "step"), [("build", 1), ("batch", 1), ("validate", 1), ("conclude", 40)])
def test_a_signal_at_any_moment_stops_the_run(tmp_path, method, step):
    with pytest.raises(Stopped):
        train(Doing(method, interrupt), tmp_path)
    assert stored_step(tmp_path) == step
    assert_same(train(teacher.Task(CONFIG), tmp_path, resume=True), train(teacher.Task(CONFIG)))


def test_the_second_ctrl_c_acts_as_usual(tmp_path):
    # A shell lets what it runs with & ignore it.
    with handled(signal.SIGINT, signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        train(teacher.Task(CONFIG), tmp_path, on_step=at_step(17, interrupt, interrupt))
    assert not (tmp_path / "checkpoint.safetensors").exists()


@pytest.mark.parametrize("action", [lambda: None, interrupt, crash], ids=["finished", "stopped", "crashed"])
def test_the_handlers_of_signals_are_put_back(action):
    def handlers():
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]

    during = []
    on_step = at_step(17, lambda: during.extend(handlers()), action)
    with handled(signal.SIGHUP, signal.SIG_DFL):  # the tests may run under nohup, where it stays ignored
        before = handlers()
        with suppress(Stopped, Crash):
            train(teacher.Task(CONFIG), on_step=on_step)
        assert handlers() == before
    assert len(during) == 3
    assert not set(during) & set(before)


def test_without_resume_an_earlier_run_is_left_alone(tmp_path):
    stop_at(17, teacher.Task(CONFIG), tmp_path)
    before, files = (tmp_path / "checkpoint.safetensors").read_bytes(), names(tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoint\.safetensors is of an earlier run: --resume goes on"):
        train(teacher.Task(CONFIG), tmp_path)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before
    assert names(tmp_path) == files


def test_a_run_with_other_settings_is_not_gone_on_with(tmp_path):
    stop_at(17, teacher.Task(CONFIG), tmp_path)
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"is of another run: lr is 0\.01 there and 0\.02 here"):
        train(teacher.Task(replace(CONFIG, lr=0.02)), tmp_path, resume=True)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before


def test_with_nothing_to_resume_a_run_starts(tmp_path):
    assert_same(train(teacher.Task(CONFIG), tmp_path, resume=True), train(teacher.Task(CONFIG)))


def test_a_finished_run_is_only_concluded_again(tmp_path):
    expected = train(teacher.Task(CONFIG), tmp_path)
    assert_same(train(teacher.Task(CONFIG), tmp_path, resume=True, on_step=lambda *_: crash()), expected)


def test_checkpoints_are_written_as_often_as_asked(tmp_path):
    seen = []
    folder = tmp_path / "often"
    train(
        teacher.Task(CONFIG),
        folder,
        save_every=0,
        on_step=lambda step, *_: seen.append(step == 1 or stored_step(folder) == step - 1),
    )
    assert seen == [True] * 40
    folder = tmp_path / "seldom"
    train(
        teacher.Task(CONFIG),
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
    assert_same(train(teacher.Task(CONFIG), tmp_path, resume=True), train(teacher.Task(CONFIG)))


def test_an_interrupted_write_is_swept_away(tmp_path):
    stop_at(17, teacher.Task(CONFIG), tmp_path)
    (tmp_path / "checkpoint.safetensorsabc.part").write_bytes(b"half")
    train(teacher.Task(CONFIG), tmp_path, resume=True)
    assert not list(tmp_path.glob("*.part"))


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stop_at(17, teacher.Task(CONFIG), None, save_every=0)
    train(teacher.Task(CONFIG), save_every=0)
    assert names(tmp_path) == []
