"""What everything else is compared with is itself what it says, and its bounds let nothing through that is wrong."""

import pytest
import torch

import oracle
from pairmix import Schedule


@pytest.mark.parametrize("block", ["general", "rotation"])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (7, 7), (12, 5), (5, 12), (1, 9), (64, 64), (97, 30)])
@pytest.mark.parametrize("residual", ["scale", "pass"])
def test_stage_after_stage_is_the_matrix(sizes, block, residual):
    n = max(sizes)
    for schedule in (Schedule.butterfly(n), Schedule.random(n, 5), Schedule.random_blocks(n), Schedule.butterfly(n, 0)):
        arguments = oracle.random_arguments(
            schedule, block, in_features=sizes[0], out_features=sizes[1], residual=residual
        )
        by_matrix = arguments.x @ oracle.dense(arguments).T + arguments.bias
        answer = oracle.answers(arguments, torch.ones_like(by_matrix))["output"]
        answer.roundings += n  # of the products of matrices
        oracle.assert_matches(by_matrix, answer)


def test_what_was_left_out_is_neutral():
    arguments = oracle.random_arguments(Schedule.butterfly(7), in_features=5)
    ones = {"d_in": 7, "d_out": 7, "residual_scale": arguments.schedule.stages}
    for name, size in ones.items():
        setattr(arguments, name, torch.ones(size, dtype=torch.float64))
    arguments.bias = torch.zeros(7, dtype=torch.float64)
    with_ones = oracle.output(arguments)
    arguments.d_in = arguments.d_out = arguments.bias = arguments.residual_scale = None
    assert oracle.output(arguments).equal(with_ones)
    assert oracle.dense(arguments).shape == (7, 5)


def test_nothing_cancels_in_magnitudes():
    """With positive numbers only, they are the values themselves; with others, they are larger."""
    arguments = oracle.random_arguments(Schedule.butterfly(9), in_features=4, out_features=7)
    grad = torch.rand(5, 7, dtype=torch.float64)
    for name, answer in oracle.answers(arguments.absolute(), grad).items():
        assert answer.magnitude.equal(answer.value), name
    for block in ("general", "rotation"):
        arguments = oracle.random_arguments(Schedule.butterfly(9), block, in_features=4, out_features=7)
        for name, answer in oracle.answers(arguments, torch.randn(5, 7)).items():
            assert (answer.magnitude >= answer.value.abs() * (1 - 1e-12)).all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_few_wrong_roundings_do_not_match(dtype):
    arguments = oracle.random_arguments(Schedule.butterfly(8, 2), dtype=dtype)
    answer = oracle.answers(arguments, torch.ones(5, 8))["output"]
    right = answer.value.to(dtype)
    oracle.assert_matches(right, answer)
    where = (answer.value.abs() / answer.magnitude).argmax()  # least has cancelled there
    wrong = right.clone()
    wrong.view(-1)[where] *= 1 + 32 * torch.finfo(dtype).eps
    with pytest.raises(AssertionError, match=r"output\[\d, \d\] is .*, not .* \+- "):
        oracle.assert_matches(wrong, answer)
    wrong.view(-1)[where] = torch.nan
    with pytest.raises(AssertionError, match="is nan, not"):
        oracle.assert_matches(wrong, answer)
    with pytest.raises(AssertionError, match=r"output: shape \(5, 7\), expected \(5, 8\)"):
        oracle.assert_matches(right[:, :7], answer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_results_that_are_not_linear(dtype):
    x = torch.randn(50, 8, dtype=torch.float64)

    def plain(dtype):
        return {"sine": (10 * x).to(dtype).sin(), "rest": [x.to(dtype).exp().sum(0), x.new_empty(0)]}

    oracle.assert_agrees(plain(dtype), plain)
    for name, wrong in (
        (r"result\['sine'\]\[0, 0\]", {"sine": plain(dtype)["sine"] + 1e-4, "rest": plain(dtype)["rest"]}),
        (r"result\['rest'\]\[0\]\[0\]", {**plain(dtype), "rest": [x.to(dtype).exp().sum(0) * 1.0001, x.new_empty(0)]}),
    ):
        with pytest.raises(AssertionError, match=name):
            oracle.assert_agrees(wrong, plain)
    with pytest.raises(AssertionError, match=r"expected .*rest"):
        oracle.assert_agrees({"sine": x}, plain)
