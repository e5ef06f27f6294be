"""Stagewise Pairwise Mixers for PyTorch: linear layers in O(n log n)."""

from pairmix import functional, nn
from pairmix.nn import SPMLinear
from pairmix.schedule import Schedule

__version__ = "0.1.0"

__all__ = ["SPMLinear", "Schedule", "functional", "nn"]
