"""Modules that are compared with torch's own, with random parameters."""

import copy

from torch import nn

from pairmix import SPMLinear


def randomised(module, std):
    """Every parameter random, so that none can be mistaken for another; choose `std` so that nothing saturates."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module


def plain_copy(module, dtype):
    """A copy whose operators are computed by the reference."""
    copied = copy.deepcopy(module).to(dtype)
    for layer in copied.modules():
        if isinstance(layer, SPMLinear):
            layer.impl = "reference"
    return copied
