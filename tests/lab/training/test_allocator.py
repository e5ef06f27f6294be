import platform
import subprocess
import sys

import pytest

from pairmix_lab.training import allocator

FAULTS = """
import resource, sys, torch
from pairmix_lab.training import allocator
if sys.argv[1] == "keep":
    allocator.keep_freed_memory()
for _ in range(20):  # the first few still make the heap grow
    torch.ones(8 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.ones(8 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(argument):
    printed = subprocess.run([sys.executable, "-c", FAULTS, argument], check=True, capture_output=True, text=True)
    return int(printed.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_freed_memory_is_used_again_without_faults():
    pages = 5 * (32 << 20) // 4096
    assert faults("as usual") > pages / 2
    assert faults("keep") < pages / 10


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: object())
    allocator.keep_freed_memory()
