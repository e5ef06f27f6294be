"""Single cells are one step of the networks, and of torch's own cells."""

import pytest
import torch

from pairmix import SPMGRUCell, SPMLSTMCell, SPMRNNCell
from plain_rnn import CELLS, NETWORKS, TORCHS_CELLS, B, H, I, T, dense_parameters, flat, randomised


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
