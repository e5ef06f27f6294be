"""Two processes that would train the same run."""

import signal
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from small_runs import CONFIG, Crash, Doing, at_step, crash, names, stored_step
from test_distributed import PATIENCE, said_by, torchrun
from test_kill import forkserver
from typer.testing import CliRunner

from pairmix_lab import cli
from pairmix_lab.experiments import teacher
from pairmix_lab.training import runs
from pairmix_lab.training.checkpoints import CheckpointError


def train_until(out, reached, go_on):
    """Train, and wait at the 17th step until told to go on."""
    torch.set_num_threads(1)

    def wait():
        reached.set()
        go_on.wait(PATIENCE)

    run(out, save_every=0, resume=True, on_step=at_step(17, wait))


@contextmanager
def training(out):
    """A process that is at its 17th step, and goes on when the event is set."""
    reached, go_on = forkserver.Event(), forkserver.Event()
    process = forkserver.Process(target=train_until, args=(out, reached, go_on))
    process.start()
    try:
        assert reached.wait(PATIENCE)
        yield process, go_on
    finally:
        process.kill()
        process.join()


def run(out, **options):
    return runs.run(partial(teacher.Task, CONFIG), out, CONFIG, "", **options)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("resume", [False, True])
def test_the_second_process_is_refused_and_touches_nothing(tmp_path, resume):
    with training(tmp_path) as (first, go_on):
        (tmp_path / CONFIG.name / "checkpoint.safetensorsabc.part").write_bytes(b"what the first is writing")
        before = contents(tmp_path)
        with pytest.raises(CheckpointError, match=rf"/{CONFIG.name}: process {first.pid} is training this run"):
            run(tmp_path, resume=resume)
        assert contents(tmp_path) == before
        go_on.set()
        first.join(PATIENCE)
        assert first.exitcode == 0
    assert runs.is_finished(tmp_path, CONFIG, resume=True)
    assert "lock" not in names(tmp_path)


def test_a_run_is_not_discarded_while_it_is_trained(tmp_path):
    with training(tmp_path) as (first, _):
        before = contents(tmp_path)
        with pytest.raises(CheckpointError, match=f"process {first.pid} is training this run"):
            runs.discard(tmp_path, CONFIG)
        assert contents(tmp_path) == before


def test_a_killed_process_holds_nothing(tmp_path):
    with training(tmp_path) as (first, _):
        first.kill()
        first.join(PATIENCE)
        assert first.exitcode == -signal.SIGKILL
    assert stored_step(tmp_path / CONFIG.name) == 16
    run(tmp_path, resume=True)
    assert stored_step(tmp_path / CONFIG.name) == 40
    assert "lock" not in names(tmp_path)


def test_other_runs_in_the_same_folder_go_on(tmp_path):
    other = teacher.Config(width=8, steps=2, batch=4)
    with training(tmp_path):
        runs.run(partial(teacher.Task, other), tmp_path, other, "")


def test_the_command_says_who_trains_it(tmp_path):
    options = "--layers spm --widths 16 --seeds 0 --steps 40 --batch 32 --lr 1e-2 --resume --out"
    with training(tmp_path) as (first, _):
        result = CliRunner().invoke(cli.app, ["train", "teacher", *options.split(), str(tmp_path)])
    assert result.exit_code == 1
    assert f"process {first.pid} is training this run" in " ".join(result.output.split())


def test_two_processes_of_torchrun_are_both_told(tmp_path):
    options = "--layers spm --widths 16 --steps 40 --batch 32 --lr 1e-2 --resume"
    with training(tmp_path) as (first, _), torchrun(tmp_path, *options.split()) as second:
        said = " ".join(said_by(second).split())
    assert second.returncode == 1
    assert f"process {first.pid} is training this run" in said
    assert "RuntimeError" not in said


def test_a_run_that_fails_before_its_first_step_leaves_nothing(tmp_path):
    with pytest.raises(Crash):
        runs.run(lambda: Doing("build", crash), tmp_path / "new" / "runs", CONFIG, "")
    assert names(tmp_path) == []
