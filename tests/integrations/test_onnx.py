"""ONNX models compute in onnxruntime what the layers compute in torch."""

import io
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from pairmix import SPMGRU, SPMLSTM, SPMRNN, Schedule, SPMLinear, SPMTransformerEncoderLayer
from pairmix.nn import MergedStages

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
# The exporter copies its tree specs, which torch itself deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning")

BATCH = {0: torch.export.Dim("batch")}


class SideBySide(nn.Module):
    """Layers that read the first features of one input: one export for all of them, because each takes seconds."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        return tuple(layer(x[..., : layer.in_features]) for layer in self.layers)


def exported(model, *inputs, **options):
    program = torch.onnx.export(model.eval(), inputs, dynamo=True, verbose=False, **options)
    file = io.BytesIO()
    program.save(file)
    return program, onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])


def assert_same(session, model, *inputs):
    feed = {one.name: x.numpy() for one, x in zip(session.get_inputs(), inputs, strict=True)}
    with torch.no_grad():
        expected = torch.utils._pytree.tree_leaves(model(*inputs))
    actual = session.run(None, feed)
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=1e-5)


def randomised(layer):
    """With parameters of which none is as it starts, and outputs of the size of one."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.7 if name == "coeffs" else 0.5))
    return layer


def all_kinds(block):
    yield SPMLinear(16, 16, block=block)
    yield SPMLinear(9, 5, block=block)
    if block == "rotation":  # which differs in its coefficients only
        return
    yield SPMLinear(12, 20)
    yield SPMLinear(5, 13, residual="pass", bias=False)
    yield SPMLinear(6, 5, maps=3)
    yield SPMLinear(6, 4, rank=2)
    yield SPMLinear(4, 4, rank=1, maps=2)
    yield SPMLinear(8, 8, schedule=Schedule.random(8, 2))
    yield SPMLinear(7, 7, schedule="brick", stages=2)
    yield SPMLinear(16, 16, schedule=Schedule.random_blocks(16, block_size=4))
    yield SPMLinear(6, 6, stages=0)


@pytest.mark.parametrize("block", ["general", "rotation"])
def test_layers(block):
    model = SideBySide(randomised(layer) for layer in all_kinds(block))
    _, session = exported(model, torch.randn(3, 16), dynamic_shapes=(BATCH,))
    for batch in (1, 5):
        assert_same(session, model, torch.randn(batch, 16))


def test_the_graph_of_a_butterfly_is_small():
    model = nn.Sequential(randomised(SPMLinear(64, 64)))
    program, session = exported(model, torch.randn(2, 3, 64))
    assert_same(session, model, torch.randn(2, 3, 64))
    nodes = Counter(node.op_type for node in program.model.graph)
    assert nodes["Gather"] == model[0].stages
    assert nodes["Mul"] == 2 * model[0].stages + 2  # and the diagonals
    assert sum(nodes.values()) <= 9 * model[0].stages + 10


def test_merged_stages():
    sizes = [(256, 256), (128, 192), (192, 128), (9, 5)]
    model = SideBySide(MergedStages(SPMLinear(*size, rank=2)) for size in sizes)
    program, session = exported(model, torch.randn(3, 256), dynamic_shapes=(BATCH,))
    assert_same(session, model, torch.randn(5, 256))
    assert {"MatMul", "Gemm"} & {node.op_type for node in program.model.graph}


class Networks(nn.Module):
    def __init__(self):
        super().__init__()
        self.networks = nn.ModuleList([SPMRNN(2, 4), SPMGRU(2, 4), SPMLSTM(2, 4)])

    def forward(self, x):
        return tuple(network(x) for network in self.networks)


def test_recurrent_networks_step_by_step():
    model = Networks()
    _, session = exported(model, torch.randn(2, 3, 2))
    assert_same(session, model, torch.randn(2, 3, 2))


def test_attention():
    layer = SPMTransformerEncoderLayer(4, 2, 8, batch_first=True)
    _, session = exported(layer, torch.randn(2, 3, 4))
    assert_same(session, layer, torch.randn(2, 3, 4))
