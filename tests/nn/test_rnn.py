"""Every result is compared in float64 with that of dense matrices, in torch's own networks or in plain loops."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

import oracle
import twins
from pairmix import SPMGRU, SPMLSTM, SPMRNN, Schedule, SPMGRUCell, SPMLSTMCell, SPMRNNCell
from plain_rnn import (
    CELLS,
    NETWORKS,
    TORCHS,
    B,
    Case,
    H,
    I,
    T,
    flat,
    network_of,
    randomised,
)

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
        {"rank": 2},
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
    oracle.assert_agrees(case.plain(), case.torchs)


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
        {"schedule": "random_blocks", "input_size": 63, "hidden_size": 64},
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
    assert actual[0].equal(plain[0]) != is_training
    if not is_training:
        oracle.assert_agrees(actual, case.plain)
    if cell in TORCHS:
        oracle.assert_agrees(actual, case.torchs)


def test_dropout_of_everything_or_nothing(cell):
    """With all dropped between the layers, the second one sees only zeros. Nothing is dropped of the last one."""
    network, x = network_of(cell, num_layers=2, dropout=1.0, bidirectional=True), torch.randn(T, B, I).double()
    upper = network_of(cell, 2 * H, H, bidirectional=True)
    for suffix in ("", "_reverse"):
        for which in ("ih", "hh"):
            layer = getattr(network, f"{which}_l1{suffix}")
            getattr(upper, f"{which}_l0{suffix}").load_state_dict(layer.state_dict())
    assert network(x)[0].equal(upper(x.new_zeros(T, B, 2 * H))[0])


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
        maps = [layer.get_parameter(name) for layer in (gru.ih_l0, gru.hh_l0) for name in ("coeffs", "d_in", "d_out")]
        gradients = torch.autograd.grad((y, h_n), [x, h_0, gru.ih_l0.bias, *maps], (g_y, g_n))
        oracle.assert_agrees((y, h_n, *gradients), lambda dtype: self.paper(gru, dtype, x, h_0, g_y, g_n))

    def paper(self, gru, dtype, *tensors):
        gru = twins.plain_copy(gru, dtype)
        x, h_0, g_y, g_n = (tensor.detach().to(dtype) for tensor in tensors)
        W_r, W_z, W_h = gru.ih_l0.to_dense().detach().chunk(3)
        U_r, U_z, U_h = gru.hh_l0.to_dense().detach().chunk(3)
        b_r, b_z, b_h = gru.ih_l0.bias.detach()
        h, z, r, candidate = [h_0], [], [], []
        for x_t in x:
            z.append(torch.sigmoid(x_t @ W_z.T + h[-1] @ U_z.T + b_z))
            r.append(torch.sigmoid(x_t @ W_r.T + h[-1] @ U_r.T + b_r))
            candidate.append(torch.tanh(x_t @ W_h.T + (r[-1] * h[-1]) @ U_h.T + b_h))
            h.append((1 - z[-1]) * h[-1] + z[-1] * candidate[-1])

        g_x, g_b = torch.zeros_like(x), x.new_zeros(3, H)
        of_W, of_U = x.new_zeros(3, H, I), x.new_zeros(3, H, H)
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
                of_W[number] += g.T @ x[t]
                of_U[number] += g.T @ read

        # and through the operators: the gradients of the matrices, handed on to what they are made of
        of_maps = []
        for layer, of_matrix in ((gru.ih_l0, of_W), (gru.hh_l0, of_U)):
            parameters = [layer.coeffs, layer.d_in, layer.d_out]
            of_maps += torch.autograd.grad(layer.to_dense(), parameters, of_matrix.flatten(0, 1))
        return torch.stack(h[1:]), h[-1][None], g_x, g_h, g_b, *of_maps

    def test_it_is_not_torchs(self):
        """The two arrangements agree if nothing is reset and the update gates are each other's complements."""
        options = {"init": "hadamard", "dtype": torch.float64}
        ours, theirs = SPMGRU(H, H, **options), SPMGRU(H, H, **options, reset_after=True)
        assert (ours.cell, theirs.cell) == ("gru", "gru_reset_after")
        theirs.load_state_dict({**ours.state_dict(), "hh_l0.bias": torch.zeros(3, H)})
        x, h = torch.randn(T, B, H).double(), torch.randn(1, B, H).double()
        assert (ours(x, h)[0] - theirs(x, h)[0]).abs().max() > 0.01
        with torch.no_grad():
            for network, sign in ((ours, 1), (theirs, -1)):
                network.ih_l0.bias[0] = 50
                network.ih_l0.d_out[1] *= sign
                network.hh_l0.d_out[1] *= sign
        oracle.assert_agrees(ours(x, h), lambda dtype: twins.plain_copy(theirs, dtype)(x.to(dtype), h.to(dtype)))


@pytest.mark.parametrize("init", ["near_identity", "random_rotation"])
@pytest.mark.parametrize("size", [16, 27])
def test_rotations_keep_the_norm_over_a_thousand_steps(init, size):
    options = {"nonlinearity": "linear", "block": "rotation", "bias": False, "init": init}
    network = SPMRNN(size, size, **options)
    h = torch.randn(1, 2, size, requires_grad=True)
    y, h_n = network(torch.zeros(1000, 2, size), h)
    rounding = oracle.rounding_of_rotations(1000 * network.hh_l0.stages, torch.float32)
    norms = y.double().norm(dim=-1) / h.double().norm(dim=-1)
    assert norms.sub(1).abs().max() <= rounding
    assert (y[500] - h[0]).abs().max() > 0.01, "it is not the identity"
    grad = torch.randn_like(h_n)
    (of_h,) = torch.autograd.grad(h_n, h, grad)
    assert (of_h.double().norm(dim=-1) / grad.double().norm(dim=-1)).sub(1).abs().max() <= rounding
    general = SPMRNN(size, size, **{**options, "block": "general"})
    randomised(general)
    assert (general(torch.zeros(1000, 2, size), h)[1].norm() / h.norm()).sub(1).abs() > 0.1


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
            assert actual[number][:, others].equal(clean[number][:, others])
    assert actual[0].isnan().any()
    assert not actual[0].isnan().all()
    for s in range(B):
        if s != disturbed:
            assert actual[f"x{s}"].equal(clean[f"x{s}"])
    if cell in TORCHS:
        assert actual[0].isnan().equal(case.torchs()[0].isnan())


def test_infinite_inputs_saturate(cell):
    """Gates of infinity are zero or one, as in torch, and not NaN."""
    if cell not in ("tanh", "gru_reset_after", "lstm"):
        pytest.skip("has no gates, or torch has no such network")
    case = Case(NETWORKS[cell](1, 1, dtype=torch.float64, init="identity"), with_state=False, batch=4)
    for s, value in enumerate((torch.inf, -torch.inf, 1e300, -1e300)):
        case.tensors[f"x{s}"].fill_(value)
    actual = case.actual()[0]
    assert actual.isfinite().all()
    oracle.assert_agrees(actual, lambda dtype: case.torchs(dtype)[0])


def test_unusual_layouts(cell):
    network = network_of(cell)
    x = torch.randn(I, B, T, dtype=torch.float64).permute(2, 1, 0)
    states = [torch.randn(H, B, 1, dtype=torch.float64).permute(2, 1, 0) for _ in network.states]

    def call(x, *states):
        return network(x, tuple(states) if cell == "lstm" else states[0])

    y = call(x, *states)
    expected = flat(call(x.contiguous(), *(state.contiguous() for state in states)))
    assert all(a.equal(b) for a, b in zip(flat(y), expected, strict=True))
    grad = torch.randn(H, B, T, dtype=torch.float64).permute(2, 1, 0)
    actual, expected = (
        torch.autograd.grad(y[0], list(network.parameters()), g, retain_graph=True) for g in (grad, grad.contiguous())
    )
    assert all(a.equal(b) for a, b in zip(actual, expected, strict=True))


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
        expected = dict(oracle.leaves(network(x)))
        assert all(tensor.equal(expected[name]) for name, tensor in oracle.leaves(same(x)))
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
        oracle.assert_agrees(
            (output, h_n[:, s]), lambda dtype, alone=sequence: twins.plain_copy(network, dtype)(alone.to(dtype))
        )
