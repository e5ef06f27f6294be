"""Feed-forward blocks that are converted as wholes compute what their layers do one by one."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import oracle
import pairmix
from dense_blocks import Dropped, Gated, Model, Plain, gelu_tanh, sequential
from pairmix import SPMFeedForward, SPMLinear
from pairmix.convert import convert_, restore_

# how to make it, the names of the wide maps and of the map back, and what the block is
BLOCKS = {
    "relu": (lambda: sequential(nn.ReLU()), ("0",), "2", "relu"),
    "gelu": (lambda: sequential(nn.GELU(), features=7, hidden=21), ("0",), "2", "gelu"),
    "gelu_tanh": (lambda: Plain(gelu_tanh), ("first",), "last", "gelu_tanh"),
    "square": (lambda: Plain(F.silu, 16, 16, bias=False), ("first",), "last", "silu"),
    "narrower": (lambda: Plain(F.relu, 16, 4), ("first",), "last", "relu"),
    "gated": (Gated, ("gate", "value"), "back", "silu"),
    "gated without bias": (lambda: Gated(bias=False), ("gate", "value"), "back", "silu"),
    "dropout between": (lambda: sequential(nn.ReLU(), nn.Dropout(0.3)), ("0",), "3", "relu"),
    "dropout at the end": (lambda: sequential(nn.GELU(), end=[nn.Dropout(0.3)]), ("0",), "2", "gelu"),
    "dropout between, no bias": (lambda: Dropped(bias=False), ("first",), "last", "relu"),
    "two dropouts": (
        lambda: sequential(nn.GELU(), nn.Dropout(0.2), end=[nn.Dropout(0.4)]), ("0",), "3", "gelu",
    ),
    "gated dropout": (lambda: Gated(0.3), ("gate", "value"), "back", "silu"),
}  # fmt: skip


@pytest.fixture(params=BLOCKS)
def case(request):
    return BLOCKS[request.param]


def converted_twice(build, **options):
    """The same model with the block as a whole, and with its layers one by one."""
    whole = Model(build())
    one_by_one = copy.deepcopy(whole)
    seed = torch.random.get_rng_state()
    report = convert_(whole, feed_forward=True, **options)
    expected = torch.rand(1)
    torch.random.set_rng_state(seed)
    convert_(one_by_one, **options)
    assert torch.equal(torch.rand(1), expected)  # as many random numbers were drawn
    return whole.part, one_by_one.part, report


def features_of(block):
    return block.up.in_features


def same_parameters(whole, one_by_one, ups, down):
    """The parameters of the block, each with those of the layers that it should be."""
    for name, parameter in whole.up.named_parameters():
        parts = [one_by_one.get_submodule(up).get_parameter(name) for up in ups]
        yield parameter, torch.stack(parts) if len(ups) > 1 else parts[0]
    for name, parameter in whole.down.named_parameters():
        yield parameter, one_by_one.get_submodule(down).get_parameter(name)


def results(block, x, parameters):
    """The output, and the gradients of x and of the parameters."""
    x = x.detach().requires_grad_()
    y = block(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *parameters])]


def assert_computes_the_same(whole, one_by_one, ups, down):
    x = torch.randn(30, features_of(whole))
    inner = [parameter for parameter, _ in same_parameters(whole, one_by_one, ups, down)]

    def plain(dtype):
        torch.manual_seed(5)
        parts = copy.deepcopy(one_by_one).to(dtype)
        layers = [[parts.get_submodule(up) for up in ups], [parts.get_submodule(down)]]
        names = [[name for name, _ in group[0].named_parameters()] for group in layers]
        own = [[layer.get_parameter(n) for layer in group] for group, of in zip(layers, names, strict=True) for n in of]
        y, of_x, *found = results(parts, x.to(dtype), [parameter for group in own for parameter in group])
        found = iter(found)
        gradients = [[next(found) for _ in group] for group in own]
        return [y, of_x, *(torch.stack(group) if len(group) > 1 else group[0] for group in gradients)]

    torch.manual_seed(5)
    oracle.assert_agrees(results(whole, x, inner), plain)


class TestAsAWhole:
    def test_it_starts_as_its_layers_do_one_by_one(self, case):
        build, ups, down, activation = case
        whole, one_by_one, _ = converted_twice(build)
        assert type(whole) is SPMFeedForward
        assert (whole.activation, whole.gated, whole.up.maps) == (
            activation,
            len(ups) == 2,
            2 if len(ups) == 2 else None,
        )
        pairs = list(same_parameters(whole, one_by_one, ups, down))
        assert len(pairs) == len(list(whole.parameters()))
        assert all(torch.equal(*pair) for pair in pairs)

    @pytest.mark.parametrize("training", [True, False])
    def test_it_computes_what_they_do(self, case, training):
        build, ups, down, _ = case
        whole, one_by_one, _ = converted_twice(build)
        assert_computes_the_same(whole.train(training), one_by_one.train(training), ups, down)

    def test_the_kernels_compute_it_in_one_call(self, case, fused):
        whole, _, _ = converted_twice(case[0])
        whole.eval()(torch.randn(3, features_of(whole)))
        assert len(fused) == (whole.up.width == whole.up.out_features)

    def test_going_back_it_is_the_module_again(self, case):
        model = Model(case[0]()).eval()
        before = model.part
        state = {key: value.shape for key, value in before.state_dict().items()}
        convert_(model, feed_forward=True)
        block, x = model.part, torch.randn(30, features_of(model.part))
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        y = block(x)
        (one,) = restore_(model).replaced
        assert (one.name, one.before, one.after) == ("part", "SPMFeedForward", type(before).__name__)
        assert type(model.part) is type(before)
        assert not any(part.training for part in model.part.modules())
        assert repr(model.part) == repr(before)
        assert list(model.part.state_dict()) == list(state)
        assert {key: value.shape for key, value in model.part.state_dict().items()} == state
        torch.testing.assert_close(model.part(x), y, rtol=1e-4, atol=1e-5)

    def test_fitted_it_is_what_its_layers_are(self, case):
        build, ups, down, _ = case
        whole, one_by_one, report = converted_twice(build, weights="fit", fit_steps=2)
        assert all(torch.equal(*pair) for pair in same_parameters(whole, one_by_one, ups, down))
        assert 0 < report.replaced[0].error < 1

    def test_copies_and_checkpoints(self, case):
        model = Model(case[0]()).eval()
        convert_(model, feed_forward=True)
        x = torch.randn(3, features_of(model.part))
        y = model.part(x)
        saved = io.BytesIO()
        torch.save(model.state_dict(), saved)
        saved.seek(0)
        other = Model(case[0]()).eval()
        convert_(other, feed_forward=True)
        assert not torch.equal(other.part(x), y)
        other.load_state_dict(torch.load(saved))
        copied = copy.deepcopy(model)
        for one in (other, copied):
            assert torch.equal(one.part(x), y)
            restore_(one)
            assert type(one.part) is type(case[0]())
            torch.testing.assert_close(one.part(x), y, rtol=1e-4, atol=1e-5)
        assert type(model.part) is SPMFeedForward
        another = Model(case[0]())
        convert_(another, feed_forward=True, schedule="random")
        with pytest.raises(RuntimeError, match="the checkpoint is of another layer"):
            another.load_state_dict(model.state_dict())

    def test_on_the_meta_device(self, case):
        model = Model(case[0]().to("meta"))
        convert_(model, feed_forward=True)
        assert type(model.part) is SPMFeedForward
        assert {tensor.device.type for tensor in (*model.part.parameters(), *model.part.buffers())} == {"meta"}


class TestWhatIsKept:
    def test_a_whole_model_is_pickled_and_goes_back(self):
        model = Model(Plain(F.gelu))
        convert_(model, feed_forward=True)
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False)
        x = torch.randn(3, 16)
        assert torch.equal(loaded.part(x), model.part(x))
        restore_(loaded)
        assert (type(loaded.part), loaded.part.note) == (Plain, "kept")

    def test_rates_of_dropout_that_were_changed(self):
        model = Model(sequential(nn.ReLU(), nn.Dropout(0.2), end=[nn.Dropout(0.4)]))
        convert_(model, feed_forward=True)
        assert (model.part.dropout.p, model.part.output_dropout.p) == (0.2, 0.4)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p *= 2
        restore_(model)
        assert (model.part[2].p, model.part[4].p) == (0.4, 0.8)

    def test_hooks_of_the_block(self):
        model, seen = Model(sequential(nn.ReLU())), []
        handle = model.part.register_forward_hook(lambda module, args, output: seen.append(type(module)))
        convert_(model, feed_forward=True)
        model.part(torch.randn(2, 16))
        restore_(model)
        model.part(torch.randn(2, 16))
        handle.remove()
        model.part(torch.randn(2, 16))
        assert seen == [SPMFeedForward, nn.Sequential]

    def test_dtype_and_options(self):
        model = Model(Gated().double())
        convert_(model, feed_forward=True, block="rotation", stages=3, rank=2)
        layers = [model.part.up, model.part.down]
        assert {(one.block, one.stages, one.rank, one.d_in.dtype) for one in layers} == {
            ("rotation", 3, 2, torch.float64)
        }
        restore_(model)
        assert {parameter.dtype for parameter in model.part.parameters()} == {torch.float64}

    def test_a_block_at_two_places_stays_one(self):
        shared = sequential(nn.ReLU())
        model = Model(nn.ModuleList([shared, shared]))
        report = convert_(model, feed_forward=True)
        assert type(model.part[0]) is SPMFeedForward
        assert model.part[0] is model.part[1]
        assert [one.name for one in report.replaced] == ["part.0"]
        restore_(model)
        assert model.part[0] is model.part[1]

    def test_frozen_blocks_that_are_fitted_stay_frozen(self):
        model = Model(Gated().requires_grad_(False))
        assert {one.why for one in convert_(model, feed_forward=True).left[:3]} == {"frozen"}
        convert_(model, feed_forward=True, weights="fit", fit_steps=0)
        assert type(model.part) is SPMFeedForward
        assert not any(parameter.requires_grad for parameter in model.part.parameters())

    def test_blocks_that_were_not_converted_get_dense_layers(self):
        model = nn.ModuleDict({"plain": SPMFeedForward(16, 64), "gated": SPMFeedForward(16, 64, gated=True)})
        x = torch.randn(5, 16)
        expected = [block(x) for block in model.values()]
        restore_(model)
        assert not any(isinstance(module, SPMLinear) for module in model.modules())
        torch.testing.assert_close([block(x) for block in model.values()], expected, rtol=1e-4, atol=1e-5)


def test_the_report_has_a_line_for_a_block():
    model = Model(Gated())
    before = sum(parameter.numel() for parameter in model.part.parameters())
    report = convert_(model, feed_forward=True)
    after = sum(parameter.numel() for parameter in model.part.parameters())
    multiply_adds = model.part.up.multiply_adds + model.part.down.multiply_adds
    line = str(report).splitlines()[1].split()
    assert line == [
        "part",
        "Gated",
        "SPMFeedForward",
        f"{before:,}",
        f"{after:,}",
        f"{3 * 640:,}",
        f"{multiply_adds:,}",
    ]


def test_other_layers_in_the_place_of_its_own_are_left_where_they_are():
    model = Model(sequential(nn.ReLU()))
    convert_(model, feed_forward=True)
    model.part.up = nn.Linear(16, 64)
    restore_(model)
    assert [type(model.part), type(model.part.up), type(model.part.down)] == [SPMFeedForward, nn.Linear, nn.Linear]


def test_a_converted_block_learns():
    model = Model(Gated())
    convert_(model, feed_forward=True)
    x, target = torch.randn(64, 16), torch.randn(64, 16)
    optimizer = torch.optim.Adam(pairmix.param_groups(model, lr=1e-2))
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model.part(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
