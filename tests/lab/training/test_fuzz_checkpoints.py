"""A few of the files of fuzz_checkpoints.py, which tries thousands."""

import os
import signal

import fuzz_checkpoints

from pairmix_lab.training import checkpoints


def test_damaged_and_forged_checkpoints():
    verdicts = list(fuzz_checkpoints.check_all(first=0, count=400))
    assert [verdict for verdict in verdicts if verdict[2] not in fuzz_checkpoints.GOOD] == []
    assert [seed for seed, _, _ in verdicts] == list(range(400))
    assert {kind for _, kind, _ in verdicts} == {kind.__name__.replace("_", " ") for kind in fuzz_checkpoints.KINDS}


def verdicts(folder, count=100):
    fuzz = fuzz_checkpoints.Fuzz(folder)
    return {fuzz.check(seed)[1].partition(":")[0] for seed in range(count)}


def test_it_finds_a_checksum_that_is_not_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "digest", lambda about, tensors: "sha256:0")
    assert "silently different" in verdicts(tmp_path)


def test_it_finds_tensors_that_are_not_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_check_tensors", lambda tensors, state, step: None)
    assert {"wrong error", "silently different"} <= verdicts(tmp_path)


def crash_at_two(first, end, connection):
    for seed in range(first, end):
        if seed == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        connection.send((seed, "any kind", "refused"))


def test_it_finds_a_crash_and_goes_on():
    seeds, _, verdicts = zip(*fuzz_checkpoints.check_all(0, 5, crash_at_two), strict=True)
    assert seeds == (0, 1, 2, 3, 4)
    assert verdicts == ("refused", "refused", "crash: exit code -9", "refused", "refused")
