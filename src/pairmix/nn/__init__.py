"""Layers with parameters."""

from pairmix.nn import init
from pairmix.nn.linear import SPMLinear

__all__ = ["SPMLinear", "init"]
