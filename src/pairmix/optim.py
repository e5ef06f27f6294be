"""Learning rates and weight decay that suit SPM, as groups of parameters for any optimiser of torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import nn

from pairmix.nn import SPMLinear

_MIXING = ("coeffs", "angles", "d_in", "d_out", "residual_scale")


class ParamGroups(list[dict[str, Any]]):
    """Groups of parameters for an optimiser; printed, they are a table that says what each of them holds."""

    frozen: int = 0
    """How many tensors are in no group because they do not require gradients."""

    def __repr__(self) -> str:
        header = ["rate", "times lr", "weight decay", "tensors", "numbers", "what"]
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
    """Groups of parameters with which the learning rate of a dense model suits the same model with SPM layers.

    Args:
        model: with any number of SPM layers; other layers are treated as usual.
        lr: the learning rate that suits the dense model.
        weight_decay: of matrices.
        optimizer: `"adam"` for optimisers that divide by the size of the gradient, such as Adam, AdamW, Adafactor and
            Lion, or `"sgd"`.
    """
    groups: dict[tuple[str, float, float], dict[str, Any]] = {}
    result = ParamGroups()
    for parameter, name, scale, decays in _sorted(model, optimizer):
        if not parameter.requires_grad:
            result.frozen += 1
            continue
        decay = weight_decay if decays else 0.0
        group = groups.setdefault(
            (name, scale, decay),
            {"params": [], "lr": lr * scale, "weight_decay": decay, "lr_scale": scale, "name": name},
        )
        group["params"].append(parameter)
    result.extend(groups.values())
    return result


def rate_scale(layer: SPMLinear, optimizer: str = "adam") -> float:
    """What the rate of a dense layer is multiplied by for the mixing parameters of an SPM layer in its place."""
    return max(1.0, layer.width / (40 * math.sqrt(max(1, layer.stages))))


def _sorted(model: nn.Module, optimizer: str) -> Iterator[tuple[nn.Parameter, str, float, bool]]:
    """Every parameter once, with the name of its group, what its rate is multiplied by, and whether it decays."""
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            if isinstance(module, SPMLinear) and name in _MIXING:
                yield (
                    parameter,
                    f"SPM, width {module.width:,}, {module.stages} stages",
                    rate_scale(module, optimizer),
                    False,
                )
            elif parameter.dim() >= 2:
                yield parameter, "matrices", 1.0, True
            else:
                yield parameter, "vectors and scalars", 1.0, False
