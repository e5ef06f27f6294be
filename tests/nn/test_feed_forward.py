"""The feed-forward block as a module: what it looks like to the rest of torch, and when its parts are called."""

import copy

import pytest
import torch
from torch import nn

from pairmix import SPMFeedForward, SPMLinear, SPMTransformerEncoderLayer, param_groups


def parts_of(block, x):
    return block.down(nn.functional.gelu(block.up(x)))


def test_parameters_and_starts():
    block = SPMFeedForward(64, 256, gain=0.5)
    assert [name for name, _ in block.named_children()] == ["up", "dropout", "down", "output_dropout"]
    assert (block.up.in_features, block.up.out_features, block.up.maps) == (64, 256, None)
    assert SPMFeedForward(64, 256, gated=True).up.maps == 2
    x = torch.randn(100, 64)
    hidden = block.up(x)
    assert hidden.std().item() == pytest.approx(1, rel=0.1)  # the start keeps the size of its input
    assert block.down(hidden).std().item() == pytest.approx(0.5, rel=0.1)


def test_options_reach_both_maps():
    block = SPMFeedForward(8, 32, "relu", False, block="rotation", stages=7, dtype=torch.float64, impl="reference")
    for layer in (block.up, block.down):
        assert (layer.block, layer.stages, layer.bias, layer.d_in.dtype, layer.impl) == (
            "rotation", 7, None, torch.float64, "reference"
        )  # fmt: skip
    assert "activation=relu" in repr(block)


def test_an_activation_that_does_not_exist():
    with pytest.raises(
        ValueError, match=r"activation must be one of \['relu', 'gelu', 'gelu_tanh', 'silu'\], got 'tanh'"
    ):
        SPMFeedForward(8, 32, "tanh")


def test_dropout_runs_between_the_parts_and_only_in_training(fused):
    block, x = SPMFeedForward(16, 64, dropout=0.5), torch.randn(5, 16)
    assert not torch.equal(block(x), block(x))
    assert not fused
    block.eval()
    torch.testing.assert_close(block(x), parts_of(block, x))
    assert fused


def test_dropout_of_the_output_leaves_one_call(fused):
    block, x = SPMFeedForward(16, 64, output_dropout=0.5), torch.randn(50, 16)
    y = block(x)
    kept = y != 0
    assert 0.3 < kept.float().mean() < 0.7
    torch.testing.assert_close(y[kept], 2 * parts_of(block, x)[kept])
    torch.testing.assert_close(block.eval()(x), parts_of(block, x))
    assert len(fused) == 2


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_hooks_on_its_maps_are_called(kind, fused):
    block, seen = SPMFeedForward(16, 64), []
    getattr(block.up, kind)(lambda *arguments: seen.append(kind))
    block(torch.randn(5, 16, requires_grad=True)).sum().backward()
    assert seen
    assert not fused


def test_a_map_that_was_replaced_is_called(fused):
    block = SPMFeedForward(16, 64)
    block.up = nn.Linear(16, 64)
    assert block(torch.randn(5, 16)).shape == (5, 16)
    assert not fused


def test_a_dense_gate_can_take_the_place_of_its_own():
    block, x = SPMFeedForward(16, 64, "silu", gated=True), torch.randn(5, 16)
    y, dense = block(x), nn.Linear(16, 2 * 64)
    dense.weight.data, dense.bias.data = block.up.to_dense().detach(), block.up.bias.detach().flatten()
    block.up = dense
    torch.testing.assert_close(block(x), y, rtol=1e-4, atol=1e-4)


def test_checkpoints_of_another_block_are_refused():
    block = SPMFeedForward(16, 64)
    same = SPMFeedForward(16, 64)
    same.load_state_dict(block.state_dict())
    x = torch.randn(5, 16)
    assert torch.equal(same(x), block(x))
    with pytest.raises(RuntimeError, match="the checkpoint is of another layer"):
        SPMFeedForward(16, 64, schedule="random", stages=6).load_state_dict(block.state_dict())


def test_it_trains_and_is_copied_and_compiled():
    block, x = SPMFeedForward(16, 64), torch.randn(32, 16)
    target = torch.randn(32, 16)
    optimizer = torch.optim.AdamW(param_groups(block, lr=1e-2))
    losses = []
    for _ in range(30):
        loss = (block(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    torch.testing.assert_close(copy.deepcopy(block)(x), block(x))


def test_a_leaf_of_traced_graphs():
    traced = torch.fx.symbolic_trace(nn.Sequential(SPMFeedForward(16, 64)))
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "output"]


def test_jagged_inputs():
    block = SPMFeedForward(16, 64)
    rows = [torch.randn(3, 16), torch.randn(5, 16)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    torch.testing.assert_close(block(nested).values(), block(torch.cat(rows)))


@pytest.mark.parametrize("activation", ["relu", "gelu", torch.tanh])
def test_encoder_layers_compute_theirs_in_one_call(activation, fused):
    layer = SPMTransformerEncoderLayer(16, 4, 64, activation=activation, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    y = layer(x)
    assert bool(fused) == isinstance(activation, str)
    fused.clear()
    layer.linear1.register_forward_hook(lambda *arguments: None)
    torch.testing.assert_close(layer(x), y)
    assert not fused


def test_multiply_adds_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    block, x = SPMFeedForward(16, 64, gated=True), torch.randn(5, 16)
    with FlopCounterMode(display=False) as counter:
        block(x).sum().backward()
    of_maps = sum(layer.multiply_adds for layer in block.modules() if isinstance(layer, SPMLinear))
    assert counter.get_total_flops() == 3 * 2 * 5 * of_maps
