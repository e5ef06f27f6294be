import pytest
import torch

import oracle
from pairmix import Schedule, SPMLinear, ops
from pairmix.functional import choose_impl, spm
from pairmix.ops import reference

SCHEDULE = Schedule.butterfly(6, 2)
BLOCKS = torch.zeros(2, 4, 3)
X = torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((torch.zeros(4, 7), BLOCKS, SCHEDULE), {}, r"last dimension of 1\.\.6, .* got \(4, 7\)"),
        ((torch.zeros(4, 0), BLOCKS, SCHEDULE), {}, r"last dimension of 1\.\.6, .* got \(4, 0\)"),
        ((torch.tensor(1.0), BLOCKS, SCHEDULE), {}, r"last dimension of 1\.\.6, .* got \(\)"),
        ((X, torch.zeros(3, 4, 3), SCHEDULE), {}, r"got \(3, 4, 3\)"),
        ((X, torch.zeros(2, 5, 3), SCHEDULE), {}, r"angles of shape \(2, 3\) or coefficients of shape \(2, 4, 3\)"),
        ((X, BLOCKS, SCHEDULE), {"block": "rotation"}, r"got \(2, 4, 3\) for block='rotation'"),
        ((X, BLOCKS, SCHEDULE), {"block": "dense"}, "block must be 'general' or 'rotation', got 'dense'"),
        ((X, torch.zeros(2, 4), SCHEDULE), {}, r"got \(2, 4\)"),
        ((X, BLOCKS, SCHEDULE), {"d_in": torch.ones(5)}, r"d_in must have the shape \(6,\), got \(5,\)"),
        ((X, BLOCKS, SCHEDULE), {"d_out": torch.ones(6, 1)}, r"d_out must have the shape \(6,\), got \(6, 1\)"),
        ((X, BLOCKS, SCHEDULE), {"bias": torch.ones(5)}, r"bias must have the shape \(6,\), got \(5,\)"),
        ((X, BLOCKS, SCHEDULE), {"out_features": 7}, r"out_features must be in 1\.\.6, .* got 7"),
        ((X, BLOCKS, SCHEDULE), {"out_features": 0}, r"out_features must be in 1\.\.6, .* got 0"),
        ((X, BLOCKS, SCHEDULE), {"residual_scale": torch.ones(2)}, "residual_scale is for odd widths, .* is 6"),
        (
            (X[:, :5], torch.zeros(2, 2), Schedule.butterfly(5, 2)),
            {"residual_scale": torch.ones(3)},
            r"residual_scale must have the shape \(2,\), got \(3,\)",
        ),
        ((X, BLOCKS.to("meta"), SCHEDULE), {}, "blocks are on meta and x is on cpu"),
        ((X, BLOCKS, SCHEDULE), {"d_in": torch.ones(6, device="meta")}, "d_in is on meta and x is on cpu"),
        ((X, BLOCKS, SCHEDULE), {"impl": "gpu"}, r"impl must be one of \['auto', .*'reference'.*\], got 'gpu'"),
    ],
)
def test_arguments_that_do_not_fit(arguments, options, message, impl_name):
    with pytest.raises(ValueError, match=message):
        spm(*arguments, **{"impl": impl_name, **options})


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((X.double(), BLOCKS, SCHEDULE), {}, r"blocks are torch\.float32 and x is torch\.float64"),
        ((X.bfloat16(), BLOCKS, SCHEDULE), {}, r"blocks are torch\.float32 and x is torch\.bfloat16"),
        ((X, BLOCKS, SCHEDULE), {"d_in": torch.ones(6).double()}, r"d_in is torch\.float64"),
        ((X, BLOCKS, SCHEDULE), {"bias": torch.ones(6).half()}, r"bias is torch\.float16"),
        ((X.long(), BLOCKS, SCHEDULE), {}, r"x must be float32, .* got torch\.int64"),
        ((X.cfloat(), BLOCKS, SCHEDULE), {}, r"x must be float32, .* got torch\.complex64"),
    ],
)
def test_dtypes_that_do_not_fit(arguments, options, message, impl_name):
    with pytest.raises(TypeError, match=message):
        spm(*arguments, **options, impl=impl_name)


def test_mixed_parameters_do_not_fit_under_autocast_either():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=r"bias is torch\.bfloat16"):
        spm(X, BLOCKS, SCHEDULE, bias=torch.ones(6, dtype=torch.bfloat16))


def test_an_impl_asked_for_by_name_never_falls_back(monkeypatch):
    broken = ops.Impl("broken", reference.forward, reference.backward, lambda device: "its library is missing")
    monkeypatch.setitem(ops.IMPLS, "broken", broken)
    with pytest.raises(RuntimeError, match="impl='broken' cannot run here: its library is missing"):
        spm(X, BLOCKS, SCHEDULE, impl="broken")
    with pytest.raises(RuntimeError, match="impl='broken' cannot run here"):
        SPMLinear(4, 4, impl="broken")
    assert choose_impl("auto", torch.device("cpu")) != "broken"


def test_float16():
    arguments = oracle.random_arguments(Schedule.butterfly(8), "rotation", dtype=torch.float16)
    arguments.d_in = arguments.d_out = arguments.bias = None
    y = spm(arguments.x, arguments.blocks, arguments.schedule)
    assert y.dtype == torch.float16
    oracle.assert_matches(y, oracle.answers(arguments, torch.ones_like(y))["output"])
