from itertools import islice

import pytest
import torch
from torch import nn

from pairmix import SPMLinear
from pairmix.experiments.teacher import Teacher, student
from pairmix.experiments.training import accuracy, train


def test_the_same_seed_gives_the_same_data():
    first, again, other = (next(Teacher(16, seed=seed).batches(8)) for seed in (1, 1, 2))
    assert first[0].equal(again[0])
    assert first[1].equal(again[1])
    assert not first[0].equal(other[0])


def test_batches_are_fresh_and_apart_from_the_test_set():
    teacher = Teacher(16)
    inputs = [x for x, _ in islice(teacher.batches(8), 3)] + [teacher.test_set(8)[0]]
    assert len({x.sum().item() for x in inputs}) == 4


@pytest.mark.parametrize("seed", range(5))
def test_a_student_of_the_same_seed_does_not_start_as_the_teacher(seed):
    teacher = Teacher(64, angle_std=0.1, seed=seed)._rule()[0]
    torch.manual_seed(seed)
    layer = SPMLinear(64, 64)
    both = torch.stack([teacher.coeffs[:, 2].flatten(), layer.coeffs[:, 2].flatten()])
    assert both.corrcoef()[0, 1].abs() < 0.3


def test_making_data_disturbs_no_random_state():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    Teacher(16).test_set(10)
    assert torch.rand(3).equal(expected)
    assert torch.is_grad_enabled()


def test_train_learns_and_notes_every_step():
    teacher = Teacher(8, classes=3)
    torch.manual_seed(0)
    model = student(nn.Linear(8, 8), 8, classes=3)
    test_set = teacher.test_set(1000)
    before = accuracy(model, test_set)
    seen = []
    history = train(model, teacher.batches(64), steps=150, lr=1e-2, on_step=seen.append)
    assert seen == history.losses
    assert len(history.milliseconds) == 150
    assert accuracy(model, test_set) > max(before, 0.8)
