"""All steps in one call of the kernels are what single steps in plain PyTorch are: the states and all gradients."""

from __future__ import annotations

import functools
import math
from itertools import product

import pytest
import torch

import oracle
from kernels import running
from pairmix import SPMGRU, SPMLSTM, SPMRNN, Schedule, functional
from pairmix.ops import GATES, Parameters, cpu, cpu_recurrence

CPU = torch.device("cpu")
BATCHES = [1, 2, 5, 17, 33]
WIDTHS = [1, 2, 3, 7, 8, 24, 31, 64, 100]
DTYPES = [torch.float64, torch.float32]


def random_arguments(cell, n, batch_sizes, dtype=torch.float64, block="general", batch=None, with_bias=True, seed=0):
    """The tensors that `functional.recurrence` takes, by name. Nothing explodes: the maps are contractions, mostly."""
    generator = torch.Generator().manual_seed(seed)
    maps, schedule = GATES[cell], Schedule.butterfly(n)
    batch = batch_sizes[0] if batch is None else batch

    def random(*shape, scale=1.0):
        return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()

    shape = (maps, schedule.stages, n // 2) if block == "rotation" else (maps, schedule.stages, 4, n // 2)
    tensors = {"gates": random(sum(batch_sizes), maps * n), "h": random(batch, n)}
    tensors["c"] = random(batch, n) if cell == "lstm" else None
    tensors["blocks"] = random(*shape, scale=0.7)
    tensors |= {"d_in": random(maps, n, scale=0.7), "d_out": random(maps, n, scale=0.7)}
    tensors["bias"] = random(maps, n) if with_bias else None
    tensors["residual_scale"] = random(maps, schedule.stages) if n % 2 else None
    return {"cell": cell, "schedule": schedule, "batch_sizes": batch_sizes, **tensors}


def results(arguments, impl, with_gradients=True):
    """The states after every step, and the gradients of all tensors by name."""
    h, c = functional.recurrence(**arguments, impl=impl)
    outputs = {"all h": h} | ({"all c": c} if arguments["cell"] == "lstm" else {})
    if not with_gradients:
        return outputs
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in outputs.values()]
    tensors = {name: t for name, t in arguments.items() if isinstance(t, torch.Tensor) and t.requires_grad}
    gradients = torch.autograd.grad(list(outputs.values()), list(tensors.values()), grads)
    return {name: o.detach() for name, o in outputs.items()} | dict(zip(tensors, gradients, strict=True))


def converted(arguments, dtype):
    def convert(value):
        return value.detach().to(dtype).requires_grad_() if isinstance(value, torch.Tensor) else value

    return {name: convert(value) for name, value in arguments.items()}


def by_plain_pytorch(arguments):
    """The results in any dtype, each computed once."""
    return functools.cache(lambda dtype: results(converted(arguments, dtype), "reference"))


def assert_equal(actual, expected):
    """To the last bit."""
    assert actual.keys() == expected.keys()
    assert not [name for name in actual if not actual[name].equal(expected[name])]


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("cell", GATES)
def test_kernels_are_plain_pytorch(cell, n, targets):
    for number, batch in enumerate(BATCHES):
        number += WIDTHS.index(n)
        ragged = sorted([batch, (batch + 1) // 2, (batch + 3) // 4, 1], reverse=True)
        options = {"block": ("general", "rotation")[number // 2 % 2], "with_bias": number % 3 > 0}
        arguments = random_arguments(cell, n, ([batch] * 3, ragged)[number % 2], torch.float32, **options)
        plain = by_plain_pytorch(arguments)
        for target, dtype in product(targets, DTYPES):
            states = []
            for threads in (1, 2 + number % 2):
                with running(target, threads):
                    actual = results(converted(arguments, dtype), "cpu")
                oracle.assert_agrees(actual, plain)
                states.append({name: actual[name] for name in actual if name.startswith("all ")})
            assert_equal(*states)


@pytest.mark.parametrize("cell", GATES)
def test_threads_and_runs(cell, target):
    """As many sequences as all threads can have some of, and more steps: the states are the same to the last bit."""
    arguments = random_arguments(cell, 40, [150, 150, 131, 64, 64, 3, 1], torch.float32)
    plain, alone = by_plain_pytorch(arguments), results(arguments, "cpu")
    oracle.assert_agrees(alone, plain)
    for threads in (2, 3):
        with running(target, threads):
            actual, again = results(arguments, "cpu"), results(arguments, "cpu")
        assert_equal(actual, again)
        oracle.assert_agrees(actual, plain)
        of_rows = ("all h", "all c", "gates", "h", "c")
        assert all(actual[name].equal(alone[name]) for name in of_rows if name in actual)


def test_batch_sizes_may_be_left_out(impl_name):
    arguments = random_arguments("gru", 9, [3] * 4)
    assert_equal(results({**arguments, "batch_sizes": None}, impl_name), results(arguments, impl_name))


@pytest.mark.parametrize("cell", ["tanh", "gru", "lstm"])
def test_sequences_without_any_step(cell, impl_name):
    """There may be more states than sequences with a first step. They have no gradient, whatever was in memory."""
    arguments = random_arguments(cell, 8, [3, 2], batch=40)
    for _ in range(4):
        garbage = [torch.full((40, 8), torch.nan, dtype=torch.float64) for _ in range(8)]
        del garbage
        actual = results(arguments, impl_name)
        for name in ("h", "c"):
            if name in actual:
                assert actual[name][3:].equal(torch.zeros(37, 8, dtype=torch.float64))
    some = {name: arguments[name][:3].detach() for name in ("h", "c") if arguments[name] is not None}
    assert actual["all h"].equal(results({**arguments, **some}, impl_name, False)["all h"])


def test_memory_layouts(impl_name):
    arguments = random_arguments("lstm", 6, [4, 4, 2])
    expected = results(arguments, impl_name)

    def spread(tensor):
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), torch.nan, dtype=tensor.dtype)
        wide[..., ::2] = tensor.detach()
        return wide[..., ::2].requires_grad_()

    strided = {name: spread(t) if isinstance(t, torch.Tensor) else t for name, t in arguments.items()}
    assert_equal(results(strided, impl_name), expected)


class TestOperator:
    @pytest.mark.parametrize("cell", ["linear", "gru", "gru_reset_after", "lstm"])
    def test_opcheck(self, cell):
        batch_sizes = [3, 2, 1] if cell in ("gru", "lstm") else None
        sizes = batch_sizes or [3, 3]
        a = random_arguments(cell, 5, sizes)
        c0 = a["h"].new_empty(0) if a["c"] is None else a["c"]
        parameters = [a[name] for name in Parameters._fields]
        maps = [a["schedule"].on(CPU).order, *parameters]
        inputs = (a["gates"], a["h"], c0, batch_sizes, *maps, "general", cell, "cpu")
        operator = torch.ops.pairmix.recurrence.default
        torch.library.opcheck(operator, inputs)

        h, c, saved = (output.detach() for output in operator(*inputs))
        maps = [tensor.detach() for tensor in maps]
        for grads, needs in (
            ([torch.randn_like(h), torch.randn_like(c) if cell == "lstm" else None], [True] * 8),
            ([None, torch.randn_like(c)] if cell == "lstm" else [h.cos(), None], [True, *[False] * 4, *[True] * 3]),
        ):
            needs[2] = cell == "lstm"
            rest = (a["h"].detach(), c0.detach(), batch_sizes, *maps, "general", h, c, saved, cell, needs, "cpu")
            torch.library.opcheck(torch.ops.pairmix.recurrence_backward.default, (*grads, *rest))

    @pytest.mark.parametrize("cell", GATES)
    def test_gradcheck(self, cell):
        arguments = random_arguments(cell, 3, [3, 2, 2])
        tensors = {name: t for name, t in arguments.items() if isinstance(t, torch.Tensor)}

        def call(*values):
            named = {**arguments, **dict(zip(tensors, values, strict=True))}
            return tuple(results(named, "cpu", with_gradients=False).values())

        assert torch.autograd.gradcheck(call, tuple(tensors.values()))

    def test_bad_arguments(self, impl_name):
        good = random_arguments("gru", 4, [2, 1])
        for name, value, message in (
            ("cell", "peephole", "cell must be one of .* got 'peephole'"),
            ("gates", torch.zeros(3, 8), r"needs gates of shape \(N, 12\) .* got \(3, 8\) and \(2, 4\)"),
            ("h", torch.zeros(2, 5), r"states of shape \(B, 4\), got \(3, 12\) and \(2, 5\)"),
            ("c", torch.zeros(2, 4), r"a gru and c=\(2, 4\), h=\(2, 4\) do not fit"),
            ("batch_sizes", [1, 2], r"batch_sizes \[1, 2\] do not fit 3 rows of 2 sequences"),
            ("batch_sizes", [3], r"batch_sizes \[3\] do not fit 3 rows of 2 sequences"),
            ("batch_sizes", [2, 2], r"batch_sizes \[2, 2\] do not fit 3 rows"),
            ("batch_sizes", None, "3 rows of gates cannot be steps of 2 sequences"),
            ("blocks", torch.zeros(2, 2, 4, 2).double(), "fit|shape"),
            ("d_in", torch.zeros(3, 5).double(), "fit|shape"),
        ):
            with pytest.raises(ValueError, match=message):
                functional.recurrence(**{**good, name: value}, impl=impl_name)
        with pytest.raises(ValueError, match="a lstm and c=None"):
            functional.recurrence(**{**random_arguments("lstm", 4, [2, 1]), "c": None}, impl=impl_name)
        with pytest.raises(ValueError, match=r"impl must be one of .* got 'magic'"):
            functional.recurrence(**good, impl="magic")


class TestWhatIsComputed:
    @pytest.fixture
    def calls(self, monkeypatch):
        """What the operator's own backward, which has the gradients of parameters, is asked for."""
        asked = []
        backward = cpu.backward
        monkeypatch.setattr(
            cpu_recurrence.cpu, "backward", lambda *inputs: asked.append(inputs[-1]) or backward(*inputs)
        )
        return asked

    @pytest.mark.parametrize("wanted", [["gates"], ["h"], ["gates", "h", "c"], ["blocks"], ["d_in", "bias"], ["d_out"]])
    @pytest.mark.parametrize("cell", ["tanh", "gru", "gru_reset_after", "lstm"])
    def test_gradients_that_are_not_needed_are_skipped(self, cell, wanted, calls):
        arguments = random_arguments(cell, 5, [3, 3, 1])
        everything = results(arguments, "cpu")
        calls.clear()
        frozen = {
            name: t.detach().requires_grad_(name in wanted) if isinstance(t, torch.Tensor) else t
            for name, t in arguments.items()
        }
        actual = results(frozen, "cpu")
        assert {name for name in actual if not name.startswith("all ")} == set(wanted) & set(everything)
        assert_equal(actual, {name: everything[name] for name in actual})
        parameters = ["blocks", "d_in", "d_out", "bias", "residual_scale"]
        expected = [name in wanted for name in parameters]
        times = 2 if cell == "gru" else 1  # the map of the candidate has read something else
        assert [list(asked) for asked in calls] == ([expected] * times if any(expected) else [])

    def test_without_a_loss_nothing_is_computed(self, calls):
        network, x = SPMLSTM(4, 4), torch.randn(5, 2, 4)
        y, _ = network(x)
        (y.detach().sum() + 0 * network.ih_l0.bias.sum()).backward()
        assert calls == []

    @pytest.mark.parametrize(
        ("kind", "options", "numbers"),
        [(SPMRNN, {}, 1), (SPMGRU, {}, 4), (SPMGRU, {"reset_after": True}, 5), (SPMLSTM, {}, 6)],
        ids=str,
    )
    def test_what_is_kept_for_backward(self, kind, options, numbers):
        """States and gates, `numbers` for every unit of every step. The stages between are computed again."""
        steps, batch, size = 30, 8, 64
        network = kind(size, size, **options)
        x = torch.randn(steps, batch, size, requires_grad=True)
        saved = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: saved.setdefault((tensor.data_ptr(), tensor.shape), tensor), lambda tensor: tensor
        ):
            network(x)
        count = sum(tensor.numel() for tensor in saved.values() if tensor.is_floating_point())
        unit = steps * batch * size
        fixed = sum(parameter.numel() for parameter in network.parameters()) + 2 * batch * size
        assert count <= x.numel() + numbers * unit + fixed
        assert count >= x.numel() + numbers * unit, "these are needed"
        assert numbers + 1 < network.gates * network.hh_l0.stages, "all stages of all maps would be more"


def sigmoid_of(x):
    """By the kernels: a GRU's z, of which the candidate is one and the state zero."""
    return _cell_of_gates("gru", x, [torch.zeros_like(x), x, torch.full_like(x, 100)])


def tanh_of(x):
    return _cell_of_gates("tanh", x, [x])


def candidate_of(x):
    return _cell_of_gates("gru", x, [torch.zeros_like(x), torch.full_like(x, 100), x])


def cell_state_of(x):
    """tanh(c), of a c that is kept as it is, with the output gate open."""
    zeros, open_gate = torch.zeros_like(x), torch.full_like(x, 100)
    return _cell_of_gates("lstm", x, [torch.full_like(x, -100), open_gate, zeros, open_gate], c=x)


def _cell_of_gates(cell, x, gates, c=None):
    """One step of a state of zeros that is mixed by zeros, so that only the gates count."""
    n, maps = x.shape[-1], GATES[cell]
    schedule, zeros = Schedule.butterfly(n), x.new_zeros(maps, n)
    blocks = x.new_zeros(maps, schedule.stages, 4, n // 2)
    h, _ = functional.recurrence(
        cell, torch.cat(gates, -1), torch.zeros_like(x), c, blocks, schedule, d_in=zeros, d_out=zeros, impl="cpu"
    )
    return h


ULPS = 4  # that an activation may be off
FUNCTIONS = {
    "sigmoid": (sigmoid_of, torch.sigmoid),
    "tanh": (tanh_of, torch.tanh),
    "candidate": (candidate_of, torch.tanh),
    "cell state": (cell_state_of, torch.tanh),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.usefixtures("target")
class TestNonlinearities:
    def test_accuracy(self, name, dtype):
        """To a few units in the last place. Only sigmoids that are hardly numbers any more are cut off."""
        ours, exact = FUNCTIONS[name]
        smallest = math.log10(torch.finfo(dtype).tiny)
        small = torch.logspace(smallest, 0, 1000, dtype=torch.float64)
        large = torch.linspace(0, 120 if dtype == torch.float32 else 800, 4001, dtype=torch.float64)
        turns = torch.linspace(0, 3, 2001, dtype=torch.float64)  # where the power of two changes
        huge = torch.logspace(2, math.log10(torch.finfo(dtype).max) - 0.01, 200, dtype=torch.float64)
        x = torch.cat([small, large, turns, huge]).to(dtype)
        x = torch.cat([x, -x])[None]
        y = ours(x)
        expected = exact(x.double())
        eps, tiny = torch.finfo(dtype).eps, 2 * torch.finfo(dtype).tiny
        error = (y.double() - expected).abs()
        worst = (error - tiny).clamp(min=0).div(expected.abs()).nan_to_num(0).max() / eps
        assert worst <= ULPS, f"{worst} units in the last place"
        assert (y.abs() <= 1).all()

    def test_extremes(self, name, dtype):
        ours, exact = FUNCTIONS[name]
        finfo = torch.finfo(dtype)
        subnormal = [finfo.tiny / 2, finfo.tiny / 1024, finfo.smallest_normal, finfo.tiny * finfo.eps]
        extremes = [0.0, torch.inf, torch.nan, finfo.max, *subnormal]
        for count in (1, 3, 4, 5, 8, 16, 17):  # at every place of a vector, and in the rest of a row
            for shift in range(len(extremes)):
                x = torch.tensor([extremes[(i + shift) % len(extremes)] * (-1) ** i for i in range(count)], dtype=dtype)
                y = ours(x[None])[0]
                expected = exact(x.double())
                assert y.isnan().equal(expected.isnan())
                y, expected = y.nan_to_num(0), expected.nan_to_num(0)
                oracle.assert_within(y, expected, ULPS * finfo.eps * expected.abs() + 2 * finfo.tiny, name)

    def test_gradients_are_finite_where_it_is_flat(self, name, dtype):
        ours, exact = FUNCTIONS[name]
        x = torch.tensor([[100.0, -100.0, 1e30, -1e30, torch.inf, -torch.inf, 0.0, 1e-30]], dtype=dtype)
        actual, expected = (
            torch.autograd.grad(f(point).sum(), point)[0]
            for f, point in ((ours, x.clone().requires_grad_()), (exact, x.double().requires_grad_()))
        )
        finfo = torch.finfo(dtype)
        oracle.assert_within(actual, expected, 2 * ULPS * finfo.eps * expected.abs() + 2 * finfo.tiny, name)


@pytest.mark.usefixtures("target")
def test_relu_of_extremes():
    x = torch.tensor([[torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-45, -1e-45, 3.0, -3.0]])
    y = _cell_of_gates("relu", x, [x])
    assert y.isnan().equal(x.isnan())
    assert y.nan_to_num(0, posinf=torch.inf).equal(x.relu().nan_to_num(0, posinf=torch.inf))


@pytest.mark.parametrize(("cell", "block"), [("gru", "rotation"), ("lstm", "general")])
def test_long_sequences(cell, block):
    """A hundred steps: errors grow no faster than in plain PyTorch, and gradients do not get lost on the way."""
    arguments = random_arguments(cell, 16, [4] * 50 + [3] * 40 + [1] * 10, torch.float32, block)
    oracle.assert_agrees(results(arguments, "cpu"), by_plain_pytorch(arguments))
