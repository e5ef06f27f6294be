"""Every result is compared with torch's own attention, in float64, whose weights are the operators' dense matrices."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call

import oracle
import twins
from pairmix import Schedule, functional
from pairmix.nn.attention import SPMMultiheadAttention
from plain_attention import (
    ALL_PATTERNS,
    HEADS,
    E,
    L,
    N,
    S,
    assert_is_torchs,
    dense_parameters,
    dense_twin,
    inputs,
    masks_of,
    randomised,
    results,
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_first": True},
        {"bias": False},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"add_bias_kv": True, "add_zero_attn": True, "bias": False, "batch_first": True},
        {"kdim": 20, "vdim": 9},
        {"kdim": 7, "vdim": 7, "batch_first": True},
        {"vdim": 5, "bias": False, "add_bias_kv": True},
        {"block": "rotation"},
        {"schedule": "brick", "stages": 3},
        {"schedule": Schedule.random(E, 5, seed=2)},
        {"schedule": "random_blocks"},
        {"embed_dim": 15},
        {"embed_dim": 15, "residual": "pass", "block": "rotation"},
        {"num_heads": 1, "impl": "reference"},
        {"num_heads": E},
    ],
    ids=str,
)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_options_are_torchs(options, need_weights, batched):
    attention = randomised(
        SPMMultiheadAttention(**{"embed_dim": E, "num_heads": HEADS, **options}, dtype=torch.float64)
    )
    patterns = ["xyz"] if attention.in_proj is None else ["xxx", "xyy"]
    for pattern in patterns:
        keys = L if pattern == "xxx" else S
        for masks in ({}, masks_of("2d padding", batched, keys)):
            tensors = {**inputs(attention, pattern, batched), **masks}
            assert_is_torchs(attention, pattern, tensors, need_weights=need_weights)


@pytest.mark.parametrize("kind", ["2d", "3d", "padding", "2d padding", "3d padding"])
@pytest.mark.parametrize("values", ["bool", "float"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("call", [{}, {"average_attn_weights": False}, {"need_weights": False}], ids=str)
@pytest.mark.parametrize("batched", [True, False])
def test_masks_are_torchs(kind, values, dtype, call, batched):
    for options in ({"batch_first": True}, {"add_bias_kv": True, "add_zero_attn": True}):
        attention = randomised(SPMMultiheadAttention(E, HEADS, **options, dtype=dtype))
        tensors = {**inputs(attention, "xyy", batched, dtype), **masks_of(f"{kind} {values}", batched, dtype=dtype)}
        assert_is_torchs(attention, "xyy", tensors, **call)


@pytest.mark.parametrize("kind", ["causal", "causal padding"])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("options", [{}, {"add_zero_attn": True}], ids=str)
def test_causal_is_torchs(kind, need_weights, is_causal, options):
    """With an added key too, which torch hides from all if it goes by the hint."""
    attention = randomised(SPMMultiheadAttention(E, HEADS, **options, dtype=torch.float64))
    tensors = {**inputs(attention, "xxx"), **masks_of(kind, keys=L)}
    assert_is_torchs(attention, "xxx", tensors, need_weights=need_weights, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [True, False])
def test_causal_does_not_see_the_future(is_causal):
    attention = randomised(SPMMultiheadAttention(E, HEADS))
    x = torch.randn(L, N, E)
    later = x.clone()
    later[3:] += 1
    mask = masks_of("causal", keys=L)["attn_mask"]
    y, other = (attention(x, x, x, attn_mask=mask, is_causal=is_causal, need_weights=False)[0] for x in (x, later))
    assert y[:3].equal(other[:3])
    assert ((y - other)[3:].abs().amax(-1) > 1e-3).all()


def test_the_hint_stands_in_for_the_mask():
    """As in torch: with the hint alone the mask is not read, so one for the longest sequence will do."""
    attention = randomised(SPMMultiheadAttention(E, HEADS))
    x = torch.randn(L, N, E)
    mask = torch.ones(100, 100).triu(1).bool()
    y, _ = attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)

    def plain(dtype):
        return twins.plain_copy(attention, dtype)(*[x.to(dtype)] * 3, attn_mask=mask[:L, :L])[0]

    oracle.assert_agrees(y, plain)


@pytest.mark.parametrize("pattern", ALL_PATTERNS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{}, {"embed_dim": 15, "block": "rotation", "bias": False}], ids=str)
def test_inputs_that_are_the_same_tensor(pattern, dtype, options):
    attention = randomised(SPMMultiheadAttention(**{"embed_dim": E, "num_heads": HEADS, **options}, dtype=dtype))
    assert_is_torchs(attention, pattern, inputs(attention, pattern, dtype=dtype))


@pytest.mark.parametrize(
    ("pattern", "maps"), [("xxx", [3]), ("xyy", [1, 2]), ("xxy", [2, 1]), ("xyz", [1, 1, 1]), ("xyx", [1, 1, 1])]
)
def test_projections_of_one_input_are_one_call(pattern, maps, monkeypatch):
    calls = []
    mix = functional.mix

    def counted(x, parameters, schedule, block, out_features, maps, impl):
        calls.append(maps)
        return mix(x, parameters, schedule, block, out_features, maps, impl)

    monkeypatch.setattr(functional, "mix", counted)
    for attention in (SPMMultiheadAttention(E, HEADS), SPMMultiheadAttention(E, HEADS, batch_first=True)):
        calls.clear()
        tensors = inputs(attention, pattern, dtype=torch.float32)
        attention(*(tensors[letter] for letter in pattern))
        assert calls == [*maps, None], "the last one is the output's"


@pytest.mark.parametrize("need_weights", [True, False])
def test_the_papers_equations(need_weights):
    attention = randomised(SPMMultiheadAttention(E, HEADS, bias=False, dtype=torch.float64))
    x_q, x_k, x_v = (torch.randn(length, E, dtype=torch.float64, requires_grad=True) for length in (L, S, S))
    y, _ = attention(x_q, x_k, x_v, need_weights=need_weights)
    G_Y = torch.randn_like(y)
    actual = y, torch.autograd.grad(y, (x_q, x_k, x_v), G_Y)

    @torch.no_grad()
    def paper(dtype):
        twin = twins.plain_copy(attention, dtype)
        X_Q, X_K, X_V, of_y = (t.to(dtype) for t in (x_q, x_k, x_v, G_Y))
        # The paper writes X W, where a layer multiplies by its matrix from the left.
        W_Q, W_K, W_V = (W.T for W in twin.in_proj.to_dense().chunk(3))
        W_O = twin.out_proj.to_dense().T
        d_h = E // HEADS
        G_H = of_y @ W_O.T
        Y = torch.zeros_like(of_y)
        G_Q, G_K, G_V = (torch.zeros_like(x) for x in (X_Q, X_K, X_V))
        for head in (slice(i, i + d_h) for i in range(0, E, d_h)):
            Q, K, V = (X_Q @ W_Q)[:, head], (X_K @ W_K)[:, head], (X_V @ W_V)[:, head]
            A = torch.softmax(Q @ K.T / d_h**0.5, dim=-1)
            Y += A @ V @ W_O[head]
            G_A = G_H[:, head] @ V.T
            G_V[:, head] = A.T @ G_H[:, head]
            G_S = torch.zeros_like(A)
            for t in range(L):
                for i in range(S):
                    G_S[t, i] = A[t, i] * (G_A[t, i] - sum(A[t, j] * G_A[t, j] for j in range(S)))
            G_Q[:, head] = G_S @ K / d_h**0.5
            G_K[:, head] = G_S.T @ Q / d_h**0.5
        return Y, (G_Q @ W_Q.T, G_K @ W_K.T, G_V @ W_V.T)

    oracle.assert_agrees(actual, paper)


@pytest.mark.parametrize("need_weights", [True, False])
def test_gradcheck(need_weights):
    attention = randomised(SPMMultiheadAttention(4, 2, add_bias_kv=True, dtype=torch.float64))
    parameters = dict(attention.named_parameters())
    tensors = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    mask = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

    def call(q, k, v, mask, *values):
        named = dict(zip(parameters, values, strict=True))
        y, weights = functional_call(attention, named, (q, k, v, None, need_weights, mask))
        return (y, weights) if need_weights else y

    assert torch.autograd.gradcheck(call, (*tensors, mask, *parameters.values()))


@pytest.mark.parametrize("kind", ["2d", "3d", "padding"])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("is_training", [True, False])
def test_a_query_that_sees_nothing(kind, need_weights, is_training):
    """Not a number where torch has none either, else the bias of the output."""
    attention = randomised(SPMMultiheadAttention(E, 2, batch_first=True)).train(is_training)
    mask = {"2d": torch.zeros(L, L), "3d": torch.zeros(N * 2, L, L), "padding": torch.zeros(N, L)}[kind].bool()
    mask[1] = True
    masks = {"key_padding_mask" if kind == "padding" else "attn_mask": mask}
    x = torch.randn(N, L, E)
    y, weights = attention(x, x, x, **masks, need_weights=need_weights)

    def torchs(dtype, **call):
        parameters = dense_parameters(twins.plain_copy(attention, dtype))
        return functional_call(dense_twin(attention, dtype), parameters, (x.to(dtype),) * 3, {**masks, **call})

    def of_torch(dtype):
        return numbers_of(*torchs(dtype, need_weights=need_weights))

    def numbers_of(*results):
        return [result.nan_to_num(0) for result in results if result is not None]

    assert y.isnan().any() == need_weights
    assert y.isnan().equal(torchs(torch.float64, need_weights=need_weights)[0].isnan())
    oracle.assert_agrees(numbers_of(y, weights), of_torch)
    if not need_weights:
        assert_is_torchs(attention, "xxx", {"x": x, **masks}, need_weights=False)
    with torch.no_grad():  # torch's fast path
        assert not (y.isnan() & ~torchs(torch.float32)[0].isnan()).any()


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_only_in_training(need_weights):
    attention = randomised(SPMMultiheadAttention(E, HEADS, dropout=0.5, dtype=torch.float64))
    tensors = inputs(attention, "xyy")
    assert_is_torchs(attention, "xyy", tensors, need_weights=need_weights)
    assert_is_torchs(attention.eval(), "xyy", tensors, need_weights=need_weights)
    arguments = (tensors["x"], tensors["y"], tensors["y"], None, need_weights)
    assert attention(*arguments)[0].equal(attention(*arguments)[0])
    assert not attention.train()(*arguments)[0].equal(attention(*arguments)[0])


@pytest.mark.parametrize(("pattern", "kind"), [("xxx", ""), ("xxx", "causal"), ("xyy", "2d padding")])
@pytest.mark.parametrize("need_weights", [True, False])
def test_compile(pattern, kind, need_weights):
    torch._dynamo.reset()
    attention = randomised(SPMMultiheadAttention(E, HEADS, add_bias_kv=True, dtype=torch.float64))
    tensors = {**inputs(attention, pattern), **masks_of(kind, keys=L if pattern == "xxx" else S)}
    call = {"need_weights": need_weights, "is_causal": kind == "causal"}
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)

    def results_of(module, of, dtype=torch.float64):
        masks = [name for name in tensors if len(name) > 1]
        converted = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        return results(of, lambda t: module(*(t[i] for i in pattern), **{m: t[m] for m in masks}, **call), converted)

    def plain(dtype):
        twin = twins.plain_copy(attention, dtype)
        return results_of(twin, twin, dtype)

    oracle.assert_agrees(results_of(compiled, attention), plain)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}, {"kdim": 20}], ids=str)
@pytest.mark.parametrize("kind", ["", "2d padding", "3d padding float"])
def test_autocast(need_weights, options, kind):
    attention = randomised(SPMMultiheadAttention(E, HEADS, **options))
    tensors = inputs(attention, "xyz", dtype=torch.float32)
    arguments = (*tensors.values(),)
    masks = masks_of(kind, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = attention(*arguments, **masks, need_weights=need_weights)
    assert y.dtype == torch.bfloat16

    def plain(dtype):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            twin = twins.plain_copy(attention, torch.promote_types(dtype, torch.float32))
            converted = [t.to(twin.out_proj.d_in.dtype) for t in arguments]
            return twin(*converted, **masks, need_weights=need_weights)[0]

    oracle.assert_agrees(y, plain, rough=torch.bfloat16, margin=4)
    y.sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in attention.parameters())


@pytest.mark.parametrize("need_weights", [True, False])
def test_half_precision_parameters(need_weights):
    attention = randomised(SPMMultiheadAttention(E, HEADS, add_bias_kv=True, dtype=torch.bfloat16))
    x, masks = torch.randn(L, N, E).bfloat16(), masks_of("2d padding", keys=L)
    y, _ = attention(x, x, x, **masks, need_weights=need_weights)
    assert y.dtype == torch.bfloat16

    def plain(dtype):
        return twins.plain_copy(attention, dtype)(*[x.to(dtype)] * 3, **masks, need_weights=need_weights)[0]

    oracle.assert_agrees(y, plain, rough=torch.bfloat16, margin=4)


@pytest.mark.parametrize("need_weights", [True, False])
def test_unusual_layouts(need_weights):
    attention = randomised(SPMMultiheadAttention(E, HEADS, dtype=torch.float64))
    x = torch.randn(E, N, L, dtype=torch.float64).permute(2, 1, 0)
    mask = torch.randn(L, L, dtype=torch.float64).T

    def plain(dtype):
        x_here, mask_here = (t.contiguous().to(dtype) for t in (x, mask))
        return twins.plain_copy(attention, dtype)(*[x_here] * 3, attn_mask=mask_here)[0]

    oracle.assert_agrees(attention(x, x, x, attn_mask=mask, need_weights=need_weights)[0], plain)
    assert attention(*[x[:, :0]] * 3, need_weights=need_weights)[0].shape == (L, 0, E)
    assert attention(*[x[:0]] * 3, need_weights=need_weights)[0].shape == (0, N, E)


@pytest.mark.parametrize("options", [{}, {"kdim": 20, "add_bias_kv": True}], ids=str)
def test_copies_and_checkpoints(options):
    attention = randomised(SPMMultiheadAttention(E, HEADS, **options))
    other = randomised(SPMMultiheadAttention(E, HEADS, **options))
    arguments = tuple(inputs(attention, "xyz", dtype=torch.float32).values())
    other.load_state_dict(attention.state_dict())
    for same in (other, copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        assert same(*arguments)[0].equal(attention(*arguments)[0])
        assert not {p.data_ptr() for p in same.parameters()} & {p.data_ptr() for p in attention.parameters()}
    another = SPMMultiheadAttention(E, HEADS, **options, schedule="brick", stages=4)
    with pytest.raises(RuntimeError, match="out_proj: the checkpoint is of another layer: schedule is"):
        another.load_state_dict(attention.state_dict())


@pytest.mark.parametrize("options", [{}, {"vdim": 20, "add_bias_kv": True}], ids=str)
def test_reset_parameters(options):
    with torch.device("meta"):
        attention = SPMMultiheadAttention(E, HEADS, **options)
    attention = attention.to_empty(device="cpu")
    for parameter in attention.parameters():
        parameter.data.fill_(torch.nan)
    torch.manual_seed(0)
    attention.reset_parameters()
    torch.manual_seed(0)
    fresh = SPMMultiheadAttention(E, HEADS, **options)
    for (name, a), (_, b) in zip(attention.named_parameters(), fresh.named_parameters(), strict=True):
        assert a.equal(b), name


def test_one_line_change():
    """The arguments of torch.nn.MultiheadAttention, by position."""
    for kind in (nn.MultiheadAttention, SPMMultiheadAttention):
        attention = kind(E, HEADS, 0.1, False, True, True, 9, 7, True, "cpu", torch.float64)
        q, k, v = (torch.randn(N, length, size).double() for length, size in ((L, E), (S, 9), (S, 7)))
        y, weights = attention(q, k, v, torch.zeros(N, S).bool(), True, torch.zeros(L, S).bool(), False, True)
        assert (y.shape, weights.shape) == ((N, L, E), (N, HEADS, L, S + 2))
    with pytest.raises(TypeError):
        SPMMultiheadAttention(E, HEADS, 0.1, False, True, True, 9, 7, True, "cpu", torch.float64, "rotation")
    assert "embed_dim=12, num_heads=3, batch_first=False" in repr(SPMMultiheadAttention(E, HEADS))
