"""A small state, its checkpoint, and what is said of one that is not restored."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pairmix import SPMLinear
from pairmix_lab.training import checkpoints
from pairmix_lab.training.checkpoints import CheckpointError
from pairmix_lab.training.loop import make_optimizer, timed_step

CONFIG = {"lr": 0.01, "seed": 3, "layer": "spm", "stages": None, "steps": 10}
RECORD = {
    "rows": [{"step": 2, "train_loss": 0.1 + 0.2, "ms_per_step": 1.5}],
    "losses": [1e-308],
    "milliseconds": [1.0, 2.0, 1 / 3],
}


def new_state(layer=None, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(SPMLinear(16, 16) if layer is None else layer, nn.ReLU(), nn.Linear(16, 4))
    return checkpoints.State(model, make_optimizer(model.parameters(), lr=0.01), 0, {})


def take_step(state):
    labels = torch.randint(4, (8,))
    timed_step(state.model, state.optimizer, torch.randn(8, 16), labels, lr=0.01)
    state.step += 1


def all_tensors(state):
    moments = state.optimizer.state_dict()["state"].items()
    return {
        **{name: value.clone() for name, value in state.model.state_dict().items()},
        **{(index, name): value.clone() for index, kinds in moments for name, value in kinds.items()},
    }


def assert_same_bits(tensors, expected):
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert tensors[name].dtype == value.dtype, name
        assert tensors[name].shape == value.shape, name
        assert bits(tensors[name]).equal(bits(value)), name


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def stored_in(folder):
    """A state after three steps, and its checkpoint."""
    state = new_state()
    for _ in range(3):
        take_step(state)
    state.record = copy.deepcopy(RECORD)
    path = folder / "new" / "checkpoint.safetensors"
    checkpoints.store(path, state, CONFIG)
    return SimpleNamespace(path=path, state=state, content=path.read_bytes())


def refusal(path, state=None, config=CONFIG):
    """What is said of a checkpoint that is not restored; the file and the state must be left as they are."""
    state = state or new_state()
    before, tensors, random_state = path.read_bytes(), all_tensors(state), torch.get_rng_state()
    with pytest.raises(CheckpointError) as refused:
        checkpoints.restore(path, state, config)
    assert path.read_bytes() == before
    assert_same_bits(all_tensors(state), tensors)
    assert (state.step, state.record) == (0, {})
    assert torch.get_rng_state().equal(random_state)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert str(refused.value).startswith(f"{path} ")
    return str(refused.value)
