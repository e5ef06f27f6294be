"""Which modules are taken for feed-forward blocks: those that compute one, and nothing that only looks like it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dense_blocks import Gated, Model, Plain, sequential
from pairmix import SPMLinear
from pairmix.convert import convert_, restore_


class Residual(Plain):
    def forward(self, x):
        return x + super().forward(x)


class Scaled(Plain):
    def forward(self, x):
        return super().forward(x) * self.first.out_features**-0.5


class Dropping(Plain):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


class WithAnOption(Plain):
    def forward(self, x, scale=1.0):
        return scale * super().forward(x)


class Raising(Plain):
    def forward(self, x):
        raise OSError("not today")


class InTraining(Plain):
    def forward(self, x):
        return super().forward(x.clamp(-1, 1) if self.training else x)


class InEvaluation(Plain):
    def forward(self, x):
        return super().forward(x if self.training else x.clamp(-1, 1))


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


def mixed_dtypes():
    block = Plain(F.relu)
    block.first.double()
    return block


def half_frozen():
    block = Plain(F.relu)
    block.first.requires_grad_(False)
    return block


def watched():
    block = sequential(nn.ReLU())
    block[1].register_forward_hook(lambda module, args, output: None)
    return block


def wrapped():
    block = sequential(nn.ReLU())
    block[1].forward = torch.relu  # in the instance, as a wrapper would be
    return block


def tied():
    block = Gated()
    block.gate = block.value
    return block


def with_a_parameter():
    block = Plain(F.relu)
    block.unused = nn.Parameter(torch.zeros(1))
    return block


def with_a_buffer():
    block = Plain(F.relu)
    block.register_buffer("unused", torch.zeros(1))
    return block


def one_bias():
    block = Gated()
    block.gate.bias = None
    return block


OTHERS = (Residual, Scaled, Dropping, WithAnOption, Raising, InTraining, InEvaluation)
ONE_BY_ONE = {
    **{one.__name__: (lambda one=one: one(F.relu)) for one in OTHERS},
    **{one.__name__: one for one in (mixed_dtypes, half_frozen, watched, wrapped, one_bias, tied)},
    **{one.__name__: one for one in (with_a_parameter, with_a_buffer)},
    "tanh": lambda: Plain(torch.tanh),
    "quick_gelu": lambda: Plain(quick_gelu),
    "relu6": lambda: Plain(F.relu6),
    "clipped": lambda: Plain(lambda x: F.gelu(x).clamp(max=100)),
    "leaky": lambda: sequential(nn.LeakyReLU(1e-3)),
    "learned": lambda: sequential(nn.PReLU()),
    "normed": lambda: sequential(nn.ReLU(), nn.LayerNorm(64)),
    "dropout first": lambda: nn.Sequential(nn.Dropout(0.1), *sequential(nn.ReLU())),
    "dropout before the activation": lambda: sequential(nn.Dropout(0.1), nn.GELU()),
    "alpha dropout": lambda: sequential(nn.ReLU(), nn.AlphaDropout(0.1)),
    "other sizes": lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)),
    "three layers": lambda: nn.Sequential(*sequential(nn.ReLU()), nn.ReLU(), nn.Linear(16, 64)),
    "nothing": lambda: sequential(),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_what_is_not_a_block_is_converted_layer_by_layer(name):
    model = Model(ONE_BY_ONE[name]())
    weights = {"weights": "fit", "fit_steps": 0} if name == "half_frozen" else {}
    kind = type(model.part)
    report = convert_(model, feed_forward=True, **weights)
    assert type(model.part) is kind
    assert {one.after for one in report.replaced} == {"SPMLinear"}
    assert not any(isinstance(module, nn.Linear) for module in model.part.modules())


class TestWhichBlocks:
    def test_none_unless_asked_for(self):
        model = Model(sequential(nn.ReLU()))
        convert_(model)
        assert [type(layer) for layer in model.part] == [SPMLinear, nn.ReLU, SPMLinear]

    def test_those_all_of_whose_layers_are_to_be_replaced(self):
        for options, left in (
            ({"skip": "b.2"}, "skip"),
            ({"filter_fn": lambda module, name: name != "b.2"}, "filter_fn"),
        ):
            model = nn.ModuleDict({"a": sequential(nn.ReLU()), "b": sequential(nn.ReLU()), "head": nn.Linear(16, 3)})
            report = convert_(model, feed_forward=True, **options)
            assert [(one.name, one.after) for one in report.replaced] == [("a", "SPMFeedForward"), ("b.0", "SPMLinear")]
            assert [(one.name, one.why) for one in report.left] == [("b.2", left), ("head", "the output head")]

    def test_a_filter_sees_each_layer_once(self):
        model, seen = Model(Gated()), []
        convert_(model, lambda module, name: seen.append((type(module), name)) or True, feed_forward=True)
        assert seen == [(nn.Linear, f"part.{name}") for name in ("value", "gate", "back")]

    def test_not_those_that_have_a_layer_in_common(self):
        model = Model(nn.ModuleList([Plain(F.relu), Plain(F.relu)]))
        model.part[1].first = model.part[0].first
        convert_(model, feed_forward=True)
        assert model.part[1].first is model.part[0].first
        assert [type(part) for part in model.part] == [Plain, Plain]

    def test_not_the_model_itself(self):
        model = sequential(nn.ReLU())
        convert_(model, feed_forward=True, head=True)
        assert [type(layer) for layer in model] == [SPMLinear, nn.ReLU, SPMLinear]
        block = nn.ModuleList([sequential(nn.ReLU())])
        convert_(block, feed_forward=True, head=True)
        with pytest.raises(ValueError, match="the model is itself a SPMFeedForward"):
            restore_(block[0])

    def test_weights_do_not_matter(self):
        block = Plain(F.silu)
        nn.init.zeros_(block.last.weight)  # a residual branch that starts at zero
        model = Model(block)
        convert_(model, feed_forward=True)
        assert model.part.activation == "silu"

    def test_a_module_is_tried_out_without_a_trace(self):
        model, seen = Model(sequential(nn.ReLU(), nn.Dropout(0.5))), []
        before = model.part
        before.register_forward_hook(lambda module, args, output: seen.append(args))
        layers = list(before)
        convert_(model, feed_forward=True)
        assert not seen
        assert list(before) == layers
        assert all(layer.training for layer in layers)
