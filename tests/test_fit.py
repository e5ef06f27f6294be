"""Matrices become layers that are close to them."""

import math

import pytest
import torch
from torch import nn

from pairmix import Schedule, SPMLinear
from pairmix.fit import fit, fit_
from pairmix.fit.factors import factorise


def product(in_features, out_features, **options):
    """The matrix of a random layer."""
    layer = SPMLinear(in_features, out_features, bias=False, dtype=torch.float64, init="random_rotation", **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer.to_dense().detach()


def hadamard(n):
    matrix = torch.ones(1, 1)
    while len(matrix) < n:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix


def error_of(layer, matrix):
    return ((layer.to_dense().double() - matrix).norm() / matrix.norm()).item()


class TestFactorisation:
    @pytest.mark.parametrize("n", [1, 2, 4, 6, 10, 32, 96, 100, 250])
    def test_square_products_of_the_fewest_stages_are_found_exactly(self, n):
        matrix = product(n, n)
        layer, error = fit(matrix, steps=0)
        assert error < 1e-10
        assert error_of(layer, matrix) == pytest.approx(error, abs=1e-12)

    @pytest.mark.parametrize(
        ("in_features", "out_features"), [(8, 3), (3, 8), (1, 6), (6, 1), (7, 21), (3, 1), (24, 96), (96, 24)]
    )
    def test_rectangular_matrices_give_factors_of_the_right_shapes(self, in_features, out_features):
        schedule = Schedule.butterfly(max(in_features, out_features))
        coeffs, d_in, d_out = factorise(torch.randn(out_features, in_features), schedule)
        assert coeffs.shape == (schedule.stages, 4, schedule.n // 2)
        assert d_in.shape == d_out.shape == (schedule.n,)
        assert all(factor.isfinite().all() for factor in (coeffs, d_in, d_out))

    # Several mixers of the same input and a network of them: of one, three and five segments, in both precisions.
    @pytest.mark.parametrize(
        ("in_features", "out_features"),
        [(8, 16), (16, 64), (48, 96), (48, 192), (20, 40), (64, 192), (16, 8), (64, 16), (192, 48), (192, 64)],
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_rectangular_products_of_the_fewest_stages_are_found(self, in_features, out_features, dtype):
        matrix = product(in_features, out_features).to(dtype)
        assert fit(matrix, steps=0).error < 1e-5
        assert fit(matrix, stages=Schedule.butterfly(out_features).stages + 3, steps=0).error < 1e-5

    def test_a_tall_matrix_that_is_no_product_is_not_taken_for_one(self):
        assert fit(torch.randn(64, 16), steps=0).error < 1.5

    def test_a_matrix_of_zeros(self):
        layer, error = fit(torch.zeros(8, 8))
        assert error == 0
        assert not layer.to_dense().any()

    def test_more_stages_than_needed_are_the_identity(self):
        matrix = product(32, 32)
        layer, error = fit(matrix, stages=9, steps=0)
        assert error < 1e-10
        assert layer.prune_(1e-9) == [5, 6, 7, 8]


class TestFit:
    @pytest.mark.parametrize("n", [64, 256])
    def test_hadamard_matrices(self, n):
        layer, error = fit(hadamard(n))
        assert error < 1e-5
        assert layer.stages == math.log2(n)

    def test_the_reported_error_is_that_of_the_layer(self):
        matrix = torch.randn(24, 40)
        layer, error = fit(matrix, steps=30)
        assert error_of(layer, matrix) == pytest.approx(error, rel=1e-4)

    def test_refinement_gets_closer_and_more_stages_closer_still(self):
        matrix = torch.linalg.qr(torch.randn(32, 32)).Q
        errors = [fit(matrix, stages=stages, steps=steps).error for stages, steps in ((5, 0), (5, 60), (15, 60))]
        assert errors[0] > errors[1] + 0.005
        assert errors[1] > errors[2] + 0.05

    # Relative errors of the best of many fits that are on record, for matrices of this kind.
    @pytest.mark.parametrize(("stages", "known"), [(6, 0.886), (12, 0.813), (24, 0.692)])
    def test_random_orthogonal_matrices(self, stages, known):
        matrix = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(0))).Q
        assert fit(matrix, stages=stages).error < known + 0.005

    def test_odd_widths_are_refined(self):
        matrix = torch.randn(17, 17)
        assert fit(matrix, steps=50).error < fit(matrix, steps=0).error - 0.05

    def test_a_low_rank_map_takes_what_is_of_low_rank(self):
        matrix = product(32, 32) + 3 * torch.randn(32, 2).double() @ torch.randn(2, 32).double()
        alone, together = fit(matrix, steps=60).error, fit(matrix, rank=2, steps=60).error
        assert together < 0.7 * alone

    def test_typical_inputs_matter_more_than_the_matrix(self):
        matrix = torch.randn(32, 32)
        inputs = torch.randn(200, 4) @ torch.randn(4, 32)  # of four directions only
        general, special = fit(matrix, steps=100), fit(matrix, inputs=inputs, steps=100)
        of_general = (general.layer(inputs) - inputs @ matrix.T).norm() / (inputs @ matrix.T).norm()
        of_special = (special.layer(inputs) - inputs @ matrix.T).norm() / (inputs @ matrix.T).norm()
        assert of_special.item() == pytest.approx(special.error, rel=1e-3)
        assert of_special < 0.5 * of_general

    def test_rotations_stay_rotations(self):
        layer, error = fit(torch.linalg.qr(torch.randn(16, 16)).Q, block="rotation", stages=8, steps=50)
        assert layer.block == "rotation"
        assert error < 0.9

    def test_a_linear_layer_keeps_its_bias_dtype_and_device(self):
        linear = nn.Linear(16, 16, dtype=torch.float64)
        layer, _ = fit(linear, steps=5)
        torch.testing.assert_close(layer.bias, linear.bias)
        assert layer.d_in.dtype == torch.float64
        assert fit(nn.Linear(16, 16, bias=False), steps=5).layer.bias is None
        assert fit(torch.randn(8, 8), bias=torch.ones(8), steps=5).layer.bias.tolist() == [1.0] * 8

    def test_it_is_the_same_in_every_run_and_leaves_random_numbers_alone(self):
        matrix, layer = torch.randn(16, 16), SPMLinear(16, 16)
        before = torch.random.get_rng_state()
        error = fit_(layer, matrix, steps=20)
        torch.testing.assert_close(torch.random.get_rng_state(), before)
        torch.manual_seed(5)
        assert fit_(layer, matrix, steps=20) == error

    def test_several_maps_are_fitted_to_their_rows(self):
        layer = SPMLinear(16, 16, bias=False, maps=3)
        matrix = torch.cat([product(16, 16) for _ in range(3)])
        assert fit_(layer, matrix) < 1e-5
        torch.testing.assert_close(layer.to_dense().double(), matrix, rtol=1e-4, atol=1e-4)

    def test_a_progress_bar(self, capsys):
        fit(torch.randn(16, 16), steps=20, progress=True)
        assert "fit" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("weight", "options", "message"),
        [
            (torch.randn(4), {}, r"weight must be a matrix \[out_features, in_features\], got the shape \(4,\)"),
            (torch.empty(0, 4), {}, r"got the shape \(0, 4\)"),
            (torch.full((2, 2), math.nan), {}, "weight must be finite"),
            (torch.ones(2, 2, dtype=torch.int), {}, "weight must be finite floating-point numbers"),
            (torch.randn(4, 4), {"inputs": torch.randn(3, 5)}, r"inputs must have the shape \(\*, 4\), got \(3, 5\)"),
            (torch.randn(4, 4), {"steps": -1}, "steps must be at least 0, got -1"),
        ],
    )
    def test_what_cannot_be_fitted(self, weight, options, message):
        with pytest.raises(ValueError, match=message):
            fit(weight, **options)

    def test_a_module_that_is_no_linear_map(self):
        with pytest.raises(TypeError, match=r"expected an nn.Linear, .* got Conv2d"):
            fit(nn.Conv2d(3, 3, 1))

    def test_a_layer_of_another_shape(self):
        with pytest.raises(ValueError, match=r"stands for a matrix of shape \(8, 8\), got \(4, 8\)"):
            fit_(SPMLinear(8, 8), torch.randn(4, 8))
