"""Inputs that are more than a tensor, and what torch's tools see of a layer."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

from pairmix import SPMGRU, SPMLinear


class TestFx:
    def test_a_layer_is_a_node_of_its_own(self):
        model = nn.Sequential(SPMLinear(16, 16, rank=2), nn.ReLU(), nn.Linear(16, 4))
        traced = torch.fx.symbolic_trace(model)
        assert [node.op for node in traced.graph.nodes][1:4] == ["call_module"] * 3
        x = torch.randn(3, 16)
        torch.testing.assert_close(traced(x), model(x))


class TestJagged:
    def test_rows_of_all_sequences(self):
        layer = SPMLinear(16, 24, rank=2)
        parts = [torch.randn(length, 16) for length in (3, 5, 1)]
        x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        y = layer(x)
        for got, part in zip(y.unbind(), parts, strict=True):
            torch.testing.assert_close(got, layer(part))
        y.values().sum().backward()
        assert x.grad.is_nested
        assert layer.coeffs.grad is not None

    def test_another_layout_is_refused(self):
        x = torch.nested.nested_tensor([torch.randn(3, 16)])
        with pytest.raises(ValueError, match=r"nested tensor of the layout torch\.strided"):
            SPMLinear(16, 16)(x)


DISTRIBUTED = """
import os
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from pairmix import SPMLinear

distributed.init_process_group("gloo")
rank = distributed.get_rank()
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
plain = SPMLinear(16, 16)
x = torch.randn(6, 16)
expected = plain(x)
expected.square().sum().backward()

for placement in (Replicate(), Shard(0)):
    torch.manual_seed(0)
    layer = distribute_module(SPMLinear(16, 16), mesh)
    y = layer(distribute_tensor(x, mesh, [placement]))
    assert y.placements == (placement,), y.placements
    torch.testing.assert_close(y.full_tensor(), expected)
    y.square().sum().backward()
    for name, parameter in layer.named_parameters():
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, msg=name)

def refused(function, part):
    try:
        function()
    except (ValueError, NotImplementedError) as error:
        assert part in str(error), error
    else:
        raise AssertionError(part)

refused(lambda: layer(distribute_tensor(x, mesh, [Shard(1)])), "must not be split along them")
refused(lambda: plain(distribute_tensor(x, mesh, [Replicate()])), "use distribute_module")
refused(lambda: parallelize_module(nn.Sequential(SPMLinear(16, 16)), mesh, {"0": ColwiseParallel()}), "nn.Linear")

with torch.device("meta"):
    model = nn.Sequential(SPMLinear(16, 16), nn.ReLU(), SPMLinear(16, 4))
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
model.to_empty(device="cpu")
torch.manual_seed(0)
for module in model.modules():
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
model(x[rank::2]).sum().backward()
torch.optim.Adam(model.parameters()).step()
assert all(torch.isfinite(parameter.full_tensor()).all() for parameter in model.parameters())
print("done", flush=True)
distributed.destroy_process_group()
os._exit(0)  # a thread of gloo may still hold a tensor: with torch 2.13 a process that ends meanwhile is aborted
"""


def test_tensors_on_several_devices(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(DISTRIBUTED)
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        script,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2


class TestFlops:
    def test_forward_and_backward_of_a_layer(self):
        layer, x = SPMLinear(64, 64, bias=False), torch.randn(8, 64, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            layer(x)
        assert counter.get_total_flops() == 2 * 8 * layer.multiply_adds
        with FlopCounterMode(display=False) as counter:
            layer(x).sum().backward()
        assert counter.get_total_flops() == 3 * 2 * 8 * layer.multiply_adds

    def test_a_recurrent_network(self):
        network = SPMGRU(32, 32)
        with FlopCounterMode(display=False) as counter:
            network(torch.randn(5, 4, 32))
        maps = network.ih_l0.multiply_adds + network.hh_l0.multiply_adds
        assert counter.get_total_flops() == 2 * 5 * 4 * maps


class TestWhatIsRefused:
    @pytest.mark.parametrize("dtype", [torch.complex64, torch.int8])
    def test_dtypes_without_a_fraction(self, dtype):
        with pytest.raises(TypeError, match=f"dtype must be a floating-point one, got {dtype}"):
            SPMLinear(8, 8, dtype=dtype)

    @pytest.mark.parametrize("spectral_norm", [parametrizations.spectral_norm, nn.utils.spectral_norm])
    @pytest.mark.parametrize(("block", "name"), [("general", "coeffs"), ("rotation", "angles")])
    @pytest.mark.filterwarnings("ignore:.*spectral_norm.*deprecated")
    def test_a_spectral_norm_of_the_blocks(self, spectral_norm, block, name):
        layer = spectral_norm(SPMLinear(8, 8, block=block), name)
        with pytest.raises(ValueError, match=f"spectral_norm on {name} of an SPM layer"):
            layer(torch.randn(2, 8))


def test_torchs_encoder_layer_reads_the_weight_in_evaluation():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
    layer.linear1, layer.linear2 = SPMLinear(16, 32), SPMLinear(32, 16)
    x = torch.randn(2, 5, 16)
    trained = layer(x)
    layer.eval()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), trained, rtol=1e-4, atol=1e-5)


def test_the_weight_is_the_dense_matrix():
    layer = SPMLinear(8, 12, rank=2)
    torch.testing.assert_close(layer.weight, layer.to_dense())
    assert "weight" not in dict(layer.named_parameters())
