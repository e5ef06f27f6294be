from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck
from torch.func import functional_call

from oracle import assert_agrees
from pairmix_lab import contenders
from pairmix_lab.contenders import TRAINED
from pairmix_lab.experiments.language_models import CELLS, DenseElman, LanguageModel, generate

WIDTHS = {"rnn": 7, "gru": 6, "attention": 128}
BATCH, LENGTH = 3, 9


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def model_of(layer, cell, width=None, **options):
    """In float64, with no parameter left at one or zero."""
    model = plain_model_of(layer, cell, width or WIDTHS[cell], **options)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def plain_model_of(layer, cell, width, longest=None, **options):
    of_cell = {} if longest is None else {"longest": longest}
    return LanguageModel(partial(contenders.make, layer, width, **options), width, cell, **of_cell).double()


def text_of(length=LENGTH):
    return torch.randint(256, (BATCH, length))


def with_gradients(output, leaves):
    """The output and the gradients of all leaves, in the dtype in which they were computed."""
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    gradients = torch.autograd.grad((output * weights).sum(), list(leaves), retain_graph=True)
    return [tensor.to(output.dtype) for tensor in (output, *gradients)]


def call(module, parameters, *inputs, dtype):
    """The module with these parameters, in a given dtype: gradients reach the parameters."""
    converted = {name: value.to(dtype) for name, value in parameters.items()}
    return functional_call(module.to(dtype), converted, inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(("cell", "torchs"), [("rnn", nn.RNN), ("gru", nn.GRU)])
def test_dense_cells_are_torchs_own_on_one_hot_bytes(cell, torchs, with_state, dtype):
    model, text = model_of("dense", cell).to(dtype), text_of()
    h = torch.randn(BATCH, WIDTHS[cell], dtype=dtype, requires_grad=True) if with_state else None
    leaves = [*model.parameters(), *([h] if with_state else [])]
    parameters = {
        "weight_ih_l0": model.table.weight.T,
        "bias_ih_l0": torch.zeros_like(model.mixer.u.bias),
        "weight_hh_l0": model.mixer.u.weight,
        "bias_hh_l0": model.mixer.u.bias,
    }
    twin = torchs(256, WIDTHS[cell])
    head = nn.Linear(WIDTHS[cell], 256)

    def plain(dtype):
        one_hot = nn.functional.one_hot(text.T, 256).to(dtype)
        states, last = call(twin, parameters, one_hot, h[None].to(dtype) if with_state else None, dtype=dtype)
        logits = call(head, dict(model.head.named_parameters()), states, dtype=dtype)
        return with_gradients(torch.cat([logits.transpose(0, 1).flatten(), last.flatten()]), leaves)

    logits, state = model.read(text, h)
    assert_agrees(with_gradients(torch.cat([logits.flatten(), state.flatten()]), leaves), plain)


def test_gradients_of_the_dense_elman_cell():
    shapes = (4, 2, 3), (2, 3), (3, 3)
    assert gradcheck(DenseElman.apply, [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes])


@pytest.mark.parametrize(
    ("cell", "width"), [("rnn", 6), ("rnn", 7), ("rnn", 8), ("gru", 5), ("gru", 6), ("attention", 64)]
)
@pytest.mark.parametrize("options", [{}, {"block": "rotation", "stages": 2}], ids=["general", "rotation"])
def test_spm_is_a_dense_model_with_its_matrices(cell, width, options):
    model, text = model_of("spm", cell, width, **options), text_of()
    dense = plain_model_of("dense", cell, width)
    shared = {name: value for name, value in model.named_parameters() if name in dict(dense.named_parameters())}
    for name, layer in model.mixer.named_children():
        if hasattr(layer, "to_dense"):
            shared |= {f"mixer.{name}.weight": layer.to_dense(), f"mixer.{name}.bias": layer.bias.flatten()}
    assert shared.keys() == dict(dense.named_parameters()).keys()
    assert_agrees(
        with_gradients(model(text), model.parameters()),
        lambda dtype: with_gradients(call(dense, shared, text, dtype=dtype), model.parameters()),
    )


@pytest.mark.parametrize(("cell", "maps"), [("rnn", 1), ("gru", 3)])
def test_low_rank_is_a_dense_model_with_its_products(cell, maps):
    model, text = model_of("lowrank", cell), text_of()
    dense = plain_model_of("dense", cell, WIDTHS[cell])
    shared = {name: value for name, value in model.named_parameters() if not name.startswith("mixer")}
    products = [model.mixer.u] if maps == 1 else list(model.mixer.u)
    shared["mixer.u.weight"] = torch.cat([outer.weight @ inner.weight for inner, outer in products])
    shared["mixer.u.bias"] = torch.cat([outer.bias for _, outer in products])
    assert len(products) == maps
    assert_agrees(
        with_gradients(model(text), model.parameters()),
        lambda dtype: with_gradients(call(dense, shared, text, dtype=dtype), model.parameters()),
    )


def attention_by_hand(model, text):
    mixer = model.mixer
    x = model.table(text) + mixer.places[:LENGTH, 0]
    q, k, v = mixer.qkv(mixer.norm_in(x)).chunk(3, -1)
    heads = []
    for head in (slice(0, 64), slice(64, 128)):
        scores = q[..., head] @ k[..., head].mT / 8
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        heads.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ v[..., head])
    return model.head(mixer.norm_out(x + mixer.out(torch.cat(heads, -1))))


def test_attention_by_hand():
    model, text = model_of("dense", "attention"), text_of()

    def plain(dtype):
        twin = deepcopy(model).to(dtype)
        return with_gradients(attention_by_hand(twin, text), twin.parameters())

    assert_agrees(with_gradients(model(text), model.parameters()), plain)


@pytest.mark.parametrize("layer", TRAINED)
@pytest.mark.parametrize("cell", CELLS)
def test_no_logits_depend_on_a_later_byte_and_all_later_ones_on_an_earlier(cell, layer):
    model, text = model_of(layer, cell), text_of()
    changed = text.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 256
    difference = (model(changed) - model(text)).abs().amax(-1)
    assert difference[:, :4].max() == 0
    assert difference[:, 4:].min() > 1e-9


@pytest.mark.parametrize("layer", TRAINED)
@pytest.mark.parametrize("cell", CELLS)
def test_reading_in_pieces_is_reading_in_one_go(cell, layer):
    model, text = model_of(layer, cell), text_of()
    logits, state = [], None
    for piece in text.split([4, 1, 3, 1], dim=1):
        more, state = model.read(piece, state)
        logits.append(more)
    assert_agrees(torch.cat(logits, 1), lambda dtype: deepcopy(model).to(dtype)(text))


def test_attention_forgets_what_does_not_fit():
    model = model_of("dense", "attention", longest=4)
    text = text_of(6)
    _, state = model.read(text[:, :4], None)
    logits, state = model.read(text[:, 4:], state)
    assert_agrees(logits, lambda dtype: deepcopy(model).to(dtype)(text[:, 2:])[:, 2:])
    assert len(state) == 4
    assert len(generate(model.float(), b"\n", 10, seed=0)) == 11


def test_attention_does_not_read_more_at_once_than_fits():
    with pytest.raises(ValueError, match=r"at most 4.* got 9"):
        model_of("dense", "attention", longest=4)(text_of())


def test_attention_needs_whole_heads():
    with pytest.raises(ValueError, match="multiple of 64, got 100"):
        plain_model_of("dense", "attention", 100)


@pytest.mark.parametrize("cell", CELLS)
def test_generate(cell):
    model = model_of("spm", cell)
    state = torch.get_rng_state()
    one, again, other = (generate(model, b"To be", 20, seed) for seed in (1, 1, 2))
    assert one == again != other
    assert len(one) == 25
    assert one.startswith(b"To be")
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize("cell", CELLS)
def test_a_cold_model_writes_what_is_most_likely(cell):
    model = model_of("spm", cell)
    text = list(generate(model, b"To be", 12, seed=0, temperature=1e-9))
    logits = model(torch.tensor([text]))[0]
    assert text[5:] == logits.argmax(-1)[4:-1].tolist()
