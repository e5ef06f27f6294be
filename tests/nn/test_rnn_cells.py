"""Single cells are one step of the networks, and of torch's own cells."""

from itertools import product

import pytest
import torch

import oracle
import twins
from pairmix import SPMGRUCell, SPMLSTMCell, SPMRNNCell
from plain_rnn import CELLS, NETWORKS, TORCHS_CELLS, B, H, I, T, dense_parameters, randomised


def as_cell(network):
    """A single step of it, called like a cell."""

    def step(x, hx=None):
        _, states = network(x[None], each(lambda state: state[None], hx))
        return each(lambda state: state[0], states)

    return step


def each(f, states):
    """Of h, of (h, c), or of None."""
    return tuple(map(f, states)) if isinstance(states, tuple) else None if states is None else f(states)


class TestCells:
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("sizes", [(I, H), (7, 1), (2, 13)])
    def test_one_step(self, cell, sizes, bias):
        single = randomised(CELLS[cell](*sizes, bias, dtype=torch.float64))

        def network(dtype):
            network, plain = NETWORKS[cell](*sizes, bias=bias), twins.plain_copy(single, dtype)
            network.ih_l0, network.hh_l0 = plain.ih, plain.hh
            return as_cell(network)

        def torchs(dtype):
            twin = TORCHS_CELLS[cell](*sizes, bias, dtype=dtype)
            twin.load_state_dict(dense_parameters(twins.plain_copy(single, dtype)))
            return twin

        x = torch.randn(B, sizes[0], dtype=torch.float64)
        states = tuple(torch.randn(B, sizes[1], dtype=torch.float64) for _ in single.states)
        hx = states if cell == "lstm" else states[0]
        first = each(lambda state: state[0], hx)
        calls = [(x, hx), (x, None), (x[0], first), (x[0], None)]
        for (x, hx), twin in product(calls, (network, torchs) if cell in TORCHS_CELLS else (network,)):

            def plain(dtype, x=x, hx=hx, twin=twin):
                return twin(dtype)(x.to(dtype), each(lambda state: state.to(dtype), hx))

            oracle.assert_agrees(single(x, hx), plain)

    def test_steps_by_hand_are_the_network(self, cell):
        """With the gradients of everything."""
        single = randomised(CELLS[cell](I, H, dtype=torch.float64))
        x = torch.randn(T, B, I, dtype=torch.float64, requires_grad=True)
        hx, outputs = None, []
        for row in x:
            hx = single(row, hx)
            outputs.append(hx[0] if cell == "lstm" else hx)

        def with_gradients(y, *inputs):
            return y, torch.autograd.grad(y.sin().sum(), inputs)

        def plain(dtype):
            network, cell_of_it = NETWORKS[cell](I, H), twins.plain_copy(single, dtype)
            network.ih_l0, network.hh_l0 = cell_of_it.ih, cell_of_it.hh
            x_here = x.detach().to(dtype).requires_grad_()
            return with_gradients(network(x_here)[0], x_here, *cell_of_it.parameters())

        oracle.assert_agrees(with_gradients(torch.stack(outputs), x, *single.parameters()), plain)

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
