"""Every result is compared with torch's own encoder, in float64, whose weights are the operators' dense matrices."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import oracle
import twins
from pairmix import Schedule
from pairmix.nn.attention import SPMTransformerEncoderLayer
from plain_attention import HEADS, E, L, N, assert_is_torchs, dense_parameters, masks_of, randomised


def encoder_of(layer, num_layers=2):
    return randomised(nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_first": True},
        {"norm_first": True, "activation": "gelu"},
        {"bias": False, "activation": torch.tanh},
        {"dim_feedforward": 7, "block": "rotation"},
        {"dropout": 0.3},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("is_training", [True, False])
def test_is_torchs(options, is_training):
    options = {"dim_feedforward": 30, "dropout": 0.0, "dtype": torch.float64, **options}
    encoder = encoder_of(SPMTransformerEncoderLayer(E, HEADS, **options)).train(is_training)
    x = torch.randn(L, N, E, dtype=torch.float64)
    x = x.transpose(0, 1).contiguous() if options.get("batch_first") else x
    causal, padding = masks_of("causal padding", keys=L).values()
    for masks in ({}, {"src_key_padding_mask": padding}, {"mask": causal}):
        assert_is_torchs(encoder, "x", {"x": x, **masks})
    assert_is_torchs(encoder, "x", {"x": x, "src_key_padding_mask": padding, "mask": causal}, is_causal=True)


def test_unbatched():
    encoder = encoder_of(SPMTransformerEncoderLayer(E, HEADS, 30, 0.0, dtype=torch.float64))
    assert_is_torchs(encoder, "x", {"x": torch.randn(L, E, dtype=torch.float64)})


def test_inference_is_that_of_torchs_fast_path():
    encoder = encoder_of(SPMTransformerEncoderLayer(E, 2, 30, batch_first=True, dtype=torch.float64)).eval()
    x, padding = torch.randn(N, L, E).double(), masks_of("padding", keys=L)["key_padding_mask"]

    def torchs(dtype):
        twin = nn.TransformerEncoderLayer(E, 2, 30, batch_first=True, dtype=dtype)
        twin = nn.TransformerEncoder(twin, 2, enable_nested_tensor=False).eval()
        twin.load_state_dict(dense_parameters(twins.plain_copy(encoder, dtype)))
        return twin(x.to(dtype), src_key_padding_mask=padding)

    with torch.inference_mode():
        oracle.assert_agrees(encoder(x, src_key_padding_mask=padding), torchs)


def test_nested_tensors_are_not_used():
    layer = SPMTransformerEncoderLayer(E, 2, 30, batch_first=True)
    with pytest.warns(UserWarning, match="encoder_layer was not TransformerEncoderLayer"):
        encoder = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(N, L, E), masks_of("padding", keys=L)["key_padding_mask"]
    with torch.inference_mode():
        assert encoder(x, src_key_padding_mask=padding).isfinite().all()


def test_compile():
    torch._dynamo.reset()
    layer = randomised(SPMTransformerEncoderLayer(E, HEADS, 30, 0.0))
    x = torch.randn(L, N, E)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    oracle.assert_agrees(compiled(x), lambda dtype: twins.plain_copy(layer, dtype)(x.to(dtype)))


def test_checkpoint():
    encoder, other = (encoder_of(SPMTransformerEncoderLayer(E, HEADS, 30)).eval() for _ in range(2))
    other.load_state_dict(encoder.state_dict())
    x = torch.randn(L, N, E)
    assert other(x).equal(encoder(x))


def test_arguments():
    for kind in (nn.TransformerEncoderLayer, SPMTransformerEncoderLayer):
        layer = kind(E, HEADS, 30, 0.2, F.gelu, 1e-3, True, True, False, "cpu", torch.float64)
        assert layer(torch.randn(N, L, E).double()).shape == (N, L, E)
        assert (layer.norm1.eps, layer.norm2.eps, layer.norm1.bias) == (1e-3, 1e-3, None)
        assert [layer.self_attn.dropout, *(d.p for d in (layer.dropout, layer.dropout1, layer.dropout2))] == [0.2] * 4
    with pytest.raises(ValueError, match=r"activation must be one of \['relu', 'gelu'\] .* got 'swish'"):
        SPMTransformerEncoderLayer(E, HEADS, activation="swish")
    with pytest.raises(ValueError, match=r"the layer has the width 30, its schedule has 12"):
        SPMTransformerEncoderLayer(E, HEADS, 30, schedule=Schedule.butterfly(E))
