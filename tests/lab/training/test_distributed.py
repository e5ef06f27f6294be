"""Two processes that train one model together, as `torchrun` starts them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from pairmix_lab import results
from pairmix_lab.experiments import teacher
from pairmix_lab.training import runs
from pairmix_lab.training.processes import Processes

# With this start no gradient is close to zero, where Adam would turn rounding errors into whole steps.
START = ("--inits", "near_identity", "--layer-rate", "1")
CONFIG = teacher.Config(width=32, steps=30, init="near_identity", layer_rate=1.0)
PATIENCE = 120  # seconds, after which something hangs

# Two processes sum up a gradient in another order than one, which changes about the last bit of it, and Adam moves a
# weight by lr = 3e-3 at most whatever the gradient's size. 30 steps come to 6e-8; half of the rows come to over 1e-2.
TOLERANCE = 1e-5


@contextmanager
def torchrun(out, *options):
    """The command in two processes."""
    words = "-m torch.distributed.run --standalone --nproc-per-node 2 -m pairmix train teacher --widths 32 --seeds 0"
    process = subprocess.Popen(
        [sys.executable, *words.split(), "--out", out, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        start_new_session=True,  # a group of its own, to which signals can be sent
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # not killed: it has to end its processes
        process.communicate(timeout=PATIENCE)


def environment():
    """Gloo needs an address, by the name of the machine if it has one."""
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    return dict(os.environ)


def said_by(process):
    """All that a process writes until its end."""
    return process.communicate(timeout=PATIENCE)[0]


def children(process):
    """The processes that a process has started."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


class HalfOfTheRows(teacher.Task):
    """What a process would learn from alone."""

    def batch(self, step):
        return Processes(0, 2).share(super().batch(step), self.config.batch)


def weights(out, config):
    tensors = load_file(out / config.name / "checkpoint.safetensors")
    return {name: value for name, value in tensors.items() if name.startswith("model.") and value.is_floating_point()}


def distances(weights, others):
    assert weights.keys() == others.keys()
    return {name: float((value - others[name]).abs().max()) for name, value in weights.items()}


def stored_step(out, config):
    path = out / config.name / "checkpoint.safetensors"
    if not path.exists():
        return 0
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["about"])["step"]


def test_the_processes_share_all_rows():
    batch = torch.arange(12).reshape(6, 2), torch.arange(6)
    shares = [Processes(rank, 3).share(batch, 6) for rank in range(3)]
    assert [len(labels) for _, labels in shares] == [2, 2, 2]
    for inputs, labels in shares:
        assert inputs.equal(batch[0][labels])
    assert torch.cat([labels for _, labels in shares]).sort().values.equal(batch[1])


def test_one_process_has_all_rows():
    batch = torch.rand(5, 2), torch.arange(5)
    inputs, labels = Processes().share(batch, 5)
    assert inputs.equal(batch[0])
    assert labels.equal(batch[1])


def test_two_processes_come_to_the_same_as_one(tmp_path):
    together, alone, half = tmp_path / "together", tmp_path / "alone", tmp_path / "half"
    configs = {"spm": CONFIG, "dense": teacher.Config(width=32, steps=30, layer="dense")}
    with torchrun(together, "--layers", "spm,dense", "--steps", "30", *START) as process:
        said = said_by(process)
    assert process.returncode == 0, said
    assert "Warning" not in said
    for config in configs.values():
        runs.run(partial(teacher.Task, config), alone, config, "")
        runs.run(partial(HalfOfTheRows, config), half, config, "")
        expected = weights(alone, config)
        assert max(distances(weights(together, config), expected).values()) < TOLERANCE
        assert min(distances(weights(half, config), expected).values()) > 100 * TOLERANCE

        ours, theirs = (results.load(runs.result_path(folder, config)) for folder in (together, alone))
        assert (ours["outcome"]["processes"], theirs["outcome"]["processes"]) == (2, 1)
        for row, wanted in zip(ours["rows"], theirs["rows"], strict=True):
            assert row.keys() == wanted.keys()
            for name in row.keys() - {"ms_per_step"}:
                assert row[name] == pytest.approx(wanted[name], rel=1e-4), name

        files = [path.name.split(".")[0] for path in (together / config.name).iterdir()]
        assert sorted(files) == ["checkpoint", "events"]  # those of one process
        assert said.count(f"{config.name}: ") == 1
    assert sorted(path.name for path in together.glob("*.json")) == sorted(f"{c.name}.json" for c in configs.values())


def test_a_batch_that_cannot_be_shared_is_refused(tmp_path):
    with torchrun(tmp_path, "--layers", "spm", "--steps", "30", "--batch", "33") as process:
        said = said_by(process)
    assert process.returncode == 1
    assert "Error: a batch of 33 rows cannot be shared by 2 processes" in said
    assert not list(tmp_path.rglob("*.json"))
    assert not list(tmp_path.rglob("*.safetensors"))


def test_two_processes_are_stopped_and_one_goes_on(tmp_path):
    config = replace(CONFIG, steps=1000)
    with torchrun(tmp_path, "--layers", "spm", "--steps", "1000", "--save-every", "0", *START) as process:
        deadline = time.monotonic() + PATIENCE
        while stored_step(tmp_path, config) < 1:
            assert process.poll() is None, said_by(process)
            assert time.monotonic() < deadline, "hangs"
            time.sleep(1e-3)
        process.send_signal(signal.SIGINT)
        said = said_by(process)
    step = stored_step(tmp_path, config)
    assert 1 <= step < 1000
    assert f"stopped after step {step}. The same command with --resume goes on" in " ".join(said.split())

    steps = []
    runs.run(
        partial(teacher.Task, config),
        tmp_path,
        config,
        "",
        resume=True,
        on_step=lambda step, loss, milliseconds: steps.append(step),
    )
    assert steps == list(range(step + 1, 1001))
    result = results.load(runs.result_path(tmp_path, config))
    assert [row["step"] for row in result["rows"]] == [1, *range(20, 1001, 20)]
    assert result["outcome"]["test_accuracy"] > 0.9


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")
@pytest.mark.parametrize(
    ("number", "at_once"),
    [(signal.SIGTERM, False), (signal.SIGHUP, False), (signal.SIGTERM, True)],
    ids=["SIGTERM", "SIGHUP", "SIGTERM to the group"],
)
def test_a_signal_to_torchrun_and_its_processes_leaves_a_checkpoint(tmp_path, number, at_once):
    """As a terminal or a scheduler sends it: the processes get it a second time from torchrun."""
    config = teacher.Config(layer="dense", width=2048, steps=100_000)  # large, so that a checkpoint takes its time
    options = "--layers dense --widths 2048 --batch 32 --steps 100000 --save-every 3600"
    with torchrun(tmp_path, *options.split()) as process:
        deadline = time.monotonic() + PATIENCE
        while not list(tmp_path.rglob("events*")):  # the first step has been logged
            assert process.poll() is None, said_by(process)
            assert time.monotonic() < deadline, "hangs"
            time.sleep(1e-3)
        if at_once:
            os.killpg(process.pid, number)
        else:
            for pid in children(process):
                os.kill(pid, number)
            time.sleep(0.05)  # until it has been noted; two that come at once count as one
            process.send_signal(number)
        said_by(process)
    assert stored_step(tmp_path, config) >= 1
