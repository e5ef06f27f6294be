"""How the operator behaves under everything that torch does with operators."""

from __future__ import annotations

import io
import weakref
from functools import partial

import pytest
import torch
import torch.fx.experimental.proxy_tensor
from torch import nn

import oracle
import twins
from pairmix import Schedule, SPMLinear, functional, ops
from pairmix.ops import Parameters, library, reference
from pairmix.schedule import DeviceSchedule

BLOCKS = ["general", "rotation"]
CPU = torch.device("cpu")


def call(arguments, impl, *tensors):
    """The operator as a function of its differentiable arguments, in their order."""
    return library.spm(*operands(arguments, *tensors), impl)


def plain_call(arguments, *tensors):
    """The same, by the reference alone: torch differentiates its stages."""
    x, order, *parameters, block, out_features = operands(arguments, *tensors)
    return reference.forward(x, Parameters(*parameters), DeviceSchedule.of(order), block, out_features)


def operands(arguments, x, *parameters):
    """All that the operator takes, except for the implementation."""
    parameters = [None if parameter is None else parameter[None] for parameter in (*parameters, *[None] * 5)[:5]]
    block = "general" if arguments.blocks.dim() == 3 else "rotation"
    return x, arguments.schedule.on(CPU).order, *parameters, block, arguments.out_features


def double_arguments(block, n=5, **kwargs):
    return oracle.random_arguments(Schedule.butterfly(n, 3), block, leading=(2,), **kwargs)


@pytest.fixture(params=BLOCKS)
def arguments(request):
    return double_arguments(request.param, in_features=3)


@pytest.fixture
def impl(impl_name):
    return impl_name


def test_gradcheck(arguments, impl):
    inputs = tuple(arguments.tensors.values())
    f = partial(call, arguments, impl)
    assert torch.autograd.gradcheck(f, inputs, check_forward_ad=True, check_batched_grad=True)


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("block", BLOCKS)
def test_gradgradcheck(block, n, impl):
    arguments = double_arguments(block, n)
    inputs = tuple(arguments.tensors.values()) if n % 2 else (*arguments.tensors.values(), None)
    assert torch.autograd.gradgradcheck(partial(call, arguments, impl), inputs, check_fwd_over_rev=True)


def test_third_derivatives(arguments, impl):
    def third(f, arguments):
        value = f(*arguments.tensors.values()).sin().sum()
        for _ in range(3):
            gradient = torch.autograd.grad(value, arguments.blocks, create_graph=True)[0]
            value = gradient.sin().sum()
        return gradient

    def plain(dtype):
        return third(partial(plain_call, arguments), arguments.to(dtype))

    oracle.assert_agrees(third(partial(call, arguments, impl), arguments), plain)


@pytest.mark.parametrize("block", BLOCKS)
def test_opcheck(block, impl):
    arguments = oracle.random_arguments(Schedule.butterfly(3, 1), block, in_features=2, leading=(2,))
    leaves = [tensor.detach()[None].requires_grad_() for name, tensor in arguments.tensors.items() if name != "x"]
    inputs = (arguments.x, arguments.schedule.on(CPU).order, *leaves, block, arguments.out_features)
    torch.library.opcheck(library.spm, (*inputs, impl))
    grad = torch.randn(2, arguments.out_features, dtype=torch.float64, requires_grad=True)
    x, order, blocks, d_in, d_out, _, residual_scale, _, _ = inputs
    differentiated = (x, order, blocks, d_in, d_out, residual_scale, block)
    torch.library.opcheck(library.spm_backward, (grad, *differentiated, [True] * 6, impl))
    # what is needed changes only which outputs are empty, of which a compiler sees the shapes
    for needs in ([True, *[False] * 5], [True] * 5 + [False], [False] * 5 + [True], [False] * 6):
        torch.library.opcheck(
            library.spm_backward,
            (grad, *differentiated, needs, impl),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_only_x_and_the_parameters_are_saved(block, requires_grad):
    layer = SPMLinear(65, 65, block=block)
    x = torch.randn(32, 65, requires_grad=requires_grad)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        layer(x)
    known = {t.data_ptr() for t in (x, layer.schedule.on(CPU).order, *layer.parameters())}
    assert x.data_ptr() in {t.data_ptr() for t in saved}
    assert {t.data_ptr() for t in saved} <= known
    assert sum(t.numel() for t in saved) <= x.numel() + layer.schedule.on(CPU).order.numel() + sum(
        p.numel() for p in layer.parameters()
    )


@pytest.fixture
def spy(monkeypatch):
    """An implementation that notes which gradients it is asked for."""
    asked = []

    def backward(*inputs):
        *_, needs_x, needs = inputs
        asked.append([needs_x, *needs])
        return reference.backward(*inputs)

    monkeypatch.setitem(ops.IMPLS, "spy", ops.Impl("spy", reference.forward, backward, lambda device: None))
    return asked


@pytest.mark.parametrize(
    "wanted", [["x"], ["blocks"], ["d_in"], ["d_out"], ["bias"], ["residual_scale"], ["x", "bias"], ["blocks", "d_in"]]
)
def test_gradients_that_are_not_needed_are_skipped(wanted, arguments, spy, monkeypatch):
    order = ["x", "blocks", "d_in", "d_out", "bias", "residual_scale"]
    everything = oracle.gradients(
        call(arguments, "reference", *arguments.tensors.values()), arguments, torch.tensor(1.0).expand(2, 5)
    )
    tensors = {name: tensor.detach().requires_grad_(name in wanted) for name, tensor in arguments.tensors.items()}
    y = call(arguments, "spy", *tensors.values())
    if not {"blocks", "residual_scale", "d_out"} & set(wanted):
        # these gradients do not depend on the stages' inputs, so the stages need not run again
        monkeypatch.setattr(reference._Stages, "run", None)
    y.sum().backward()
    assert spy[0] == [name in wanted for name in order]
    for name, tensor in tensors.items():
        if name in wanted:
            assert tensor.grad.equal(everything[name]), name
        else:
            assert tensor.grad is None


def test_backward_holds_few_of_the_stages_inputs(monkeypatch):
    """They are computed again on the way back; a logarithmic number of them is alive at a time, not all."""
    stages, n = 64, 8
    alive, most = [], 0
    run = reference._Stages.run

    def watched_run(self, z, start, stop):
        nonlocal most
        z = run(self, z, start, stop)
        alive.append(weakref.ref(z))
        most = max(most, sum(reference() is not None for reference in alive))
        return z

    monkeypatch.setattr(reference._Stages, "run", watched_run)
    x, grad, blocks = torch.randn(3, n), torch.randn(3, n), torch.randn(1, stages, 4, n // 2)
    needs = Parameters(True, True, True, True, False)
    parameters = Parameters(blocks, None, None, None, None)
    reference.backward(grad, x, parameters, Schedule.butterfly(n, stages).on(CPU), "general", True, needs)
    assert len(alive) >= stages - 1
    assert most <= 7  # log2(stages), and z_L


TRANSFORMS = {
    "grad": torch.func.grad,
    "jacfwd": torch.func.jacfwd,
    "hessian": torch.func.hessian,
    "jacrev(jacrev)": lambda f: torch.func.jacrev(torch.func.jacrev(f)),
    "jacrev(jacfwd)": lambda f: torch.func.jacrev(torch.func.jacfwd(f)),
    "vmap over x": lambda f: torch.vmap(f, (None, 0)),
    "vmap over a later dimension of x": lambda f: torch.vmap(f, (None, 1)),
    "vmap over parameters": lambda f: lambda b, x: torch.vmap(f, (0, None))(torch.stack([b, 2 * b, -b]), x),
    "gradients of each sample": lambda f: torch.vmap(torch.func.grad(f), (None, 0)),
    "ensemble": lambda f: lambda b, x: torch.vmap(torch.func.grad(f), (0, None))(torch.stack([b, 2 * b]), x),
    "jvp": lambda f: lambda b, x: torch.func.jvp(f, (b, x), (b.cos(), x.sin())),
    "vjp": lambda f: lambda b, x: torch.func.vjp(f, b, x)[1](x.new_tensor(2.0)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_function_transforms(transform, arguments, impl):
    def transformed(f, dtype):
        x, blocks, *rest = (tensor.detach().to(dtype) for tensor in arguments.tensors.values())
        return transform(lambda blocks, x: f(x, blocks, *rest).sin().sum())(blocks, x)

    actual = transformed(partial(call, arguments, impl), torch.float64)
    oracle.assert_agrees(actual, partial(transformed, partial(plain_call, arguments)))


def test_vmap_reaches_the_batch_of_parameters_that_need_gradients():
    layer = SPMLinear(6, 6, dtype=torch.float64)
    x = torch.randn(3, 4, 6, dtype=torch.float64)

    def plain(dtype):
        twin = twins.plain_copy(layer, dtype)
        return torch.autograd.grad(twin(x.to(dtype)).sin().sum(), twin.coeffs)

    oracle.assert_agrees(torch.autograd.grad(torch.vmap(layer)(x).sin().sum(), layer.coeffs), plain)


def test_batched_gradients():
    arguments = double_arguments("general")
    y = call(arguments, "cpu", *arguments.tensors.values())
    grads = torch.randn(4, *y.shape, dtype=torch.float64)
    batched = torch.autograd.grad(y, list(arguments.tensors.values()), grads, is_grads_batched=True)
    for k, grad in enumerate(grads):
        answers = oracle.answers(arguments, grad)
        for name, gradients in zip(arguments.tensors, batched, strict=True):
            oracle.assert_matches(gradients[k], answers[name], name)


def test_a_negated_view():
    layer = SPMLinear(4, 4, dtype=torch.float64)
    negated = torch.randn(3, 4, dtype=torch.complex128).conj().imag
    assert negated.is_neg()
    assert layer(negated).equal(layer(negated.resolve_neg()))


def derivative_along(layer, tangent):
    """Of a linear map, what it makes of the tangent."""
    arguments = oracle.of_layer(layer, tangent)
    arguments.bias = None
    return oracle.answers(arguments, torch.ones_like(tangent))["output"]


def test_dual_numbers_through_a_layer():
    layer = SPMLinear(6, 6, dtype=torch.float64)
    x, tangent = torch.randn(2, 4, 6, dtype=torch.float64)
    with torch.autograd.forward_ad.dual_level():
        y = layer(torch.autograd.forward_ad.make_dual(x, tangent))
        actual = torch.autograd.forward_ad.unpack_dual(y).tangent
    oracle.assert_matches(actual, derivative_along(layer, tangent))


def test_a_tracer_sees_the_operator():
    layer = SPMLinear(6, 6)
    graph = torch.fx.experimental.proxy_tensor.make_fx(layer)(torch.randn(2, 6))
    assert library.spm in [node.target for node in graph.graph.nodes]
    x = torch.randn(5, 6)
    with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(x)).shape == (5, 6)


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, but it must not record a constant
def test_jit_trace():
    layer = SPMLinear(6, 6)
    traced = torch.jit.trace(layer, torch.randn(2, 6), check_trace=False)
    assert "pairmix::spm" in str(traced.inlined_graph)
    x = torch.randn(2, 6)
    assert traced(x).equal(layer(x))


def test_gradients_of_parameters_alone():
    layer = SPMLinear(6, 6, dtype=torch.float64)
    x = torch.randn(4, 6, dtype=torch.float64)
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(layer, parameters, (x,)).sin().sum()

    def plain(dtype):
        twin = twins.plain_copy(layer, dtype)
        return torch.autograd.grad(twin(x.to(dtype)).sin().sum(), list(twin.parameters()))

    oracle.assert_agrees(list(torch.func.grad(loss)(parameters).values()), plain)


def test_forward_mode_of_a_layer():
    layer = SPMLinear(6, 6, dtype=torch.float64)
    x, tangent = torch.randn(2, 4, 6, dtype=torch.float64)
    _, actual = torch.func.jvp(layer, (x,), (tangent,))
    oracle.assert_matches(actual, derivative_along(layer, tangent))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("n", [7, 16])
def test_compile(block, n):
    layer = SPMLinear(n, n, block=block)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for batch in (3, 5):
        x, grad = torch.randn(batch, n, requires_grad=True), torch.randn(batch, n)
        y, expected = compiled(x), layer(x)
        assert y.equal(expected), "the compiler calls the same kernels"
        inputs = [x, *layer.parameters()]
        actual, expected = (torch.autograd.grad(output, inputs, grad) for output in (y, expected))
        assert all(a.equal(b) for a, b in zip(actual, expected, strict=True))


def test_compile_a_model_with_autocast():
    model = nn.Sequential(SPMLinear(12, 24), nn.ReLU(), SPMLinear(24, 6))
    x = torch.randn(4, 12)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.compile(model, fullgraph=True)(x).equal(model(x))


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict):
    layer = SPMLinear(9, 5)
    batch = torch.export.Dim("batch")
    program = torch.export.export(layer, (torch.randn(4, 9),), dynamic_shapes=({0: batch},), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    x = torch.randn(7, 9)
    assert torch.export.load(file).module()(x).equal(layer(x))


@pytest.mark.parametrize("block", BLOCKS)
def test_autocast(block):
    layer = SPMLinear(33, 20, block=block)
    x = torch.randn(8, 33, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert x.grad.dtype == torch.float32
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())
    # the parameters stay float32: only x and y are rounded
    answers = oracle.answers(oracle.of_layer(layer, x.bfloat16()), torch.ones_like(y))
    oracle.assert_matches(y, answers["output"])


def test_autocast_leaves_double_alone():
    layer = SPMLinear(4, 4, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 4, dtype=torch.float64)).dtype == torch.float64


def test_autocast_accepts_a_layer_of_its_own_dtype():
    layer = SPMLinear(4, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 4)).dtype == torch.bfloat16


def test_inference_mode():
    layer = SPMLinear(6, 6)
    x = torch.randn(2, 6)
    with torch.inference_mode():
        y = layer(x)
    assert y.equal(layer(x))


def test_meta_tensors():
    x = torch.empty(3, 5, 6, device="meta")
    y = functional.spm(x, torch.empty(2, 4, 4, device="meta"), Schedule.butterfly(8, 2), out_features=7)
    assert y.device.type == "meta"
    assert y.shape == (3, 5, 7)


def test_checkpointing_and_hooks():
    layer = SPMLinear(6, 6)
    x = torch.randn(3, 6, requires_grad=True)
    layer(x).sin().sum().backward()
    expected = x.grad.clone()
    x.grad = None
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sin().sum().backward()
    assert x.grad.equal(expected)
    with torch.autograd.graph.save_on_cpu():
        y = layer(x)
    x.grad = None
    y.sin().sum().backward()
    assert x.grad.equal(expected)
