"""Processes that are forked while kernels are at work."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

PATIENCE = 60
"""Seconds after which a child hangs."""

ENDS = """
def ends(pid):
    for _ in range(600):
        child, status = os.waitpid(pid, os.WNOHANG)
        if child:
            return status == 0
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    return False
"""

AFTER_A_PARALLEL_CALL = """
import os, signal, time, torch
from pairmix import SPMGRU, SPMLinear
torch.manual_seed(0)
torch.set_num_threads(2)
layer, x = SPMLinear(64, 64), torch.randn(400, 64)
network, sequence = SPMGRU(16, 16), torch.randn(5, 40, 16)
with torch.no_grad():
    expected, states = layer(x), network(sequence)[0]
    pid = os.fork()
    if pid == 0:
        os._exit(not (layer(x).equal(expected) and network(sequence)[0].equal(states)))
print(ends(pid))
"""

WHILE_ANOTHER_THREAD_PLANS = """
import os, signal, threading, time, torch
from pairmix import Schedule, SPMLinear
torch.set_num_threads(1)
layers = [SPMLinear(96, 96, schedule=Schedule.random(96, 5, seed=k)) for k in range(10)]  # not planned yet
x, wide, done = torch.ones(3, 96), torch.ones(2, 4096), False

def plan():
    seed = 0
    while not done:
        SPMLinear(4096, 4096, schedule=Schedule.random(4096, 12, seed=seed))(wide)
        seed += 1

planner = threading.Thread(target=plan)
planner.start()
ended = []
with torch.no_grad():
    for layer in layers:
        time.sleep(0.05)
        pid = os.fork()
        if pid == 0:
            layer(x)
            os._exit(0)
        ended.append(ends(pid))
done = True
planner.join()
print(all(ended))
"""


@pytest.mark.parametrize("code", [AFTER_A_PARALLEL_CALL, WHILE_ANOTHER_THREAD_PLANS])
def test_the_child_can_go_on(code):
    result = subprocess.run([sys.executable, "-c", ENDS + code], capture_output=True, text=True, timeout=20 * PATIENCE)
    assert result.stdout == "True\n", result.stderr
