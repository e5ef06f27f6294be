"""What rotations before and after a layer compute, and that they work with the rest of torch."""

import copy
import io

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import oracle
from adapted import LAYERS, SIZES, Quantised, matrix, network, state, turn, turned
from pairmix import Schedule, adapters, param_groups
from pairmix.adapters import Rotations


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("where", ["input", "output"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_output_and_gradients_are_those_of_the_matrix(sizes, layer, where, scale, dtype):
    model = nn.Sequential(LAYERS[layer](*sizes)).to(dtype)
    adapters.add(model, ["0"], where=where, scale=scale, stages=5)
    turn(model)
    x = torch.randn(4, sizes[0], dtype=dtype, requires_grad=True)
    grad = torch.randn(4, sizes[1], dtype=dtype)
    rotations = model[0].chain("default")
    parameters = dict(rotations.named_parameters())

    def plain(computed):
        inputs = {"x": x, **parameters}
        inputs = {name: value.detach().to(computed).requires_grad_() for name, value in inputs.items()}
        arguments = oracle.Arguments(
            torch.eye(rotations.schedule.n, dtype=computed), inputs["angles"], None, inputs.get("scale"), None, None,
            schedule=rotations.schedule, out_features=rotations.schedule.n,
        )  # fmt: skip
        mixing = oracle.output(arguments).to(computed).T
        weight = model[0].weight.detach().to(computed)
        weight = weight.T if layer == "Conv1D" else weight
        bias = 0 if model[0].bias is None else model[0].bias.detach().to(computed)
        y = inputs["x"] @ (weight @ mixing if where == "input" else mixing @ weight).T + bias
        found = torch.autograd.grad(y, list(inputs.values()), grad.to(computed))
        return {"y": y, **dict(zip(inputs, found, strict=True))}

    y = model(x)
    found = torch.autograd.grad(y, [x, *parameters.values()], grad)
    oracle.assert_agrees({"y": y, **dict(zip(["x", *parameters], found, strict=True))}, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("where", ["input", "output"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_model_computes_the_same_before_training_bit_for_bit(layer, where, dtype):
    model = nn.Sequential(LAYERS[layer](30, 42)).to(dtype)
    x = torch.randn(9, 30, dtype=dtype)
    before = model(x)
    adapters.add(model, ["0"], where=where, scale=True)
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("where", ["input", "output"])
def test_autocast(where):
    model = network()
    x = torch.randn(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        before = model(x)
        adapters.add(model, ["0", "2"], where=where)
        assert torch.equal(model(x), before)
        y = turn(model)(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    exact = model(x)
    assert (y - exact).abs().max() <= 16 * torch.finfo(torch.bfloat16).eps * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_layer_has_rotations_in_float32(dtype):
    model = nn.Sequential(nn.Linear(16, 16)).to(dtype)
    adapters.add(model, ["0"], scale=True)
    turn(model)
    x = torch.randn(4, 16, dtype=dtype, requires_grad=True)
    rotations = model[0].chain("default")
    mixed = rotations(x)
    assert mixed.dtype == dtype
    rest = (None, rotations.scale, None, None)
    arguments = oracle.Arguments(x, rotations.angles, *rest, schedule=rotations.schedule, out_features=16)
    answers = oracle.answers(arguments, torch.ones_like(mixed))
    oracle.assert_matches(mixed, answers["output"])
    mixed.backward(torch.ones_like(mixed))
    assert rotations.angles.grad.dtype == torch.float32
    oracle.assert_matches(rotations.angles.grad, answers["blocks"], "angles")
    oracle.assert_matches(x.grad, answers["x"], "x")


@pytest.mark.parametrize("where", ["input", "output"])
def test_backward_keeps_an_input_and_no_matrix(where):
    width, rows = 64, 3
    model = nn.Sequential(nn.Linear(width, width, bias=False))
    adapters.add(model, ["0"], where=where, scale=True)
    kept = {}

    def note(tensor):
        kept[tensor.data_ptr()] = tensor
        return tensor

    x = torch.randn(rows, width, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(x)
    owned = {parameter.data_ptr() for parameter in model.parameters()}
    assert sum(tensor.numel() for address, tensor in kept.items() if address not in owned) == rows * width


def test_training_changes_the_adapter_alone():
    model = network()
    adapters.add(model, ["0", "2"], scale=True)
    before = state(model)
    x, y = torch.randn(32, 16), torch.randn(32, 16)
    optimizer = torch.optim.Adam(param_groups(model, 1e-2))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.95 * losses[0]
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {f"{layer}.rotations.default.{name}" for layer in "02" for name in ("angles", "scale")}


@pytest.mark.parametrize("where", ["input", "output"])
def test_a_quantised_layer(where):
    model = nn.Sequential(Quantised(12, 20))
    x = torch.randn(3, 12, requires_grad=True)
    before = model(x)
    adapters.add(model, ["0"], where=where)
    assert torch.equal(model(x), before)
    turn(model)
    mixing, weight = matrix(model[0].chain("default")), model[0].weight.double() / 127
    exact = x.double() @ (weight @ mixing if where == "input" else mixing @ weight).T + model[0].bias
    torch.testing.assert_close(model(x), exact.float())
    model(x).sum().backward()
    assert adapters.parameters(model)[0].grad.any()


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
def test_a_quantised_layer_of_torch():
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(12, 20)), {nn.Linear}, torch.qint8)
    x = torch.randn(3, 12)
    before = model(x)
    adapters.add(model, ["0"], where="output")
    assert torch.equal(model(x), before)
    turn(model)(x).sum().backward()
    assert adapters.parameters(model)[0].grad.any()
    with pytest.raises(ValueError, match="nothing can be merged into it"):
        adapters.merge_(model)


@pytest.mark.parametrize("where", ["input", "output"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compile(where, dtype):
    model = network().to(dtype)
    adapters.add(model, ["0", "2"], where=where, scale=True)
    turn(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 16, dtype=dtype)
    y, exact = compiled(x), model(x)
    torch.testing.assert_close(y, exact)
    y.sum().backward()
    found = [parameter.grad.clone() for parameter in adapters.parameters(model)]
    model.zero_grad()
    exact.sum().backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in adapters.parameters(model)])
    assert adapters.names(compiled) == ["default"]
    with adapters.off(compiled):
        torch.testing.assert_close(compiled(x), model(x))


def test_copies_and_pickles():
    model, x = turned(), torch.randn(3, 16)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for other in (copy.deepcopy(model), torch.load(stored, weights_only=False)):
        assert torch.equal(other(x), model(x))
        adapters.use(other, None)
        assert not torch.equal(other(x), model(x))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant):
    model, x = turned(), torch.randn(3, 16, requires_grad=True)
    model(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in adapters.parameters(model)]
    model.zero_grad()
    checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    torch.testing.assert_close([parameter.grad for parameter in adapters.parameters(model)], expected)


def test_distributed(tmp_path):
    distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, x = turned(), torch.randn(3, 16)
        adapters.add(model, ["0"], name="other")  # of which no parameter is used
        adapters.use(model, "default")
        wrapped = DistributedDataParallel(model)
        for _ in range(2):
            wrapped(x).sum().backward()
        assert all(parameter.grad is not None for parameter in adapters.parameters(wrapped))
        adapters.save(wrapped, tmp_path / "adapter.safetensors")
        other = network()
        adapters.load(other, tmp_path / "adapter.safetensors")
        assert torch.equal(adapters.parameters(other)[0], adapters.parameters(model)[0])
    finally:
        distributed.destroy_process_group()


def test_param_groups():
    model = turned(scale=True, keep_trainable=["2.weight"])
    groups = param_groups(model, 1e-3, 0.1)
    assert [(group["name"], group["lr"], group["weight_decay"], len(group["params"])) for group in groups] == [
        ("adapters", 1e-3, 0.0, 4),
        ("matrices", 1e-3, 0.1, 1),
    ]
    assert groups.frozen == 3


def test_state_dicts_know_what_they_are_of():
    model, other = turned(), network()
    adapters.add(other, ["0", "2"])
    other.load_state_dict(model.state_dict())
    x = torch.randn(3, 16)
    assert torch.equal(other(x), model(x))
    for options in ({"where": "output"}, {"schedule": "brick", "stages": 4}):
        different = network()
        adapters.add(different, ["0", "2"], **options)
        with pytest.raises(
            RuntimeError, match=r"0\.rotations\.default: the checkpoint is of another layer: (where|schedule) is"
        ):
            different.load_state_dict(model.state_dict(), strict=False)
    adapters.merge_(model)
    with pytest.raises(RuntimeError, match="merged is True there and False here"):
        other.load_state_dict(model.state_dict())


@pytest.mark.parametrize("difference", ["schedule", "merged", "not merged"])
def test_what_another_loader_wrote_is_compared_at_the_first_use(difference):
    """Such as those of transformers and accelerate, which copy tensors by name and compare shapes only."""
    model, other = turned(stages=4), network()
    adapters.add(other, ["0", "2"], stages=4, schedule="random" if difference == "schedule" else "butterfly")
    if difference == "merged":
        adapters.merge_(model)
    elif difference == "not merged":
        adapters.merge_(other)
    with torch.no_grad():
        for name, tensor in other.state_dict(keep_vars=True).items():
            tensor.copy_(model.state_dict()[name])
    with pytest.raises(RuntimeError, match=f"the checkpoint is of another layer: {difference.split()[-1]} is"):
        other(torch.randn(3, 16))


def test_rotations_alone():
    rotations = Rotations(Schedule.butterfly(6))
    x = torch.randn(2, 6)
    assert torch.equal(rotations(x), x)
    nn.init.normal_(rotations.angles)
    rounding = oracle.rounding_of_rotations(rotations.schedule.stages, torch.float32)
    torch.testing.assert_close(rotations(x).norm(dim=-1), x.norm(dim=-1), rtol=rounding, atol=0)
    rotations.reset_parameters()
    assert torch.equal(rotations(x), x)
