"""A checkpoint describes its layer. Whatever stands there, it is compared and nothing of it is built."""

from __future__ import annotations

import json
import tracemalloc

import pytest
import torch

from pairmix import Schedule, SPMLinear


def with_description(layer, text):
    return {**layer.state_dict(), "_extra_state": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}


def described(layer, **changes):
    description = json.loads(bytes(layer.get_extra_state().tolist()))
    description["schedule"] |= changes
    return with_description(layer, json.dumps(description))


def test_a_huge_schedule_is_not_built(monkeypatch):
    layer = SPMLinear(8, 8)
    state = described(layer, kind="random", n=2**22, stages=100, seed=0)
    monkeypatch.setattr(Schedule, "from_dict", None)
    tracemalloc.start()
    with pytest.raises(RuntimeError, match=r"schedule is Schedule.random\(n=4194304, stages=100, seed=0\) there"):
        layer.load_state_dict(state)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize(
    "text",
    [
        "[" * 1100,
        '{"schedule":' * 100 + "1" + "}" * 100,
        '{"schedule": {"n": 8}}',
        '{"schedule": null}',
        "[]",
        "7",
        "nul",
        "\x00\x01",
    ],
)
def test_what_is_no_description_is_an_error(text):
    with pytest.raises(RuntimeError, match="its description cannot be read"):
        SPMLinear(8, 8).load_state_dict(with_description(SPMLinear(8, 8), text))


def test_a_long_description_is_not_parsed():
    with pytest.raises(RuntimeError, match="its description has 100,000 bytes, that of this layer at most"):
        SPMLinear(8, 8).load_state_dict(with_description(SPMLinear(8, 8), "[" * 100_000))


@pytest.mark.parametrize("state", [5, "text", torch.zeros(3), torch.zeros(2, 2, dtype=torch.uint8), None])
def test_what_is_no_vector_of_bytes_is_an_error(state):
    layer = SPMLinear(8, 8)
    if state is None:  # as from a checkpoint of plain numbers
        checkpoint = {name: value for name, value in layer.state_dict().items() if name != "_extra_state"}
        with pytest.raises(RuntimeError, match="_extra_state"):
            layer.load_state_dict(checkpoint)
        return
    with pytest.raises(RuntimeError, match="its description must be a vector of bytes"):
        layer.load_state_dict({**layer.state_dict(), "_extra_state": state})


def test_own_pairs_are_told_apart_by_their_digest():
    one, other = ([[(0, 1), (2, 3)]], [[(0, 2), (1, 3)]])
    first, second = (SPMLinear(4, 4, schedule=Schedule.from_pairs(4, pairs)) for pairs in (one, other))
    with pytest.raises(RuntimeError, match=r"Schedule.from_pairs\(n=4, stages=1, digest='\w+...\w+'\) there"):
        second.load_state_dict(first.state_dict())
    same = SPMLinear(4, 4, schedule=Schedule.from_pairs(4, one))
    same.load_state_dict(first.state_dict())
    assert same.coeffs.equal(first.coeffs)


@pytest.mark.parametrize("n", [8, 2000])
def test_equal_pairs_however_they_were_made(n):
    butterfly = SPMLinear(n, n)
    pairs = butterfly.schedule.pairs.transpose(0, 2, 1)
    own = SPMLinear(n, n, schedule=Schedule.from_pairs(n, pairs))
    own.load_state_dict(butterfly.state_dict())
    butterfly.load_state_dict(own.state_dict())
