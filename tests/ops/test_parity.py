"""Every implementation equals the definition: the output and all gradients."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from kernels import using
from pairmix import Schedule
from pairmix.functional import spm

BLOCKS = ["general", "rotation"]
WIDTHS = [1, 2, 3, 5, 7, 8, 12, 31, 64, 97, 100, 255, 256, 1000]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SCHEDULES = {
    "butterfly": Schedule.butterfly,
    "brick": Schedule.brick,
    "random": Schedule.random,
    "random_blocks": Schedule.random_blocks,
    "from_pairs": lambda n, stages: Schedule.from_pairs(
        n, Schedule.random(n, stages, seed=7).pairs.transpose(0, 2, 1)[..., ::-1]
    ),
}
RECTANGLES = [(1, 8), (8, 1), (1, 7), (7, 1), (3, 7), (7, 3), (4, 12), (12, 4), (5, 64), (64, 5), (97, 100), (100, 97)]


def check(arguments, builds, grad=None):
    """Compare the output and every gradient of all implementations with the oracle."""
    a, dtype = arguments, arguments.x.dtype
    if grad is None:
        shape = (*a.x.shape[:-1], a.out_features)
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    answers = oracle.answers(a, grad)
    options = {"d_in": a.d_in, "d_out": a.d_out, "bias": a.bias, "residual_scale": a.residual_scale}
    for build in builds:
        with using(build) as impl:
            y = spm(a.x, a.blocks, a.schedule, **options, out_features=a.out_features, impl=impl)
            results = {"output": y.detach(), **oracle.gradients(y, a, grad)}
        for name, actual in results.items():
            assert actual.dtype == dtype, f"{build}: {name}"
            oracle.assert_matches(actual, answers[name], f"{build}: {name}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("n", WIDTHS)
def test_square(n, kind, block, dtype, builds):
    log = (n - 1).bit_length()
    for stages, residual in product(sorted({0, 1, 3, log, 2 * log}), ["scale", "pass"] if n % 2 else ["pass"]):
        schedule = SCHEDULES[kind](n, stages)
        check(oracle.random_arguments(schedule, block, dtype=dtype, residual=residual, leading=(3,)), builds)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("in_features", "out_features"), RECTANGLES)
def test_rectangular(in_features, out_features, block, dtype, builds):
    for kind, residual in product(SCHEDULES, ["scale", "pass"]):
        schedule = SCHEDULES[kind](max(in_features, out_features), 4)
        arguments = oracle.random_arguments(
            schedule, block, in_features=in_features, out_features=out_features, dtype=dtype, residual=residual
        )
        check(arguments, builds)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33, 130])
@pytest.mark.parametrize("n", [6, 12, 63, 64, 100])
@pytest.mark.parametrize("block", BLOCKS)
def test_batches_that_fill_tiles_or_not(block, n, rows, builds):
    for dtype, kind in product((torch.float32, torch.float64), ("butterfly", "random", "random_blocks")):
        check(oracle.random_arguments(SCHEDULES[kind](n, 7), block, leading=(rows,), dtype=dtype), builds)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("in_features", "out_features"), [(16, 64), (64, 16), (32, 96), (96, 32), (16, 32)])
def test_a_width_that_is_a_multiple_of_the_features(in_features, out_features, block, dtype, builds):
    """Then kernels can repeat and sum up whole vectors."""
    n = {16: 64, 32: 96}[min(in_features, out_features)]
    for kind, rows in product(("butterfly", "random"), (3, 21)):
        ends = {"in_features": in_features, "out_features": out_features}
        check(oracle.random_arguments(SCHEDULES[kind](n, 8), block, leading=(rows,), dtype=dtype, **ends), builds)


@pytest.mark.parametrize("in_features", [1, 3, 10])
@pytest.mark.parametrize("out_features", [1, 4, 10])
def test_wider_than_both_ends(in_features, out_features, builds):
    arguments = oracle.random_arguments(Schedule.butterfly(10), in_features=in_features, out_features=out_features)
    check(arguments, builds)


@pytest.mark.parametrize("leading", [(), (0,), (1,), (4,), (2, 3), (2, 0, 3), (1, 2, 1, 2)], ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_leading_dimensions(leading, block, builds):
    check(oracle.random_arguments(Schedule.butterfly(7), block, leading=leading, in_features=5), builds)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_memory_layouts_of_x(block, dtype, builds):
    arguments = oracle.random_arguments(Schedule.butterfly(12), block, leading=(4, 6), dtype=dtype)
    values = arguments.x.detach()
    padded = torch.full((8, 6, 30), torch.nan, dtype=dtype)
    padded[::2, :, 1:25:2] = values
    layouts = {
        "transposed": values.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "strided": padded[::2, :, 1:25:2],
        "batch transposed": values.transpose(0, 1).contiguous().transpose(0, 1),
        "expanded": values[:1].expand(4, 6, 12),
    }
    for layout in layouts.values():
        assert not layout.is_contiguous()
        arguments.x = layout.requires_grad_() if layout.is_leaf else layout.detach().requires_grad_()
        check(arguments, builds)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_gradient_that_is_expanded_or_strided(block, builds):
    arguments = oracle.random_arguments(Schedule.butterfly(6), block)
    values = torch.randn(6, 10, dtype=torch.float64)
    for grad in (values[:1, :1].expand(5, 6), values[:1, :6].expand(5, 6), values[:, ::2].T):
        check(arguments, builds, grad)


def test_without_optional_arguments(builds):
    arguments = oracle.random_arguments(Schedule.butterfly(9), residual="pass")
    arguments.d_in = arguments.d_out = arguments.bias = None
    check(arguments, builds)


def test_the_output_is_never_the_input_itself(impl):
    x = torch.randn(2, 4)
    y = spm(x, torch.empty(0, 2), Schedule.butterfly(4, 0), impl=impl)
    assert y.equal(x)
    assert y.data_ptr() != x.data_ptr()


@st.composite
def layers(draw):
    n = draw(st.integers(1, 24))
    stages = draw(st.integers(0, 5))
    matchings = [draw(st.permutations(range(n))) for _ in range(stages)]
    pairs = [[(order[2 * p], order[2 * p + 1]) for p in range(n // 2)] for order in matchings]
    return oracle.random_arguments(
        Schedule.from_pairs(n, pairs),
        draw(st.sampled_from(BLOCKS)),
        in_features=draw(st.integers(1, n)),
        out_features=draw(st.integers(1, n)),
        leading=tuple(draw(st.lists(st.integers(0, 3), max_size=2))),
        dtype=draw(st.sampled_from(DTYPES)),
        residual=draw(st.sampled_from(["scale", "pass"])),
        seed=draw(st.integers(0, 2**16)),
    )


@settings(max_examples=200)
@given(arguments=layers())
def test_random_matchings(builds, arguments):
    check(arguments, builds)


@pytest.mark.parametrize("block", BLOCKS)
def test_unit_vectors_give_the_matrix(block, builds):
    arguments = oracle.random_arguments(Schedule.random(31, 6), block, in_features=12, out_features=31)
    arguments.x, arguments.bias = torch.eye(12, dtype=torch.float64, requires_grad=True), None
    check(arguments, builds)
    answer = oracle.answers(arguments, torch.ones(12, 31))["output"]
    answer.roundings += 31  # of the products of matrices
    oracle.assert_matches(oracle.dense(arguments).T, answer)


def test_rotations_preserve_the_norm(impl):
    x = torch.randn(16, 4096)
    angles = torch.randn(48, 2048)
    y = spm(x, angles, Schedule.butterfly(4096, 48), impl=impl)
    ratio = y.double().norm(dim=1) / x.double().norm(dim=1)
    assert (ratio - 1).abs().max() <= oracle.rounding_of_rotations(48, torch.float32)


@pytest.mark.parametrize("n", [64, 97, 200])
def test_the_operator_norm_of_rotations_is_one(n, impl):
    angles = torch.randn(20, n // 2, dtype=torch.float64)
    matrix = spm(torch.eye(n, dtype=torch.float64), angles, Schedule.random(n, 20), impl=impl)
    allowed = oracle.rounding_of_rotations(20, torch.float64) + n * torch.finfo(torch.float64).eps  # and of the SVD
    assert (torch.linalg.svdvals(matrix) - 1).abs().max() <= allowed


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(8, 8), (7, 7), (5, 12), (12, 5), (1, 1), (64, 64), (3, 31), (100, 97), (24, 24)])
def test_several_maps_of_one_input(sizes, dtype, block, impl):
    schedule, (in_features, out_features) = Schedule.butterfly(max(sizes)), sizes
    make = partial(oracle.random_arguments, schedule, block, in_features=in_features, out_features=out_features)
    singles = [make(leading=(2, 5), dtype=dtype, seed=seed) for seed in range(3)]
    x = singles[0].x
    for single in singles:
        single.x = x
    grads = [torch.randn(2, 5, out_features).to(dtype) for _ in singles]
    answers = [oracle.answers(single, grad) for single, grad in zip(singles, grads, strict=True)]

    blocks, *rest = names = [name for name in singles[0].tensors if name != "x"]
    together = {name: torch.stack([s.tensors[name] for s in singles]).detach().requires_grad_() for name in names}
    options = {name: together[name] for name in rest}
    y = spm(x, together[blocks], schedule, **options, out_features=out_features, maps=3, impl=impl)
    of_x, *of_parameters = torch.autograd.grad(y, [x, *together.values()], torch.cat(grads, dim=-1))

    first, *others = (answer["x"] for answer in answers)
    oracle.assert_matches(of_x, sum(others, first), "x")
    for k, answer in enumerate(answers):
        oracle.assert_matches(y.chunk(3, dim=-1)[k], answer["output"])
        for name, gradient in zip(names, of_parameters, strict=True):
            oracle.assert_matches(gradient[k], answer[name], name)
