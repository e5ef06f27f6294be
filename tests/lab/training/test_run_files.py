"""Runs on the disk."""

import json
from dataclasses import asdict, replace
from functools import partial

import pytest
from small_runs import CONFIG, at_step, interrupt, names, stored_step, without_times

from pairmix_lab import results
from pairmix_lab.experiments import teacher
from pairmix_lab.training import runs
from pairmix_lab.training.checkpoints import CheckpointError
from pairmix_lab.training.loop import train
from pairmix_lab.training.signals import Stopped


def run(out, config=CONFIG, **options):
    return runs.run(partial(teacher.Task, config), out, config, "the command", **options)


def test_a_run_leaves_its_result(tmp_path):
    outcome = run(tmp_path)
    result = results.load(tmp_path / f"{CONFIG.name}.json")
    expected = train(teacher.Task(CONFIG))
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
    differences = "lr is 0.01 there and 0.02 here; steps is 40 there and 50 here"
    assert f"{CONFIG.name}.json is of another run: {differences}" in str(refused.value)


class WithData(teacher.Task):
    """Says that it learns from a file."""

    def __init__(self, config, digest):
        super().__init__(config)
        self.data = {"agnews/train.csv": digest}


OURS, THEIRS = "sha256:0123456789" + "a" * 54, "sha256:9876543210" + "b" * 54
DIFFERENCE = r"is of another run: agnews/train\.csv is 'sha256:01234.*aaa' there and 'sha256:98765.*bbb' here"


def test_a_run_is_not_resumed_on_other_data(tmp_path):
    with pytest.raises(Stopped):
        train(WithData(CONFIG, OURS), tmp_path, on_step=at_step(17, interrupt))
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=DIFFERENCE) as refused:
        train(WithData(CONFIG, THEIRS), tmp_path, resume=True)
    assert OURS not in str(refused.value)  # short
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before
    train(WithData(CONFIG, OURS), tmp_path, resume=True)


def test_a_result_on_other_data_does_not_count_as_finished(tmp_path):
    runs.run(partial(WithData, CONFIG, OURS), tmp_path, CONFIG, "the command")
    path = runs.result_path(tmp_path, CONFIG)
    before = path.read_bytes()
    assert results.load(path)["data"] == {"agnews/train.csv": OURS}
    assert runs.is_finished(tmp_path, CONFIG, True, lambda: {"agnews/train.csv": OURS})
    with pytest.raises(CheckpointError, match=DIFFERENCE):
        runs.is_finished(tmp_path, CONFIG, True, lambda: {"agnews/train.csv": THEIRS})
    assert path.read_bytes() == before


def test_a_result_from_before_data_was_recorded_counts_as_finished(tmp_path):
    runs.run(partial(WithData, CONFIG, OURS), tmp_path, CONFIG, "the command")
    path = runs.result_path(tmp_path, CONFIG)
    result = json.loads(path.read_text())
    del result["data"]
    path.write_text(json.dumps(result))
    assert runs.is_finished(tmp_path, CONFIG, True, lambda: pytest.fail("the data need not be there"))


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
