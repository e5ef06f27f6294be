"""Recurrent networks by their equations, with dense matrices: in torch's own modules, or in plain loops."""

from functools import partial

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence

import oracle
import twins
from pairmix import SPMGRU, SPMLSTM, SPMRNN, SPMGRUCell, SPMLSTMCell, SPMRNNCell

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
T, B, I, H = 4, 3, 5, 6
LENGTHS = [2, 4, 1]


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
        b, c = (W[0].new_zeros(module.gates, module.hidden_size) if m.bias is None else m.bias for m in (ih, hh))
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

    def torchs(self, dtype=torch.float64):
        """What torch's own network does with the dense matrices."""
        ours, reference = self.network, twins.plain_copy(self.network, dtype)
        options = {"bias": ours.bias, "batch_first": ours.batch_first, "bidirectional": ours.bidirectional}
        options |= {"num_layers": ours.num_layers, "dropout": ours.dropout, "dtype": dtype}
        twin = TORCHS[ours.cell](ours.input_size, ours.hidden_size, **options).train(ours.training)
        assert set(dense_parameters(reference)) == {name for name, _ in twin.named_parameters()}

        def call(tensors):
            return flat(functional_call(twin, dense_parameters(reference), self.arguments(tensors)))

        return answers(reference, call, {name: tensor.to(dtype) for name, tensor in self.tensors.items()})

    def plain(self, dtype=torch.float64):
        """What a loop over single sequences does with the dense matrices."""
        reference = twins.plain_copy(self.network, dtype)

        def call(tensors):
            states = [tensors[name] for name in self.states]
            states = states or [torch.zeros(self.shape, dtype=dtype) for _ in reference.states]
            outputs, states = plain_network(reference, self.sequences(tensors), states)
            if self.form == "unbatched":
                return [outputs[0], *(state[:, 0] for state in states)]
            if self.form == "padded":
                return [pad_sequence(outputs, batch_first=reference.batch_first), *states]
            return [pack_sequence(outputs, enforce_sorted=False).data, *states]

        return answers(reference, call, {name: tensor.to(dtype) for name, tensor in self.tensors.items()})

    def check(self):
        actual = self.actual()
        assert all(value.dtype == next(self.network.parameters()).dtype for value in actual.values())
        oracle.assert_agrees(actual, self.torchs if self.network.cell in TORCHS else self.plain)


def network_of(cell, input_size=I, hidden_size=H, dtype=torch.float64, **options):
    return randomised(NETWORKS[cell](input_size, hidden_size, dtype=dtype, **options))
