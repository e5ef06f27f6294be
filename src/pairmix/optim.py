"""Learning rates and weight decay that suit SPM, as groups of parameters for any optimiser of torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from pairmix.adapters import Rotations
from pairmix.nn import SPMLinear
from pairmix.tables import aligned

_MATRIX, _EMBEDDING = "matrices", "embeddings"
_MATRICES = ("down", "up")  # of an SPM layer: its low-rank map is dense, all other parameters have SPM's own rate


class ParamGroups(list[dict[str, Any]]):
    """Groups of parameters for an optimiser. Printed, they are a table of what each group holds.

    Attributes:
        frozen: how many tensors are in no group because they do not require gradients.
    """

    frozen: int = 0

    def __repr__(self) -> str:
        header = ["rate", "times lr", "decay", "tensors", "numbers", "what"]
        lines = [
            [
                f"{group['lr']:.3g}",
                f"{group['lr_scale']:.3g}",
                f"{group['weight_decay']:.3g}",
                f"{len(group['params']):,}",
                f"{sum(parameter.numel() for parameter in group['params']):,}",
                group["name"],
            ]
            for group in self
        ]
        return "\n".join(
            aligned([header, *lines]) + [f"frozen, in no group: {self.frozen} tensors"] * (self.frozen > 0)
        )


def param_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.0,
    *,
    optimizer: str = "adam",
    embedding_scale: float | None = None,
) -> ParamGroups:
    """Groups with which the learning rate of a dense model suits the same model with SPM layers.

    The numbers of a stage's blocks are of the size of one, whatever the width, and far fewer than those of a dense
    matrix: at the dense layer's rate they hardly move. The rate of an SPM layer is `spm_rate`. It does not decay: a
    product of L stages would shrink L times as fast as a matrix. The wider a dense model, the smaller the rate that it
    bears; embeddings had to follow, and without dense layers they have the rate `embedding_rate`. All other parameters
    have the rate `lr`. Of embeddings and the others only matrices decay. A model without SPM layers has one rate.

    Each group has an entry `lr_scale`. Schedulers of torch keep the ratios of the groups' rates; a loop that sets rates
    by hand must do so too: `group["lr"] = lr * group["lr_scale"]`.

    Args:
        model: with any number of SPM layers, also one that is compiled, or wrapped by DDP or FSDP2. Parameters that
            occur twice are in one group; those that do not require gradients are in none.
        lr: the learning rate that suits the dense model.
        weight_decay: of matrices.
        optimizer: `"adam"` for one whose steps do not depend on the size of the gradient, such as Adam, AdamW or Lion;
            `"sgd"` for one whose steps do.
        embedding_scale: what the rate of `nn.Embedding` and `nn.EmbeddingBag` is multiplied by; None for what
            `embedding_rate` says, 1 to train them like the other matrices.

    Examples:
        >>> model = nn.Sequential(SPMLinear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
        >>> groups = param_groups(model, lr=1e-3, weight_decay=0.1)
        >>> optimizer = torch.optim.AdamW(groups)
        >>> groups
        rate    times lr  decay  tensors  numbers  what
        0.019   19        0      4        23,552   SPM, width 1,024, 10 stages
        0.001   1         0.1    1        10,240   matrices
        0.001   1         0      1        10       vectors and scalars
    """
    if optimizer not in ("adam", "sgd"):
        raise ValueError(f"optimizer must be 'adam' or 'sgd', got {optimizer!r}")
    given = {"lr": lr, "weight_decay": weight_decay, "embedding_scale": embedding_scale}
    for name, value in given.items():
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a number of at least 0, got {value}")
    result, by_key = ParamGroups(), dict[tuple[str, float], dict[str, Any]]()
    for parameter, name, rate in _sorted(model, lr, optimizer, embedding_scale):
        if not parameter.requires_grad:
            result.frozen += 1
            continue
        decay = weight_decay if name in (_MATRIX, _EMBEDDING) else 0.0
        new = {"params": [], "lr": rate, "weight_decay": decay, "lr_scale": rate / lr if lr else 1.0, "name": name}
        by_key.setdefault((name, rate), new)["params"].append(parameter)
    result.extend(by_key.values())
    return result


def spm_rate(layer: SPMLinear, lr: float, optimizer: str = "adam", layers: int = 1) -> float:
    """The learning rate of an SPM layer in the place of a dense one whose best rate is `lr`.

    For Adam and its kin `min(2.13 lr m^(1/2), 0.06) / (L^(1/2) K^(1/4))`, where m is the smaller of the numbers of
    features, L that of stages and K that of SPM layers in the model. The best rate of a dense layer falls with its
    width; that of an SPM layer does so less, and falls with its depth and somewhat with that of the model; larger rates
    than the bound often diverged. A layer that starts at or near the identity, to stay there, has `lr m / 30` instead,
    where m counts as 256 at most. For SGD `20 lr / L`: the gradients of wide layers are small already. The constants
    were fitted in short runs: see docs/training.md.
    """
    features, stages = min(layer.in_features, layer.out_features), max(1, layer.stages)
    if optimizer == "sgd":
        return 20 * lr / stages
    stays = layer.init in ("identity", "near_identity")
    scale = min(features, 256) / 30 if stays else 32 / 15 * math.sqrt(features)
    return min(lr * scale, 0.06) / math.sqrt(stages * math.sqrt(layers))


def embedding_rate(features: int, lr: float) -> float:
    """The learning rate, for Adam and its kin, of an embedding in a model of SPM layers.

    `min(2.56 lr d^(1/2), 0.1)` for d features, but never less than `lr`. A step reads one row of the table for each
    token, so the rate that suits it falls less with the width than that of dense layers.
    """
    return max(lr, min(2.56 * lr * math.sqrt(features), 0.1))


def _sorted(
    model: nn.Module, lr: float, optimizer: str, embedding_scale: float | None
) -> Iterator[tuple[nn.Parameter, str, float]]:
    """Every parameter once, with the name of its group and its rate."""
    layers = sum(isinstance(module, SPMLinear) for module in model.modules())

    def rate_of_embedding(module: nn.Embedding | nn.EmbeddingBag) -> float:
        if embedding_scale is not None:
            return lr * embedding_scale
        return embedding_rate(module.embedding_dim, lr) if layers and optimizer == "adam" else lr

    seen = set[torch.Tensor]()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            if isinstance(module, SPMLinear) and name not in _MATRICES:
                what = f"SPM, width {module.width:,}, {module.stages} stages"
                yield parameter, what, spm_rate(module, lr, optimizer, layers)
            elif isinstance(module, Rotations):
                yield parameter, "adapters", lr
            elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
                yield parameter, _EMBEDDING, rate_of_embedding(module)
            else:
                yield parameter, _MATRIX if parameter.dim() >= 2 else "vectors and scalars", lr
