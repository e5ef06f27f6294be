import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pairmix import SPMLinear
from pairmix_lab import contenders
from pairmix_lab.contenders import count_parameters
from pairmix_lab.experiments.gpt_task import LAYERS
from pairmix_lab.experiments.transformer import GPT, MAPS, STD, branch_gain, generate, start_

LENGTH = 32


def make(layer, out_features, in_features, **options):
    return contenders.make(layer, in_features, out_features, **options)


def started(layer, width=64, depth=2, seed=0, length=LENGTH, **options):
    torch.manual_seed(seed)
    return GPT(partial(make, layer), width, depth, length, **options)


def some_text(rows=4, length=LENGTH, seed=1):
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(seed))


def matrix(layer, in_features):
    """What a map stands for, [out_features, in_features]."""
    with torch.no_grad():
        return (layer(torch.eye(in_features)) - layer(torch.zeros(1, in_features))).T


@pytest.mark.parametrize("layer", LAYERS)
def test_a_later_byte_changes_no_earlier_logits(layer):
    model, text = started(layer), some_text()
    changed = text.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 256
    with torch.inference_mode():
        before, after = model(text), model(changed)
    torch.testing.assert_close(after[:, :20], before[:, :20])
    for place in range(20, LENGTH):  # and every byte changes all that follow
        assert not torch.allclose(after[:, place], before[:, place], rtol=0, atol=1e-6), place


def test_the_same_byte_means_something_else_in_another_place():
    with torch.inference_mode():
        logits = started("dense")(torch.full((1, LENGTH), 65))
    assert not torch.allclose(logits[0, 3], logits[0, 4], atol=1e-4)


def test_a_dense_block_is_torchs_own():
    model = started("dense", 128)
    block = model.blocks[0]
    theirs = nn.TransformerEncoderLayer(128, 2, 512, 0.0, "gelu", batch_first=True, norm_first=True)
    names = {"self_attn.in_proj_": "qkv.", "self_attn.out_proj.": "out.", "linear1.": "up.", "linear2.": "down."}
    names |= {"norm1.": "norm_attention.", "norm2.": "norm_feed_forward."}
    ours = {name: torch.randn_like(value) / 8 for name, value in block.state_dict().items()}
    block.load_state_dict(ours)
    theirs.load_state_dict({a + kind: ours[b + kind] for a, b in names.items() for kind in ("weight", "bias")})
    x = torch.randn(3, LENGTH, 128)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    torch.testing.assert_close(block(x), theirs(x, mask, is_causal=True), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("layer", "calls"), [("spm", 2), ("deeper", 2), ("companion", 0), ("dense", 0)])
def test_a_feed_forward_network_of_spm_is_one_call(layer, calls, fused):
    model = started(layer)
    before = model(some_text())
    assert len(fused) == calls
    for block in model.blocks:
        block.up.register_forward_hook(lambda *_: None)  # one that is watched runs on its own
    torch.testing.assert_close(model(some_text()), before, rtol=1e-4, atol=1e-5)
    assert len(fused) == calls


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("tied", [False, True])
def test_every_layer_learns(layer, tied):
    model, text = started(layer, tied=tied), some_text()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for _ in range(8):
        loss = F.cross_entropy(model(text)[:, :-1].flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.2
    assert all(parameter.grad.any() for parameter in model.parameters() if parameter.dim() > 1)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("tied", [False, True])
def test_it_starts_without_an_opinion(layer, width, tied):
    text = some_text(rows=8)
    with torch.inference_mode():
        logits = started(layer, width, depth=4, tied=tied)(text)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())
    assert float(loss) == pytest.approx(math.log(256), abs=0.3)


def test_a_tied_head_is_the_table():
    tied, untied = started("dense", tied=True), started("dense")
    assert tied.head_weight is tied.table.weight
    assert untied.head_weight is not untied.table.weight
    assert untied.head.bias is None
    assert count_parameters(untied) - count_parameters(tied) == 256 * 64
    with torch.no_grad():
        tied.table.weight.zero_()
    assert not tied(some_text()).any()


def test_dense_starts_as_gpt_2():
    depth = 8
    model = started("dense", 128, depth)
    for name in MAPS:
        weights = torch.stack([block.get_submodule(name).weight for block in model.blocks])
        wanted = STD / math.sqrt(2 * depth) if name in ("out", "down") else STD
        assert float(weights.detach().std()) == pytest.approx(wanted, rel=0.02), name
        assert not any(block.get_submodule(name).bias.any() for block in model.blocks)
    for weight in (model.table.weight, model.places.weight, model.head.weight):
        assert float(weight.detach().std()) == pytest.approx(STD, rel=0.05)


@pytest.mark.parametrize("layer", ["dense", "lowrank", "monarch"])
@pytest.mark.parametrize("name", MAPS)
def test_products_of_factors_have_the_spread_of_a_dense_start(layer, name):
    taken, given, maps = MAPS[name]
    torch.manual_seed(0)
    squares = []
    for _ in range(20):
        one = make(layer, given * 64, taken * 64, maps=maps)
        start_(one, 0.01)
        found = matrix(one, taken * 64)
        assert found.shape == (maps * given * 64, taken * 64)
        squares.append(float(found.square().mean()))
        assert not one(torch.zeros(1, taken * 64)).any()  # no bias
    assert math.sqrt(sum(squares) / 20) == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("name", ["out", "up", "down"])
def test_factors_of_low_rank_are_balanced(name):
    taken, given, _ = MAPS[name]
    torch.manual_seed(0)
    layer = make("lowrank", given * 256, taken * 256)
    start_(layer, 0.01)
    down, up = (float(factor.weight.detach().norm()) for factor in layer)
    assert down == pytest.approx(up, rel=0.05)


@pytest.mark.parametrize("layer", ["spm", "companion"])
def test_spm_keeps_the_start_of_the_library_but_for_branch_ends(layer):
    model = started(layer, depth=4)
    block = model.blocks[0]
    for name in MAPS:
        one = block.get_submodule(name)
        assert isinstance(one, SPMLinear)
        assert one.gain == (pytest.approx(1 / math.sqrt(8)) if name in ("out", "down") else 1.0)
    torch.manual_seed(7)
    expected = make(layer, 64, 64, maps=1, gain=branch_gain(4))
    torch.manual_seed(7)
    started_as = make(layer, 64, 64, maps=1, gain=branch_gain(4))
    start_(started_as, STD)
    for name, value in expected.state_dict().items():
        assert started_as.state_dict()[name].equal(value), name


def test_the_gain_of_branch_ends_is_an_option():
    assert [started("spm", gain=0.25).blocks[1].get_submodule(name).gain for name in MAPS] == [1.0, 0.25, 1.0, 0.25]
    weight = started("dense", 128, gain=0.25).blocks[0].down.weight.detach()
    assert float(weight.std()) == pytest.approx(0.25 * STD, rel=0.02)


def test_some_maps_can_stay_dense():
    block = started("spm", dense_maps=("qkv", "down")).blocks[0]
    assert [type(block.get_submodule(name)) for name in MAPS] == [nn.Linear, SPMLinear, SPMLinear, nn.Linear]
    assert (block.qkv.out_features, block.down.in_features) == (192, 256)
    assert float(block.qkv.weight.detach().std()) == pytest.approx(STD, rel=0.05)
    assert float(block.down.weight.detach().std()) == pytest.approx(STD / 2, rel=0.05)
    # The rate of the layers that are compared is not theirs.
    assert not hasattr(block.qkv, "is_compared")
    assert hasattr(block.out, "is_compared")


def test_it_counts_what_is_in_the_maps():
    model = started("dense", depth=2)
    assert model.count_in_maps() == 2 * (12 * 64 * 64 + (3 + 1 + 4 + 1) * 64)


def test_a_width_without_whole_heads_is_refused():
    with pytest.raises(ValueError, match=r"width must be a multiple of 64, .* got 100"):
        started("dense", 100)


def test_a_text_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match=r"at most 32 bytes at once, got 33"):
        started("dense")(some_text(length=33))


class Reader(nn.Module):
    """Predicts the byte after the last, and keeps what it was given."""

    def __init__(self):
        super().__init__()
        self.places, self.seen = nn.Embedding(4, 1), []

    def forward(self, text):
        self.seen.append(text)
        return 100.0 * F.one_hot((text + 1) % 256, 256)


def test_it_writes_from_the_last_bytes_that_it_can_read():
    model = Reader()
    assert generate(model, b"abc", 5, samples=2) == [b"abcdefgh"] * 2
    assert [bytes(text[0].tolist()) for text in model.seen] == [b"abc", b"abcd", b"bcde", b"cdef", b"defg"]


def test_what_it_writes_depends_on_the_seed_and_the_sample():
    model = started("dense")
    first, second = generate(model, b"\n", 20, samples=2)
    assert len(first) == len(second) == 21
    assert first != second
    assert generate(model, b"\n", 20, samples=2) == [first, second]
    assert generate(model, b"\n", 20, samples=2, seed=1) != [first, second]


def test_a_low_temperature_writes_what_is_likely():
    model = started("dense")
    with torch.no_grad():
        model.head.weight.mul_(20)
        likely = int(model(torch.tensor([[10]]))[0, -1].argmax())
    assert {text[1] for text in generate(model, b"\n", 1, samples=50, temperature=1e-3)} == {likely}
    assert len({text[1] for text in generate(model, b"\n", 1, samples=50)}) > 1
