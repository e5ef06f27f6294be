"""Every result is compared in float64 with that of dense matrices, in torch's own networks or in plain loops."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence, unpack_sequence

import twins
from pairmix import SPMGRU, SPMLSTM, SPMRNN, Schedule, SPMGRUCell, SPMLSTMCell, SPMRNNCell

randomised = partial(twins.randomised, std=0.7)
NETWORKS = {
    "tanh": SPMRNN,
    "relu": partial(SPMRNN, nonlinearity="relu"),
    "linear": partial(SPMRNN, nonlinearity="linear"),
    "gru": SPMGRU,
    "gru_reset_after": partial(SPMGRU, reset_after=True),
    "lstm": SPMLSTM,
}
CELLS = {
    "tanh": SPMRNNCell,
    "relu": partial(SPMRNNCell, nonlinearity="relu"),
    "linear": partial(SPMRNNCell, nonlinearity="linear"),
    "gru": SPMGRUCell,
    "gru_reset_after": partial(SPMGRUCell, reset_after=True),
    "lstm": SPMLSTMCell,
}
TORCHS = {"tanh": nn.RNN, "relu": partial(nn.RNN, nonlinearity="relu"), "gru_reset_after": nn.GRU, "lstm": nn.LSTM}
TORCHS_CELLS = {
    "tanh": nn.RNNCell,
    "relu": partial(nn.RNNCell, nonlinearity="relu"),
    "gru_reset_after": nn.GRUCell,
    "lstm": nn.LSTMCell,
}
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}
T, B, I, H = 4, 3, 5, 6
LENGTHS = [2, 4, 1]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def suffixes(module):
    """Of the names of all maps: layer by layer, and both directions of each."""
    return [name.removeprefix("ih") for name, _ in module.named_children() if name.startswith("ih")]


def dense_parameters(module):
    """What the parameters of torch's own network must be, by name; differentiable."""
    named = {}
    for suffix in suffixes(module):
        for which in ("ih", "hh"):
            layer = getattr(module, which + suffix)
            named[f"weight_{which}{suffix}"] = layer.to_dense()
            if module.bias:
                zeros = torch.zeros(layer.maps * layer.out_features, dtype=layer.d_in.dtype)
                named[f"bias_{which}{suffix}"] = zeros if layer.bias is None else layer.bias.flatten()
    return named


def plain_step(cell, W, U, b, c, x, h, memory):
    """One step of one sequence, from the equations. W, U, b, c: for every gate a matrix or a vector."""
    a = [W[g] @ x + b[g] for g in range(len(W))]
    if cell == "linear":
        return U[0] @ h + a[0], None
    if cell == "tanh":
        return torch.tanh(U[0] @ h + a[0]), None
    if cell == "relu":
        return (U[0] @ h + a[0]).clamp(min=0), None
    if cell == "gru":
        r, z = torch.sigmoid(a[0] + U[0] @ h), torch.sigmoid(a[1] + U[1] @ h)
        candidate = torch.tanh(a[2] + U[2] @ (r * h))
        return (1 - z) * h + z * candidate, None
    if cell == "gru_reset_after":
        r, z = torch.sigmoid(a[0] + U[0] @ h + c[0]), torch.sigmoid(a[1] + U[1] @ h + c[1])
        candidate = torch.tanh(a[2] + r * (U[2] @ h + c[2]))
        return (1 - z) * candidate + z * h, None
    i, f, o = (torch.sigmoid(a[g] + U[g] @ h) for g in (0, 1, 3))
    memory = f * memory + i * torch.tanh(a[2] + U[2] @ h)
    return o * torch.tanh(memory), memory


def plain_network(module, sequences, states):
    """The outputs of every sequence, and the last states; `sequences` is a list, states are `[layers, batch, H]`."""
    finals = []
    for number, suffix in enumerate(suffixes(module)):
        ih, hh = getattr(module, f"ih{suffix}"), getattr(module, f"hh{suffix}")
        W, U = (layer.to_dense().chunk(module.gates) for layer in (ih, hh))
        b, c = (torch.zeros(module.gates, module.hidden_size) if m.bias is None else m.bias for m in (ih, hh))
        is_reverse = suffix.endswith("_reverse")
        if not is_reverse:
            below, sequences = sequences, [[] for _ in sequences]
        ends = []
        for s, sequence in enumerate(below):
            h, *memory = (state[number, s] for state in states)
            memory = memory[0] if memory else None
            after = []
            for x in reversed(sequence) if is_reverse else sequence:
                h, memory = plain_step(module.cell, W, U, b, c, x, h, memory)
                after.append(h)
            ends.append((h, memory) if memory is not None else (h,))
            after = after[::-1] if is_reverse else after
            sequences[s] = [torch.cat(pair) for pair in zip(sequences[s], after, strict=True)] if is_reverse else after
        finals.append([torch.stack(parts) for parts in zip(*ends, strict=True)])
    return [torch.stack(rows) for rows in sequences], [torch.stack(parts) for parts in zip(*finals, strict=True)]


def flat(result):
    """All tensors of what a network returns."""
    output, states = result
    output = output.data if isinstance(output, PackedSequence) else output
    return [output, *(states if isinstance(states, tuple) else [states])]


def answers(module, call, tensors):
    """The outputs by number, and the gradients of all of these tensors and of the module's parameters by name."""
    tensors = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    torch.manual_seed(3)  # for dropout
    outputs = call(tensors)
    generator = torch.Generator().manual_seed(1)
    loss = sum((o * torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype)).sum() for o in outputs)
    wanted = {**tensors, **dict(module.named_parameters())}
    gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True, materialize_grads=True)
    return {**dict(enumerate(outputs)), **dict(zip(wanted, gradients, strict=True))}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert value.shape == expected[name].shape, name
        if value.numel():
            error = (value.double() - expected[name]).abs().max()
            assert error <= TOLERANCE[value.dtype] * max(1, expected[name].abs().max()), f"{name} is off by {error}"


class Case:
    """A network and an input of some form: `"padded"`, `"unbatched"`, `"packed"` or `"packed and sorted"`."""

    def __init__(self, network, form="padded", with_state=True, dtype=torch.float64, batch=B):
        self.network, self.form = network, form
        lengths = {"padded": [T] * batch, "unbatched": [T], "packed": LENGTHS, "packed and sorted": [4, 2, 1]}[form]
        self.tensors = {f"x{s}": torch.randn(t, network.input_size, dtype=dtype) for s, t in enumerate(lengths)}
        layers = network.num_layers * (2 if network.bidirectional else 1)
        self.shape = (layers, len(lengths), network.hidden_size)
        self.states = network.states if with_state else ()
        self.tensors |= {name: torch.randn(self.shape, dtype=dtype) for name in self.states}

    def sequences(self, tensors):
        return [tensor for name, tensor in tensors.items() if name[0] == "x"]

    def arguments(self, tensors):
        sequences, states = self.sequences(tensors), [tensors[name] for name in self.states]
        if self.form == "unbatched":
            x, states = sequences[0], [state[:, 0] for state in states]
        elif self.form == "padded":
            x = pad_sequence(sequences, batch_first=self.network.batch_first)
        else:
            x = pack_sequence(sequences, enforce_sorted=self.form == "packed and sorted")
        return (x,) if not states else (x, tuple(states) if len(states) == 2 else states[0])

    def actual(self, network=None):
        network = self.network if network is None else network
        return answers(self.network, lambda tensors: flat(network(*self.arguments(tensors))), self.tensors)

    def torchs(self):
        """What torch's own network does with the dense matrices."""
        ours, reference = self.network, twins.in_float64(self.network)
        options = {"bias": ours.bias, "batch_first": ours.batch_first, "bidirectional": ours.bidirectional}
        options |= {"num_layers": ours.num_layers, "dropout": ours.dropout, "dtype": torch.float64}
        twin = TORCHS[ours.cell](ours.input_size, ours.hidden_size, **options).train(ours.training)
        assert set(dense_parameters(reference)) == {name for name, _ in twin.named_parameters()}

        def call(tensors):
            return flat(functional_call(twin, dense_parameters(reference), self.arguments(tensors)))

        return answers(reference, call, {name: tensor.double() for name, tensor in self.tensors.items()})

    def plain(self):
        """What a loop over single sequences does with the dense matrices."""
        reference = twins.in_float64(self.network)

        def call(tensors):
            states = [tensors[name] for name in self.states]
            states = states or [torch.zeros(self.shape, dtype=torch.float64) for _ in reference.states]
            outputs, states = plain_network(reference, self.sequences(tensors), states)
            if self.form == "unbatched":
                return [outputs[0], *(state[:, 0] for state in states)]
            if self.form == "padded":
                return [pad_sequence(outputs, batch_first=reference.batch_first), *states]
            return [pack_sequence(outputs, enforce_sorted=False).data, *states]

        return answers(reference, call, {name: tensor.double() for name, tensor in self.tensors.items()})

    def check(self):
        actual = self.actual()
        assert all(value.dtype == next(self.network.parameters()).dtype for value in actual.values())
        assert_same(actual, self.torchs() if self.network.cell in TORCHS else self.plain())


@pytest.fixture(params=NETWORKS)
def cell(request):
    return request.param


def network_of(cell, input_size=I, hidden_size=H, dtype=torch.float64, **options):
    return randomised(NETWORKS[cell](input_size, hidden_size, dtype=dtype, **options))


FORMS = ["padded", "unbatched", "packed", "packed and sorted"]


@pytest.mark.parametrize("form", ["padded", "unbatched", "packed"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"num_layers": 2, "batch_first": True},
        {"bidirectional": True},
        {"num_layers": 2, "bidirectional": True, "block": "rotation"},
        {"num_layers": 3, "bidirectional": True, "bias": False, "batch_first": True, "hidden_size": 3},
    ],
    ids=str,
)
def test_layers_and_directions(cell, options, form):
    Case(network_of(cell, **options), form).check()


@pytest.mark.parametrize("form", FORMS)
def test_without_a_state(cell, form):
    Case(network_of(cell, num_layers=2, bidirectional=True), form, with_state=False).check()


@pytest.mark.parametrize("block", ["general", "rotation"])
@pytest.mark.parametrize(("input_size", "hidden_size"), [(1, 1), (1, 7), (7, 1), (2, 2), (13, 5), (5, 13), (16, 16)])
def test_sizes(cell, input_size, hidden_size, block):
    Case(network_of(cell, input_size, hidden_size, block=block), batch=2).check()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cell", TORCHS)
def test_the_plain_loops_are_torchs(cell, form):
    """So that they can be trusted with the networks that torch does not have."""
    case = Case(network_of(cell, num_layers=2, bidirectional=True), form)
    assert_same(case.plain(), case.torchs())


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize(("input_size", "hidden_size", "block"), [(24, 13, "general"), (9, 32, "rotation")])
def test_float32(cell, input_size, hidden_size, form, block):
    options = {"num_layers": 2, "bidirectional": form == "packed", "block": block}
    Case(network_of(cell, input_size, hidden_size, torch.float32, **options), form, dtype=torch.float32).check()


@pytest.mark.parametrize(
    "options",
    [
        {"impl": "reference"},
        {"schedule": "brick", "stages": 2},
        {"schedule": Schedule.random(9, 3, seed=2), "input_size": 9, "hidden_size": 9},
        {"stages": 0},
        {"hidden_size": 9, "residual": "pass"},
        {"init": "hadamard"},
    ],
    ids=str,
)
def test_options_of_the_maps(cell, options):
    Case(network_of(cell, **options)).check()


@pytest.mark.parametrize("batch", [1, 2, 17])
def test_batches(cell, batch):
    Case(network_of(cell, hidden_size=8), batch=batch).check()


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("is_training", [True, False])
def test_dropout(cell, form, is_training):
    """Between layers, and of the same numbers as in torch, which draws them in the same order."""
    case = Case(network_of(cell, num_layers=3, dropout=0.4).train(is_training), form)
    without = Case(network_of(cell, num_layers=3), form)
    without.network.load_state_dict(case.network.state_dict())
    without.tensors = case.tensors
    actual, plain = case.actual(), without.actual()
    assert actual[0].isclose(plain[0]).all() != is_training
    if not is_training:
        assert_same(actual, case.plain())
    if cell in TORCHS:
        assert_same(actual, case.torchs())


def test_dropout_of_everything_or_nothing(cell):
    """With all dropped between the layers, the second one sees only zeros. Nothing is dropped of the last one."""
    network, x = network_of(cell, num_layers=2, dropout=1.0, bidirectional=True), torch.randn(T, B, I).double()
    upper = network_of(cell, 2 * H, H, bidirectional=True)
    for suffix in ("", "_reverse"):
        for which in ("ih", "hh"):
            layer = getattr(network, f"{which}_l1{suffix}")
            getattr(upper, f"{which}_l0{suffix}").load_state_dict(layer.state_dict())
    torch.testing.assert_close(network(x)[0], upper(x.new_zeros(T, B, 2 * H))[0])


def test_dropout_of_a_single_layer_is_a_warning():
    for kind in (nn.GRU, SPMGRU):
        with pytest.warns(UserWarning, match=r"dropout.*0\.5") as warnings:
            network = kind(I, H, dropout=0.5)
        assert kind is nn.GRU or warnings[0].filename == __file__
        x = torch.randn(T, B, I)
        assert network(x)[0].equal(network(x)[0])


class TestPapersGRU:
    """The default form, and its gradients as the paper has them."""

    def test_gradients_through_time(self):
        gru = randomised(SPMGRU(I, H, dtype=torch.float64))
        x = torch.randn(T, B, I, dtype=torch.float64, requires_grad=True)
        h_0 = torch.randn(B, H, dtype=torch.float64, requires_grad=True)
        y, h_n = gru(x, h_0[None])
        g_y, g_n = torch.randn_like(y), torch.randn_like(h_n)
        wanted = [x, h_0, gru.ih_l0.bias]
        actual = torch.autograd.grad((y, h_n), wanted, (g_y, g_n), retain_graph=True)

        W_r, W_z, W_h = gru.ih_l0.to_dense().detach().chunk(3)
        U_r, U_z, U_h = gru.hh_l0.to_dense().detach().chunk(3)
        b_r, b_z, b_h = gru.ih_l0.bias.detach()
        h, z, r, candidate = [h_0.detach()], [], [], []
        for x_t in x.detach():
            z.append(torch.sigmoid(x_t @ W_z.T + h[-1] @ U_z.T + b_z))
            r.append(torch.sigmoid(x_t @ W_r.T + h[-1] @ U_r.T + b_r))
            candidate.append(torch.tanh(x_t @ W_h.T + (r[-1] * h[-1]) @ U_h.T + b_h))
            h.append((1 - z[-1]) * h[-1] + z[-1] * candidate[-1])
        torch.testing.assert_close(y, torch.stack(h[1:]))
        torch.testing.assert_close(h_n, h[-1][None])

        g_x, g_b = torch.zeros_like(x), torch.zeros(3, H, dtype=torch.float64)
        of_W, of_U = torch.zeros(3, H, I, dtype=torch.float64), torch.zeros(3, H, H, dtype=torch.float64)
        g_h = g_n[0]
        for t in reversed(range(T)):
            g_h = g_h + g_y[t]
            g_z = g_h * (candidate[t] - h[t])
            g_candidate = g_h * z[t]
            g_h1 = g_h * (1 - z[t])
            g_a = g_candidate * (1 - candidate[t] ** 2)
            g_s = g_z * z[t] * (1 - z[t])
            g_r = (g_a @ U_h) * h[t]
            g_q = g_r * r[t] * (1 - r[t])
            g_x[t] = g_q @ W_r + g_s @ W_z + g_a @ W_h
            g_h = g_h1 + (g_a @ U_h) * r[t] + g_s @ U_z + g_q @ U_r
            for number, (g, read) in enumerate(((g_q, h[t]), (g_s, h[t]), (g_a, r[t] * h[t]))):
                g_b[number] += g.sum(0)
                of_W[number] += g.T @ x.detach()[t]
                of_U[number] += g.T @ read
        torch.testing.assert_close(actual, (g_x, g_h, g_b))

        # and through the operators: the gradients of the matrices, handed on to what they are made of
        for layer, of_matrix in ((gru.ih_l0, of_W), (gru.hh_l0, of_U)):
            parameters = [layer.coeffs, layer.d_in, layer.d_out]
            expected = torch.autograd.grad(layer.to_dense(), parameters, of_matrix.flatten(0, 1))
            through_time = torch.autograd.grad((y, h_n), parameters, (g_y, g_n), retain_graph=True)
            torch.testing.assert_close(through_time, expected)

    def test_it_is_not_torchs(self):
        """The two arrangements agree if nothing is reset and the update gates are each other's complements."""
        ours, theirs = SPMGRU(H, H, init="hadamard"), SPMGRU(H, H, init="hadamard", reset_after=True)
        assert (ours.cell, theirs.cell) == ("gru", "gru_reset_after")
        theirs.load_state_dict({**ours.state_dict(), "hh_l0.bias": torch.zeros(3, H)})
        x, h = torch.randn(T, B, H), torch.randn(1, B, H)
        assert not ours(x, h)[0].isclose(theirs(x, h)[0]).all()
        with torch.no_grad():
            for network, sign in ((ours, 1), (theirs, -1)):
                network.ih_l0.bias[0] = 50
                network.ih_l0.d_out[1] *= sign
                network.hh_l0.d_out[1] *= sign
        torch.testing.assert_close(ours(x, h), theirs(x, h))


class TestCells:
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("sizes", [(I, H), (7, 1), (2, 13)])
    def test_one_step(self, cell, sizes, bias):
        single = randomised(CELLS[cell](*sizes, bias, dtype=torch.float64))
        network = NETWORKS[cell](*sizes, bias=bias, dtype=torch.float64)
        network.ih_l0.load_state_dict(single.ih.state_dict())
        network.hh_l0.load_state_dict(single.hh.state_dict())
        x = torch.randn(B, sizes[0], dtype=torch.float64)
        states = [torch.randn(B, sizes[1], dtype=torch.float64) for _ in single.states]
        given = [tuple(states) if cell == "lstm" else states[0]]
        many = [tuple(s[None] for s in states) if cell == "lstm" else states[0][None]]

        def of(module, *arguments):
            found = module(*arguments)
            return list(found) if cell == "lstm" else [found]

        for hx, hxs in ((given, many), ([], [])):
            actual = of(single, x, *hx)
            _, *expected = flat(network(x[None], *hxs))
            torch.testing.assert_close(actual, [state[0] for state in expected])
            one = [tuple(s[0] for s in h) if cell == "lstm" else h[0] for h in hx]
            torch.testing.assert_close(of(single, x[0], *one), [state[0] for state in actual])
            if cell in TORCHS_CELLS:
                twin = TORCHS_CELLS[cell](*sizes, bias, dtype=torch.float64)
                twin.load_state_dict(dense_parameters(single))
                torch.testing.assert_close(actual, of(twin, x, *hx))
                torch.testing.assert_close(of(single, x[0], *one), of(twin, x[0], *one))

    def test_steps_by_hand_are_the_network(self, cell):
        """With the gradients of everything."""
        single = randomised(CELLS[cell](I, H, dtype=torch.float64))
        network = NETWORKS[cell](I, H, dtype=torch.float64)
        network.ih_l0, network.hh_l0 = single.ih, single.hh
        x = torch.randn(T, B, I, dtype=torch.float64, requires_grad=True)
        hx, outputs = None, []
        for row in x:
            hx = single(row, hx)
            outputs.append(hx[0] if cell == "lstm" else hx)
        y = network(x)[0]
        torch.testing.assert_close(torch.stack(outputs), y)
        inputs = [x, *single.parameters()]
        actual, expected = (torch.autograd.grad(o.sin().sum(), inputs) for o in (torch.stack(outputs), y))
        torch.testing.assert_close(actual, expected)

    def test_bad_input(self):
        for x in (torch.zeros(B, I + 1), torch.zeros(1, B, I), torch.zeros(I + 1), torch.tensor(1.0)):
            with pytest.raises(ValueError, match=r"expected an input of shape \(batch, 5\), got"):
                SPMGRUCell(I, H)(x)
        x = torch.zeros(B, I)
        with pytest.raises(ValueError, match=r"expected an initial h of shape \(3, 6\), got \(2, 6\)"):
            SPMGRUCell(I, H)(x, torch.zeros(2, H))
        with pytest.raises(ValueError, match=r"expected an initial h of shape \(6,\), got \(1, 6\)"):
            SPMRNNCell(I, H)(x[0], torch.zeros(1, H))
        with pytest.raises(ValueError, match=r"expected an initial c of shape \(3, 6\), got \(3, 5\)"):
            SPMLSTMCell(I, H)(x, (torch.zeros(B, H), torch.zeros(B, H - 1)))
        with pytest.raises(ValueError, match=r"the initial states \(h, c\) as tensors, got \(Tensor, Tensor, Tensor\)"):
            SPMLSTMCell(I, H)(x, (x, x, x))
        with pytest.raises(ValueError, match=r"nonlinearity must be one of .* got 'cube'"):
            SPMRNNCell(I, H, nonlinearity="cube")
        with pytest.raises(TypeError, match=r"x is torch\.float64"):
            SPMLSTMCell(I, H)(x.double())


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


@pytest.mark.parametrize("init", ["near_identity", "random_rotation"])
@pytest.mark.parametrize("size", [16, 27])
def test_rotations_keep_the_norm_over_a_thousand_steps(init, size):
    options = {"nonlinearity": "linear", "block": "rotation", "bias": False, "init": init}
    network = SPMRNN(size, size, **options)
    h = torch.randn(1, 2, size, requires_grad=True)
    y, h_n = network(torch.zeros(1000, 2, size), h)
    norms = y.norm(dim=-1) / h.norm(dim=-1)
    assert norms.sub(1).abs().max() < 1e-3
    assert not y[500].isclose(h[0]).all(), "it is not the identity"
    grad = torch.randn_like(h_n)
    (of_h,) = torch.autograd.grad(h_n, h, grad)
    assert (of_h.norm(dim=-1) / grad.norm(dim=-1)).sub(1).abs().max() < 1e-3
    general = SPMRNN(size, size, **{**options, "block": "general"})
    randomised(general)
    assert (general(torch.zeros(1000, 2, size), h)[1].norm() / h.norm()).sub(1).abs() > 0.1


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (SPMRNN, {"input_size": 0}, "input_size must be at least 1, got 0"),
        (SPMGRU, {"hidden_size": -2}, "hidden_size must be at least 1, got -2"),
        (SPMLSTM, {"num_layers": 0}, "num_layers must be at least 1, got 0"),
        (SPMRNN, {"nonlinearity": "cube"}, r"nonlinearity must be one of .*tanh.*relu.*linear.* got 'cube'"),
        (SPMGRU, {"dropout": 2, "num_layers": 2}, r"dropout must be .*0\.\.1, got 2"),
        (SPMGRU, {"dropout": -0.5, "num_layers": 2}, r"dropout must be .*0\.\.1, got -0.5"),
        (SPMLSTM, {"proj_size": 3}, "proj_size must be 0, got 3"),
        (SPMGRU, {"block": "cube"}, "block must be one of .* got 'cube'"),
        (SPMGRU, {"impl": "magic"}, "impl must be one of .* got 'magic'"),
        (SPMGRU, {"schedule": Schedule.butterfly(7)}, "the layer has the width 6 .* its schedule has 7"),
    ],
)
def test_bad_arguments(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(**{"input_size": I, "hidden_size": H, **arguments})


X, STATE = torch.zeros(T, B, I), torch.zeros(1, B, H)
PACKED = pack_sequence([torch.zeros(t, I) for t in LENGTHS], enforce_sorted=False)
BAD_CALLS = [
    (SPMGRU, (X[..., :4],), ValueError, r"expected an input of size 5, got 4: \(4, 3, 4\)"),
    (SPMGRU, (X[0, 0],), ValueError, r"2 or 3 dimensions, got 1: \(5,\)"),
    (SPMGRU, (X[None],), ValueError, r"2 or 3 dimensions, got 4: \(1, 4, 3, 5\)"),
    (SPMGRU, (X[:0],), ValueError, r"at least one step, got the shape \(0, 3, 5\)"),
    (SPMGRU, (X[:0, 0],), ValueError, r"at least one step, got the shape \(0, 5\)"),
    (SPMGRU, (X, STATE[0]), ValueError, r"an initial h of shape \(1, 3, 6\), got \(3, 6\)"),
    (SPMGRU, (X, STATE.expand(2, B, H)), ValueError, r"an initial h of shape \(1, 3, 6\), got \(2, 3, 6\)"),
    (SPMGRU, (X[:, 0], STATE), ValueError, r"an initial h of shape \(1, 6\), got \(1, 3, 6\)"),
    (SPMGRU, (PACKED, STATE[:, :2]), ValueError, r"an initial h of shape \(1, 3, 6\), got \(1, 2, 6\)"),
    (SPMRNN, (PACKED._replace(data=PACKED.data[:, :4]),), ValueError, r"packed data of shape \(\*, 5\), got \(7, 4\)"),
    (SPMLSTM, (X, (STATE, STATE[..., :5])), ValueError, r"an initial c of shape \(1, 3, 6\), got \(1, 3, 5\)"),
    (
        SPMLSTM,
        (X, (STATE, STATE, STATE)),
        ValueError,
        r"the initial states \(h, c\) as tensors, got \(Tensor, Tensor, Tensor\)",
    ),
    (SPMLSTM, (X, (STATE,)), ValueError, r"the initial states \(h, c\) as tensors, got \(Tensor\)"),
    (SPMLSTM, (X, STATE), ValueError, r"the initial states \(h, c\) as tensors, got \(Tensor\)"),
    (SPMGRU, (X, (STATE, STATE)), ValueError, r"the initial states \(h\) as tensors, got \(Tensor, Tensor\)"),
    (SPMGRU, (X, STATE.double()), TypeError, r"torch\.float64"),
    (SPMLSTM, (X, (STATE, STATE.double())), TypeError, r"torch\.float64"),
    (SPMGRU, (X.double(),), TypeError, r"x is torch\.float64"),
    (SPMGRU, (X.long(),), TypeError, r"got torch\.int64"),
]


@pytest.mark.parametrize(("kind", "arguments", "error", "message"), BAD_CALLS)
def test_bad_input(kind, arguments, error, message):
    with pytest.raises(error, match=message):
        kind(I, H)(*arguments)
    with pytest.raises((RuntimeError, ValueError, TypeError, IndexError, AttributeError)):  # torch refuses it too
        getattr(nn, kind.__name__.removeprefix("SPM"))(I, H)(*arguments)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_no_sequences(cell, impl, batch_first):
    """As in torch: no rows."""
    x = torch.zeros(0, T, I) if batch_first else torch.zeros(T, 0, I)
    options = {"batch_first": batch_first, "bidirectional": True, "num_layers": 2}
    outputs = flat(NETWORKS[cell](I, H, **options, impl=impl)(x))
    expected = flat(TORCHS.get(cell, nn.GRU)(I, H, **options)(x))
    assert [output.shape for output in outputs] == [output.shape for output in expected]
    sum(output.sum() for output in outputs).backward()


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_a_sequence_with_nan_disturbs_no_other(cell, form):
    case = Case(network_of(cell, bidirectional=True, hidden_size=17), form)
    clean = case.actual()
    disturbed, step = 1, 2
    case.tensors[f"x{disturbed}"][step, 0] = torch.nan
    actual, expected = case.actual(), case.plain()
    for number in range(len(flat(case.network(*case.arguments(case.tensors))))):
        assert actual[number].isnan().equal(expected[number].isnan())
        if number:
            others = [s for s in range(B) if s != disturbed]
            torch.testing.assert_close(actual[number][:, others], clean[number][:, others])
    assert actual[0].isnan().any()
    assert not actual[0].isnan().all()
    for s in range(B):
        if s != disturbed:
            torch.testing.assert_close(actual[f"x{s}"], clean[f"x{s}"])
    if cell in TORCHS:
        assert actual[0].isnan().equal(case.torchs()[0].isnan())


def test_infinite_inputs_saturate(cell):
    """Gates of infinity are zero or one, as in torch, and not NaN."""
    if cell not in ("tanh", "gru_reset_after", "lstm"):
        pytest.skip("has no gates, or torch has no such network")
    case = Case(NETWORKS[cell](1, 1, dtype=torch.float64, init="identity"), with_state=False, batch=4)
    for s, value in enumerate((torch.inf, -torch.inf, 1e300, -1e300)):
        case.tensors[f"x{s}"].fill_(value)
    actual, expected = case.actual()[0], case.torchs()[0]
    assert actual.isfinite().all()
    torch.testing.assert_close(actual, expected)


def test_unusual_layouts(cell):
    network = network_of(cell)
    x = torch.randn(I, B, T, dtype=torch.float64).permute(2, 1, 0)
    states = [torch.randn(H, B, 1, dtype=torch.float64).permute(2, 1, 0) for _ in network.states]

    def call(x, *states):
        return network(x, tuple(states) if cell == "lstm" else states[0])

    y = call(x, *states)
    torch.testing.assert_close(y, call(x.contiguous(), *(state.contiguous() for state in states)))
    grad = torch.randn(H, B, T, dtype=torch.float64).permute(2, 1, 0)
    actual, expected = (
        torch.autograd.grad(y[0], list(network.parameters()), g, retain_graph=True) for g in (grad, grad.contiguous())
    )
    torch.testing.assert_close(actual, expected)


def test_the_input_and_the_states_are_not_written_to(cell):
    case = Case(network_of(cell, bidirectional=True))
    before = copy.deepcopy(case.tensors)
    case.network(*case.arguments(case.tensors))
    assert all(case.tensors[name].equal(before[name]) for name in before)


@pytest.mark.parametrize("kind", [*NETWORKS.values(), *CELLS.values()])
def test_copies_and_checkpoints(kind):
    network, other = (randomised(kind(I, H)) for _ in range(2))
    other.load_state_dict(network.state_dict())
    x = torch.randn(T, I)
    for same in (other, copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        torch.testing.assert_close(same(x), network(x), atol=0, rtol=0)
        assert not {p.data_ptr() for p in same.parameters()} & {p.data_ptr() for p in network.parameters()}
    with pytest.raises(RuntimeError, match=r"ih.*: the checkpoint is of another layer: in_features is 5 there and 7"):
        kind(7, H).load_state_dict(network.state_dict())
    with pytest.raises(RuntimeError, match=r"hh.*: the checkpoint is of another layer: schedule is"):
        kind(I, H, schedule="brick", stages=3).load_state_dict(network.state_dict())


def test_checkpoints_of_other_networks():
    network = SPMGRU(I, H, num_layers=2)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        SPMGRU(I, H).load_state_dict(network.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        SPMGRU(I, H, num_layers=2, bidirectional=True).load_state_dict(network.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*hh_l0\.bias"):
        SPMGRU(I, H, num_layers=2, reset_after=True).load_state_dict(network.state_dict())
    with pytest.raises(RuntimeError, match="maps is 3 there and 4 here"):
        SPMLSTM(I, H, num_layers=2).load_state_dict(network.state_dict())


@pytest.mark.parametrize("kind", [*NETWORKS.values(), *CELLS.values()])
def test_reset_parameters(kind):
    with torch.device("meta"):
        network = kind(I, H)
    network = network.to_empty(device="cpu")
    for parameter in network.parameters():
        parameter.data.fill_(torch.nan)
    torch.manual_seed(0)
    network.reset_parameters()
    torch.manual_seed(0)
    fresh = kind(I, H)
    for (name, a), (_, b) in zip(network.named_parameters(), fresh.named_parameters(), strict=True):
        assert a.equal(b), name


def test_names_and_biases():
    names = {name for name, _ in SPMLSTM(I, H, num_layers=2, bidirectional=True).named_parameters()}
    maps = [f"{which}_l{layer}{way}" for which in ("ih", "hh") for layer in (0, 1) for way in ("", "_reverse")]
    parameters = {f"{name}.{kind}" for name in maps for kind in ("coeffs", "d_in", "d_out")}
    assert names == parameters | {f"{name}.bias" for name in maps if name[0] == "i"}
    for kind, biases in ((SPMGRU, {"ih_l0"}), (partial(SPMGRU, reset_after=True), {"ih_l0", "hh_l0"})):
        gru = kind(I, H)
        assert {n.removesuffix(".bias") for n, _ in gru.named_parameters() if n.endswith("bias")} == biases
        assert gru.ih_l0.to_dense().shape == (3 * H, I)
        assert gru.hh_l0.to_dense().shape == (3 * H, H)
    assert not [n for n, _ in SPMGRU(I, H, bias=False, reset_after=True).named_parameters() if n.endswith("bias")]


def test_repr():
    assert repr(SPMLSTM(I, H)).startswith("SPMLSTM(\n  5, 6, cell=lstm\n  (ih_l0): SPMLinear(in_features=5, ")
    options = {"num_layers": 2, "bias": False, "batch_first": True, "dropout": 0.1, "bidirectional": True}
    shown = "num_layers=2, bias=False, batch_first=True, dropout=0.1, bidirectional=True"
    assert f"5, 6, cell=gru_reset_after, {shown}\n" in repr(SPMGRU(I, H, **options, reset_after=True))
    assert "5, 6, cell=relu, bias=False\n" in repr(SPMRNNCell(I, H, bias=False, nonlinearity="relu"))


def test_one_line_change():
    """The arguments of torch's networks and cells, by position."""
    x = torch.randn(B, T, I).double()
    last = {"device": "cpu", "dtype": torch.float64}  # torch has a position for them, but does not take them there
    for rnn in (nn.RNN, SPMRNN):
        network = rnn(I, H, 2, "relu", False, True, 0.1, True, **last)
        assert network(x)[0].shape == (B, T, 2 * H)
        assert (network.nonlinearity, network.num_layers, network.dropout) == ("relu", 2, 0.1)
    for gru in (nn.GRU, SPMGRU):
        y, h = gru(I, H, 2, False, True, 0.1, True, **last)(x, torch.zeros(4, B, H).double())
        assert (y.shape, h.shape) == ((B, T, 2 * H), (4, B, H))
    for lstm in (nn.LSTM, SPMLSTM):
        network = lstm(I, H, 2, False, True, 0.1, True, 0, **last)
        y, (h, c) = network(x)
        assert (y.shape, h.shape, c.shape) == ((B, T, 2 * H), (4, B, H), (4, B, H))
        assert (network.input_size, network.hidden_size, network.bias, network.batch_first) == (I, H, False, True)
        assert network.bidirectional
        assert network.proj_size == 0
    assert SPMRNNCell(I, H, False, "relu", **last)(x[0]).shape == nn.RNNCell(I, H, False, "relu", **last)(x[0]).shape
    assert SPMGRUCell(I, H, False, **last)(x[0]).shape == nn.GRUCell(I, H, False, **last)(x[0]).shape
    assert SPMLSTMCell(I, H, False, **last)(x[0])[1].shape == nn.LSTMCell(I, H, False, **last)(x[0])[1].shape
    with pytest.raises(TypeError):
        SPMGRU(I, H, 2, False, True, 0.1, True, None, None, True)


def test_packed_sequences_keep_their_order():
    network = network_of("gru", num_layers=2)
    sequences = [torch.randn(t, I, dtype=torch.float64) for t in (1, 5, 3, 5)]
    packed = pack_sequence(sequences, enforce_sorted=False)
    y, h_n = network(packed)
    assert y.sorted_indices.equal(packed.sorted_indices)
    assert y.unsorted_indices.equal(packed.unsorted_indices)
    assert y.batch_sizes.equal(packed.batch_sizes)
    for s, (sequence, output) in enumerate(zip(sequences, unpack_sequence(y), strict=True)):
        alone, h_alone = network(sequence)
        torch.testing.assert_close(output, alone)
        torch.testing.assert_close(h_n[:, s], h_alone)
