from concurrent.futures import Future
from contextlib import nullcontext

import pytest

from pairmix_lab.bench import init


@pytest.fixture
def part(tmp_path):
    return tmp_path / "out" / "init.part.jsonl"


@pytest.fixture
def here(monkeypatch):
    """Runs are trained in this process: another one takes seconds to start. Gives the runs that were trained."""
    trained_here = []

    def submitted(pool, work, calls):
        futures = []
        for arguments in calls:
            trained_here.append(arguments[1])
            futures.append(Future())
            futures[-1].set_result(work(*arguments))
        return futures

    monkeypatch.setattr(init, "processes", lambda jobs: nullcontext())
    monkeypatch.setattr(init, "submitted", submitted)
    return trained_here
