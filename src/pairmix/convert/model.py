"""Dense layers of a model to SPM, in place, and back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pairmix.convert import twins
from pairmix.convert.feed_forward import twin_of_dense_block, twin_of_spm_block
from pairmix.convert.report import Conversion, Left, Replaced
from pairmix.convert.twins import Twin
from pairmix.dense import matrix_of
from pairmix.fit import fit_
from pairmix.nn import SPMLinear
from pairmix.places import Place, outermost

_SEVERAL_MAPS = ("attn", "qkv", "query_key_value", "in_proj")
"""What modules are called whose rows are those of Q, K and V: maps of their own, which read the same input."""

_Found = tuple[Place, Twin, str | None]
"""A module that has a twin, its twin, and why it is left as it is; None if it is to be replaced."""


def convert_(
    model: nn.Module,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    skip: str | Sequence[str] = (),
    head: bool = False,
    feed_forward: bool = False,
    weights: str = "new",
    fit_steps: int = 100,
    progress: bool = False,
    **options: Any,
) -> Conversion:
    """Replace the dense layers of a model by SPM layers, in place.

    Replaced are `nn.Linear`, the `Conv1D` of transformers, `nn.RNN`, `nn.GRU`, `nn.LSTM`, `nn.MultiheadAttention` and
    `nn.TransformerEncoderLayer`. The twins have the dtype, device, bias, training mode and hooks of what they replace.
    A single layer that computes Q, K and V becomes three maps of one call, and so do the gates of recurrent networks.
    Left alone are weights that several modules share, the output head, frozen layers unless they are fitted, and what
    has weights that are computed (parametrizations).

    New layers start so that their outputs are as large as those of the dense layers were: a model whose residual
    branches start small still does.

    Args:
        model: that contains such modules; it cannot be one itself.
        filter_fn: `filter_fn(module, name)`, whether a module is to be replaced; None for all.
        skip: names of modules to leave alone, with all that is in them; `*` stands for anything, as in
            `"*.mlp.*"`.
        head: whether to replace the output head too.
        feed_forward: whether to replace feed-forward blocks as wholes, by `SPMFeedForward`, if all their layers are to
            be replaced. A block is recognised by what it computes, whatever its class. It computes what its layers
            would, and keeps nothing but its input for backward; its class and the names of its parameters change.
        weights: `"new"`, to be trained; `"fit"` for layers that come close to the old matrices, as `pairmix.fit` does.
            Look at their errors: most matrices have no SPM near them.
        fit_steps: the steps of refinement for every matrix that is fitted.
        progress: whether to show a progress bar while fitting.
        **options: of `SPMLinear`: `block`, `stages`, `schedule`, `residual`, `init`, `rank`, `impl`.

    Returns:
        What was replaced and what was not, and why.

    Raises:
        ValueError: if the model itself would have to be replaced, for names in `skip` that match nothing, and for
            options that `SPMLinear` does not take. The model is as it was, then.

    Examples:
        >>> model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
        >>> convert_(model)
        module  before  after      parameters         multiply-adds
        0       Linear  SPMLinear  262,656     10,752  262,144        10,240
        all                        262,656     10,752  262,144        10,240
        <BLANKLINE>
        left as it is  kind    why
        2              Linear  the output head
    """
    if weights not in ("new", "fit"):
        raise ValueError(f"weights must be 'new' or 'fit', got {weights!r}")
    if twins.of_dense(model) is not None:
        raise ValueError(f"the model is itself a {_kind(model)}, and cannot be replaced in place; put it into another")
    patterns = [skip] if isinstance(skip, str) else list(skip)
    result, made, planned = Conversion(), dict[nn.Module, nn.Module](), list[tuple[Place, nn.Module]]()
    found = list(_found(model, filter_fn, patterns, head, weights))
    for place, twin, why in _with_whole_blocks(model, found) if feed_forward else found:
        module = place.found
        if why is not None:
            result.left.append(Left(place.name, _kind(module), why))
            continue
        if module not in made:
            made[module], replaced = _converted(twin, module, place.name, weights, fit_steps, progress, options)
            result.replaced.append(replaced)
        planned.append((place, made[module]))
    for place, spm in planned:  # only now: an option that SPMLinear refuses leaves the model as it was
        place.put(spm)
    return result


def restore_(model: nn.Module) -> Conversion:
    """Replace the SPM layers of a model by dense ones that compute the same, in place.

    Returns:
        What was replaced and what was not, and why.

    Examples:
        >>> model = nn.Sequential(SPMLinear(64, 64), nn.Tanh())
        >>> x = torch.randn(2, 64)
        >>> y = model(x)
        >>> report = restore_(model)
        >>> type(model[0]), torch.allclose(model(x), y, atol=1e-5)
        (<class 'torch.nn.modules.linear.Linear'>, True)
    """
    if _twin_of_spm(model) is not None:
        raise ValueError(f"the model is itself a {_kind(model)}, and cannot be replaced in place; put it into another")
    result, made = Conversion(), dict[nn.Module, nn.Module]()
    for place, twin in _with_twin(model, _twin_of_spm):
        module = place.found
        why = twin.why_not_back(module)
        if why is not None:
            result.left.append(Left(place.name, _kind(module), why))
            continue
        if module not in made:
            made[module] = _restored(twin, module)
            maps = list(twin.maps(made[module], module))
            result.replaced.append(_replaced(place.name, module, made[module], maps, back=True))
        place.put(made[module])
    return result


def _found(
    model: nn.Module,
    filter_fn: Callable[[nn.Module, str], bool] | None,
    patterns: list[str],
    head: bool,
    weights: str,
) -> Iterator[_Found]:
    """The modules that have a twin, and why they are left as they are; None if they are to be replaced."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"skip={pattern!r} matches no module; the model has {', '.join(names[1:20])}, ...")
    heads = set() if head else _heads(model)
    owners = Counter(parameter for module in model.modules() for parameter in module._parameters.values())
    for place, twin in _with_twin(model, twins.of_dense):
        module = place.found
        if any(fnmatchcase(part, pattern) for part in _prefixes(place.name) for pattern in patterns):
            why: str | None = "skip"
        elif module in heads:
            why = "the output head"
        elif filter_fn is not None and not filter_fn(module, place.name):
            why = "filter_fn"
        else:
            why = _why_not(module, twin, owners, weights)
        yield place, twin, why


def _with_whole_blocks(model: nn.Module, found: list[_Found]) -> list[_Found]:
    """The same, with a feed-forward block in the place of its layers if they are all to be replaced."""
    parents = {(place.found, place.parent) for place, _, _ in found}
    count = Counter(layer for layer, _ in parents)
    left = {place.parent for place, _, why in found if why is not None}
    left |= {parent for layer, parent in parents if count[layer] > 1}  # two blocks have the layer in common
    candidates = {parent for _, parent in parents} - left
    blocks = {module: twin for module in candidates if (twin := twin_of_dense_block(module)) is not None}
    wholes = {place.name: place for place in outermost(model, lambda place: place.found in blocks)}
    result = dict[str, _Found]()
    for one in found:
        name = one[0].name.rpartition(".")[0]
        if name in wholes:
            result[name] = wholes[name], blocks[wholes[name].found], None
        else:
            result[one[0].name] = one
    return list(result.values())


def _why_not(module: nn.Module, twin: Twin, owners: Counter[nn.Parameter | None], weights: str) -> str | None:
    """Why a module cannot be replaced."""
    parameters = list(module.parameters())
    if isinstance(module, twin.dense) and type(module).forward is not twin.dense.forward:
        return "a subclass with a forward of its own"
    if any(parametrize.is_parametrized(part) or hasattr(part, "weight_g") for part in module.modules()):
        return "its weights are computed"
    if any(owners[parameter] > 1 for parameter in parameters):
        return "its weights are shared with another module"
    if weights == "new" and not any(parameter.requires_grad for parameter in parameters):
        return "frozen"
    return twin.why_not(module)


def _twin_of_spm(module: nn.Module) -> Twin | None:
    return twin_of_spm_block(module) or twins.of_spm(module)


def _with_twin(model: nn.Module, twin_of: Callable[[nn.Module], Twin | None]) -> Iterator[tuple[Place, Twin]]:
    """The modules that have a twin, and are in no other that has one, as often as they occur."""
    for place in outermost(model, lambda place: twin_of(place.found) is not None):
        twin = twin_of(place.found)
        assert twin is not None
        yield place, twin


def _prefixes(name: str) -> list[str]:
    """The name of a module and of all that it is in."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _heads(model: nn.Module) -> set[nn.Module]:
    """The output head: what transformers calls so, or else what maps onto the vocabulary, or else the last layer."""
    named: Any = getattr(model, "get_output_embeddings", None)
    if callable(named) and isinstance(named(), nn.Module):
        return {named()}
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if tables:
        table = max(tables, key=lambda one: one.num_embeddings)
        shape = (table.embedding_dim, table.num_embeddings)
        onto: set[nn.Module] = {one for one in layers if (one.in_features, one.out_features) == shape}
        if onto and table.embedding_dim != table.num_embeddings:
            return onto
    return set(layers[-1:])


def _converted(
    twin: Twin, module: nn.Module, name: str, weights: str, steps: int, progress: bool, options: dict[str, Any]
) -> tuple[nn.Module, Replaced]:
    if twin is twins.LINEAR:
        options = {**options, "maps": _number_of_maps(module, name)}
    spm = twin.to_spm(module, **options)
    spm.train(module.training)
    for kept in twins.HOOKS:
        setattr(spm, kept, getattr(module, kept))
    maps, squares, sizes = list(twin.maps(module, spm)), 0.0, 0.0
    for layer, matrix, biases in maps:
        frozen = not matrix.requires_grad
        if matrix.is_meta and weights == "fit":
            raise ValueError(f"{name} is on the meta device: there is nothing to fit to, use weights='new'")
        if not matrix.is_meta:
            if weights == "fit":
                size = matrix.norm().item() ** 2
                squares += fit_(layer, matrix, steps=steps, progress=progress) ** 2 * size
                sizes += size
            else:
                _scale_(layer, matrix)
            _copy_bias_(layer, biases)
        layer.requires_grad_(not frozen)
    twins.copy_others_(twin, module, spm, to_dense=False)
    error = math.sqrt(squares / sizes) if sizes else None
    return spm, _replaced(name, module, spm, maps, error=error)


def _number_of_maps(module: nn.Module, name: str) -> int | None:
    """Three for a layer that computes Q, K and V of one size; None for one that is a single map."""
    out_features, in_features = matrix_of(module).shape
    last = name.rsplit(".", 1)[-1].lower()
    return 3 if out_features == 3 * in_features and any(word in last for word in _SEVERAL_MAPS) else None


@torch.no_grad()
def _scale_(layer: SPMLinear, matrix: Tensor) -> None:
    """Let the outputs be as large as those of the matrix, for inputs without a direction."""
    rows = matrix.double().square().sum(1).view(layer.maps or 1, -1).mean(1).sqrt()  # of every map
    layer.d_out.mul_(rows[:, None].to(layer.d_out) if layer.maps else rows.to(layer.d_out))


@torch.no_grad()
def _copy_bias_(layer: SPMLinear, biases: Sequence[Tensor]) -> None:
    if layer.bias is not None and biases:
        layer.bias.copy_(torch.stack(list(biases)).sum(0).view_as(layer.bias))


@torch.no_grad()
def _restored(twin: Twin, module: nn.Module) -> nn.Module:
    dense = twin.to_dense(module)
    dense.train(module.training)
    for kept in twins.HOOKS:
        setattr(dense, kept, getattr(module, kept))
    for layer, matrix, biases in twin.maps(dense, module):
        if not matrix.is_meta:
            matrix.copy_(layer.to_dense())
        for number, bias in enumerate(biases):
            bias.copy_(layer.bias.flatten()) if number == 0 and layer.bias is not None else bias.zero_()
    twins.copy_others_(twin, dense, module, to_dense=True)
    trained = any(parameter.requires_grad for parameter in module.parameters())
    return dense.requires_grad_(trained)


def _replaced(
    name: str,
    before: nn.Module,
    after: nn.Module,
    maps: list[twins.Map],
    *,
    back: bool = False,
    error: float | None = None,
) -> Replaced:
    counts = [sum(parameter.numel() for parameter in module.parameters()) for module in (before, after)]
    dense = sum(one.matrix.numel() for one in maps)
    spm = sum(one.layer.multiply_adds for one in maps)
    multiply_adds = (spm, dense) if back else (dense, spm)
    return Replaced(name, _kind(before), _kind(after), (counts[0], counts[1]), multiply_adds, error)


def _kind(module: nn.Module) -> str:
    return type(module).__name__
