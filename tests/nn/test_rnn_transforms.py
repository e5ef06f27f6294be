"""Recurrent networks under gradcheck, torch.compile, torch.func, autocast and second derivatives."""

from functools import partial

import pytest
import torch
from torch.func import functional_call

import oracle
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
        compiled = torch.compile(case.network, backend="aot_eager", fullgraph=True)
        oracle.assert_agrees(case.actual(compiled), case.plain)

    def test_compile_with_lengths_that_change(self):
        torch._dynamo.reset()
        network = network_of("gru")
        compiled = torch.compile(network, backend="aot_eager", fullgraph=True, dynamic=True)
        for steps, batch in ((4, 3), (7, 2)):
            x = torch.randn(steps, batch, I, dtype=torch.float64)
            oracle.assert_agrees(compiled(x), lambda dtype, x=x: twins.plain_copy(network, dtype)(x.to(dtype)))

    @pytest.mark.parametrize("form", ["padded", "packed", "unbatched"])
    def test_autocast(self, cell, form):
        case = Case(network_of(cell, dtype=torch.float32, num_layers=2), form, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            outputs = flat(case.network(*case.arguments(case.tensors)))
        assert outputs[0].dtype == torch.bfloat16

        def plain(dtype):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                wide = torch.promote_types(dtype, torch.float32)
                twin = twins.plain_copy(case.network, wide)
                return flat(twin(*case.arguments({name: t.to(wide) for name, t in case.tensors.items()})))

        oracle.assert_agrees(outputs, plain, rough=torch.bfloat16, margin=4)
        sum(output.float().sum() for output in outputs).backward()
        assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in case.network.parameters())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_half_precision(self, cell, dtype):
        network = network_of(cell, dtype=torch.float32, num_layers=2).to(dtype)
        x = torch.randn(T, B, I).to(dtype)
        outputs = flat(network(x))
        assert all(output.dtype == dtype for output in outputs)
        oracle.assert_agrees(outputs, lambda d: flat(twins.plain_copy(network, d)(x.to(d))), rough=dtype, margin=4)
        outputs[0].sum().backward()
        assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in network.parameters())

    def test_function_transforms(self, cell):
        network = network_of(cell)
        parameters = {name: parameter.detach() for name, parameter in network.named_parameters()}
        tangents = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}
        x = torch.randn(2, T, B, I, dtype=torch.float64)

        def loss(parameters, x):
            return functional_call(network, parameters, (x,))[0].sin().sum()

        with torch.autograd.forward_ad.dual_level():
            dual = network(torch.autograd.forward_ad.make_dual(x[0], x[1]))[0].sin().sum()
            along_x = torch.autograd.forward_ad.unpack_dual(dual).tangent
        actual = {
            "grad": torch.func.grad(loss)(parameters, x[0]),
            "grad of each": torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x),
            "output of each": torch.vmap(network)(x)[0],
            "jvp": torch.func.jvp(loss, (parameters, x[0]), (tangents, x[1])),
            "dual": along_x,
        }

        def plain(dtype):
            """The same without any transform: one gradient after the other, and their products with the tangents."""
            twin = twins.plain_copy(network, dtype)
            names, of = list(parameters), x.to(dtype).requires_grad_()
            outputs = [twin(part)[0] for part in of]
            losses = [output.sin().sum() for output in outputs]
            inputs = list(twin.parameters())
            each = [
                dict(zip(names, torch.autograd.grad(loss, inputs, retain_graph=True), strict=True)) for loss in losses
            ]
            (of_x,) = torch.autograd.grad(losses[0], of)
            along_x = (of_x[0] * of[1]).sum()
            along_parameters = sum((each[0][name] * tangents[name].to(dtype)).sum() for name in names)
            return {
                "grad": each[0],
                "grad of each": {name: torch.stack([gradients[name] for gradients in each]) for name in names},
                "output of each": torch.stack(outputs),
                "jvp": (losses[0], along_x + along_parameters),
                "dual": along_x,
            }

        oracle.assert_agrees(actual, plain)

    def test_second_derivatives(self, cell):
        network = network_of(cell)
        x = torch.randn(T, B, I, dtype=torch.float64, requires_grad=True)
        gradient = torch.autograd.grad(network(x)[0].sin().sum(), x, create_graph=True)[0]
        with pytest.raises(NotImplementedError, match=r'second derivatives .* use impl="reference"'):
            gradient.sin().sum().backward()

        def second(run, dtype):
            reference, of = twins.plain_copy(network, dtype), x.detach().to(dtype).requires_grad_()
            inputs = [of, *reference.parameters()]
            first = torch.autograd.grad(run(reference, of).sin().sum(), inputs, create_graph=True)
            return torch.autograd.grad(sum(g.sin().sum() for g in first), inputs)

        def by_steps(reference, x):
            zeros = [x.new_zeros(1, B, H) for _ in network.states]
            return torch.stack(plain_network(reference, list(x.unbind(1)), zeros)[0], 1)

        actual = second(lambda reference, x: reference(x)[0], torch.float64)
        oracle.assert_agrees(actual, partial(second, by_steps))

    def test_batched_gradients(self, cell):
        """Right, if torch can do it at all."""
        network = network_of(cell)
        x = torch.randn(T, B, I, dtype=torch.float64, requires_grad=True)
        y = network(x)[0]
        grads = torch.randn(2, *y.shape, dtype=torch.float64)
        batched = torch.autograd.grad(y, [x, *network.parameters()], grads, is_grads_batched=True)

        def one_by_one(dtype):
            twin, of = twins.plain_copy(network, dtype), x.detach().to(dtype).requires_grad_()
            y, inputs = twin(of)[0], [of, *twin.parameters()]
            found = [torch.autograd.grad(y, inputs, grad.to(dtype), retain_graph=True) for grad in grads]
            return list(map(torch.stack, zip(*found, strict=True)))

        oracle.assert_agrees(batched, one_by_one)

    def test_inference_and_frozen_parameters(self, cell):
        network = network_of(cell, num_layers=2)
        x = torch.randn(T, B, I, dtype=torch.float64, requires_grad=True)
        y = network(x)[0]
        (expected,) = torch.autograd.grad(y.sum(), x)
        with torch.inference_mode():
            assert network(x)[0].equal(y)
        network.requires_grad_(False)
        assert torch.autograd.grad(network(x)[0].sum(), x)[0].equal(expected)
        assert not network(x.detach())[0].requires_grad

    def test_only_some_outputs_have_a_loss(self):
        """Only the last c, for example: torch then hands over no gradient of h."""
        case = Case(network_of("lstm"))

        def gradients(number, run, network, dtype):
            x = torch.stack(case.sequences(case.tensors), 1).to(dtype).requires_grad_()
            states = [case.tensors[name].clone().to(dtype).requires_grad_() for name in "hc"]
            inputs = [x, *states, *network.parameters()]
            return torch.autograd.grad(run(network, x, states)[number].sin().sum(), inputs)

        def at_once(network, x, states):
            return flat(network(x, tuple(states)))

        def by_steps(network, x, states):
            outputs, finals = plain_network(network, list(x.unbind(1)), states)
            return [torch.stack(outputs, 1), *finals]

        def plain(dtype, number):
            return gradients(number, by_steps, twins.plain_copy(case.network, dtype), dtype)

        for number in range(3):
            actual = gradients(number, at_once, case.network, torch.float64)
            oracle.assert_agrees(actual, partial(plain, number=number))
