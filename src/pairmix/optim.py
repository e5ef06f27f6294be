"""Learning rates and weight decay that suit SPM, as groups of parameters for any optimiser of torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from pairmix.nn import SPMLinear

MIXING = ("coeffs", "angles", "d_in", "d_out", "residual_scale")
"""The parameters of an SPM layer that mix: products of small matrices, which neither decay nor have a dense rate."""


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
        widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
        rows = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in [header, *lines]
        ]
        return "\n".join(rows + [f"frozen, in no group: {self.frozen} tensors"] * (self.frozen > 0))


def param_groups(model: nn.Module, lr: float, weight_decay: float = 0.0, *, optimizer: str = "adam") -> ParamGroups:
    """Groups with which the learning rate of a dense model suits the same model with SPM layers.

    The numbers of a stage's blocks are of the size of one, whatever the width, and far fewer than those of a dense
    matrix: at the dense layer's rate they hardly move. Their rate is `lr` times `rate_scale`. They do not decay: a
    product of L stages would shrink L times as fast as a matrix. All other parameters have the rate `lr`, and of them
    only matrices decay.

    Each group has an entry `lr_scale`. Schedulers of torch keep the ratios of the groups' rates; a loop that sets rates
    by hand must do so too: `group["lr"] = lr * group["lr_scale"]`.

    Args:
        model: with any number of SPM layers, also one that is compiled, or wrapped by DDP or FSDP2. Parameters that
            occur twice are in one group; those that do not require gradients are in none.
        lr: the learning rate that suits the dense model.
        weight_decay: of matrices.
        optimizer: `"adam"` for one whose steps do not depend on the size of the gradient, such as Adam, AdamW or Lion;
            `"sgd"` for one whose steps do.

    Examples:
        >>> model = nn.Sequential(SPMLinear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
        >>> groups = param_groups(model, lr=1e-3, weight_decay=0.1)
        >>> optimizer = torch.optim.AdamW(groups)
        >>> groups
        rate     times lr  decay  tensors  numbers  what
        0.00711  7.11      0      3        22,528   SPM, width 1,024, 10 stages
        0.001    1         0      2        1,034    vectors and scalars
        0.001    1         0.1    1        10,240   matrices
    """
    if optimizer not in ("adam", "sgd"):
        raise ValueError(f"optimizer must be 'adam' or 'sgd', got {optimizer!r}")
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a number of at least 0, got {value}")
    result, by_key = ParamGroups(), dict[tuple[str, float], dict[str, Any]]()
    for parameter, name, scale in _sorted(model, optimizer):
        if not parameter.requires_grad:
            result.frozen += 1
            continue
        decay = weight_decay if name == "matrices" else 0.0
        new = {"params": [], "lr": lr * scale, "weight_decay": decay, "lr_scale": scale, "name": name}
        by_key.setdefault((name, scale), new)["params"].append(parameter)
    result.extend(by_key.values())
    return result


def rate_scale(layer: SPMLinear, optimizer: str = "adam") -> float:
    """What the rate of a dense layer is multiplied by for the SPM layer in its place.

    For Adam and its kin `m / (45 sqrt(L))`, where m is the smaller of the numbers of features and L that of stages, but
    at least one half. The best rate of a dense layer falls with its width; that of an SPM layer does not, but falls
    with its depth. The form and the constant were found by measuring: see docs/training.md.
    """
    features, stages = min(layer.in_features, layer.out_features), max(1, layer.stages)
    if optimizer == "sgd":
        return features / (2 * stages)
    return max(0.5, features / (45 * math.sqrt(stages)))


def _sorted(model: nn.Module, optimizer: str) -> Iterator[tuple[nn.Parameter, str, float]]:
    """Every parameter once, with the name of its group and what its rate is multiplied by."""
    seen = set[torch.Tensor]()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            if isinstance(module, SPMLinear) and name in MIXING:
                what = f"SPM, width {module.width:,}, {module.stages} stages"
                yield parameter, what, rate_scale(module, optimizer)
            else:
                is_matrix = parameter.dim() >= 2 and not (isinstance(module, SPMLinear) and name == "bias")
                yield parameter, "matrices" if is_matrix else "vectors and scalars", 1.0
