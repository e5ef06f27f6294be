"""What would compute an SPM layer here, and why: `pairmix doctor`."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import pairmix
from pairmix import functional, ops


def report() -> str:
    """Versions, machine and implementations, a line each."""
    sections = versions(), {name.replace("_", " "): str(value) for name, value in machine().items()}, dict(_impls())
    width = max(len(name) for section in sections for name in section)
    return "\n\n".join("\n".join(f"{name:{width}}  {value}" for name, value in section.items()) for section in sections)


def versions() -> dict[str, str]:
    """The versions of Python, pairmix and what it computes with."""
    return {
        "python": platform.python_version(),
        "pairmix": pairmix.__version__,
        **{name: metadata.version(name) for name in ("torch", "numpy")},
    }


def machine() -> dict[str, Any]:
    """The processor, its cores, the threads in use, and the instruction sets of torch and of the compiled kernels."""
    return {
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "kernels": "none" if ops.cpu.why_not(torch.device("cpu")) else ops.cpu.instruction_set(),
    }


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _impls() -> Iterator[tuple[str, str]]:
    cpu = torch.device("cpu")
    for name, impl in ops.IMPLS.items():
        reason = impl.why_not(cpu)
        details = "" if reason is not None else impl.details()
        available = ", ".join(filter(None, ["available", details]))
        yield f'impl "{name}"', available if reason is None else f"not available: {reason}"
    yield 'impl "auto"', f'picks "{functional.choose_impl("auto", cpu)}" for CPU tensors'
