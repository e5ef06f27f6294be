"""`impl="auto"` is resolved where a graph runs, not where it was traced."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import oracle
import twins
from pairmix import SPMGRU, SPMLSTM, SPMRNN, SPMLinear, ops
from pairmix.ops import library

NETWORKS = {"rnn": SPMRNN, "gru": SPMGRU, "lstm": SPMLSTM}


@pytest.fixture
def without_kernels(monkeypatch):
    """From here on this machine has no compiled kernels: who calls them nevertheless fails."""

    def remove():
        monkeypatch.setattr(ops.cpu, "_missing", "not compiled")
        monkeypatch.setattr(ops.cpu, "_kernels", None)

    return remove


def impls_in(graph):
    ours = [node for node in graph.nodes if str(node.target).startswith("pairmix.")]
    return [node.args[-1] for node in ours]


def gradients(layer, x):
    def loss(x, *parameters):
        named = dict(zip(dict(layer.named_parameters()), parameters, strict=True))
        return torch.func.functional_call(layer, named, (x,)).sin().sum()

    leaves = [x.requires_grad_(), *layer.parameters()]
    return (lambda *leaves: torch.autograd.grad(loss(*leaves), leaves)), leaves


@pytest.mark.parametrize("impl", ["auto", "cpu", "reference"])
def test_a_graph_has_what_the_caller_gave(impl):
    layer = SPMLinear(6, 6, impl=impl)
    compute, leaves = gradients(layer, torch.randn(2, 6))
    assert impls_in(make_fx(compute)(*leaves).graph) == [impl, impl]  # forward and backward


@pytest.mark.parametrize("block", ["general", "rotation"])
def test_a_traced_graph_runs_without_the_kernels(block, without_kernels):
    layer = SPMLinear(9, 5, block=block)
    compute, leaves = gradients(layer, torch.randn(3, 9))
    graph = make_fx(compute)(*leaves)
    without_kernels()
    actual = graph(*leaves)

    def plain(dtype):
        twin = twins.plain_copy(layer, dtype)
        x = leaves[0].detach().to(dtype).requires_grad_()
        return torch.autograd.grad(twin(x).sin().sum(), [x, *twin.parameters()])

    oracle.assert_agrees(list(actual), plain)


def test_a_name_in_a_graph_stays_that_name(without_kernels):
    layer, x = SPMLinear(6, 6, impl="cpu"), torch.randn(2, 6)
    graph = make_fx(layer)(x)
    assert graph(x).equal(layer(x))  # as in programs that were exported when "auto" became a name
    without_kernels()
    with pytest.raises(RuntimeError, match="impl='cpu' cannot run here: not compiled"):
        graph(x)


def test_a_name_that_is_not_registered_here():
    schedule = SPMLinear(4, 4).schedule.on(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"impl must be one of .*, got 'other'"):
        library.spm(torch.ones(1, 4), schedule.order, torch.ones(1, 2, 2), *[None] * 4, "rotation", 4, "other")


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_recurrence_runs_step_by_step_without_the_kernels(kind, without_kernels):
    network = NETWORKS[kind](3, 5)
    x = torch.randn(4, 2, 3, requires_grad=True)
    program = torch.export.export(network, (x,))
    assert torch.ops.pairmix.recurrence.default in [node.target for node in program.graph.nodes]
    assert set(impls_in(program.graph)) == {"auto"}
    run = program.module()
    without_kernels()
    actual = run(x)[0]
    gradient = torch.autograd.grad(actual.sin().sum(), [x, *run.parameters()])

    def plain(dtype):
        twin = twins.plain_copy(network, dtype)
        copy = x.detach().to(dtype).requires_grad_()
        y = twin(copy)[0]
        return [y, *torch.autograd.grad(y.sin().sum(), [copy, *twin.parameters()])]

    oracle.assert_agrees([actual, *gradient], plain)
