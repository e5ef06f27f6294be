"""Every private name of torch that pairmix uses, looked up once.

Where this torch lacks one of them, public names do what it is for, or the shortcut that it serves is not taken: slower,
with the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

NAMES = (
    "_C._AutoDispatchBelowAutograd",
    "_C._FunctionBase",
    "_C._after_autograd_keyset",
    "_C._are_functorch_transforms_active",
    "_C._dispatch_keys",
    "_C._is_tracing",
    "_C._len_torch_dispatch_stack",
    "_C.DispatchKey",
    "autograd.forward_ad._current_level",
)


def _find(name: str) -> Any:
    found: Any = torch
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


_FOUND = {name: _find(name) for name in NAMES}
_below_autograd = _FOUND["_C._AutoDispatchBelowAutograd"]
_function_base = _FOUND["_C._FunctionBase"]
_after_autograd = _FOUND["_C._after_autograd_keyset"]
_transforms_are_active = _FOUND["_C._are_functorch_transforms_active"]
_dispatch_keys = _FOUND["_C._dispatch_keys"]
_is_tracing = _FOUND["_C._is_tracing"]
_dispatch_modes = _FOUND["_C._len_torch_dispatch_stack"]
_DispatchKey = _FOUND["_C.DispatchKey"]
_has_dual_level = _FOUND["autograd.forward_ad._current_level"] is not None  # a variable, which is read every time
_can_redispatch = all(name is not None for name in (_below_autograd, _after_autograd, _DispatchKey))

_ORDINARY_TYPES = (Tensor, torch.nn.Parameter)


def _keys(tensor: Tensor) -> int:
    keys: int = _dispatch_keys(tensor).raw_repr()
    return keys


_ORDINARY_KEYS: set[int] = set()
if _has_dual_level and all(
    name is not None for name in (_transforms_are_active, _dispatch_keys, _is_tracing, _dispatch_modes)
):
    with torch.inference_mode():
        _ORDINARY_KEYS.add(_keys(torch.empty(0, device="cpu")))
    _ORDINARY_KEYS.add(_keys(torch.empty(0, device="cpu")))


def is_ordinary(tensor: Tensor) -> bool:
    """Whether this is an ordinary CPU tensor, and nothing traces, transforms or replaces it.

    Then nothing on the way through the dispatcher would look at a call with it, and that way takes longer than a small
    layer itself.
    """
    return (
        type(tensor) in _ORDINARY_TYPES
        and bool(_ORDINARY_KEYS)
        and not torch.compiler.is_compiling()
        and not _dispatch_modes()
        and not _transforms_are_active()
        and forward_ad._current_level < 0
        and not _is_tracing()
        and _keys(tensor) in _ORDINARY_KEYS
    )


def are_transformed(tensors: Iterable[Tensor]) -> bool:
    """Whether a transform of torch.func may be at work on these tensors."""
    if _transforms_are_active is not None:
        return bool(_transforms_are_active())
    return any(type(tensor) in _ORDINARY_TYPES and not _has_storage(tensor) for tensor in tensors)


def _has_storage(tensor: Tensor) -> bool:
    """What the wrappers of torch.func do not have."""
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True


def have_tangents(tensors: Iterable[Tensor]) -> bool:
    """Whether one of them is a dual number of forward-mode differentiation."""
    if _has_dual_level and forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def call_below_autograd(op: Any, kernel: Callable[..., Any], keyset: Any, arguments: Sequence[Any]) -> Any:
    """The result of `op` without autograd, from within its kernel for autograd."""
    if not _can_redispatch:
        with torch.inference_mode():  # which leaves autograd out
            result = op(*arguments)
        return result.clone() if isinstance(result, Tensor) else tuple(part.clone() for part in result)
    keyset = keyset & _after_autograd
    if keyset.highestPriorityTypeId() == _DispatchKey.CPU:
        # Nothing is left between here and the kernel, so it can be called without another round through the dispatcher.
        return kernel(*arguments)
    with _below_autograd():
        return op.redispatch(keyset, *arguments)


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply`, without its part for torch.func where that is known not to be at work."""
    if _function_base is None:
        return function.apply
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply
