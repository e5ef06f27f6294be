import copy
import json
import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pairmix import Schedule

BIG = [1000, 1023, 1025, 4095, 4097]


CPU = torch.device("cpu")


def is_matching(schedule):
    """Every stage holds floor(n/2) pairs, and with the residual every coordinate once."""
    assert schedule.pairs.shape == (schedule.stages, 2, schedule.n // 2)
    assert schedule.residual.shape == (schedule.stages,)
    for pairs, residual in zip(schedule.pairs, schedule.residual, strict=True):
        coordinates = [*pairs.ravel(), *([residual] if schedule.n % 2 else [])]
        if sorted(coordinates) != list(range(schedule.n)):
            return False
    return schedule.n % 2 == 1 or (schedule.residual == -1).all()


def log2_ceil(n):
    return int(np.ceil(np.log2(n)))


@pytest.mark.parametrize("n", [*range(2, 301), *BIG])
def test_butterfly_reaches_everything_in_the_fewest_stages(n):
    schedule = Schedule.butterfly(n)
    assert schedule.stages == log2_ceil(n) + n % 2
    assert is_matching(schedule)
    assert schedule.reach().all()
    # Fewer cannot do: reach doubles at most, and the coordinate left over at the first stage loses one doubling.
    assert not Schedule.butterfly(n, schedule.stages - 1).reach().all()


@pytest.mark.parametrize("k", range(1, 8))
def test_butterfly_of_a_power_of_two_is_strided(k):
    n = 2**k
    for stage, (first, second) in enumerate(Schedule.butterfly(n).pairs):
        assert (second - first == 2**stage).all()


@pytest.mark.parametrize("n", [1, 2, 5, 12])
def test_butterfly_starts_over(n):
    depth = Schedule.butterfly(n).stages - n % 2
    if depth > 0:
        long = Schedule.butterfly(n, 3 * depth)
        assert (long.pairs[:depth] == long.pairs[depth : 2 * depth]).all()
        assert (long.pairs[:depth] == long.pairs[2 * depth :]).all()


def test_butterfly_meets_in_whole_blocks():
    """Widths with a large power of two in them pair contiguous runs, which vectorised kernels count on."""
    for first, second in Schedule.butterfly(768).pairs[3:]:
        assert (first.reshape(-1, 8) == first[::8, None] + np.arange(8)).all()
        assert (second.reshape(-1, 8) == second[::8, None] + np.arange(8)).all()
        assert (first[::8] % 8 == 0).all()
        assert (second[::8] % 8 == 0).all()


@pytest.mark.parametrize("n", range(1, 40))
def test_brick_pairs_neighbours_and_takes_the_fewest_stages(n):
    schedule = Schedule.brick(n)
    assert is_matching(schedule)
    distance = (schedule.pairs[:, 1] - schedule.pairs[:, 0]) % n
    assert np.isin(distance, [1, n - 1]).all()
    assert schedule.reach().all()
    assert schedule.stages == 0 or not Schedule.brick(n, schedule.stages - 1).reach().all()


@pytest.mark.parametrize("n", [1, 2, 3, 10, 33, 1030, 1500])
def test_random_takes_the_fewest_stages(n):
    schedule = Schedule.random(n, seed=4)
    assert is_matching(schedule)
    assert schedule.reach().all()
    assert schedule.stages == 0 or not Schedule.random(n, schedule.stages - 1, seed=4).reach().all()


def test_random_is_the_same_everywhere():
    # Written down once: a change of these numbers would make old checkpoints unreadable.
    assert Schedule.random(6, 2, seed=1).pairs.tolist() == [[[2, 4, 5], [0, 3, 1]], [[3, 1, 5], [2, 4, 0]]]
    assert Schedule.random(6, 2, seed=1) == Schedule.random(6, 2, seed=1)
    assert Schedule.random(6, 2, seed=1) != Schedule.random(6, 2, seed=2)
    assert (Schedule.random(6, 5, seed=1).pairs[:2] == Schedule.random(6, 2, seed=1).pairs).all()


@pytest.mark.parametrize("n", [*range(1, 150), *BIG])
def test_random_blocks_reach_everything_in_as_few_stages_as_a_butterfly(n):
    for block_size in (1, 2, 16):
        schedule = Schedule.random_blocks(n, seed=n, block_size=block_size)
        assert schedule.stages == Schedule.butterfly(n).stages
        assert is_matching(schedule)
        assert schedule.reach().all()


def test_random_blocks_are_the_same_everywhere():
    # Written down once: a change of these numbers would make old checkpoints unreadable.
    blocks = Schedule.random_blocks(12, seed=1, block_size=2).pairs[1:, :, ::2] // 2
    assert blocks.tolist() == [[[2, 4, 0], [3, 1, 5]], [[2, 3, 4], [1, 0, 5]], [[2, 1, 3], [0, 4, 5]]]
    single = Schedule.random_blocks(5, 5, seed=1).order.tolist()
    assert single == [[3, 1, 2, 4, 0], [3, 1, 4, 0, 2], [4, 2, 1, 0, 3], [3, 1, 2, 4, 0], [3, 1, 4, 2, 0]]


@pytest.mark.parametrize(
    ("n", "block_size", "expected"),
    [(1, 16, 1), (6, 16, 1), (32, 64, 16), (48, 16, 8), (768, 16, 16), (768, 1, 1), (1000, 16, 4), (1023, 16, 16)],
)
def test_random_blocks_are_halved_until_their_number_is_even(n, block_size, expected):
    schedule = Schedule.random_blocks(n, seed=2, block_size=block_size)
    assert schedule.block_size == expected
    assert repr(schedule) == f"Schedule.random_blocks(n={n}, stages={schedule.stages}, seed=2, block_size={expected})"
    assert schedule is Schedule.random_blocks(n, seed=2, block_size=expected)


def test_random_blocks_start_over_in_a_new_order():
    long = Schedule.random_blocks(256, 3 * 8, seed=5)
    first, second, third = np.split(np.sort(long.pairs, axis=1), 3)
    for another in (second, third):
        assert (first[:4] == another[:4]).all()
        assert (first[4:] != another[4:]).any(axis=(1, 2)).all()
    assert Schedule.random_blocks(256, 3 * 8, seed=6) != long
    assert Schedule.random_blocks(256, 10, seed=5).extended(14) is long
    assert long.only(range(10)) is Schedule.random_blocks(256, 10, seed=5)


def test_random_blocks_are_paired_in_every_way_as_often():
    # Four blocks can be paired in three ways: of 600 schedules, 200 +- 12 should start with each, and end with each.
    schedules = [Schedule.random_blocks(8, seed=seed, block_size=2) for seed in range(600)]
    for stage in (1, 2):
        partners = [int(schedule.order[stage].reshape(2, 4)[0, -1]) // 2 for schedule in schedules]
        assert (abs(np.bincount(partners) - 200) < 4 * 12).all()


def meets_in_vectors(schedule, lanes):
    """Whether vectors of the kernels can hold so many neighbouring coordinates: the rule of `Plan::fits`."""
    pairs = schedule.pairs
    if schedule.n % 2:  # what is left over is paired with a zero behind the last coordinate, as the last pair
        added = np.stack([schedule.residual, np.full(schedule.stages, schedule.n)], axis=1)
        pairs = np.concatenate([pairs, added[:, :, None]], axis=2)
    half = pairs.shape[2]
    if 2 * half % lanes:
        return False
    units = np.arange(2 * half).reshape(-1, lanes)
    lane = np.arange(lanes)
    for first, second in pairs:
        partner, number = np.empty((2, 2 * half), int)
        partner[first], partner[second] = second, first
        number[first], number[second] = np.arange(half), ~np.arange(half)
        partner, number = partner[units], number[units]
        stride = partner[0, 0]
        if stride < lanes:  # inside units
            expected = units[:, :1] // 2 + lane // (2 * stride) * stride + lane % stride
            fits = stride & (stride - 1) == 0 and (partner == units ^ stride).all()
            fits = fits and (number == np.where(lane & stride, ~expected, expected)).all()
        else:  # between whole units
            start = number[:, :1]
            fits = (partner[:, 0] % lanes == 0).all() and (partner == partner[:, :1] + lane).all()
            fits = fits and (number == np.where(start < 0, start - lane, start + lane)).all()
        if not fits:
            return False
    return True


@pytest.mark.parametrize("n", [16, 31, 32, 64, 96, 159, 256, 768, 1023, 1024])
@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16])
def test_random_blocks_meet_in_whole_vectors(n, lanes):
    for seed in range(3):
        assert meets_in_vectors(Schedule.random_blocks(n, 23, seed=seed), lanes)
    assert meets_in_vectors(Schedule.butterfly(1024), lanes)
    assert not meets_in_vectors(Schedule.random_blocks(2 * lanes * n, seed=1, block_size=lanes), 2 * lanes)
    for other in (Schedule.random(n, 3), Schedule.brick(n, 3)):
        assert lanes == 1 or not meets_in_vectors(other, lanes)


def test_reach_tells_output_from_input():
    schedule = Schedule.from_pairs(3, [[(0, 1)], [(1, 2)]])
    expected = [[True, True, False], [True, True, True], [True, True, True]]
    assert schedule.reach().tolist() == expected


def test_no_stages_reach_only_themselves():
    assert (Schedule.butterfly(5, 0).reach() == np.eye(5, dtype=bool)).all()


def test_pairs_residual_and_order_agree():
    schedule = Schedule.random(7, 3)
    half = 3
    order = schedule.order
    assert (order[:, :half] == schedule.pairs[:, 0]).all()
    assert (order[:, half : 2 * half] == schedule.pairs[:, 1]).all()
    assert (order[:, -1] == schedule.residual).all()
    assert schedule.pairs.dtype == schedule.residual.dtype == np.int32


@pytest.mark.parametrize(
    ("n", "pairs", "message"),
    [
        (4, [[(0, 1), (2, 3)], [(0, 1), (1, 2)]], "stage 1: coordinate 1 is paired twice"),
        (4, [[(2, 2), (0, 1)]], "stage 0: coordinate 2 is paired twice"),
        (4, [[(0, 1), (2, 4)]], r"stage 0: coordinate 4 is not in 0\.\.3"),
        (4, [[(0, 1), (2, -1)]], r"stage 0: coordinate -1 is not in 0\.\.3"),
        (4, [[(0, 1)]], "stage 0: 1 pairs, but width 4 takes 2; coordinate 2 is unpaired"),
        (4, [[]], "stage 0: 0 pairs, but width 4 takes 2"),
        (5, [[(0, 1)]], "stage 0: 1 pairs, but width 5 takes 2"),
        (4, [[(0, 1), (2, 3, 1)]], "stage 0: expected a list of pairs"),
        (4, [[(0, 1, 2)]], "stage 0: expected pairs of two integers"),
        (4, [[(0, 1), (2, 2.5)]], "stage 0: expected pairs of two integers, got float64"),
        (4, [(0, 1), (2, 3)], r"stage 0: expected a list of pairs of coordinates, got \(0, 1\)"),
        (0, [], "n must be an integer of at least 1, got 0"),
        (2.0, [], r"n must be an integer of at least 1, got 2\.0"),
    ],
)
def test_a_pairing_that_is_no_matching(n, pairs, message):
    with pytest.raises(ValueError, match=message):
        Schedule.from_pairs(n, pairs)


@pytest.mark.parametrize("make", [Schedule.butterfly, Schedule.brick, Schedule.random, Schedule.random_blocks])
def test_bad_sizes(make):
    for n in (0, -3, 2.5, True, "8"):
        with pytest.raises(ValueError, match=f"n must be an integer of at least 1, got {n!r}"):
            make(n)
    for stages in (-1, 1.5, False):
        with pytest.raises(ValueError, match=f"stages must be an integer of at least 0, got {stages!r}"):
            make(8, stages)


@pytest.mark.parametrize("seed", [-1, 0.5, None])
def test_bad_seed(seed):
    for make in (Schedule.random, Schedule.random_blocks):
        with pytest.raises(ValueError, match=f"seed must be an integer of at least 0, got {seed!r}"):
            make(8, 3, seed)


def test_bad_block_size():
    for block_size in (0, -4, 2.0, True, None):
        with pytest.raises(ValueError, match=f"block_size must be an integer of at least 1, got {block_size!r}"):
            Schedule.random_blocks(64, block_size=block_size)
    with pytest.raises(ValueError, match="block_size must be a power of two, got 12"):
        Schedule.random_blocks(64, block_size=12)


EXAMPLES = [
    Schedule.butterfly(12),
    Schedule.brick(7, 3),
    Schedule.random(9, 4, seed=3),
    Schedule.random_blocks(9, 4, seed=3),
    Schedule.random_blocks(96, seed=2, block_size=8),
    Schedule.from_pairs(3, [[(2, 0)], [(1, 2)]]),
    Schedule.from_pairs(1, [[], []]),
    Schedule.butterfly(5, 0),
]


@pytest.mark.parametrize("schedule", EXAMPLES, ids=repr)
def test_round_trips(schedule):
    for other in (
        Schedule.from_dict(json.loads(json.dumps(schedule.to_dict()))),
        pickle.loads(pickle.dumps(schedule)),
        copy.deepcopy(schedule),
    ):
        assert other == schedule
        assert hash(other) == hash(schedule)
        assert (other.pairs == schedule.pairs).all()
        assert (other.residual == schedule.residual).all()
        assert repr(other) == repr(schedule)


def test_equality_is_of_the_pairing():
    butterfly = Schedule.butterfly(8)
    same = Schedule.from_pairs(8, butterfly.pairs.transpose(0, 2, 1))
    assert same == butterfly
    assert len({same, butterfly, *EXAMPLES}) == 1 + len(EXAMPLES)
    assert butterfly != Schedule.butterfly(8, 2)
    assert butterfly != "butterfly"
    assert Schedule.butterfly(4, 0) != Schedule.butterfly(5, 0)


def test_a_changed_description_is_refused():
    description = Schedule.random(8, 3).to_dict()
    with pytest.raises(ValueError, match="digest"):
        Schedule.from_dict({**description, "seed": 1})
    for kind in ("spiral", ["random"], None):
        with pytest.raises(ValueError, match=re.escape(f"unknown kind of schedule: {kind!r}")):
            Schedule.from_dict({**description, "kind": kind})
    with pytest.raises(ValueError, match="'digest' is missing"):
        Schedule.from_dict({"kind": "butterfly", "n": 4, "stages": 2})
    with pytest.raises(ValueError, match="'block_size' is missing"):
        Schedule.from_dict({**description, "kind": "random_blocks"})
    with pytest.raises(ValueError, match="digest"):
        Schedule.from_dict({**Schedule.random_blocks(96).to_dict(), "block_size": 2})


def test_immutable():
    schedule = Schedule.butterfly(6)
    with pytest.raises(AttributeError):
        schedule.n = 7
    with pytest.raises(AttributeError):
        schedule.kind = "other"
    with pytest.raises(ValueError, match="read-only"):
        schedule.pairs[0, 0, 0] = 5
    with pytest.raises(ValueError, match="read-only"):
        schedule.residual[0] = 5


def test_layers_share_one_schedule():
    assert Schedule.butterfly(48) is Schedule.butterfly(48)


def test_the_mode_it_is_made_in_does_not_stick():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.inference_mode():
        assert not Schedule.butterfly(1234).on(CPU).order.is_inference()
    with torch.device("meta"):
        assert Schedule.butterfly(1236).on(CPU).order.device.type == "cpu"
    with FakeTensorMode():
        assert type(Schedule.butterfly(1238).on(CPU).order) is torch.Tensor


def test_large_widths():
    kinds = (
        Schedule.butterfly(65536),
        Schedule.random_blocks(65536),
        Schedule.brick(65536, 16),
        Schedule.random(65536, 16),
    )
    for schedule in kinds:
        assert len({schedule, pickle.loads(pickle.dumps(schedule))}) == 1
    assert Schedule.from_pairs(65536, schedule.pairs.transpose(0, 2, 1)) == schedule


@given(st.integers(1, 400), st.integers(0, 12))
def test_every_stage_of_every_kind_is_a_matching(n, stages):
    for schedule in (
        Schedule.butterfly(n, stages),
        Schedule.brick(n, stages),
        Schedule.random(n, stages, seed=n),
        Schedule.random_blocks(n, stages, seed=n),
    ):
        assert is_matching(schedule)
