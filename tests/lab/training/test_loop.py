"""What a run comes to."""

import math
from dataclasses import replace
from statistics import mean, median

import pytest
import torch
from small_runs import CONFIG, CONFIGS, EXPERIMENTS, LOGGED, VALIDATED, assert_same, stop_at
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pairmix_lab.experiments import teacher
from pairmix_lab.training.loop import Recipe, train


@pytest.mark.parametrize("name", CONFIGS)
def test_it_learns(name):
    trained = train(EXPERIMENTS[name]())
    first, last = trained.rows[0], trained.rows[-1]
    assert last["train_loss"] < 0.9 * first["train_loss"]
    assert last["valid_loss"] < 0.9 * first["valid_loss"]
    assert trained.outcome["test_loss"] == pytest.approx(last["valid_loss"], rel=0.1)


def test_the_history_sums_up_the_steps_since_the_row_before():
    losses, times = [], []
    trained = train(
        teacher.Task(CONFIG), on_step=lambda step, loss, ms: (losses.append((step, loss)), times.append(ms))
    )
    assert [step for step, _ in losses] == list(range(1, 41))
    assert [row["step"] for row in trained.rows] == LOGGED
    for before, row in zip([0, *LOGGED], trained.rows, strict=False):
        validation = {"valid_loss", "valid_accuracy"} if row["step"] in VALIDATED else set()
        assert row.keys() == {"step", "train_loss", "ms_per_step"} | validation
        assert row["train_loss"] == mean(loss for _, loss in losses[before : row["step"]])
        assert row["ms_per_step"] == pytest.approx(median(times[before : row["step"]]), abs=1e-4)


def test_the_outcome_is_complete():
    trained = train(teacher.Task(CONFIG))
    measured = {"ms_per_step", "test_loss", "test_accuracy", "mixer_parameters"}
    assert {name: value for name, value in trained.outcome.items() if name not in measured} == {
        "step": 40,
        "processes": 1,
        "parameters": sum(weight.numel() for weight in trained.model.parameters()),
    }
    assert measured < trained.outcome.keys()


def test_the_same_seed_gives_the_same_run_and_another_another():
    first, again = (train(teacher.Task(CONFIG)) for _ in range(2))
    assert_same(again, first)
    other = train(teacher.Task(replace(CONFIG, seed=1)))
    assert not torch.equal(other.model[2].weight, first.model[2].weight)


def test_cosine_decay_goes_from_the_rate_to_zero():
    recipe = Recipe(steps=10, batch=1, lr=0.2)
    rates = [recipe.lr_at(step) for step in range(1, 12)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 0.2
    assert rates[5] == pytest.approx(0.1)  # half of the steps are done
    assert rates[9] > 0
    assert rates[10] == pytest.approx(0)


def test_constant_decay_is_none():
    recipe = Recipe(steps=10, batch=1, lr=0.2, decay="constant")
    assert {recipe.lr_at(step) for step in range(1, 11)} == {0.2}


def test_every_step_is_taken_with_its_rate_also_after_a_stop(tmp_path):
    rates = []

    def note(optimizer, *_):
        rates.append([(group["lr"], group["lr_scale"]) for group in optimizer.param_groups])

    hook = register_optimizer_step_pre_hook(note)
    try:
        stop_at(17, teacher.Task(CONFIG), tmp_path)
        train(teacher.Task(CONFIG), tmp_path, resume=True)
    finally:
        hook.remove()
    scales = [scale for _, scale in rates[0]]
    assert len(set(scales)) > 1
    assert rates == [[(CONFIG.lr_at(step) * scale, scale) for scale in scales] for step in range(1, 41)]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("steps", 0, "steps must be at least 1, got 0"),
        ("steps", 1_000_001, "steps must be at most 1000000, got 1000001"),
        ("batch", -1, "batch must be at least 1, got -1"),
        ("batch", 2**31, "batch must be at most 2147483647, got 2147483648"),
        ("log_every", 0, "log_every must be at least 1, got 0"),
        ("validate_every", 0, "validate_every must be at least 1, got 0"),
        ("lr", 0.0, "lr must be above 0, got 0.0"),
        ("lr", -1e-3, "lr must be above 0, got -0.001"),
        ("lr", math.inf, "lr must be above 0, got inf"),
        ("lr", math.nan, "lr must be above 0, got nan"),
        ("decay", "linear", "decay must be one of ['cosine', 'constant'], got 'linear'"),
        ("seed", -1, "seed must be in 0..2^31-1, got -1"),
        ("seed", 2**31, "seed must be in 0..2^31-1, got 2147483648"),
    ],
)
def test_bad_recipes_are_refused(name, value, message):
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        Recipe(**{"steps": 1, "batch": 1, "lr": 1e-3, name: value})
    assert str(refused.value) == message
