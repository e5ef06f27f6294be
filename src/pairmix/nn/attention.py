"""Attention, and the encoder layer around it, with SPM operators for all their linear maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pairmix import functional
from pairmix.nn.feed_forward import feed_forward
from pairmix.nn.linear import SPMLinear, SPMOptions

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


class SPMMultiheadAttention(nn.Module):
    """Multi-head attention with SPM projections, in place of `torch.nn.MultiheadAttention`.

        Q = SPM_Q(query)        K = SPM_K(key)        V = SPM_V(value)
        Y = SPM_O(softmax(Q K^T / sqrt(d_h) + mask) V)

    with a softmax for each head, which is `d_h` wide. Projections that read the same tensor are computed in one call:
    all three in self-attention, those of keys and values if `key is value`, those of queries and keys if
    `query is key`.

    Args:
        embed_dim: size of the queries and of the output; divided among the heads.
        num_heads: the number of heads.
        dropout: the probability with which a weight of the attention is dropped in training.
        bias: whether the projections add learned biases, which start at zero.
        add_bias_kv: whether a learned key and value stand at the end of every sequence.
        add_zero_attn: whether a key and a value of zeros stand at the end of every sequence.
        kdim: size of the keys; None for `embed_dim`.
        vdim: size of the values; None for `embed_dim`.
        batch_first: whether batched inputs are `(N, L, E)` instead of `(L, N, E)`.
        device: where the parameters live.
        dtype: their dtype.
        gain: what the output starts multiplied by: that of `out_proj`.
        **options: `block`, `stages`, `schedule`, `residual`, `init`, `rank` and `impl` of every projection, as in
            `SPMLinear`. A `Schedule` must have the width of each of them.

    Shape:
        - query: `(L, embed_dim)`, `(L, N, embed_dim)` or, with `batch_first`, `(N, L, embed_dim)`
        - key, value: likewise with the length S, and `kdim`, `vdim`
        - key_padding_mask: `(S)` or `(N, S)`; attn_mask: `(L, S)` or `(N * num_heads, L, S)`. True hides a key, a
          float is added to its score.
        - output: as query, and the weights: None without `need_weights`, else `(N, L, S)`, or `(N, num_heads, L, S)`
          with `average_attn_weights=False`; without N for an unbatched query. S counts the added keys too.

    Attributes:
        in_proj: the operators of Q, K and V, an `SPMLinear` of three maps; None if `kdim` or `vdim` differs.
        q_proj: instead of `in_proj` the operator of Q, if `kdim` or `vdim` differs.
        k_proj: likewise that of K.
        v_proj: likewise that of V.
        out_proj: the operator of the output.
        bias_k: the learned key `[1, 1, embed_dim]`, or None without `add_bias_kv`.
        bias_v: the learned value `[1, 1, embed_dim]`, or None without `add_bias_kv`.

    Examples:
        >>> attention = SPMMultiheadAttention(512, 8, batch_first=True)
        >>> x = torch.randn(2, 10, 512)
        >>> y, weights = attention(x, x, x)
        >>> y.shape, weights.shape
        (torch.Size([2, 10, 512]), torch.Size([2, 10, 10]))
    """

    in_proj: SPMLinear | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        gain: float = 1.0,
        **options: Unpack[SPMOptions],
    ) -> None:
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads, both at least 1, "
                f"got embed_dim={embed_dim} and num_heads={num_heads}"
            )
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be in 0..1, got {dropout}")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.dropout = dropout
        self.add_zero_attn = add_zero_attn
        self.batch_first = batch_first

        def projection(in_features: int, maps: int | None = None, gain: float = 1.0) -> SPMLinear:
            return SPMLinear(in_features, embed_dim, bias, device, dtype, maps=maps, gain=gain, **options)

        if self.kdim == self.vdim == embed_dim:
            self.in_proj = projection(embed_dim, maps=3)
        else:
            self.in_proj = None
            self.q_proj = projection(embed_dim)
            self.k_proj = projection(self.kdim)
            self.v_proj = projection(self.vdim)
        self.out_proj = projection(embed_dim, gain=gain)
        for name in ("bias_k", "bias_v"):
            parameter = nn.Parameter(torch.empty(1, 1, embed_dim, device=device, dtype=dtype)) if add_bias_kv else None
            self.register_parameter(name, parameter)
        self._reset_learned_key()

    def reset_parameters(self) -> None:
        """Fill the parameters anew, the projections as `init` says."""
        for projection in self.children():
            if isinstance(projection, SPMLinear):
                projection.reset_parameters()
        self._reset_learned_key()

    def _reset_learned_key(self) -> None:
        for parameter in (self.bias_k, self.bias_v):
            if parameter is not None:
                nn.init.xavier_normal_(parameter)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        self._check_inputs(query, key, value)
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal=True is a hint about attn_mask, and needs that mask, got attn_mask=None")
        is_batched = query.dim() == 3
        q, k, v = (self._split_heads(x) for x in self._project(query, key, value))
        # As in torch, the hint stands in for the mask only where nothing else is masked and the weights are not needed.
        is_causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if is_causal else self._merged_mask(q, k, is_batched, key_padding_mask, attn_mask)
        k, v = self._with_extra(k, self.bias_k), self._with_extra(v, self.bias_v)
        heads, weights = self._attend(q, k, v, mask, need_weights, is_causal)
        output = self.out_proj(self._join_heads(heads, is_batched))
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if is_batched else weights.squeeze(0)
        return output, weights

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        for name, x, size in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if x.is_nested:
                raise ValueError(f"{name} is a nested tensor; pad it, and hide the padding with key_padding_mask")
            if x.dim() not in (2, 3) or x.size(-1) != size:
                leading = "(batch, length" if self.batch_first else "(length, batch"
                raise ValueError(
                    f"{name} must have the shape {leading}, {size}), or (length, {size}) unbatched, "
                    f"got {tuple(x.shape)}"
                )
        batch = 0 if self.batch_first else 1
        if (
            query.dim() != key.dim()
            or key.shape[:-1] != value.shape[:-1]
            or (query.dim() == 3 and query.size(batch) != key.size(batch))
        ):
            raise ValueError(
                "query, key and value must be of one batch, and key and value of one length, "
                f"got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            )

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Q, K and V. Those of the same input are one call."""
        if self.in_proj is None:
            return self.q_proj(query), self.k_proj(key), self.v_proj(value)
        if query is key and key is value:
            qkv: Tensor = self.in_proj(query)
            return qkv.chunk(3, -1)
        if key is value:
            return _some_maps(self.in_proj, query, 0, 1) + _some_maps(self.in_proj, key, 1, 3)
        if query is key:
            return _some_maps(self.in_proj, query, 0, 2) + _some_maps(self.in_proj, value, 2, 3)
        return sum((_some_maps(self.in_proj, x, i, i + 1) for i, x in enumerate((query, key, value))), ())

    def _split_heads(self, x: Tensor) -> Tensor:
        """`[N, heads, length, head_dim]` of a projection in the caller's layout."""
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        if x.dim() == 3:
            x = x.unsqueeze(0)
        elif not self.batch_first:
            x = x.transpose(0, 1)
        return x.transpose(1, 2)

    def _join_heads(self, heads: Tensor, is_batched: bool) -> Tensor:
        """The inverse of `_split_heads`."""
        x = heads.transpose(1, 2)
        if not is_batched:
            x = x.squeeze(0)
        elif not self.batch_first:
            x = x.transpose(0, 1)
        return x.flatten(-2)

    def _merged_mask(
        self, q: Tensor, k: Tensor, is_batched: bool, key_padding_mask: Tensor | None, attn_mask: Tensor | None
    ) -> Tensor | None:
        """What both masks add to the scores, of a shape that spreads to `[N, heads, L, S]`; None for nothing."""
        (batch, heads, length, _), sources = q.shape, k.shape[2]
        merged = None
        if attn_mask is not None:
            shared, of_heads = (length, sources), (batch * heads, length, sources)
            _check_mask("attn_mask", attn_mask, shared, of_heads)
            merged = _additive(attn_mask, q.dtype)
            merged = merged if merged.dim() == 2 else merged.unflatten(0, (batch, heads))
        if key_padding_mask is not None:
            _check_mask("key_padding_mask", key_padding_mask, (batch, sources) if is_batched else (sources,))
            padding = _additive(key_padding_mask, q.dtype).view(batch, 1, 1, sources)
            merged = padding if merged is None else merged + padding
        added_keys = (self.bias_k is not None) + self.add_zero_attn
        return F.pad(merged, (0, added_keys)) if merged is not None and added_keys else merged

    def _with_extra(self, heads: Tensor, learned: Tensor | None) -> Tensor:
        """Keys or values `[N, heads, S, head_dim]`, then the learned one and the zeros, as the options say."""
        batch = heads.shape[0]
        parts = [heads]
        if learned is not None:
            parts.append(learned.view(1, self.num_heads, 1, self.head_dim).expand(batch, -1, -1, -1))
        if self.add_zero_attn:
            parts.append(heads.new_zeros(batch, self.num_heads, 1, self.head_dim))
        return torch.cat(parts, 2) if len(parts) > 1 else heads

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool, is_causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        if not need_weights:
            dropout = self.dropout if self.training else 0.0
            return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal), None
        scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
        if mask is not None:
            scores = scores + mask
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        return weights @ v, weights

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}"


class SPMTransformerEncoderLayer(nn.Module):
    """Self-attention and a feed-forward network of SPM operators, for `torch.nn.TransformerEncoder`.

        h = norm_1(x + attention(x))
        y = norm_2(h + SPM_2(activation(SPM_1(h))))

    or, with `norm_first`, with each norm before its attention or network. As in
    `torch.nn.TransformerEncoderLayer`, but without its fast path: an encoder of these layers should be made with
    `enable_nested_tensor=False`, else torch warns that it will not use nested tensors.

    Args:
        d_model: size of the input and of the output.
        nhead: the number of heads of the attention.
        dim_feedforward: size between the two operators of the feed-forward network.
        dropout: the probability of dropout after every part, and of the weights of the attention.
        activation: `"relu"`, `"gelu"` or a function of one tensor.
        layer_norm_eps: the eps of both norms.
        batch_first: whether batched inputs are `(N, L, d_model)` instead of `(L, N, d_model)`.
        norm_first: whether the norms come first.
        bias: whether operators and norms add learned biases.
        device: where the parameters live.
        dtype: their dtype.
        gain: what the outputs of attention and network start multiplied by, before they are added to what they read.
        **options: `block`, `stages`, `schedule`, `residual`, `init`, `rank` and `impl`, as in `SPMLinear`. A
            `Schedule` must have the width of each of them: the feed-forward network is `max(d_model, dim_feedforward)`
            wide.

    Shape:
        - src: `(L, d_model)`, `(L, N, d_model)` or, with `batch_first`, `(N, L, d_model)`
        - src_mask, src_key_padding_mask: as attn_mask and key_padding_mask of `SPMMultiheadAttention`
        - output: as src

    Examples:
        >>> layer = SPMTransformerEncoderLayer(64, 4, 256, batch_first=True)
        >>> encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        >>> encoder(torch.randn(8, 10, 64)).shape
        torch.Size([8, 10, 64])
    """

    # Not a subclass of torch's layer: TransformerEncoder would take it for one with dense weights, and read them.

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        gain: float = 0.5,
        **options: Unpack[SPMOptions],
    ) -> None:
        super().__init__()
        common: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.self_attn = SPMMultiheadAttention(
            d_model, nhead, dropout, batch_first=batch_first, gain=gain, **common, **options
        )
        self.linear1 = SPMLinear(d_model, dim_feedforward, **common, **options)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = SPMLinear(dim_feedforward, d_model, gain=gain, **common, **options)
        self.norm_first = norm_first
        self.norm1 = nn.LayerNorm(d_model, eps=layer_norm_eps, **common)
        self.norm2 = nn.LayerNorm(d_model, eps=layer_norm_eps, **common)
        self.dropout1 = nn.Dropout(dropout)
        self.dropout2 = nn.Dropout(dropout)
        self.activation = _activation(activation)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        masks = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask, "is_causal": is_causal}
        x = src
        if self.norm_first:
            x = x + self._attention(self.norm1(x), **masks)
            x = x + self._feed_forward(self.norm2(x))
        else:
            x = self.norm1(x + self._attention(x, **masks))
            x = self.norm2(x + self._feed_forward(x))
        return x

    def _attention(self, x: Tensor, **masks: Any) -> Tensor:
        y: Tensor = self.dropout1(self.self_attn(x, x, x, need_weights=False, **masks)[0])
        return y

    def _feed_forward(self, x: Tensor) -> Tensor:
        named = next((name for name, one in _ACTIVATIONS.items() if one is self.activation), None)
        if named is not None:
            y: Tensor = feed_forward(x, self.linear1, self.linear2, named, self.dropout)
        else:
            y = self.linear2(self.dropout(self.activation(self.linear1(x))))
        return cast(Tensor, self.dropout2(y))


def _some_maps(layer: SPMLinear, x: Tensor, first: int, end: int) -> tuple[Tensor, ...]:
    """The outputs of some of the layer's maps, in one call."""
    some = layer._tensors().of_maps(first, end)
    y = functional.mix(x, some, layer.schedule, layer.block, layer.out_features, end - first, layer.impl)
    return y.chunk(end - first, -1)


def _check_mask(name: str, mask: Tensor, *shapes: tuple[int, ...]) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name} must be bool (True hides) or float (added to the scores), got {mask.dtype}")
    if all(mask.shape != shape for shape in shapes):
        raise ValueError(f"{name} must have the shape {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}")


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What the mask adds to the scores: minus infinity where a boolean one hides."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)
    return mask.to(dtype)


def _activation(activation: str | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    if not isinstance(activation, str):
        return activation
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation must be one of {list(_ACTIVATIONS)} or a function, got {activation!r}")
    return _ACTIVATIONS[activation]
