"""Processes that are really killed or stopped, and others that go on where they were."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kernels import running
from pairmix import _kernels
from pairmix_lab import results
from pairmix_lab.experiments import teacher
from pairmix_lab.training import runs

CONFIG = teacher.Config(layer="spm", width=32, steps=1000, batch=32)
KILLS = 10
PATIENCE = 120  # seconds, after which something hangs
ALWAYS, NEVER = 0, 3600  # seconds between checkpoints

forkserver = multiprocessing.get_context("forkserver")  # imports once: a new process is there in a moment
forkserver.set_forkserver_preload(
    [
        "pairmix_lab.training.runs",
        "pairmix_lab.experiments.teacher",
        "tensorboard.summary.writer.record_writer",
        "torch._dynamo",  # which the first optimizer imports
    ]
)


def run(out, save_every=NEVER, die_at=None):
    """Begin the run or go on with it."""
    torch.set_num_threads(1)
    if die_at is not None:
        die_at_call(*die_at)
    runs.run(partial(teacher.Task, CONFIG), out, CONFIG, "the command", resume=True, save_every=save_every)


def die_at_call(name, count):
    """Be killed when a file is to be put on the disk, or to take its place, for the `count`-th time."""
    owner = {"fsync": os, "replace": Path}[name]
    function, calls = getattr(owner, name), []

    def die_or_go_on(*arguments):
        calls.append(arguments)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)

    setattr(owner, name, die_or_go_on)


def start(*arguments):
    """The run in a process of its own."""
    process = forkserver.Process(target=run, args=arguments)
    process.start()
    return process


def end(process):
    """How a process ended."""
    process.join(PATIENCE)
    return process.exitcode


def checkpoint(out):
    return out / CONFIG.name / "checkpoint.safetensors"


def stored_step(out):
    """How far the run has come, by its checkpoint."""
    if not checkpoint(out).exists():
        return 0
    content = checkpoint(out).read_bytes()  # at once: the file may be replaced at any moment
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return json.loads(header["__metadata__"]["about"])["step"]


def wait_for_step(step, out, is_alive):
    deadline = time.monotonic() + PATIENCE
    while stored_step(out) < step:
        assert is_alive(), f"ended at step {stored_step(out)}, before it came to {step}"
        assert time.monotonic() < deadline, f"hangs at step {stored_step(out)}, before it came to {step}"
        time.sleep(1e-3)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    with running(_kernels.targets()[0]):  # as the processes that are compared with it, whatever --target says
        run(out)
    return out


def assert_same(out, expected):
    """The same weights, moments and history, to the bit, and nothing left over."""
    tensors, wanted = load_file(checkpoint(out)), load_file(checkpoint(expected))
    assert tensors.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(tensors[name], value), name
    ours, theirs = (results.load(runs.result_path(folder, CONFIG)) for folder in (out, expected))
    assert without_times(ours["rows"]) == without_times(theirs["rows"])
    assert without_times([ours["outcome"]]) == without_times([theirs["outcome"]])
    assert not list(out.rglob("*.part"))


def without_times(rows):
    return [{name: value for name, value in row.items() if name != "ms_per_step"} for row in rows]


def test_a_run_that_is_killed_ten_times_comes_to_the_same(tmp_path, undisturbed):
    moments = random.Random(0)
    for _ in range(KILLS):
        process = start(tmp_path, ALWAYS)
        wait_for_step(stored_step(tmp_path) + moments.randint(1, 10), tmp_path, process.is_alive)
        time.sleep(moments.uniform(0, 0.03))  # anywhere in a step, most often while it writes
        process.kill()
        assert end(process) == -signal.SIGKILL
    assert 0 < stored_step(tmp_path) < CONFIG.steps
    assert end(start(tmp_path)) == 0
    assert_same(tmp_path, undisturbed)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_killed_in_the_middle_of_writing_a_checkpoint(tmp_path, undisturbed, moment, count):
    assert end(start(tmp_path, ALWAYS, (moment, count))) == -signal.SIGKILL
    assert len(list(tmp_path.rglob("*.part"))) == 1
    assert stored_step(tmp_path) == count - 1
    assert end(start(tmp_path)) == 0
    assert_same(tmp_path, undisturbed)


def test_killed_in_the_middle_of_writing_the_result(tmp_path, undisturbed):
    assert end(start(tmp_path, NEVER, ("replace", 2))) == -signal.SIGKILL  # the first is the last checkpoint
    assert stored_step(tmp_path) == CONFIG.steps
    assert not runs.is_finished(tmp_path, CONFIG, resume=True)
    assert end(start(tmp_path)) == 0
    assert_same(tmp_path, undisturbed)


def command(out, *options):
    """The command that a user types."""
    words = f"-m pairmix train teacher --layers spm --widths 32 --seeds 0 --steps {CONFIG.steps} --batch 32 --threads 1"
    return subprocess.Popen(
        [sys.executable, *words.split(), "--out", out, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_command_is_killed_then_stopped_and_then_finishes(tmp_path, undisturbed):
    with command(tmp_path, "--save-every", "0") as killed:
        wait_for_step(1, tmp_path, lambda: killed.poll() is None)
        killed.kill()
    assert killed.returncode == -signal.SIGKILL

    with command(tmp_path, "--save-every", "0", "--resume") as stopped:
        wait_for_step(stored_step(tmp_path) + 5, tmp_path, lambda: stopped.poll() is None)
        stopped.send_signal(signal.SIGINT)
        said, _ = stopped.communicate(timeout=PATIENCE)
    assert stopped.returncode == 130, said
    step = stored_step(tmp_path)
    assert step < CONFIG.steps
    assert f"stopped after step {step:,}. The same command with --resume goes on" in " ".join(said.split())
    assert "Traceback" not in said

    with command(tmp_path, "--resume") as finished:
        said, _ = finished.communicate(timeout=PATIENCE)
    assert finished.returncode == 0, said
    assert_same(tmp_path, undisturbed)
