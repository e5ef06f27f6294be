"""What TensorBoard shows of a run that was stopped, killed or not."""

import time

import pytest
import torch
from small_runs import CONFIG, LOGGED, VALIDATED, Crash, at_step, crash, stop_at, stored_step
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from pairmix_lab.experiments import teacher
from pairmix_lab.training.loop import train


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
    trained = train(teacher.Task(CONFIG), tmp_path)
    shown = scalars(tmp_path)
    assert [step for step, _ in shown["train_loss"]] == LOGGED
    assert [step for step, _ in shown["valid_accuracy"]] == VALIDATED
    assert shown == as_scalars(trained.rows)


@pytest.mark.usefixtures("slow_disk")
def test_tensorboard_has_all_up_to_a_stop(tmp_path):
    stop_at(17, teacher.Task(CONFIG), tmp_path)
    assert [step for step, _ in scalars(tmp_path)["train_loss"]] == [1, 7, 14, 15]


@pytest.mark.usefixtures("slow_disk")
def test_tensorboard_has_all_up_to_the_checkpoint_after_a_crash(tmp_path):
    with pytest.raises(Crash):
        train(teacher.Task(CONFIG), tmp_path, save_every=0, on_step=at_step(18, crash))
    assert stored_step(tmp_path) == 17
    assert [step for step, _ in scalars(tmp_path)["train_loss"]] == [1, 7, 14, 15]


def test_tensorboard_goes_on_after_a_stop(tmp_path):
    stop_at(17, teacher.Task(CONFIG), tmp_path)
    resumed = train(teacher.Task(CONFIG), tmp_path, resume=True)
    assert scalars(tmp_path) == as_scalars(resumed.rows)


def test_tensorboard_shows_no_step_twice_that_was_taken_twice(tmp_path):
    stop_at(17, teacher.Task(CONFIG), tmp_path)
    with pytest.raises(Crash):
        train(teacher.Task(CONFIG), tmp_path, resume=True, on_step=at_step(33, crash))
    assert scalars(tmp_path)["train_loss"][-1][0] == 30  # past the checkpoint
    resumed = train(teacher.Task(CONFIG), tmp_path, resume=True)
    assert scalars(tmp_path) == as_scalars(resumed.rows)
