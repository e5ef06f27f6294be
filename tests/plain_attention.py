"""torch's own attention with the operators' dense matrices as its weights, and how to compare with it."""

from functools import partial

import torch
from torch import nn
from torch.func import functional_call

import oracle
import twins
from pairmix import SPMLinear
from pairmix.nn.attention import SPMMultiheadAttention

randomised = partial(twins.randomised, std=0.8)
E, HEADS, L, S, N = 12, 3, 5, 7, 2
ALL_PATTERNS = ["xxx", "xyy", "xxy", "xyz", "xyx"]


def dense_parameters(module, prefix=""):
    """What the parameters of torch's own module of this kind must be, by name; differentiable."""
    if isinstance(module, SPMLinear):
        return {f"{prefix}weight": module.to_dense(), f"{prefix}bias": module.bias}
    named = {prefix + name: parameter for name, parameter in module.named_parameters(recurse=False)}
    for name, child in module.named_children():
        named |= dense_parameters(child, f"{prefix}{name}.")
    if isinstance(module, SPMMultiheadAttention):
        biases = [named.pop(f"{prefix}{name}_proj.bias", None) for name in ("in", "q", "k", "v")]
        if module.out_proj.bias is not None:
            named[f"{prefix}in_proj_bias"] = torch.cat([bias.flatten() for bias in biases if bias is not None])
        for name in ("in", "q", "k", "v"):
            if f"{prefix}{name}_proj.weight" in named:
                named[f"{prefix}{name}_proj_weight"] = named.pop(f"{prefix}{name}_proj.weight")
    return {name: parameter for name, parameter in named.items() if parameter is not None}


def dense_twin(module, dtype):
    """torch's own module of this kind. Its parameters are given in the call."""
    options = {"dtype": dtype, "batch_first": False}
    if isinstance(module, nn.TransformerEncoder):
        layer = module.layers[0]
        options |= {"batch_first": layer.self_attn.batch_first, "bias": layer.linear1.bias is not None}
        options |= {"norm_first": layer.norm_first, "activation": layer.activation, "dropout": layer.dropout.p}
        twin = nn.TransformerEncoderLayer(E, HEADS, layer.linear1.out_features, **options)
        twin = nn.TransformerEncoder(twin, module.num_layers, enable_nested_tensor=False)
    else:
        options |= {"batch_first": module.batch_first, "bias": module.out_proj.bias is not None}
        options |= {"kdim": module.kdim, "vdim": module.vdim, "dropout": module.dropout}
        options |= {"add_bias_kv": module.bias_k is not None, "add_zero_attn": module.add_zero_attn}
        twin = nn.MultiheadAttention(module.embed_dim, module.num_heads, **options)
    return twin.train(module.training)


def results(module, call, tensors, loss_seed=1):
    """The outputs by number, and the gradients of all of these tensors and of the module's parameters by name."""
    tensors = {name: t.detach().clone().requires_grad_(t.is_floating_point()) for name, t in tensors.items()}
    torch.manual_seed(0)  # for dropout
    outputs = call(tensors)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else [o for o in outputs if o is not None]
    generator = torch.Generator().manual_seed(loss_seed)
    loss = sum((o * torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype)).sum() for o in outputs)
    wanted = {n: t for n, t in {**tensors, **dict(module.named_parameters())}.items() if t.requires_grad}
    gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True, materialize_grads=True)
    named = {**dict(enumerate(outputs)), **dict(zip(wanted, gradients, strict=True))}
    if "k_proj.bias" in named:
        # It adds the same to all weights of a query, which changes nothing: its gradient is made of rounding alone, and
        # is compared as in in_proj, by the size of its neighbours.
        named["in_proj.bias"] = torch.cat([named.pop(f"{name}_proj.bias") for name in "qkv"])
    return named


def assert_is_torchs(module, pattern, tensors, **call):
    """Outputs and all gradients are those of torch, if it is given the dense matrices.

    `pattern` names the tensors that are the inputs, one letter each; the other tensors are masks.
    """
    masks = {name for name in tensors if len(name) > 1}
    actual = results(module, lambda t: module(*(t[i] for i in pattern), **{m: t[m] for m in masks}, **call), tensors)

    assert len(actual) > len(list(module.parameters()))

    def torchs(dtype):
        reference, twin = twins.plain_copy(module, dtype), dense_twin(module, dtype)
        assert set(dense_parameters(reference)) == {name for name, _ in twin.named_parameters()}

        def call_twin(t):
            arguments = tuple(t[i] for i in pattern), {**{m: t[m] for m in masks}, **call}
            return functional_call(twin, dense_parameters(reference), *arguments)

        converted = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        return results(reference, call_twin, converted)

    oracle.assert_agrees(actual, torchs)


def inputs(attention, pattern, batched=True, dtype=torch.float64):
    """Random tensors for the letters of the pattern, which are the query, the key and the value."""
    tensors = {}
    keys = L if "x" in pattern[1:] else S
    sizes = (L, attention.embed_dim), (keys, attention.kdim), (keys, attention.vdim)
    for letter, (length, size) in zip(pattern, sizes, strict=True):
        leading = (length,) if not batched else (N, length) if attention.batch_first else (length, N)
        tensors[letter] = torch.randn(*leading, size, dtype=dtype)
    return tensors


def masks_of(kind, batched=True, keys=S, dtype=torch.float64):
    """Masks by name; every query sees at least one key."""
    batch = N if batched else 1
    masks = {}
    if "2d" in kind or "3d" in kind:
        masks["attn_mask"] = torch.rand(*([batch * HEADS] if "3d" in kind else []), L, keys) < 0.4
        masks["attn_mask"][..., 0] = False
    if "causal" in kind:
        masks["attn_mask"] = torch.ones(L, keys).triu(1).bool()
    if "padding" in kind:
        masks["key_padding_mask"] = torch.arange(keys) >= torch.tensor([[keys - 2], [keys - 1]])[:batch]
        if not batched:
            masks["key_padding_mask"] = masks["key_padding_mask"][0]
    if "float" in kind:
        masks = {name: torch.randn(mask.shape, dtype=dtype) for name, mask in masks.items()}
    return masks
