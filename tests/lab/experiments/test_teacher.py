import math
from dataclasses import asdict

import pytest
import torch
import typer

from pairmix.schedule import Schedule
from pairmix_lab.contenders import TRAINED
from pairmix_lab.experiments.options import grid
from pairmix_lab.experiments.teacher import EXPERIMENT, PAIRINGS, Config, Task, Teacher
from pairmix_lab.training.loop import train

SMALL = {"width": 16, "classes": 3, "batch": 8, "steps": 3}


def started(config):
    """The student before training."""
    torch.manual_seed(config.seed)
    return Task(config).build()


def angles(spm):
    return torch.atan2(spm.coeffs[..., 2, :], spm.coeffs[..., 0, :]).detach()


def rows(x):
    return set(map(tuple, x.tolist()))


def test_the_same_number_gives_the_same_batch():
    (x, labels), (again, same_labels) = (Teacher(16, seed=3).batch(8, 5) for _ in range(2))
    assert x.equal(again)
    assert labels.equal(same_labels)
    assert x.shape == (8, 16)
    assert labels.shape == (8,)


@pytest.mark.parametrize(
    ("seed", "number"), [(3, 6), (4, 5), (3, 5 + 2**31), (2**31 - 1, 5)], ids=["number", "seed", "test", "large seed"]
)
def test_another_number_or_seed_gives_another_batch(seed, number):
    assert not Teacher(16, seed=3).batch(8, 5)[0].equal(Teacher(16, seed=seed).batch(8, number)[0])


def test_every_seed_has_a_rule_of_its_own():
    rules = [Teacher(16, seed=seed).rule for seed in (0, 1, 2, 2**31 - 1)]
    for part in (angles(rule[0]) for rule in rules), (rule[2].weight.detach() for rule in rules):
        assert len({value.sum().item() for value in part}) == len(rules)


def test_labels_are_those_of_the_rule():
    teacher = Teacher(16, classes=3)
    x, labels = teacher.batch(200, 1)
    assert labels.equal((teacher.rule[0](x).relu() @ teacher.rule[2].weight.T).argmax(-1))
    assert set(labels.tolist()) == {0, 1, 2}


def test_training_validation_and_test_rows_are_apart():
    config = Config(**SMALL)
    experiment, model, seen = Task(config), started(config), []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    parts = []
    for scores in (experiment.validate, experiment.conclude):
        scores(model)
        parts.append(torch.cat(seen))
        seen.clear()
    parts.append(torch.cat([experiment.batch(step)[0] for step in range(1, 101)]))
    assert [len(part) for part in parts] == [2048, 10_000, 800]
    assert len(set().union(*map(rows, parts))) == 2048 + 10_000 + 800


@pytest.mark.parametrize("seed", [*range(5), 2**31 - 1])
def test_a_student_does_not_start_as_its_teacher(seed):
    config = Config(width=64, seed=seed)
    student, rule = started(config), Task(config).teacher.rule
    pairs = [(angles(student[0]), angles(rule[0])), (student[2].weight, rule[2].weight)]
    for own, teachers in pairs:
        assert torch.stack([own.flatten(), teachers.flatten()]).corrcoef()[0, 1].abs() < 0.3


def test_making_data_disturbs_no_random_state():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    Teacher(16).batch(10, 1)
    assert torch.rand(3).equal(expected)
    assert torch.is_grad_enabled()


def test_the_spread_of_the_angles_is_as_asked_for():
    assert angles(Teacher(256, angle_std=0.3).rule[0]).std() == pytest.approx(0.3, rel=0.1)


def test_a_uniform_teacher_has_angles_from_the_whole_circle():
    found = angles(Teacher(256, angle_std="uniform").rule[0])
    quarters = torch.histc(found, bins=4, min=-math.pi, max=math.pi) / found.numel()
    torch.testing.assert_close(quarters, torch.full((4,), 0.25), atol=0.05, rtol=0)


def test_without_angles_the_teachers_spm_is_the_identity():
    x = torch.randn(4, 12)
    assert Teacher(12, angle_std=0.0).rule[0](x).equal(x)


def test_the_same_pairing_is_the_teachers():
    experiment = Task(Config(width=12))
    assert experiment.layer().schedule == experiment.teacher.rule[0].schedule


@pytest.mark.parametrize("stages", [None, 3])
def test_the_other_pairing_has_other_pairs(stages):
    schedule = Task(Config(width=64, pairing="other", stages=stages)).layer().schedule
    teachers = Schedule.butterfly(64, stages)
    assert schedule.stages == teachers.stages
    ours, theirs = (
        [{frozenset(pair) for pair in stage.T.tolist()} for stage in one.pairs] for one in (schedule, teachers)
    )
    common = sum(len(stage & other) for stage in ours for other in theirs)
    assert common < len(ours) * 32 / 4
    assert schedule != Task(Config(width=64, pairing="other", stages=stages, seed=1)).layer().schedule


def test_every_config_of_a_grid_has_a_name_of_its_own():
    options = {"width": (8, 16), "angle_std": (0.0, 0.1, 1.0, "uniform"), "seed": (0, 10)}
    options |= {"init": ("own", "near_identity"), "layer_rate": (None, 1.0)}
    options |= {"rows": (None, 300, 3000), "weight_decay": (0.0, 0.01), "norms": (False, True)}
    configs = grid(Config, layer=tuple(TRAINED), block=("general", "rotation"), pairing=tuple(PAIRINGS), **options)
    assert len(configs) == (2 * 4 * 2) * (3 * 2 * 2) * (4 + 4 + 4 * 4)  # layers without variants, companion, SPM
    assert len({config.name for config in configs}) == len(configs)


def test_names_say_what_is_not_the_default():
    assert Config(width=8).name == "spm-general-same-8-std-0.1-seed0"
    changes = {"init": "near_identity", "layer_rate": 1.0, "rows": 300, "weight_decay": 0.1, "norms": True}
    assert Config(width=8, **changes).name == "spm-general-same-near_identity-x1-8-std-0.1-rows300-wd0.1-norms-seed0"


def test_older_results_had_fresh_rows_and_the_common_rate():
    old = {"layer": "spm", "width": 8, "steps": 1200, "batch": 256, "lr": 0.003}
    assert {**asdict(Config(width=8)), **Config.completed(old)} == asdict(
        Config(width=8, init="near_identity", layer_rate=1.0)
    )
    assert Config.completed(old).keys() >= {"init", "layer_rate", "rows", "norms", "weight_decay"}
    assert Config(**Config.completed({**old, "layer": "dense"})) == Config(width=8, layer="dense")


def visited(config, steps):
    """The rows of these steps, as they are visited."""
    return torch.cat([Task(config).batch(step)[0] for step in steps])


def test_a_training_set_is_visited_in_a_new_order_every_epoch():
    config = Config(**{**SMALL, "batch": 6}, rows=15)
    task = Task(config)
    inputs, labels = map(torch.cat, zip(*(task.batch(step) for step in range(1, 6)), strict=True))
    first, second = inputs.split(15)
    assert len(rows(first)) == 15
    assert rows(first) == rows(second)
    assert not first.equal(second)
    assert labels.equal(task.teacher.rule(inputs).argmax(-1))


def test_a_batch_of_a_training_set_depends_on_seed_and_step_alone():
    config = Config(**SMALL, rows=15)
    assert visited(config, [4]).equal(visited(config, [1, 2, 3, 4])[-8:])
    assert not rows(visited(config, [4])) & rows(visited(Config(**SMALL, rows=15, seed=1), [4]))


def test_a_larger_training_set_has_the_rows_of_a_smaller_one():
    small, large = (rows(visited(Config(**SMALL, rows=count), range(1, 6))) for count in (10, 40))
    assert (len(small), len(large)) == (10, 40)
    assert small < large


def test_a_training_set_smaller_than_a_batch_goes_around():
    inputs = visited(Config(**SMALL, rows=3), [1])
    assert inputs.shape == (8, 16)
    assert len(rows(inputs)) == 3


def test_a_training_set_is_apart_from_validation_and_test_rows():
    config = Config(**{**SMALL, "batch": 50}, rows=50)
    task, model, seen = Task(config), started(config), []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    task.validate(model)
    task.conclude(model)
    assert not rows(task.batch(1)[0]) & rows(torch.cat(seen))


def test_what_can_be_learnt_by_heart_is():
    config = Config(width=32, rows=20, steps=150, batch=20, lr=0.02, layer="dense", log_every=10)
    trained = train(Task(config))
    assert trained.rows[-1]["train_loss"] < 0.05
    assert trained.outcome["test_accuracy"] < 0.5


def test_norms_are_measured_at_validations_only_if_asked_for():
    changes = {**SMALL, "steps": 4, "log_every": 1, "validate_every": 2}
    plain, measured = (train(Task(Config(**changes, norms=norms))) for norms in (False, True))
    names = {"operator_norm", "condition", "gradient_norm"}
    assert not any(names & row.keys() for row in plain.rows)
    assert [row["step"] for row in measured.rows if names <= row.keys()] == [1, 2, 4]
    assert not names & measured.rows[2].keys()
    assert measured.outcome["test_loss"] == plain.outcome["test_loss"]
    assert all(type(row[name]) is float for row in measured.rows for name in names & row.keys())


def test_options_of_the_command():
    configs = EXPERIMENT.configs(layers="dense,spm", widths="8", seeds="0", inits="own,near_identity", rows="0,300")
    assert [(config.layer, config.init, config.rows) for config in configs] == [
        *(("dense", "own", None), ("dense", "own", 300)),
        *(("spm", "own", None), ("spm", "own", 300), ("spm", "near_identity", None), ("spm", "near_identity", 300)),
    ]
    changes = {"layer_rate": 2.0, "weight_decay": 0.1, "norms": True}
    dense, spm = EXPERIMENT.configs(layers="dense,spm", widths="8", seeds="0", **changes)
    assert (dense.layer_rate, dense.weight_decay, dense.norms) == (None, 0.1, True)
    assert (spm.layer_rate, spm.weight_decay, spm.norms) == (2.0, 0.1, True)
    with pytest.raises(typer.BadParameter, match="'nearly'"):
        EXPERIMENT.configs(inits="nearly")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"layer": "sparse"}, "layer .* got 'sparse'"),
        ({"pairing": "another"}, "pairing .* got 'another'"),
        ({"angle_std": -0.1}, "angle_std .* got -0.1"),
        ({"angle_std": math.nan}, "angle_std .* got nan"),
        ({"angle_std": math.inf}, "angle_std .* got inf"),
        ({"angle_std": "far"}, "angle_std .* got 'far'"),
        ({"steps": 0}, "steps .* got 0"),
        ({"batch": 0}, "batch .* got 0"),
        ({"lr": 0.0}, "lr .* got 0.0"),
        ({"lr": math.inf}, "lr .* got inf"),
        ({"decay": "sudden"}, "decay .* got 'sudden'"),
        ({"seed": -1}, "seed .* got -1"),
        ({"seed": 2**31}, f"seed .* got {2**31}"),
        ({"validate_every": 0}, "validate_every .* got 0"),
        ({"rows": 0}, "rows .* got 0"),
        ({"rows": 2**31}, f"rows .* got {2**31}"),
        ({"weight_decay": -1.0}, "weight_decay .* got -1.0"),
        ({"layer_rate": 0.0}, "layer_rate .* got 0.0"),
    ],
)
def test_bad_values_are_refused(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        Config(**options)


def test_what_is_said_in_the_end():
    config = Config(**SMALL)
    outcome = Task(config).conclude(started(config))
    assert outcome.keys() == {"test_loss", "test_accuracy", "mixer_parameters"}
    assert outcome["mixer_parameters"] == 4 * 4 * 8 + 3 * 16


def test_spm_that_starts_near_its_teacher_learns_better_than_dense():
    starts = {"dense": {}, "spm": {"init": "near_identity", "layer_rate": 1.0}}
    dense, spm = (
        train(Task(Config(layer=layer, width=64, steps=200, lr=1e-2, **start))).outcome
        for layer, start in starts.items()
    )
    assert spm["test_accuracy"] > dense["test_accuracy"] + 0.02
    assert spm["test_loss"] < dense["test_loss"]
    assert spm["mixer_parameters"] < dense["mixer_parameters"]
