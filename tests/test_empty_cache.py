"""Memory that the kernels keep, and give back when they are told to."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pairmix

CODE = """
import gc, threading, torch, pairmix
from pathlib import Path

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

layer = pairmix.SPMLinear(4096, 4096)
inputs = [torch.ones(1024, 4096) for _ in range(3)]

def work():
    with torch.no_grad():
        kept = [layer(x) for x in inputs]  # 16 MiB each, alive at the same time

worker = threading.Thread(target=work)
before = resident()
work()
worker.start()
worker.join()
held = resident() - before
pairmix.empty_cache()
print(held >= 40 * 2**20, resident() - before <= 8 * 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_goes_back_to_the_system():
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert result.stdout == "True True\n", result.stderr


def test_results_in_use_stay():
    import torch

    layer, x = pairmix.SPMLinear(512, 512), torch.ones(256, 512)
    with torch.no_grad():
        kept = layer(x)
        copy = kept.clone()
        layer(x)
        pairmix.empty_cache()
        assert kept.equal(copy)
        assert layer(x).equal(copy)
