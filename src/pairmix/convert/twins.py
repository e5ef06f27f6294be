"""Dense modules and their SPM twins: how one is made from the other, and which matrix belongs to which layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pairmix.dense import is_conv1d, matrix_of
from pairmix.nn import (
    SPMGRU,
    SPMLSTM,
    SPMRNN,
    SPMLinear,
    SPMMultiheadAttention,
    SPMTransformerEncoderLayer,
)

HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook",
)  # fmt: skip
"""Where a module has its hooks."""


class Map(NamedTuple):
    """A linear map of a module in both forms.

    Attributes:
        layer: that of the SPM module.
        matrix: that of the dense module, `[out_features, in_features]`; a view, so that it can be written to.
        biases: those of the dense module, whose sum is the layer's.
    """

    layer: SPMLinear
    matrix: Tensor
    biases: Sequence[Tensor]


@dataclass(frozen=True)
class Twin:
    """A kind of dense module that has an SPM twin.

    Attributes:
        dense: its class; subclasses that compute something of their own do not count.
        spm: that of its twin.
        to_spm: makes a twin of the same sizes: `to_spm(module, **options)`, with options of `SPMLinear`.
        to_dense: the way back.
        maps: `maps(dense, spm)`, all their linear maps.
        others: `others(dense, spm)`, pairs of parameters that both have alike.
        why_not: why a dense module has no twin; None if it has one.
        why_not_back: why an SPM module has no dense twin; None if it has one.
    """

    dense: type[nn.Module]
    spm: type[nn.Module]
    to_spm: Callable[..., nn.Module]
    to_dense: Callable[[Any], nn.Module]
    maps: Callable[[Any, Any], Iterator[Map]]
    others: Callable[[Any, Any], Iterator[tuple[Tensor, Tensor]]] = lambda dense, spm: iter(())
    why_not: Callable[[Any], str | None] = lambda dense: None
    why_not_back: Callable[[Any], str | None] = lambda spm: None


def of_dense(module: nn.Module) -> Twin | None:
    """The kind of a dense module, if it is one that has a twin."""
    if is_conv1d(module):
        return LINEAR
    return next((twin for twin in TWINS if isinstance(module, twin.dense)), None)


def of_spm(module: nn.Module) -> Twin | None:
    """The kind of an SPM module."""
    return next((twin for twin in TWINS if isinstance(module, twin.spm)), None)


@torch.no_grad()
def copy_others_(source: Twin, dense: nn.Module, spm: nn.Module, *, to_dense: bool) -> None:
    """Copy what both have alike from one to the other."""
    for of_dense, of_spm in source.others(dense, spm):
        (of_dense if to_dense else of_spm).copy_(of_spm if to_dense else of_dense)


def _like(tensor: Tensor) -> dict[str, Any]:
    return {"device": tensor.device, "dtype": tensor.dtype}


def _biases(*biases: Tensor | None) -> list[Tensor]:
    return [bias for bias in biases if bias is not None]


def _linear_to_spm(module: nn.Module, **options: Any) -> SPMLinear:
    matrix = matrix_of(module)
    out_features, in_features = matrix.shape
    bias = module.bias is not None
    layer = SPMLinear(in_features, out_features // (options.get("maps") or 1), bias, **{**_like(matrix), **options})
    if is_conv1d(module):
        layer._conv1d = type(module)  # type: ignore[assignment]  # for the way back: transformers is not imported here
    return layer


def _spm_to_linear(layer: SPMLinear) -> nn.Module:
    out_features, like = (layer.maps or 1) * layer.out_features, _like(layer.d_in)
    conv1d: Any = getattr(layer, "_conv1d", None)
    if conv1d is not None and layer.bias is not None:
        module: nn.Module = conv1d(out_features, layer.in_features).to(**like)
        return module
    return nn.Linear(layer.in_features, out_features, layer.bias is not None, **like)


def _linear_maps(dense: nn.Module, spm: SPMLinear) -> Iterator[Map]:
    yield Map(spm, matrix_of(dense), _biases(dense.bias))  # type: ignore[arg-type]


_RECURRENT = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")


def _recurrent_to_spm(module: nn.RNNBase, **options: Any) -> nn.Module:
    sizes = {name: getattr(module, name) for name in _RECURRENT}
    if isinstance(module, nn.RNN):
        options["nonlinearity"] = module.nonlinearity
    if isinstance(module, nn.GRU):
        options["reset_after"] = True  # torch's equations
    twin = {nn.RNN: SPMRNN, nn.GRU: SPMGRU, nn.LSTM: SPMLSTM}
    make = next(twin[kind] for kind in twin if isinstance(module, kind))
    made: nn.Module = make(**sizes, **{**_like(module.weight_ih_l0), **options})  # type: ignore[arg-type]
    return made


def _spm_to_recurrent(module: Any) -> nn.Module:
    sizes = {name: getattr(module, name) for name in _RECURRENT}
    like = _like(module.ih_l0.d_in)
    if isinstance(module, SPMRNN):
        return nn.RNN(**sizes, nonlinearity=module.nonlinearity, **like)
    return (nn.GRU if isinstance(module, SPMGRU) else nn.LSTM)(**sizes, **like)


def _recurrent_maps(dense: nn.RNNBase, spm: Any) -> Iterator[Map]:
    for layer in range(dense.num_layers):
        for suffix in (f"_l{layer}", f"_l{layer}_reverse")[: 2 if dense.bidirectional else 1]:
            ih, hh = getattr(spm, f"ih{suffix}"), getattr(spm, f"hh{suffix}")
            biases = [getattr(dense, f"bias_{name}{suffix}") for name in ("ih", "hh")] if dense.bias else []
            of_state = biases[1:] if hh.bias is not None else []
            yield Map(ih, getattr(dense, f"weight_ih{suffix}"), biases[:1] if of_state else biases)
            yield Map(hh, getattr(dense, f"weight_hh{suffix}"), of_state)


def _why_no_recurrent_twin(module: nn.RNNBase) -> str | None:
    if module.proj_size:
        return f"its state is projected (proj_size={module.proj_size})"
    return None


def _why_no_recurrent_back(module: Any) -> str | None:
    if isinstance(module, SPMGRU) and not module.reset_after:
        return "nn.GRU has other equations: it resets after the map of the state"
    if isinstance(module, SPMRNN) and module.nonlinearity == "linear":
        return "nn.RNN has no linear cell"
    return None


_ATTENTION = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim", "batch_first")


def _attention_to_spm(module: nn.MultiheadAttention, **options: Any) -> SPMMultiheadAttention:
    sizes = {name: getattr(module, name) for name in _ATTENTION}
    learned: dict[str, Any] = {"bias": module.in_proj_bias is not None, "add_bias_kv": module.bias_k is not None}
    return SPMMultiheadAttention(**sizes, **learned, **{**_like(module.out_proj.weight), **options})


def _spm_to_attention(module: SPMMultiheadAttention) -> nn.MultiheadAttention:
    sizes = {name: getattr(module, name) for name in _ATTENTION}
    learned = {"bias": module.out_proj.bias is not None, "add_bias_kv": module.bias_k is not None}
    return nn.MultiheadAttention(**sizes, **learned, **_like(module.out_proj.d_in))


def _attention_maps(dense: nn.MultiheadAttention, spm: SPMMultiheadAttention) -> Iterator[Map]:
    if spm.in_proj is not None:
        yield Map(spm.in_proj, dense.in_proj_weight, _biases(dense.in_proj_bias))
    else:
        biases = [[]] * 3 if dense.in_proj_bias is None else [[part] for part in dense.in_proj_bias.chunk(3)]
        for name, of_map in zip("qkv", biases, strict=True):
            yield Map(getattr(spm, f"{name}_proj"), getattr(dense, f"{name}_proj_weight"), of_map)
    yield Map(spm.out_proj, dense.out_proj.weight, _biases(dense.out_proj.bias))


def _attention_others(dense: nn.MultiheadAttention, spm: SPMMultiheadAttention) -> Iterator[tuple[Tensor, Tensor]]:
    if dense.bias_k is not None and spm.bias_k is not None:
        yield dense.bias_k, spm.bias_k
    if dense.bias_v is not None and spm.bias_v is not None:
        yield dense.bias_v, spm.bias_v


def _encoder_sizes(layer: Any, attention: Any) -> dict[str, Any]:
    """What both kinds of encoder layer have alike."""
    return {
        "d_model": attention.embed_dim,
        "nhead": attention.num_heads,
        "dim_feedforward": layer.linear1.out_features,
        "dropout": layer.dropout.p,
        "activation": layer.activation,
        "layer_norm_eps": layer.norm1.eps,
        "batch_first": attention.batch_first,
        "norm_first": layer.norm_first,
        "bias": layer.linear1.bias is not None,
    }


def _encoder_to_spm(layer: nn.TransformerEncoderLayer, **options: Any) -> SPMTransformerEncoderLayer:
    options = {**_like(layer.linear1.weight), "gain": 1.0, **options}
    return SPMTransformerEncoderLayer(**_encoder_sizes(layer, layer.self_attn), **options)


def _spm_to_encoder(layer: SPMTransformerEncoderLayer) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(**_encoder_sizes(layer, layer.self_attn), **_like(layer.linear1.d_in))


def _encoder_maps(dense: nn.TransformerEncoderLayer, spm: SPMTransformerEncoderLayer) -> Iterator[Map]:
    yield from _attention_maps(dense.self_attn, spm.self_attn)
    yield from _linear_maps(dense.linear1, spm.linear1)
    yield from _linear_maps(dense.linear2, spm.linear2)


def _encoder_others(
    dense: nn.TransformerEncoderLayer, spm: SPMTransformerEncoderLayer
) -> Iterator[tuple[Tensor, Tensor]]:
    for name in ("norm1", "norm2"):
        yield from zip(getattr(dense, name).parameters(), getattr(spm, name).parameters(), strict=True)


TWINS = (
    Twin(
        nn.TransformerEncoderLayer, SPMTransformerEncoderLayer, _encoder_to_spm, _spm_to_encoder, _encoder_maps,
        _encoder_others,
    ),
    Twin(
        nn.MultiheadAttention, SPMMultiheadAttention, _attention_to_spm, _spm_to_attention, _attention_maps,
        _attention_others,
    ),
    *(
        Twin(
            dense, spm, _recurrent_to_spm, _spm_to_recurrent, _recurrent_maps,
            why_not=_why_no_recurrent_twin, why_not_back=_why_no_recurrent_back,
        )
        for dense, spm in ((nn.RNN, SPMRNN), (nn.GRU, SPMGRU), (nn.LSTM, SPMLSTM))
    ),
    Twin(nn.Linear, SPMLinear, _linear_to_spm, _spm_to_linear, _linear_maps),
)  # fmt: skip
LINEAR = TWINS[-1]
