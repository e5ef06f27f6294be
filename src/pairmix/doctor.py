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
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for name, impl in ops.IMPLS.items():
        reasons = [impl.why_not(device) for device in (torch.device(impl.preferred_on or "cpu"), cpu)]
        if None in reasons:
            yield f'impl "{name}"', ", ".join(filter(None, ["available", impl.details()]))
        else:
            yield f'impl "{name}"', f"not available: {reasons[0]}"
    picks = f'picks "{functional.choose_impl("auto", cpu)}" for CPU tensors'
    if torch.cuda.is_available():
        picks += f', "{functional.choose_impl("auto", gpu)}" for CUDA tensors'
    yield 'impl "auto"', picks
