"""Dense models become SPM models and back."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import pairmix
from pairmix import SPMGRU, SPMLSTM, SPMRNN, SPMLinear, SPMMultiheadAttention, SPMTransformerEncoderLayer
from pairmix.convert import convert_, restore_


class Model(nn.Module):
    """Something around a module, with a head."""

    def __init__(self, part, features=16):
        super().__init__()
        self.part = part
        self.head = nn.Linear(features, 3)


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3))


DENSE = {
    "linear": lambda: nn.Linear(16, 24),
    "linear without bias": lambda: nn.Linear(15, 7, bias=False),
    "rnn": lambda: nn.RNN(8, 16, num_layers=2, nonlinearity="relu"),
    "gru": lambda: nn.GRU(8, 16, bidirectional=True, batch_first=True),
    "lstm": lambda: nn.LSTM(16, 16, num_layers=2, dropout=0.1, bias=False),
    "attention": lambda: nn.MultiheadAttention(16, 4, add_bias_kv=True, batch_first=True),
    "attention of other keys": lambda: nn.MultiheadAttention(16, 4, kdim=8, vdim=12),
    "encoder": lambda: nn.TransformerEncoderLayer(16, 4, 32, activation="gelu", norm_first=True, batch_first=True),
}
TWINS = {
    nn.Linear: SPMLinear,
    nn.RNN: SPMRNN,
    nn.GRU: SPMGRU,
    nn.LSTM: SPMLSTM,
    nn.MultiheadAttention: SPMMultiheadAttention,
    nn.TransformerEncoderLayer: SPMTransformerEncoderLayer,
}


def inputs_of(module):
    if isinstance(module, nn.MultiheadAttention | SPMMultiheadAttention):
        return tuple(torch.randn(5, 3, size) for size in (module.embed_dim, module.kdim, module.vdim))
    if isinstance(module, nn.TransformerEncoderLayer | SPMTransformerEncoderLayer):
        return (torch.randn(3, 5, 16),)
    return (torch.randn(5, 3, getattr(module, "input_size", getattr(module, "in_features", 0))),)


def flat(output):
    if isinstance(output, torch.Tensor):
        return [output]
    return [] if output is None else [tensor for part in output for tensor in flat(part)]


@pytest.mark.parametrize("name", DENSE)
class TestEveryKind:
    def test_is_replaced_by_its_twin_of_the_same_shapes(self, name):
        model = Model(DENSE[name]()).eval()
        inputs, before = inputs_of(model.part), model.part
        expected = [tensor.shape for tensor in flat(before(*inputs))]
        report = convert_(model)
        assert type(model.part) is TWINS[type(before)]
        assert not model.part.training
        assert [tensor.shape for tensor in flat(model.part(*inputs))] == expected
        (one,) = report.replaced
        assert one.name == "part"
        assert one.parameters == tuple(sum(p.numel() for p in part.parameters()) for part in (before, model.part))

    def test_goes_back_to_a_dense_module_that_computes_the_same(self, name):
        model = Model(DENSE[name]()).eval()
        kind, state = type(model.part), {key: value.shape for key, value in model.part.state_dict().items()}
        convert_(model)
        with torch.no_grad():
            for parameter in model.part.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        inputs = inputs_of(model.part)
        before = flat(model.part(*inputs))
        report = restore_(model)
        assert type(model.part) is kind
        assert {key: value.shape for key, value in model.part.state_dict().items()} == state
        torch.testing.assert_close(flat(model.part(*inputs)), before, rtol=1e-4, atol=1e-5)
        assert [one.name for one in report.replaced] == ["part"]

    def test_fitted_to_matrices_that_are_spms_it_computes_the_same(self, name):
        model = Model(DENSE[name]()).eval()
        convert_(model)
        restore_(model)  # now all matrices are SPMs
        inputs = inputs_of(model.part)
        before = flat(model.part(*inputs))
        report = convert_(model, weights="fit", fit_steps=300)
        assert report.replaced[0].error < (1e-5 if is_square(model) else 0.3)
        if is_square(model):
            torch.testing.assert_close(flat(model.part(*inputs)), before, rtol=1e-4, atol=1e-4)

    def test_keeps_dtype_and_device(self, name):
        model = Model(DENSE[name]().double())
        convert_(model)
        assert {parameter.dtype for parameter in model.part.parameters()} == {torch.float64}
        on_meta = Model(DENSE[name]().to("meta"))
        convert_(on_meta)
        assert {parameter.device.type for parameter in on_meta.part.parameters()} == {"meta"}


def is_square(model):
    """Whether all maps are square with an even width, whose factorisation is exact."""
    layers = [module for module in model.modules() if isinstance(module, SPMLinear)]
    return all(layer.in_features == layer.out_features and layer.width % 2 == 0 for layer in layers)


class TestWhatIsLeft:
    def test_the_head_unless_asked_for(self):
        model = mlp()
        report = convert_(model)
        assert [type(model[i]) for i in (0, 2, 4)] == [SPMLinear, SPMLinear, nn.Linear]
        assert [(one.name, one.why) for one in report.left] == [("4", "the output head")]
        assert not convert_(model, head=True).left
        assert type(model[4]) is SPMLinear

    def test_the_head_is_what_maps_onto_the_vocabulary_wherever_it_is(self):
        model = nn.ModuleDict({"head": nn.Linear(16, 50), "table": nn.Embedding(50, 16), "map": nn.Linear(16, 16)})
        convert_(model)
        assert [type(part) for part in model.values()] == [nn.Linear, nn.Embedding, SPMLinear]

    def test_what_the_caller_says(self):
        model = mlp()
        report = convert_(model, lambda module, name: module.in_features == 16)
        assert [one.name for one in report.replaced] == ["0"]
        assert ("2", "filter_fn") in [(one.name, one.why) for one in report.left]
        model = nn.ModuleDict({"a": mlp(), "b": mlp()})
        report = convert_(model, skip="a")
        assert [one.name for one in report.replaced] == ["b.0", "b.2"]
        model = nn.ModuleDict({"a": mlp(), "b": mlp()})
        report = convert_(model, skip=["*.0"])
        assert [one.name for one in report.replaced] == ["a.2", "a.4", "b.2"]

    def test_shared_weights(self):
        model = Model(nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)]))
        model.part[1].weight = model.part[0].weight
        report = convert_(model)
        assert [one.name for one in report.replaced] == ["part.2"]
        assert report.left[0].why == "its weights are shared with another module"

    def test_frozen_layers_unless_they_are_fitted(self):
        model = Model(nn.Linear(16, 16))
        model.part.requires_grad_(False)
        assert convert_(model).left[0].why == "frozen"
        convert_(model, weights="fit")
        assert not any(parameter.requires_grad for parameter in model.part.parameters())

    def test_weights_that_are_computed(self):
        model = Model(parametrizations.weight_norm(nn.Linear(16, 16)))
        assert convert_(model).left[0].why == "its weights are computed"

    def test_classes_that_compute_something_else(self):
        class Scaled(nn.Linear):
            def forward(self, x):
                return 2 * super().forward(x)

        model = Model(Scaled(16, 16))
        assert convert_(model).left[0].why == "a subclass with a forward of its own"

    def test_what_has_no_twin_says_why(self):
        assert "proj_size=4" in convert_(Model(nn.LSTM(16, 16, proj_size=4))).left[0].why
        model = Model(SPMGRU(16, 16))
        assert "other equations" in restore_(model).left[0].why
        assert type(model.part) is SPMGRU


class TestWhatIsKept:
    def test_outputs_start_as_large_as_before(self):
        for scale in (0.02, 1.0):
            model = Model(nn.Linear(256, 512))
            nn.init.normal_(model.part.weight, std=scale)
            x = torch.randn(64, 256)
            before = model.part(x).std()
            convert_(model)
            assert model.part(x).std().item() == pytest.approx(before.item(), rel=0.1)

    def test_hooks_run_on_the_twin(self):
        model, seen = Model(nn.Linear(16, 16)), []
        handle = model.part.register_forward_hook(lambda module, args, output: seen.append(type(module)))
        convert_(model)
        model.part(torch.randn(2, 16))
        handle.remove()
        model.part(torch.randn(2, 16))
        assert seen == [SPMLinear]

    def test_a_module_at_two_places_stays_one(self):
        shared = nn.Linear(16, 16)
        model = Model(nn.ModuleList([shared, shared]))
        report = convert_(model)
        assert model.part[0] is model.part[1]
        assert len(report.replaced) == 1
        restore_(model)
        assert model.part[0] is model.part[1]

    def test_queries_keys_and_values_of_one_layer_become_three_maps(self):
        model = Model(nn.ModuleDict({"c_attn": nn.Linear(16, 48), "up": nn.Linear(16, 48)}))
        convert_(model)
        assert (model.part["c_attn"].maps, model.part["up"].maps) == (3, None)
        assert model.part["c_attn"](torch.randn(2, 16)).shape == (2, 48)

    def test_options_reach_every_layer(self):
        model = Model(nn.TransformerEncoderLayer(16, 4, 32))
        convert_(model, block="rotation", stages=2, rank=3)
        layers = [module for module in model.modules() if isinstance(module, SPMLinear)]
        assert {(layer.block, layer.stages, layer.rank) for layer in layers} == {("rotation", 2, 3)}

    def test_torchs_encoder_runs_in_training_and_evaluation(self):
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        model = Model(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
        convert_(model)
        x = torch.randn(2, 5, 16)
        model.part(x).sum().backward()
        model.eval()
        with torch.no_grad():
            assert model.part(x).shape == x.shape


class TestErrors:
    def test_a_model_that_is_a_layer_itself(self):
        with pytest.raises(ValueError, match="the model is itself a Linear"):
            convert_(nn.Linear(4, 4))
        with pytest.raises(ValueError, match="the model is itself a SPMLinear"):
            restore_(SPMLinear(4, 4))

    def test_weights_that_are_not_there_cannot_be_fitted(self):
        with pytest.raises(ValueError, match="part is on the meta device"):
            convert_(Model(nn.Linear(16, 16).to("meta")), weights="fit")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"weights": "old"}, "weights must be 'new' or 'fit', got 'old'"),
            ({"skip": "nowhere"}, "skip='nowhere' matches no module; the model has 0, 1"),
            ({"block": "round"}, "block must be one of"),
        ],
    )
    def test_leave_the_model_as_it_was(self, options, message):
        model = mlp()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=message):
            convert_(model, **options)
        torch.testing.assert_close(dict(model.state_dict()), dict(before))


def test_the_report_is_a_table():
    model = mlp()
    lines = str(convert_(model, weights="fit", fit_steps=0)).splitlines()
    assert lines[0].split() == ["module", "before", "after", "parameters", "multiply-adds", "error"]
    assert lines[1].split()[:5] == ["0", "Linear", "SPMLinear", "544", "416"]
    assert lines[3].split()[0] == "all"
    assert lines[-1].split() == ["4", "Linear", "the", "output", "head"]
    assert str(pairmix.convert_(nn.Sequential(nn.ReLU()))) == "nothing was replaced"


def test_a_converted_model_learns():
    model = mlp()
    convert_(model)
    x, y = torch.randn(64, 16), torch.randint(0, 3, (64,))
    optimizer = torch.optim.Adam(pairmix.param_groups(model, lr=1e-2))
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
