"""Groups of parameters: every parameter in the right one, whatever the model is wrapped in."""

import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from pairmix import SPMGRU, SPMLinear, SPMTransformerEncoderLayer, param_groups
from pairmix.optim import embedding_rate, spm_rate


class Model(nn.Module):
    """As in nanoGPT: a table that is also the head, a norm, and an SPM layer between them."""

    def __init__(self, layer=None):
        super().__init__()
        self.table = nn.Embedding(11, 64)
        self.norm = nn.LayerNorm(64)
        self.mixer = SPMLinear(64, 64, rank=2) if layer is None else layer
        self.head = nn.Linear(64, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.mixer(self.norm(self.table(x))))


def named(groups, model):
    """For every parameter's name its group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [(names[id(parameter)], group) for group in groups for parameter in group["params"]]
    assert len(found) == len(dict(found)), "a parameter is in two groups"
    return dict(found)


def test_rates_and_decay():
    model = Model()
    groups = named(param_groups(model, 1e-3, 0.1), model)
    assert groups.keys() == {name for name, _ in model.named_parameters()}
    own = dict.fromkeys((f"mixer.{name}" for name in ("coeffs", "d_in", "d_out", "bias")), spm_rate(model.mixer, 1e-3))
    own["table.weight"] = embedding_rate(64, 1e-3)
    for name, group in groups.items():
        rate = own.get(name, 1e-3)
        assert group["lr"] == rate, name
        assert group["lr_scale"] == pytest.approx(rate / 1e-3), name
        decays = name in ("table.weight", "mixer.down", "mixer.up")
        assert group["weight_decay"] == (0.1 if decays else 0), name


@pytest.mark.parametrize("make", [lambda: SPMGRU(8, 8), lambda: SPMTransformerEncoderLayer(64, 1, 128)])
def test_biases_of_several_maps_do_not_decay(make):
    model = make()
    groups = named(param_groups(model, 1e-3, 0.1), model)
    assert groups.keys() == {name for name, _ in model.named_parameters()}
    assert not any(group["weight_decay"] for group in groups.values())


def test_a_dense_model_is_as_usual():
    model = nn.Sequential(nn.Embedding(9, 512), nn.Linear(512, 4), nn.LayerNorm(4))
    groups = param_groups(model, 1e-3, 0.1)
    assert {group["lr"] for group in groups} == {1e-3}
    assert {name: group["weight_decay"] for name, group in named(groups, model).items()} == {
        "0.weight": 0.1, "1.weight": 0.1, "1.bias": 0, "2.weight": 0, "2.bias": 0,
    }  # fmt: skip


def test_frozen_parameters_are_left_out_and_said():
    model = Model()
    model.mixer.requires_grad_(False)
    groups = param_groups(model, 1e-3)
    assert named(groups, model).keys() == {"table.weight", "norm.weight", "norm.bias"}
    assert repr(groups).endswith("frozen, in no group: 6 tensors")


def test_the_rule():
    def scale(*features, lr=1e-4, **options):
        return spm_rate(SPMLinear(*features, **options), lr) / lr

    assert [scale(n, n) for n in (256, 1024, 4096)] == pytest.approx([12.1, 21.6, 39.4], rel=0.01)
    assert scale(1024, 1024, stages=40) == pytest.approx(scale(1024, 1024, stages=10) / 2)
    assert scale(256, 1024) == pytest.approx(scale(1024, 256))
    assert scale(8, 8, stages=0) == scale(8, 8, stages=1)
    for init in ("identity", "near_identity"):  # a chain that is to stay there moves slowly, however wide it is
        wide, narrow, narrowest = (scale(n, n, stages=4, init=init) for n in (4096, 256, 64))
        assert wide == pytest.approx(narrow) == pytest.approx(256 / 60)
        assert narrowest == pytest.approx(narrow / 4)
    assert spm_rate(SPMLinear(1024, 1024), 1e-3, "sgd") == 2e-3


def test_many_layers_learn_more_slowly_than_one():
    layers = [SPMLinear(64, 64) for _ in range(16)]
    (one,), (all_of_them,) = param_groups(layers[0], 1e-3), param_groups(nn.Sequential(*layers, layers[3]), 1e-3)
    assert all_of_them["lr"] == pytest.approx(one["lr"] / 2)


def test_no_rate_is_so_large_that_it_diverges():
    layer = SPMLinear(4096, 4096, stages=16)
    assert spm_rate(layer, 1e-2) == spm_rate(layer, 1.0) == 0.06 / 4
    (group,) = param_groups(layer, 1e-2)
    assert group["lr_scale"] == pytest.approx(1.5)


def test_embeddings():
    rates = [embedding_rate(d, 1e-3) for d in (1, 25, 625, 10**6)]
    assert rates == pytest.approx([2.56e-3, 12.8e-3, 64e-3, 0.1])
    assert embedding_rate(1000, 0.5) == 0.5  # never below the rate of the rest
    model = nn.Sequential(nn.EmbeddingBag(9, 256), SPMLinear(256, 256))
    for arguments, scale in (({}, 2.56 * 16), ({"embedding_scale": 3.0}, 3), ({"optimizer": "sgd"}, 1)):
        group = named(param_groups(model, 1e-3, **arguments), model)["0.weight"]
        assert (group["name"], group["lr_scale"]) == ("embeddings", pytest.approx(scale))


def test_what_is_printed():
    lines = repr(param_groups(Model(), 1e-3, 0.1)).splitlines()
    assert lines[0].split() == ["rate", "times", "lr", "decay", "tensors", "numbers", "what"]
    assert any(line.endswith("SPM, width 64, 6 stages") for line in lines)
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [("adam", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD), ("adam", torch.optim.NAdam)],
)
def test_any_optimizer_and_scheduler_takes_them(kind, optimizer):
    torch.manual_seed(0)
    model = Model()
    made = optimizer(param_groups(model, 1e-2, optimizer=kind))
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):
        made.zero_grad()
        model(torch.arange(11)).logsumexp(-1).sum().backward()
        made.step()
        schedule.step()
    assert all((old != new).any() for old, new in zip(before, model.parameters(), strict=True))
    for group in made.param_groups:
        assert group["lr"] == pytest.approx(1e-2 * group["lr_scale"] / 3)


def test_a_stored_optimizer_goes_on():
    model = Model()
    made = torch.optim.AdamW(param_groups(model, 1e-3, 0.1))
    model(torch.arange(11)).sum().backward()
    made.step()
    other = torch.optim.AdamW(param_groups(model, 1e-3, 0.1))
    other.load_state_dict(made.state_dict())
    assert [group["lr_scale"] for group in other.param_groups] == [group["lr_scale"] for group in made.param_groups]


def test_a_compiled_model():
    model = Model()
    compiled = torch.compile(model, backend="eager")
    assert named(param_groups(compiled, 1e-3), model).keys() == {name for name, _ in model.named_parameters()}


WRAPPED = """
import os, sys
import torch
from torch import distributed, nn
from pairmix import SPMLinear, param_groups

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
model = nn.Sequential(SPMLinear(64, 64), nn.ReLU(), nn.Linear(64, 3))
if sys.argv[1] == "ddp":
    wrapped = nn.parallel.DistributedDataParallel(model)
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model[0], mesh=mesh)
    wrapped = fully_shard(model, mesh=mesh)
groups = param_groups(wrapped, 1e-3, 0.1)
made = torch.optim.AdamW(groups)
wrapped(torch.randn(5, 64)).sum().backward()
made.step()
print(sorted((group["name"], len(group["params"])) for group in groups), flush=True)
distributed.destroy_process_group()
os._exit(0)  # a thread of gloo may still hold a tensor: with torch 2.13 a process that ends meanwhile is aborted
"""


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_wrapped_models(wrapper):
    done = subprocess.run([sys.executable, "-c", WRAPPED, wrapper], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[('SPM, width 64, 6 stages', 4), ('matrices', 1), ('vectors and scalars', 1)]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1}, "lr must be a number of at least 0, got -1"),
        ({"lr": math.nan}, "lr must be a number of at least 0, got nan"),
        ({"lr": 1e-3, "weight_decay": -0.1}, r"weight_decay must be a number of at least 0, got -0\.1"),
        ({"lr": 1e-3, "embedding_scale": -2}, "embedding_scale must be a number of at least 0, got -2"),
        ({"lr": 1e-3, "optimizer": "lbfgs"}, "optimizer must be 'adam' or 'sgd', got 'lbfgs'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        param_groups(Model(), **arguments)
