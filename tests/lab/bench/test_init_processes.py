"""Starts are compared by real processes, which train, are killed, and others go on."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from small_grids import NEAR, grid

from pairmix_lab.bench import init
from pairmix_lab.bench.init import trained
from pairmix_lab.bench.jobs import Finished, processes, submitted
from pairmix_lab.experiments import teacher

PATIENCE = 120  # seconds, after which something hangs
LONG = grid((teacher.EXPERIMENT, replace(NEAR, settings={"steps": 200, "batch": 8})))
forkserver = multiprocessing.get_context("forkserver")  # imports once: a new process is there in a moment
forkserver.set_forkserver_preload(["pairmix_lab.bench.init"])


def run_long(part):
    init.run(LONG, Finished(part, resume=True), jobs=2)


def lines_of(part):
    return part.read_text().splitlines() if part.exists() else []


def wait_until(condition, is_alive=lambda: True):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert is_alive(), "it ended before"
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(1e-3)


def test_a_grid_that_was_killed_is_resumed(part):
    process = forkserver.Process(target=run_long, args=(part,))
    process.start()
    wait_until(lambda: len(lines_of(part)) >= 3, process.is_alive)
    process.kill()
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL
    before = lines_of(part)
    assert 3 <= len(before) < LONG.runs

    rows = init.run(LONG, Finished(part, resume=True), jobs=2)
    assert lines_of(part)[: len(before)] == before
    assert len(lines_of(part)) == LONG.runs  # none of them twice
    for lr, found in zip(NEAR.lrs_at(8), rows, strict=False):
        alone = trained(teacher.EXPERIMENT, LONG.candidates[0].config(lr, seed=0))
        assert {key: found[key] for key in alone} == pytest.approx(alone, rel=1e-3)


def begin_and_wait(folder):
    """Start processes that tell their numbers."""
    with processes(2) as pool:
        submitted(pool, tell_and_sleep, [(folder,)] * 4)
        time.sleep(PATIENCE)


def tell_and_sleep(folder):
    (folder / str(os.getpid())).touch()
    time.sleep(PATIENCE)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    try:  # in a container nobody may be there to reap an orphan
        return state.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return not Path("/proc").exists()


def test_processes_end_when_the_one_that_started_them_is_killed(tmp_path):
    process = forkserver.Process(target=begin_and_wait, args=(tmp_path,))
    process.start()
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, process.is_alive)
    started = [int(path.name) for path in tmp_path.iterdir()]
    assert all(map(is_running, started))
    process.kill()
    wait_until(lambda: not any(map(is_running, started)))


def begin_and_fail(folder):
    """Start processes that have much to do; how they take Ctrl-C, which reaches all of them in a terminal."""
    with processes(2) as pool:
        (handler,) = submitted(pool, signal.getsignal, [(signal.SIGINT,)])
        submitted(pool, tell_and_sleep, [(folder,)] * 4)
        wait_until(lambda: len(list(folder.iterdir())) == 2)
        raise LookupError(handler.result())


def test_processes_end_at_once_after_an_error(tmp_path):
    before, start = signal.getsignal(signal.SIGINT), time.monotonic()
    with pytest.raises(LookupError) as error:
        begin_and_fail(tmp_path)
    assert time.monotonic() - start < PATIENCE  # for which each of them would sleep
    assert not any(is_running(int(path.name)) for path in tmp_path.iterdir())
    assert error.value.args == (signal.SIG_IGN,)  # it is for the process that started them
    assert signal.getsignal(signal.SIGINT) is before


def interrupt_itself(folder, said):
    """Press Ctrl-C where an exception would leave the lock of a thread of the pool locked."""
    with processes(2) as pool:
        future, *_ = submitted(pool, tell_and_sleep, [(folder,)] * 4)
        wait_until(lambda: len(list(folder.iterdir())) == 2)
        signal.raise_signal(signal.SIGINT)
        said.append("went on")
        future.result(PATIENCE)
        said.append("waited")


def test_ctrl_c_interrupts_nothing_half_way(tmp_path):
    said = []
    with pytest.raises(KeyboardInterrupt):
        interrupt_itself(tmp_path, said)
    assert said == ["went on"]
    assert not any(is_running(int(path.name)) for path in tmp_path.iterdir())


def test_ctrl_c_in_the_end_is_not_lost():
    with pytest.raises(KeyboardInterrupt), processes(1):
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_stops_the_command_and_its_processes(part):
    words = f"-m pairmix bench init --widths 16 --jobs 2 --out {part.parent}".split()
    with subprocess.Popen(
        [sys.executable, *words, "--cases", "teacher near the identity"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a group of its own: a terminal sends Ctrl-C to all of it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # ignored if the tests run with &
    ) as process:
        wait_until(lambda: lines_of(part), lambda: process.poll() is None)
        os.killpg(process.pid, signal.SIGINT)
        try:
            said, _ = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert "The same command with --resume goes on from there." in " ".join(said.split())
    assert 1 <= len(lines_of(part)) < 30
    assert [path.name for path in part.parent.iterdir()] == [part.name]


def kill_itself(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_is_said_in_a_sentence(part, monkeypatch):
    monkeypatch.setattr(init, "trained", kill_itself)
    with pytest.raises(ValueError, match=r"a process that trained was killed.* --resume goes on"):
        init.run(grid(), Finished(part))
