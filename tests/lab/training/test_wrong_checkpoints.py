"""Checkpoints that a run did not write, or that are no longer as it wrote them."""

import copy
import json
import math
import random
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, save_file
from small_checkpoints import CONFIG, RECORD, all_tensors, assert_same_bits, new_state, refusal, stored_in
from torch import nn

from pairmix_lab.training import checkpoints
from pairmix_lab.training.checkpoints import CheckpointError


@pytest.fixture
def stored(tmp_path):
    return stored_in(tmp_path)


def test_a_model_that_differs_only_in_its_last_layer_keeps_its_first(stored):
    state = new_state()
    state.model[2] = nn.Linear(16, 5)
    assert "does not fit this model" in refusal(stored.path, state)


def other_optimizer(change):
    """Writes moments that a function has changed."""

    def write(state):
        moments = {
            index: {name: value.clone() for name, value in kinds.items()}
            for index, kinds in state.optimizer.state_dict()["state"].items()
        }
        change(moments)
        state.optimizer = SimpleNamespace(state_dict=lambda: {"state": moments})

    return write


def other_model(change):
    """Writes weights that a function has changed."""

    def write(state):
        weights = {name: value.clone() for name, value in state.model.state_dict().items()}
        change(weights)
        state.model = SimpleNamespace(state_dict=lambda: weights)

    return write


def replaced(index, name, make):
    return other_optimizer(lambda moments: moments[index].update({name: make(moments[index][name])}))


def removed_moment(moments):
    del moments[2]["exp_avg_sq"]


def renamed_moment(moments):
    moments[2]["momentum"] = moments[2].pop("exp_avg_sq")


WRONG_TENSORS = {
    "a moment of another shape": replaced(0, "exp_avg", lambda value: torch.zeros(3)),
    "a larger moment": replaced(0, "exp_avg", lambda value: torch.zeros(1000, 1000)),
    "an empty moment": replaced(0, "exp_avg", lambda value: torch.zeros(0)),
    "a flattened moment": replaced(4, "exp_avg", torch.flatten),
    "a float16 moment": replaced(0, "exp_avg_sq", torch.Tensor.half),
    "a float64 moment": replaced(0, "exp_avg_sq", torch.Tensor.double),
    "an int32 moment": replaced(0, "exp_avg_sq", torch.Tensor.int),
    "a missing moment": other_optimizer(removed_moment),
    "a renamed moment": other_optimizer(renamed_moment),
    "a parameter without moments": other_optimizer(lambda moments: moments.pop(2)),
    "no moments": other_optimizer(dict.clear),
    "moments of an unknown parameter": other_optimizer(lambda moments: moments.update({99: copy.deepcopy(moments[0])})),
    "moments of no parameter": other_optimizer(lambda moments: moments.update({"x": copy.deepcopy(moments[0])})),
    "a step of another dtype": replaced(0, "step", torch.Tensor.long),
    "a step of another shape": replaced(0, "step", lambda value: value[None]),
    "float64 weights": other_model(lambda weights: weights.update({"2.weight": weights["2.weight"].double()})),
    "missing weights": other_model(lambda weights: weights.pop("2.weight")),
    "more weights": other_model(lambda weights: weights.update({"3.weight": weights["2.weight"] + 1})),
    "a transposed weight": other_model(lambda weights: weights.update({"2.weight": weights["2.weight"].T})),
}


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_tensors_that_this_run_would_not_write_are_refused(stored, name):
    WRONG_TENSORS[name](stored.state)
    checkpoints.store(stored.path, stored.state, CONFIG)
    assert "does not fit this model" in refusal(stored.path)


@pytest.mark.parametrize("index", [0, 5])
@pytest.mark.parametrize("step", [2.0, 4.0, 0.0, -1.0, 1e9, math.nan, math.inf])
def test_moments_of_another_step_are_refused(stored, index, step):
    replaced(index, "step", lambda value: torch.tensor(step))(stored.state)
    checkpoints.store(stored.path, stored.state, CONFIG)
    assert f"optimizer.{index}.step" in refusal(stored.path)


@pytest.mark.parametrize("step", [-1, 0, 2, 4, 11, 10**9, 10**400, 3.0, "3", True, None, [3], math.nan], ids=str)
def test_a_wrong_step_is_refused(stored, step):
    stored.state.step = step
    checkpoints.store(stored.path, stored.state, CONFIG)
    refusal(stored.path)


def record(**changes):
    return {**copy.deepcopy(RECORD), **changes}


ROW = RECORD["rows"][0]
WRONG_RECORDS = {
    "nothing": {},
    "a list": [],
    "null": None,
    "no losses": {name: value for name, value in RECORD.items() if name != "losses"},
    "something else besides": record(note="more"),
    "rows of no list": record(rows={"step": 2}),
    "rows that are numbers": record(rows=[2]),
    "a row without a step": record(rows=[{"train_loss": 0.3, "ms_per_step": 1.5}]),
    "a row without a loss": record(rows=[{"step": 2, "ms_per_step": 1.5}]),
    "a row with a text": record(rows=[{**ROW, "train_loss": "0.3"}]),
    "a row with a list": record(rows=[{**ROW, "valid_loss": [0.3]}]),
    "a row with a truth": record(rows=[{**ROW, "valid_loss": True}]),
    "a row of half a step": record(rows=[{**ROW, "step": 2.0}]),
    "a row of a step to come": record(rows=[{**ROW, "step": 4}], losses=[]),
    "a row of step zero": record(rows=[{**ROW, "step": 0}], losses=[1.0, 1.0, 1.0]),
    "a row twice": record(rows=[ROW, ROW]),
    "a loss that is a text": record(losses=["1"]),
    "a loss that is no number": record(losses=[math.nan]),
    "an infinite loss": record(losses=[math.inf]),
    "too many losses": record(losses=[1.0, 1.0]),
    "too few losses": record(losses=[]),
    "losses of no list": record(losses=1.0),
    "too few milliseconds": record(milliseconds=[1.0, 2.0]),
    "too many milliseconds": record(milliseconds=[1.0] * 4),
    "milliseconds that are texts": record(milliseconds=["1", "2", "3"]),
    "milliseconds of no number": record(milliseconds=[1.0, math.nan, 2.0]),
    "milliseconds that are lists": record(milliseconds=[[], [], []]),
}


@pytest.mark.parametrize("name", WRONG_RECORDS)
def test_a_wrong_record_is_refused(stored, name):
    stored.state.record = WRONG_RECORDS[name]
    checkpoints.store(stored.path, stored.state, CONFIG)
    assert "record" in refusal(stored.path)


def test_a_step_before_the_first_has_no_moments(tmp_path):
    state = new_state()
    state.record = {"rows": [], "losses": [], "milliseconds": []}
    path = tmp_path / "checkpoint.safetensors"
    checkpoints.store(path, state, CONFIG)
    restored = new_state(seed=1)
    checkpoints.restore(path, restored, CONFIG)
    assert_same_bits(all_tensors(restored), all_tensors(state))


@pytest.mark.parametrize("random_state", [torch.zeros(5056, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)])
def test_a_random_state_that_torch_does_not_take_is_refused(stored, monkeypatch, random_state):
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_rng_state", lambda: random_state)
        checkpoints.store(stored.path, stored.state, CONFIG)
    assert "random" in refusal(stored.path)


def test_a_single_flipped_bit_is_found(stored):
    header = 8 + int.from_bytes(stored.content[:8], "little")
    rng = random.Random(0)
    for _ in range(121):
        place = rng.randrange(header, len(stored.content))
        content = bytearray(stored.content)
        content[place] ^= 1 << rng.randrange(8)
        stored.path.write_bytes(content)
        assert "is damaged: " in refusal(stored.path)


def test_what_the_header_says_is_under_the_checksum_too(stored):
    for old, new in [(b'\\"step\\": 3', b'\\"step\\": 1'), (b"1e-308", b"2e-308"), (b"seed", b"sead")]:
        assert stored.content.count(old) == 1
        stored.path.write_bytes(stored.content.replace(old, new))
        assert "is damaged: " in refusal(stored.path)


def test_swapped_tensors_are_found(stored):
    tensors = load(stored.content)
    names = ["optimizer.0.exp_avg", "optimizer.0.exp_avg_sq"]
    tensors |= dict(zip(names, [tensors[name] for name in reversed(names)], strict=True))
    with safe_open(stored.path, framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors, stored.path, metadata)
    assert "is damaged: " in refusal(stored.path)


def test_a_checkpoint_of_the_first_format_is_of_another_version(stored):
    about = {"format": "pairmix checkpoint 1", "config": CONFIG, "step": 3, "record": RECORD}
    save_file(load(stored.content), stored.path, {"about": json.dumps(about)})
    message = refusal(stored.path)
    assert "is of another version: pairmix checkpoint 1; this version of pairmix reads pairmix checkpoint 2" in message


def hostile_abouts():
    usual = json.dumps({"format": checkpoints.FORMAT})[:-1]
    yield "deep lists", f'{usual}, "record": {"[" * 10**6}{"]" * 10**6}}}'
    yield "deep objects", f'{usual}, "config": {"{" * 10**6}'
    yield "nothing more", f"{usual}}}"
    yield "a long number", f'{usual}, "step": {"9" * 5000}}}'
    yield "a text of half a character", f'{usual}, "config": {{"\\ud800": 3}}}}'
    yield "a format of another kind", '{"format": ["pairmix checkpoint 2"]}'


@pytest.mark.parametrize(("name", "about"), list(hostile_abouts()), ids=lambda value: value[:30])
def test_hostile_headers_are_refused(tmp_path, name, about):
    path = tmp_path / "checkpoint.safetensors"
    save_file({"model.weight": torch.ones(3)}, path, {"about": about})
    refusal(path)


def test_a_header_larger_than_any_run_writes_is_not_even_read(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    with path.open("wb") as file:
        file.write((90 << 20).to_bytes(8, "little") + b'{"a":')
        file.truncate(100 << 20)
    with pytest.raises(CheckpointError, match="its header of 94371840 bytes"):
        checkpoints.restore(path, new_state(), CONFIG)
