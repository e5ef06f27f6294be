"""Run tests as if this torch lacked a private name: `python tests/hide.py _C._dispatch_keys tests/ops -n 0`."""

from __future__ import annotations

import operator
import sys

import pytest
import torch


def hide(name: str) -> None:
    """Import pairmix while torch does not have this name, which is there again afterwards, for torch's own use."""
    *path, last = name.split(".")
    owner = operator.attrgetter(".".join(path))(torch)
    hidden = getattr(owner, last)
    delattr(owner, last)
    try:
        import pairmix.ops.torch_internals as internals
    finally:
        setattr(owner, last, hidden)
    assert internals._FOUND[name] is None, f"pairmix does not look for {name}"


if __name__ == "__main__":
    hide(sys.argv[1])
    sys.exit(pytest.main(sys.argv[2:]))
