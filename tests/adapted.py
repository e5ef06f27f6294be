"""Small models with adapters, for the tests of these."""

import torch
from torch import nn
from torch.nn import functional as F

import oracle
from pairmix import adapters

SIZES = [(8, 8), (7, 12), (13, 5), (1, 3), (3, 1)]


class Conv1D(nn.Module):
    """As that of transformers: a linear layer whose weight is `[in, out]`."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) / nx**0.5)
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


class Quantised(nn.Module):
    """Weights as whole numbers and a scale, as layers of quantised models have them; differentiable by x."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("weight", torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8))
        self.register_buffer("bias", torch.randn(out_features))

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) / 127, self.bias.to(x.dtype))


LAYERS = {
    "linear": lambda taken, given: nn.Linear(taken, given),
    "without bias": lambda taken, given: nn.Linear(taken, given, bias=False),
    "Conv1D": lambda taken, given: Conv1D(given, taken),
}


def network(width=16):
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def turn(model, name="default"):
    """Make an adapter compute something."""
    for parameter in adapters.parameters(model, name):
        nn.init.normal_(parameter, mean=0.0 if parameter.dim() == 2 else 1.0, std=0.3)
    return model


def turned(width=16, **options):
    model = network(width)
    adapters.add(model, ["0", "2"], **options)
    return turn(model)


def matrix(rotations):
    """S R by its definition."""
    n = rotations.schedule.n
    rest = (None, rotations.scale, None, None)
    return oracle.dense(
        oracle.Arguments(torch.eye(n), rotations.angles, *rest, schedule=rotations.schedule, out_features=n)
    )


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_unchanged(model, before):
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value), name
