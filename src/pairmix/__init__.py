"""Stagewise Pairwise Mixers for PyTorch: linear layers in O(n log n)."""

from pairmix import adapters, functional, nn
from pairmix.convert import convert_, restore_
from pairmix.fit import fit
from pairmix.nn import (
    SPMGRU,
    SPMLSTM,
    SPMRNN,
    SPMFeedForward,
    SPMGRUCell,
    SPMLinear,
    SPMLSTMCell,
    SPMMultiheadAttention,
    SPMRNNCell,
    SPMTransformerEncoderLayer,
)
from pairmix.ops import empty_cache
from pairmix.optim import param_groups
from pairmix.schedule import Schedule

__version__ = "0.2.0"

__all__ = [
    "SPMGRU",
    "SPMLSTM",
    "SPMRNN",
    "SPMFeedForward",
    "SPMGRUCell",
    "SPMLSTMCell",
    "SPMLinear",
    "SPMMultiheadAttention",
    "SPMRNNCell",
    "SPMTransformerEncoderLayer",
    "Schedule",
    "adapters",
    "convert_",
    "empty_cache",
    "fit",
    "functional",
    "nn",
    "param_groups",
    "restore_",
]
