"""torch without one of the private names that pairmix uses: everything still works.

`python tests/hide.py NAME tests/ops tests/nn -n 0` runs whole tests so.
"""

from __future__ import annotations

import importlib.util
import operator
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.fx.experimental.proxy_tensor
from torch.autograd import forward_ad

from pairmix import SPMLinear, ops
from pairmix.ops import library, torch_internals

ROOT = Path(__file__).parents[2]


def test_this_torch_has_them_all():
    assert all(torch_internals._find(name) is not None for name in torch_internals.NAMES)
    x = torch.ones(2, 4)
    assert torch_internals.is_ordinary(x)
    assert SPMLinear(4, 4)(x).shape == (2, 4)


@pytest.fixture(params=torch_internals.NAMES)
def hidden(request, monkeypatch):
    """pairmix as it would be if this name had been missing when it was imported."""
    *path, last = request.param.split(".")
    with monkeypatch.context() as without:
        without.delattr(operator.attrgetter(".".join(path))(torch), last)
        spec = importlib.util.spec_from_file_location("without_it", torch_internals.__file__)
        internals = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(internals)
    assert internals._FOUND[request.param] is None
    monkeypatch.setattr(library, "torch_internals", internals)
    monkeypatch.setattr(library, "_apply_directly", internals.apply_of(library._Direct))
    for module in (library, ops):
        monkeypatch.setattr(module, "is_ordinary", internals.is_ordinary)
    monkeypatch.setattr(sys.modules["pairmix.ops.recurrence"], "torch_internals", internals)
    return request.param


def results(impl):
    """What torch can do with a layer, each with its own way through the dispatcher."""
    torch.manual_seed(0)
    layer, x, tangent = SPMLinear(6, 6, dtype=torch.float64, impl=impl), *torch.randn(2, 3, 6, dtype=torch.float64)
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,)).sin().sum()

    def backward(create_graph):
        inputs = [x.clone().requires_grad_(), *layer.parameters()]
        return torch.autograd.grad(layer(inputs[0]).sin().sum(), inputs, create_graph=create_graph)

    with torch.inference_mode():
        yield "inference", layer(x)
    with forward_ad.dual_level():
        yield "dual", forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent))).tangent
    yield "backward", torch.cat([gradient.flatten() for gradient in backward(False)])
    twice = torch.autograd.grad(sum(gradient.sin().sum() for gradient in backward(True)), list(layer.parameters()))
    yield "twice", torch.cat([gradient.flatten() for gradient in twice])
    yield "jvp", torch.func.jvp(layer, (x,), (tangent,))[1]
    yield "grad", torch.func.grad(loss)(parameters, x)["coeffs"]
    yield "per sample", torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)["coeffs"]
    yield "ensemble", torch.vmap(loss, (0, None))({k: torch.stack([p, -p]) for k, p in parameters.items()}, x)
    yield "negated", layer(torch.complex(x, x).conj().imag)
    graph = torch.fx.experimental.proxy_tensor.make_fx(layer)(x)
    yield "traced", graph(tangent)
    assert library.spm in [node.target for node in graph.graph.nodes]


def test_without(hidden):
    actual, expected = dict(results("cpu")), dict(results("reference"))
    for name, tensor in actual.items():
        torch.testing.assert_close(tensor, expected[name], msg=lambda message, name=name: f"{name}: {message}")


def test_an_import_without():
    command = [sys.executable, ROOT / "tests/hide.py", "_C._dispatch_keys", "tests/test_functional.py", "-q", "-n", "0"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout[-3000:]
    assert re.search(r"\d\d passed", result.stdout)


def test_no_other_file_uses_private_names():
    for path in (ROOT / "src").rglob("*.py"):
        if path.name != "torch_internals.py":
            assert not re.search(r"torch\._|forward_ad\._", path.read_text()), path
