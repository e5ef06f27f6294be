"""Recurrent networks under gradcheck, torch.compile, torch.func, autocast and second derivatives."""

import copy

import pytest
import torch
from torch.func import functional_call

import twins
from plain_rnn import (
    B,
    Case,
    H,
    I,
    T,
    flat,
    network_of,
    plain_network,
)


class TestTransforms:
    def test_gradcheck(self, cell):
        network = network_of(cell, 2, 3, block="rotation" if cell in ("gru", "relu") else "general")
        parameters = dict(network.named_parameters())
        x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
        states = [torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True) for _ in network.states]

        def call(x, *tensors):
            states, values = tensors[: len(network.states)], tensors[len(network.states) :]
            hx = states if cell == "lstm" else states[0]
            return tuple(flat(functional_call(network, dict(zip(parameters, values, strict=True)), (x, hx))))

        assert torch.autograd.gradcheck(call, (x, *states, *parameters.values()))

    @pytest.mark.parametrize(
        ("cell", "options"),
        [("relu", {}), ("gru_reset_after", {}), ("lstm", {}), ("gru", {"bidirectional": True, "batch_first": True})],
    )
    def test_compile(self, cell, options):
        torch._dynamo.reset()
        case = Case(network_of(cell, **options), with_state=cell != "relu")
        arguments = [tensor.detach() for tensor in case.arguments(case.tensors) if isinstance(tensor, torch.Tensor)]
        x, *hx = (tensor.requires_grad_() for tensor in arguments)
        if cell == "lstm":
            hx = [tuple(case.tensors[name].requires_grad_() for name in case.states)]
        states = hx[0] if cell == "lstm" else hx
        compiled = torch.compile(case.network, backend="aot_eager", fullgraph=True)
        results = []
        for network in (compiled, case.network):
            outputs = flat(network(x, *hx))
            inputs = [x, *states, *case.network.parameters()]
            results.append((outputs, torch.autograd.grad(sum(o.sin().sum() for o in outputs), inputs)))
        torch.testing.assert_close(*results)

    def test_compile_with_lengths_that_change(self):
        torch._dynamo.reset()
        network = network_of("gru")
        compiled = torch.compile(network, backend="aot_eager", fullgraph=True, dynamic=True)
        for steps, batch in ((4, 3), (7, 2)):
            x = torch.randn(steps, batch, I, dtype=torch.float64)
            torch.testing.assert_close(compiled(x), network(x))

    @pytest.mark.parametrize("form", ["padded", "packed", "unbatched"])
    def test_autocast(self, cell, form):
        case = Case(network_of(cell, dtype=torch.float32, num_layers=2), form, dtype=torch.float32)
        expected = case.actual()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = flat(case.network(*case.arguments(case.tensors)))
        assert outputs[0].dtype == torch.bfloat16
        for number, output in enumerate(outputs):
            assert (output - expected[number]).abs().max() < 0.03 * max(1, expected[number].abs().max())
        sum(output.float().sum() for output in outputs).backward()
        assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in case.network.parameters())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_half_precision(self, cell, dtype):
        network = network_of(cell, dtype=torch.float32, num_layers=2).to(dtype)
        x = torch.randn(T, B, I).to(dtype)
        outputs = flat(network(x))
        expected = flat(copy.deepcopy(network).float()(x.float()))
        for output, wanted in zip(outputs, expected, strict=True):
            assert output.dtype == dtype
            assert (output - wanted).abs().max() < 0.03 * max(1, wanted.abs().max())
        outputs[0].sum().backward()
        assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in network.parameters())

    def test_function_transforms(self, cell):
        network = network_of(cell)
        reference = twins.in_float64(network)
        parameters = {name: parameter.detach() for name, parameter in network.named_parameters()}
        x = torch.randn(2, T, B, I, dtype=torch.float64)

        def loss(parameters, x, network=network):
            return functional_call(network, parameters, (x,))[0].sin().sum()

        def plain(parameters, x):
            return loss(parameters, x, reference)

        def gradients(x):
            return torch.autograd.grad(network(x)[0].sin().sum(), list(network.parameters()))

        actual = torch.func.grad(loss)(parameters, x[0])
        torch.testing.assert_close(tuple(actual.values()), gradients(x[0]))
        each = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        expected = tuple(map(torch.stack, zip(*map(gradients, x), strict=True)))
        torch.testing.assert_close(tuple(each.values()), expected)
        torch.testing.assert_close(torch.vmap(network)(x)[0], torch.stack([network(part)[0] for part in x]))

        tangents = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}
        primal, tangent = torch.func.jvp(loss, (parameters, x[0]), (tangents, x[1]))
        torch.testing.assert_close(primal, loss(parameters, x[0]))
        along_x = torch.func.grad(plain, 1)(parameters, x[0]) * x[1]
        along_parameters = [(actual[name] * tangents[name]).sum() for name in parameters]
        torch.testing.assert_close(tangent, along_x.sum() + sum(along_parameters))
        with torch.autograd.forward_ad.dual_level():
            dual = network(torch.autograd.forward_ad.make_dual(x[0], x[1]))[0].sin().sum()
            torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, along_x.sum())

    def test_second_derivatives(self, cell):
        network = network_of(cell)
        x = torch.randn(T, B, I, dtype=torch.float64, requires_grad=True)
        gradient = torch.autograd.grad(network(x)[0].sin().sum(), x, create_graph=True)[0]
        with pytest.raises(NotImplementedError, match=r'second derivatives .* use impl="reference"'):
            gradient.sin().sum().backward()

        reference = twins.in_float64(network)
        inputs = [x, *reference.parameters()]

        def second(output):
            first = torch.autograd.grad(output.sin().sum(), inputs, create_graph=True)
            return torch.autograd.grad(sum(g.sin().sum() for g in first), inputs)

        zeros = [torch.zeros(1, B, H, dtype=torch.float64) for _ in network.states]
        plain, _ = plain_network(reference, list(x.unbind(1)), zeros)
        torch.testing.assert_close(second(reference(x)[0]), second(torch.stack(plain, 1)))

    def test_batched_gradients(self, cell):
        """Right, if torch can do it at all."""
        network = network_of(cell)
        x = torch.randn(T, B, I, dtype=torch.float64, requires_grad=True)
        inputs = [x, *network.parameters()]
        y = network(x)[0]
        grads = torch.randn(2, *y.shape, dtype=torch.float64)
        batched = torch.autograd.grad(y, inputs, grads, is_grads_batched=True, retain_graph=True)
        one_by_one = [torch.autograd.grad(y, inputs, grad, retain_graph=True) for grad in grads]
        torch.testing.assert_close(batched, tuple(map(torch.stack, zip(*one_by_one, strict=True))))

    def test_inference_and_frozen_parameters(self, cell):
        network = network_of(cell, num_layers=2)
        x = torch.randn(T, B, I, dtype=torch.float64, requires_grad=True)
        y = network(x)[0]
        (expected,) = torch.autograd.grad(y.sum(), x)
        with torch.inference_mode():
            torch.testing.assert_close(network(x)[0], y)
        network.requires_grad_(False)
        torch.testing.assert_close(torch.autograd.grad(network(x)[0].sum(), x)[0], expected)
        assert not network(x.detach())[0].requires_grad

    def test_only_some_outputs_have_a_loss(self):
        """Only the last c, for example: torch then hands over no gradient of h."""
        case = Case(network_of("lstm"))
        for number in range(3):
            results = []
            for network, oracle in ((case.network, False), (twins.in_float64(case.network), True)):
                x = torch.stack(case.sequences(case.tensors), 1).requires_grad_()
                states = [case.tensors[name].clone().requires_grad_() for name in "hc"]
                if oracle:
                    outputs, finals = plain_network(network, list(x.unbind(1)), states)
                    outputs = [torch.stack(outputs, 1), *finals]
                else:
                    outputs = flat(network(x, tuple(states)))
                inputs = [x, *states, *network.parameters()]
                results.append(torch.autograd.grad(outputs[number].sin().sum(), inputs))
            torch.testing.assert_close(*results)
