"""Layers with parameters."""

from pairmix.nn import init
from pairmix.nn.attention import SPMMultiheadAttention, SPMTransformerEncoderLayer
from pairmix.nn.feed_forward import SPMFeedForward
from pairmix.nn.linear import SPMLinear
from pairmix.nn.merged import MergedStages, merge_stages_
from pairmix.nn.rnn import SPMGRU, SPMLSTM, SPMRNN
from pairmix.nn.rnn_cells import SPMGRUCell, SPMLSTMCell, SPMRNNCell

__all__ = [
    "SPMGRU",
    "SPMLSTM",
    "SPMRNN",
    "MergedStages",
    "SPMFeedForward",
    "SPMGRUCell",
    "SPMLSTMCell",
    "SPMLinear",
    "SPMMultiheadAttention",
    "SPMRNNCell",
    "SPMTransformerEncoderLayer",
    "init",
    "merge_stages_",
]
