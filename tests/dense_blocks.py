"""Dense feed-forward blocks as models have them, to be converted."""

import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    """A block, and a head."""

    def __init__(self, part, features=16):
        super().__init__()
        self.part = part
        self.head = nn.Linear(features, 3)


class Plain(nn.Module):
    """Two layers and a function of the hidden layer, in the order in which nothing says which layer comes first."""

    def __init__(self, activation, features=16, hidden=64, **options):
        super().__init__()
        self.last = nn.Linear(hidden, features, **options)
        self.first = nn.Linear(features, hidden, **options)
        self.activation = activation
        self.note = "kept"

    def forward(self, x):
        return self.last(self.activation(self.first(x)))


class Dropped(Plain):
    """As in T5, where nothing but the order of the maps says on which side of the second one the dropout is."""

    def __init__(self, **options):
        super().__init__(F.relu, **options)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return self.last(self.drop(self.activation(self.first(x))))


class Gated(nn.Module):
    """As in Llama, with the same dropout at two places."""

    def __init__(self, dropout=0.0, **options):
        super().__init__()
        self.value = nn.Linear(16, 40, **options)
        self.gate = nn.Linear(16, 40, **options)
        self.back = nn.Linear(40, 16, **options)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return self.drop(self.back(self.drop(self.value(x) * F.silu(self.gate(x)))))


def gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


def sequential(*between, features=16, hidden=64, end=()):
    return nn.Sequential(nn.Linear(features, hidden), *between, nn.Linear(hidden, features), *end)
