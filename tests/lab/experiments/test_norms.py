import pytest
import torch
from torch import nn

from pairmix import SPMLinear
from pairmix_lab import contenders
from pairmix_lab.experiments import norms
from pairmix_lab.experiments.norms import gradient_norm, largest_singular_value, layer_norms, matrix
from pairmix_lab.training.loop import cross_entropy

WIDTH = 12
LAYERS = ("dense", "spm", "companion", "lowrank", "monarch")


def model_of(layer):
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(WIDTH, 3))


def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(20, WIDTH, generator=generator), torch.randint(3, (20,), generator=generator)


def trained(key, **options):
    """A layer that is no longer as it started, with a bias."""
    torch.manual_seed(0)
    layer = contenders.make(key, WIDTH, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return layer


@pytest.mark.parametrize("key", LAYERS)
def test_the_matrix_of_a_layer_leaves_out_its_bias(key):
    layer = trained(key).double()
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(layer(x) - layer(torch.zeros_like(x)), x @ matrix(layer, WIDTH).T)


def test_the_matrix_of_spm_is_its_own():
    layer = trained("spm")
    torch.testing.assert_close(matrix(layer, WIDTH), layer.to_dense().detach())


def test_norms_of_a_known_matrix():
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight.copy_(torch.diag(torch.tensor([4.0, -8.0, 0.5])))
    model = nn.Sequential(layer, nn.Linear(3, 2))
    found = layer_norms(model, layer, 3, (torch.randn(5, 3), torch.zeros(5, dtype=torch.long)))
    assert (found["operator_norm"], found["condition"]) == (pytest.approx(8.0), pytest.approx(16.0))


def test_a_singular_matrix_has_no_condition():
    layer = trained("lowrank", rank=2)
    assert layer_norms(model_of(layer), layer, WIDTH, batch()).keys() == {"operator_norm", "gradient_norm"}


def test_rotations_keep_every_length():
    layer = SPMLinear(WIDTH, WIDTH, block="rotation", init="random_rotation")
    found = layer_norms(model_of(layer), layer, WIDTH, batch())
    assert (found["operator_norm"], found["condition"]) == (pytest.approx(1, abs=1e-6), pytest.approx(1, abs=1e-6))


@pytest.mark.parametrize("key", LAYERS)
def test_power_iteration_finds_the_largest_singular_value(key):
    layer = trained(key).double()
    expected = float(torch.linalg.svdvals(matrix(layer, WIDTH))[0])
    found = largest_singular_value(layer, WIDTH)
    assert found == pytest.approx(expected, rel=1e-4)
    assert found <= expected * (1 + 1e-12)


def test_power_iteration_of_nothing_is_nothing():
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.zero_()
    assert largest_singular_value(layer, 4) == 0


def test_a_wide_layer_is_measured_without_its_matrix(monkeypatch):
    layer = trained("spm")
    exact = layer_norms(model_of(layer), layer, WIDTH, batch())
    monkeypatch.setattr(norms, "LARGEST_MATRIX", WIDTH - 1)
    monkeypatch.setattr(norms, "matrix", lambda *arguments: pytest.fail("made the matrix"))
    found = layer_norms(model_of(layer), layer, WIDTH, batch())
    assert found.keys() == {"operator_norm", "gradient_norm"}
    assert found["operator_norm"] == pytest.approx(exact["operator_norm"], rel=1e-4)


@pytest.mark.parametrize("limit", [WIDTH - 1, WIDTH])
def test_the_same_layer_gives_the_same_norms_whatever_was_drawn_before(monkeypatch, limit):
    monkeypatch.setattr(norms, "LARGEST_MATRIX", limit)
    layer = trained("spm")
    model = model_of(layer)
    first = layer_norms(model, layer, WIDTH, batch())
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert layer_norms(model, layer, WIDTH, batch()) == first
    assert torch.get_rng_state().equal(state)


def test_the_gradient_is_that_of_the_layer_alone():
    layer = trained("spm")
    model = model_of(layer)
    found = gradient_norm(model, layer, batch())
    assert all(parameter.grad is None for parameter in model.parameters())
    inputs, labels = batch()
    cross_entropy(model(inputs), labels).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in layer.parameters()]).norm()
    assert found == pytest.approx(float(expected), rel=1e-5)


def test_norms_can_be_measured_in_inference_mode():
    layer = trained("spm")
    model, rows = model_of(layer), batch()
    with torch.inference_mode():
        found = layer_norms(model, layer, WIDTH, rows)
    assert found == layer_norms(model, layer, WIDTH, rows)
    assert next(layer.parameters()).dtype == torch.float32
