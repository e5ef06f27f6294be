"""A feed-forward block in one call computes what its parts do, forward and backward."""

import copy

import pytest
import torch

from kernels import running
from pairmix import Schedule, SPMFeedForward, functional, ops
from pairmix.functional import ACTIVATIONS
from plain_feed_forward import as_a_whole, assert_as_close_as_its_parts, in_parts, outputs

# features and hidden: usual, odd, prime, tiny, square, and none that divides the other
SIZES = [(16, 64), (8, 24), (5, 15), (3, 7), (1, 2), (1, 1), (12, 12), (10, 48), (100, 250)]


def block(features=16, hidden=64, activation="gelu", dtype=torch.float32, **options):
    made = SPMFeedForward(features, hidden, activation, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_size(target, sizes, gated, dtype, fused):
    with running(target, threads=2):
        made = block(*sizes, "silu" if gated else "gelu", dtype, gated=gated)
        assert_as_close_as_its_parts(made, torch.randn(37, sizes[0], dtype=dtype), torch.randn(37, sizes[0]))
    assert fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_near_and_far_from_zero(target, activation, gated, dtype, fused):
    with running(target):
        made = block(8, 32, activation, dtype, gated=gated)
        for scale in (1e-3, 1.0, 30.0):
            assert_as_close_as_its_parts(made, scale * torch.randn(20, 8, dtype=dtype), torch.randn(20, 8))
    assert len(fused) == 3


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_far_from_zero_every_activation_is_relu(target, activation, fused):
    x = torch.tensor([[1e30, 0.0], [-1e30, 0.0]], requires_grad=True)
    with running(target):
        y = SPMFeedForward(2, 2, activation, init="identity")(x)
        (slopes,) = torch.autograd.grad(y[:, 0].sum(), x)
    assert fused
    torch.testing.assert_close(y, x.relu(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(slopes[:, 0], torch.tensor([1.0, 0.0]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("schedule", ["butterfly", "brick", "random"])
@pytest.mark.parametrize("kind", ["general", "rotation"])
@pytest.mark.parametrize("bias", [False, True])
def test_every_kind_of_map(kind, schedule, bias, fused):
    made = block(6, 21, bias=bias, block=kind, schedule=schedule, stages=5)
    assert_as_close_as_its_parts(made, torch.randn(9, 6), torch.randn(9, 6))
    assert fused


@pytest.mark.parametrize("rows", [0, 1, 2, 15, 16, 17, 300])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_rows_and_threads(rows, threads):
    with running(ops.cpu.instruction_set(), threads=threads):
        assert_as_close_as_its_parts(block(), torch.randn(rows, 16), torch.randn(rows, 16))


def test_results_repeat():
    made, x, grad = block(64, 256), torch.randn(200, 64), torch.randn(200, 64)
    first, second = (outputs(as_a_whole, made, x, grad) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_inputs_with_gaps_and_more_dimensions():
    made = block()
    x = torch.randn(3, 16, 5).transpose(1, 2)
    torch.testing.assert_close(made(x), in_parts(made, x))
    torch.testing.assert_close(made(torch.randn(16).double().float()).shape, torch.Size([16]))


def test_diagonals_that_overflow_in_products():
    made = block(8, 16)
    with torch.no_grad():
        made.up.d_in.fill_(1e30), made.up.d_out.fill_(1e-30), made.down.d_in.fill_(1e-25), made.down.d_out.fill_(1e25)
    assert_as_close_as_its_parts(made, torch.randn(9, 8), torch.randn(9, 8))


def test_what_is_no_number_stays_in_its_row():
    made, x = block(8, 32, "relu"), torch.randn(5, 8)
    x[2, 3] = torch.nan
    is_nan = made(x).isnan().any(1)
    assert is_nan.tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype, fused):
    made = block()
    x = torch.randn(9, 16)
    halves = copy.deepcopy(made).to(dtype)
    y = halves(x.to(dtype))
    assert y.dtype == dtype
    rounded = copy.deepcopy(halves).float()(x.to(dtype).float())
    torch.testing.assert_close(y, rounded.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-3)
    with torch.autocast("cpu", dtype):
        assert made(x).dtype == dtype
    y.sum().backward()
    assert {parameter.grad.dtype for parameter in halves.parameters()} == {dtype}
    assert len(fused) == 3


def test_only_the_gradients_that_are_needed():
    made = block()
    made.up.requires_grad_(False)
    x = torch.randn(9, 16)
    made(x).sum().backward()
    assert all(parameter.grad is None for parameter in made.up.parameters())
    expected = torch.autograd.grad(in_parts(made, x).sum(), list(made.down.parameters()))
    for parameter, gradient in zip(made.down.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-5)
    made.requires_grad_(False)
    x.requires_grad_()
    torch.testing.assert_close(
        *(torch.autograd.grad(compute(x).sum(), x) for compute in (made, lambda x: in_parts(made, x)))
    )


def test_nothing_but_x_is_kept_for_backward():
    made, x = block(64, 256), torch.randn(100, 64, requires_grad=True)
    owned = {parameter.data_ptr() for parameter in made.parameters()}
    kept = []

    def note(tensor):
        if tensor.data_ptr() not in owned and tensor.is_floating_point():
            kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        made(x)
    assert sum(kept) == x.nbytes


@pytest.mark.parametrize("gated", [False, True])
def test_first_and_second_derivatives(gated, fused):
    made = block(4, 6, "silu", torch.float64, gated=gated)
    names = [name for name, _ in made.named_parameters()]

    def call(x, *parameters):
        return torch.func.functional_call(made, dict(zip(names, parameters, strict=True)), (x,))

    inputs = (torch.randn(2, 4, dtype=torch.float64, requires_grad=True), *made.parameters())
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)
    assert fused


def test_transforms_of_torch_func():
    made, x = block(4, 8), torch.randn(3, 4)
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(transform(made)(x[0]), transform(lambda x: in_parts(made, x))(x[0]))
    torch.testing.assert_close(torch.func.vmap(made)(x), in_parts(made, x))


def test_opcheck():
    made, x = block(4, 8, gated=True, activation="silu"), torch.randn(3, 4, requires_grad=True)
    wide, narrow = (
        ops.Map(
            layer._tensors() if layer.maps else ops.with_front(layer._tensors()), layer.schedule._on_cpu, layer.block
        )
        for layer in (made.up, made.down)
    )
    arguments = (x, *ops.arguments_of(wide, narrow), "silu", 4, "auto")
    torch.library.opcheck(ops.feed_forward, arguments)


def test_one_node_of_compiled_and_exported_graphs():
    made, x = block(), torch.randn(5, 16)
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), made(x))
    exported = torch.export.export(made, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    assert len(exported.graph.find_nodes(op="call_function", target=torch.ops.pairmix.feed_forward.default)) == 1
    torch.testing.assert_close(exported.module()(torch.randn(9, 16) * 0 + 1), made(torch.ones(9, 16)))


def test_a_graph_runs_in_parts_where_nothing_has_whole_blocks(monkeypatch):
    made, x = block(), torch.randn(5, 16)
    exported = torch.export.export(made, (x,))
    expected = made(x)
    monkeypatch.setattr(ops.cpu, "_missing", "gone")
    torch.testing.assert_close(exported.module()(x), expected)


class TestPartsRunOneAfterTheOther:
    def test_with_another_implementation(self, fused):
        made = block(impl="reference")
        assert_as_close_as_its_parts(made, torch.randn(9, 16), torch.randn(9, 16))
        assert not fused

    def test_with_low_rank_maps(self, fused):
        made = block(rank=2)
        assert_as_close_as_its_parts(made, torch.randn(9, 16), torch.randn(9, 16))
        assert not fused

    def test_if_the_hidden_layer_is_narrower(self, fused):
        made = block(32, 8)
        assert_as_close_as_its_parts(made, torch.randn(9, 32), torch.randn(9, 32))
        assert not fused

    def test_if_their_schedules_are_walked_in_different_ways(self, fused):
        made = block(16, 64)
        made.down.schedule = Schedule.random(64, 6)
        assert_as_close_as_its_parts(made, torch.randn(9, 16), torch.randn(9, 16))
        assert not fused


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"activation": "elu"}, "activation must be one of .*'silu'.*, got 'elu'"),
        ({"maps": 3}, "one or two maps up and one map down, got maps=3 and None"),
        ({"out_features": 65}, "out_features must be in 1..64"),
    ],
)
def test_bad_arguments(changed, message):
    made = block()
    up = {**made.up.operator(), "maps": changed.pop("maps", None)}
    options = {"activation": "gelu", "out_features": 16, **changed}
    with pytest.raises(ValueError, match=message):
        functional.feed_forward(torch.randn(2, 16), up, made.down.operator(), **options)
