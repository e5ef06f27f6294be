"""A layer has a description of itself in its state dict. However a checkpoint came in, another layer's is an error."""

from __future__ import annotations

import copy
import json
import pickle
import tracemalloc

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.optim import swa_utils

from pairmix import SPMGRU, Schedule, SPMGRUCell, SPMLinear, SPMMultiheadAttention
from pairmix.nn import description

NEITHER = "SPMLinear: its parameters were neither initialised nor loaded: call reset_parameters"
ANOTHER = r"the checkpoint is of another layer: schedule is Schedule.random\(n=8, stages=3, seed=1\) there and"
X = torch.linspace(-1, 1, 16).reshape(2, 8)


def made(seed=0, **options):
    return SPMLinear(8, 8, schedule=Schedule.random(8, 3, seed=seed), **options)


def text_of(layer):
    return bytes(layer.description.tolist()).rstrip(b"\0").decode()


def as_bytes(text):
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def described(layer, **changes):
    """Its state dict, with another schedule in the description."""
    meaning = json.loads(text_of(layer))
    meaning["schedule"] |= changes
    return {**layer.state_dict(), "description": as_bytes(json.dumps(meaning))}


def of_version_0_2(layer):
    """The state dict that older versions wrote."""
    state = layer.state_dict()
    residual = {"residual": layer.residual}  # for even widths, too
    meaning = json.loads(bytes(state.pop("description").tolist()).rstrip(b"\0")) | residual
    return {**state, "_extra_state": as_bytes(json.dumps(meaning))}


def replaced(layer, other):
    """As loaders do that put tensors in the place of others."""
    layer._buffers["description"] = other.description.clone()
    return layer


def overwritten(layer, other):
    """As loaders do that write to the tensors of a state dict."""
    layer.state_dict()["description"].copy_(other.description)
    return layer


class TestWhatIsStored:
    def test_it_is_one_buffer_of_one_size(self):
        for layer in (made(), SPMLinear(7, 5, block="rotation"), SPMLinear(512, 300, maps=3, stages=40)):
            assert [(name, buffer.dtype, buffer.shape) for name, buffer in layer.named_buffers()] == [
                ("description", torch.uint8, (description.SIZE,))
            ]
            assert "_extra_state" not in layer.state_dict()

    def test_it_says_what_the_parameters_mean(self):
        layer = SPMLinear(5, 7, schedule=Schedule.random(7, 4, seed=3))
        digest = layer.schedule.digest
        schedule = {"kind": "random", "n": 7, "stages": 4, "digest": digest, "seed": 3}
        sizes = {"in_features": 5, "out_features": 7, "maps": None, "block": "general"}
        assert json.loads(text_of(layer)) == {**sizes, "schedule": schedule, "residual": "scale"}
        assert "residual" not in json.loads(text_of(made()))
        layer = SPMLinear(1023, 768, schedule=Schedule.random_blocks(1023, seed=2**16, block_size=8))
        told = json.loads(text_of(layer))["schedule"]
        assert told == layer.schedule.to_dict()

    def test_the_largest_fits(self):
        schedule = {"kind": "from_pairs", "n": 10**10, "stages": 10**6, "digest": "f" * 64}
        sizes = {"in_features": 10**10, "out_features": 10**10, "maps": 1000, "block": "rotation"}
        for drawn in ({}, {"seed": 2**400}, {"kind": "random_blocks", "seed": 2**60, "block_size": 2**20}):
            meaning = {**sizes, "schedule": {**schedule, **drawn}, "residual": "scale"}
            stored = description.encoded(meaning)
            assert stored.shape == (description.SIZE,)
            assert description.differences(stored, meaning) == []

    def test_deeper_and_shallower_layers_say_so(self):
        layer = SPMLinear(8, 8)
        layer.deepen_(2)
        SPMLinear(8, 8, stages=5).load_state_dict(layer.state_dict())
        assert layer.prune_() == [3, 4]
        SPMLinear(8, 8).load_state_dict(layer.state_dict())
        assert layer(X).shape == (2, 8)


class TestLoadStateDict:
    @pytest.mark.parametrize("assign", [False, True])
    def test_another_layer_is_refused_before_anything_is_loaded(self, assign):
        model, other = (nn.Sequential(nn.ReLU(), made(seed)) for seed in (0, 1))
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(RuntimeError, match=f"1: {ANOTHER}"):
            model.load_state_dict(other.state_dict(), assign=assign)
        assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
        model(X)

    def test_a_huge_schedule_is_not_built(self, monkeypatch):
        layer = SPMLinear(8, 8)
        state = described(layer, kind="random", n=2**22, stages=100, seed=0)
        monkeypatch.setattr(Schedule, "from_dict", None)
        tracemalloc.start()
        with pytest.raises(RuntimeError, match=r"schedule is Schedule.random\(n=4194304, stages=100, seed=0\) there"):
            layer.load_state_dict(state)
        assert tracemalloc.get_traced_memory()[1] < 2**20
        tracemalloc.stop()

    @pytest.mark.parametrize(
        "text",
        [
            "[" * 1100,
            '{"schedule":' * 100 + "1" + "}" * 100,
            '{"schedule": {"n": 8}}',
            '{"schedule": null}',
            "[]",
            "7",
            "nul",
            "\x00\x01",
            "\x00",
            "",
        ],
    )
    def test_what_is_no_description_is_an_error(self, text):
        layer = SPMLinear(8, 8)
        for name in ("description", "_extra_state"):
            with pytest.raises(RuntimeError, match="its description cannot be read"):
                layer.load_state_dict({**layer.state_dict(), name: as_bytes(text)})

    def test_a_long_description_is_not_parsed(self):
        layer = SPMLinear(8, 8)
        with pytest.raises(RuntimeError, match="its description has 100,000 bytes, that of this layer at most"):
            layer.load_state_dict({**layer.state_dict(), "description": as_bytes("[" * 100_000)})

    @pytest.mark.parametrize("state", [5, "text", torch.zeros(3), torch.zeros(2, 2, dtype=torch.uint8)])
    def test_what_is_no_vector_of_bytes_is_an_error(self, state):
        layer = SPMLinear(8, 8)
        with pytest.raises(RuntimeError, match="its description must be a vector of bytes"):
            layer.load_state_dict({**layer.state_dict(), "description": state})

    def test_own_pairs_are_told_apart_by_their_digest(self):
        one, other = ([[(0, 1), (2, 3)]], [[(0, 2), (1, 3)]])
        first, second = (SPMLinear(4, 4, schedule=Schedule.from_pairs(4, pairs)) for pairs in (one, other))
        with pytest.raises(RuntimeError, match=r"Schedule.from_pairs\(n=4, stages=1, digest='\w+...\w+'\) there"):
            second.load_state_dict(first.state_dict())
        same = SPMLinear(4, 4, schedule=Schedule.from_pairs(4, one))
        same.load_state_dict(first.state_dict())
        assert same.coeffs.equal(first.coeffs)

    @pytest.mark.parametrize("n", [8, 2000])
    def test_equal_pairs_however_they_were_made(self, n):
        butterfly = SPMLinear(n, n)
        pairs = butterfly.schedule.pairs.transpose(0, 2, 1)
        own = SPMLinear(n, n, schedule=Schedule.from_pairs(n, pairs))
        own.load_state_dict(butterfly.state_dict())
        butterfly.load_state_dict(own.state_dict())


class TestOlderFiles:
    @pytest.mark.parametrize("assign", [False, True])
    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_a_state_dict_of_version_0_2(self, device, assign):
        stored = made()
        layer = made(device=device)
        if device == "meta" and not assign:
            layer.to_empty(device="cpu")
        assert layer.load_state_dict(of_version_0_2(stored), assign=assign) == ([], [])
        assert layer(X).equal(stored(X))
        assert layer.description.equal(stored.description)

    def test_of_another_layer(self):
        with pytest.raises(RuntimeError, match=f"SPMLinear: {ANOTHER}"):
            made(0).load_state_dict(of_version_0_2(made(1)))

    def test_both_names_are_compared(self):
        with pytest.raises(RuntimeError, match=ANOTHER):
            made(0).load_state_dict({**made(0).state_dict(), **of_version_0_2(made(1))})

    def test_numbers_without_a_description(self):
        numbers = dict(made().named_parameters())
        with pytest.raises(RuntimeError, match=r'Missing key.*"description"'):
            made().load_state_dict(numbers)
        layer = made(device="meta")
        missing, unexpected = layer.load_state_dict(numbers, strict=False, assign=True)
        assert (missing, unexpected) == (["description"], [])
        assert layer(X).shape == (2, 8)
        made().load_state_dict(layer.state_dict())

    def test_some_of_the_numbers_leave_the_layer_without_a_description(self):
        layer = made(device="meta").to_empty(device="cpu")
        layer.description.fill_(1)
        layer.load_state_dict({"d_in": torch.ones(8)}, strict=False)
        with pytest.raises(RuntimeError, match=NEITHER):
            layer(X)

    def test_a_layer_that_version_0_2_pickled(self):
        layer = made()
        older = copy.copy(layer)
        older.__dict__ = {key: value for key, value in layer.__dict__.items() if not key.startswith("_compared")}
        older._buffers = {}
        unpickled = pickle.loads(pickle.dumps(older))
        assert unpickled(X).equal(layer(X))
        assert unpickled.description.equal(layer.description)


READERS = {
    "forward": lambda layer: layer(X),
    "to_dense": lambda layer: layer.to_dense(),
    "operator": lambda layer: layer.operator(),
    "compile": lambda layer: torch.compile(layer, backend="eager", fullgraph=True)(X),
    "export": lambda layer: torch.export.export(layer, (X,)),
    "strict export": lambda layer: torch.export.export(layer, (X,), strict=True),
    "jit": lambda layer: torch.jit.trace(layer, (X,)),
    "vmap": lambda layer: torch.vmap(layer)(X),
    "functional_call": lambda layer: torch.func.functional_call(layer, dict(layer.named_parameters()), (X,)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
class TestOtherLoaders:
    @pytest.mark.parametrize("load", [replaced, overwritten])
    @pytest.mark.parametrize("is_called_before", [False, True])
    def test_another_layer_is_an_error_at_the_first_use(self, read, load, is_called_before):
        torch._dynamo.reset()
        layer = made(0)
        if is_called_before:
            layer(X)
        for _ in range(2):  # and at every later one
            with pytest.raises(RuntimeError, match=f"SPMLinear: {ANOTHER}"):
                read(load(layer, made(1)))
        read(load(layer, made(0)))

    def test_what_was_never_loaded_is_an_error(self, read):
        torch._dynamo.reset()
        layer = made(device="meta").to_empty(device="cpu")
        layer.description.fill_(255)
        with pytest.raises(RuntimeError, match=NEITHER):
            read(layer)
        layer.reset_parameters()
        read(layer)


def test_layers_that_read_the_parameters_of_others():
    gru, cell, attention = SPMGRU(8, 8), SPMGRUCell(8, 8), SPMMultiheadAttention(8, 2)
    query, key = torch.randn(3, 2, 8), torch.randn(4, 2, 8)
    uses = {
        gru.hh_l0: lambda: gru(query),
        cell.hh: lambda: cell(X),
        attention.in_proj: lambda: attention(query, key, key),
    }
    for inner, use in uses.items():
        use()
        replaced(inner, made(1))
        with pytest.raises(RuntimeError, match="the checkpoint is of another layer: maps is None there and 3 here"):
            use()


def count_comparisons(monkeypatch):
    calls = []
    compare = description.differences
    monkeypatch.setattr(description, "differences", lambda *given: calls.append(given) or compare(*given))
    return calls


def test_it_is_read_once_for_every_load(monkeypatch):
    calls = count_comparisons(monkeypatch)
    layer = made()
    layer(X), layer.to_dense()
    assert len(calls) == 0
    for _ in range(2):
        overwritten(layer, made())
        before = len(calls)
        for _ in range(3):
            layer(X)
        assert len(calls) == before + 1


def test_compiled_code_does_not_contain_it():
    graphs = []
    compiled = torch.compile(made(), fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)
    compiled(X)
    (graph,) = graphs
    assert "description" not in graph.code
    assert "version" not in graph.code


class TestTools:
    def test_dtypes(self):
        layer = made().half().to(torch.float64)
        assert layer.description.dtype == torch.uint8
        assert layer(X.double()).dtype == torch.float64

    def test_meta(self):
        layer = made(device="meta")
        assert layer(X.to("meta")).device.type == "meta"
        layer.to_empty(device="cpu").load_state_dict(made().state_dict())
        layer(X)
        assert layer.to("meta").description.is_meta

    def test_copies_are_compared_on_their_own(self):
        layer = made()
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), made().share_memory()):
            overwritten(other, made(1))
            with pytest.raises(RuntimeError, match=ANOTHER):
                other(X)
        layer(X)

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"use_buffers": True},
            {"use_buffers": True, "multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
            {"use_buffers": True, "avg_fn": swa_utils.get_ema_avg_fn(0.9)},
        ],
    )
    def test_averages_of_models(self, options):
        model = nn.Sequential(made())
        averaged = swa_utils.AveragedModel(model, **options)
        for _ in range(5):
            averaged.update_parameters(model)
        model.load_state_dict(averaged.module.state_dict())
        averaged.update_parameters(model)
        assert averaged(X).shape == (2, 8)

    def test_an_ensemble(self):
        models = [made() for _ in range(3)]
        expected = torch.stack([model(X) for model in models])
        state = torch.func.stack_module_state(models)
        for base in (models[0], copy.deepcopy(models[0]).to("meta")):
            run = torch.vmap(lambda state, base=base: torch.func.functional_call(base, state, (X,)))
            torch.testing.assert_close(run(state), expected)

    def test_functional_call_with_the_buffers_of_another_layer(self):
        layer, other = made(0), made(1)
        with pytest.raises(RuntimeError, match=ANOTHER):
            torch.func.functional_call(layer, other.state_dict(), (X,))
        layer(X)

    def test_inference_mode(self):
        with torch.inference_mode():
            layer = made()
            layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()}, assign=True)
            layer(X), layer(X)
            copy.deepcopy(layer)(X)
            replaced(layer, made(1))
            with pytest.raises(RuntimeError, match=ANOTHER):
                layer(X)

    def test_parametrizations(self):
        class Doubled(nn.Module):
            def forward(self, values):
                return 2 * values

        layer = made()
        parametrize.register_parametrization(layer, "d_in", Doubled())
        layer.load_state_dict(layer.state_dict())
        layer(X)
        replaced(layer, made(1))
        with pytest.raises(RuntimeError, match=ANOTHER):
            layer(X)

    def test_distributed_data_parallel(self, monkeypatch):
        calls = count_comparisons(monkeypatch)
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
        try:
            model = DistributedDataParallel(made())
            for _ in range(3):
                model(X).sum().backward()
            assert len(calls) <= 1  # the broadcast of the buffers at every forward is no load
            overwritten(model.module, made(1))
            with pytest.raises(RuntimeError, match=ANOTHER):
                model(X)
        finally:
            torch.distributed.destroy_process_group()
