import random
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from small_checkpoints import CONFIG, all_tensors, assert_same_bits, new_state, refusal, stored_in, take_step
from torch import nn

from pairmix import SPMLinear
from pairmix.schedule import Schedule
from pairmix_lab.training import checkpoints
from pairmix_lab.training.checkpoints import CheckpointError


@pytest.fixture
def stored(tmp_path):
    return stored_in(tmp_path)


def test_a_run_comes_back_to_the_bit(stored):
    expected, random_state = all_tensors(stored.state), torch.get_rng_state()
    state = new_state(seed=1)
    take_step(state)  # moments that must go
    checkpoints.restore(stored.path, state, CONFIG)
    assert torch.get_rng_state().equal(random_state)
    assert (state.step, state.record) == (3, stored.state.record)
    assert len(expected) == 7 + 3 * 6  # six parameters and a description; Adam's two moments and step
    assert_same_bits(all_tensors(state), expected)


def test_what_comes_after_is_the_same_too(stored):
    state = new_state(seed=1)
    checkpoints.restore(stored.path, state, CONFIG)
    for each in (stored.state, state):
        torch.manual_seed(7)
        take_step(each)
    assert_same_bits(all_tensors(state), all_tensors(stored.state))


def test_odd_numbers_come_back_to_the_bit(stored):
    weight = stored.state.model[2].weight.data
    weight[0, :5] = torch.tensor([-0.0, float("nan"), float("inf"), -float("inf"), 1e-45])
    checkpoints.store(stored.path, stored.state, CONFIG)
    state = new_state(seed=1)
    checkpoints.restore(stored.path, state, CONFIG)
    assert_same_bits(all_tensors(state), all_tensors(stored.state))


def test_a_restored_run_needs_the_file_no_more(stored):
    state = new_state(seed=1)
    checkpoints.restore(stored.path, state, CONFIG)
    with stored.path.open("r+b") as file:  # the same file, not another in its place
        file.write(b"\x55" * len(stored.content))
    assert_same_bits(all_tensors(state), all_tensors(stored.state))


def test_storing_replaces_the_file_and_leaves_nothing_else(stored):
    take_step(stored.state)
    stored.state.record["losses"].append(0.5)
    stored.state.record["milliseconds"].append(0.5)
    checkpoints.store(stored.path, stored.state, CONFIG)
    state = new_state()
    checkpoints.restore(stored.path, state, CONFIG)
    assert state.step == 4
    assert [file.name for file in stored.path.parent.iterdir()] == [stored.path.name]


@pytest.mark.parametrize(
    "part", ["nothing", "a byte", "half the length", "the length", "half the header", "the header", "half", "but one"]
)
def test_a_file_that_is_cut_off(stored, part):
    header = 8 + int.from_bytes(stored.content[:8], "little")
    cuts = {
        "nothing": 0,
        "a byte": 1,
        "half the length": 4,
        "the length": 8,
        "half the header": header // 2,
        "the header": header,
        "half": (header + len(stored.content)) // 2,
        "but one": len(stored.content) - 1,
    }
    stored.path.write_bytes(stored.content[: cuts[part]])
    assert "cannot be read, it is cut off or no checkpoint" in refusal(stored.path)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("start", [b"", (100).to_bytes(8, "little")])
def test_a_file_of_random_bytes(tmp_path, start, seed):
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(start + random.Random(seed).randbytes(1000))
    assert "cannot be read, it is cut off or no checkpoint" in refusal(path)


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"format": "pt"},
        {"about": "{}"},
        {"about": '{"format": "another checkpoint 2"}'},
        {"about": '"a model"'},
        {"about": "a model"},
    ],
)
def test_a_file_of_something_else(tmp_path, metadata):
    path = tmp_path / "checkpoint.safetensors"
    save_file({"model.weight": torch.ones(3)}, path, metadata)
    message = refusal(path)
    assert "is not a checkpoint of pairmix" in message or "no checkpoint" in message


def test_a_checkpoint_of_another_run_is_refused_with_the_differences(stored):
    config = {"lr": 0.02, "seed": 3, "layer": "spm", "width": 16, "steps": 10}
    assert refusal(stored.path, config=config) == (
        f"{stored.path} is of another run: lr is 0.01 there and 0.02 here; width is None there and 16 here"
    )


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(16, 16),
        SPMLinear(16, 16, stages=2),
        SPMLinear(16, 16, block="rotation"),
        SPMLinear(16, 16, schedule=Schedule.random(16, 4, seed=1)),
    ],
    ids=["dense", "fewer stages", "another block", "other pairs"],
)
def test_a_checkpoint_of_another_model_is_refused(stored, layer):
    assert "does not fit this model" in refusal(stored.path, new_state(layer))


def with_older_name(state):
    """A model whose state dict has the description of its SPM layer where version 0.2 had it."""

    def rename(_module, tensors, _prefix, _metadata):
        tensors["0._extra_state"] = torch.tensor(
            list(bytes(tensors.pop("0.description").tolist()).rstrip(b"\0")), dtype=torch.uint8
        )

    state.model.register_state_dict_post_hook(rename)
    return state


def test_a_checkpoint_with_the_older_name_of_the_description(stored):
    checkpoints.store(stored.path, with_older_name(stored.state), CONFIG)
    state = new_state(seed=1)
    checkpoints.restore(stored.path, state, CONFIG)
    assert state.model[0].coeffs.equal(stored.state.model[0].coeffs)
    other = new_state(SPMLinear(16, 16, schedule=Schedule.random(16, 4, seed=1)))
    assert "0.description is of another layer: schedule is" in refusal(stored.path, other)


def test_a_folder_in_its_place(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoints.restore(tmp_path, new_state(), CONFIG)


FULL_DISK = """
import pathlib, sys
import torch
from torch import nn
from pairmix_lab.training import checkpoints
from pairmix_lab.training.loop import make_optimizer, timed_step

path = pathlib.Path(sys.argv[1]) / "checkpoint.safetensors"

def new_state():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4))
    optimizer = make_optimizer(model.parameters(), lr=0.01)
    return checkpoints.State(model, optimizer, 0, {"rows": [], "losses": [], "milliseconds": []})

def take_step():
    labels = torch.randint(4, (8,))
    loss, milliseconds = timed_step(state.model, state.optimizer, torch.randn(8, 32), labels, lr=0.01)
    state.step += 1
    state.record["losses"].append(loss)
    state.record["milliseconds"].append(milliseconds)
    checkpoints.store(path, state, {"steps": 10})

def fail_to_take_step(reason):
    try:
        take_step()
    except checkpoints.CheckpointError as error:
        assert str(error) == f"{path} could not be written, and is as it was before: {reason}", error
    else:
        raise SystemExit("it was written, though the disk was full")
    assert path.read_bytes() == before
    assert not list(path.parent.glob("*.part"))
    restored = new_state()
    checkpoints.restore(path, restored, {"steps": 10})
    assert restored.step == 1

state = new_state()
take_step()
before = path.read_bytes()
"""

FILE_SIZE_LIMIT = """
import resource
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for limit in (0, 1, len(before) // 2, len(before) - 1):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    fail_to_take_step("File too large")
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
take_step()
"""

FILLED_UP = """
import shutil
for left in (0, len(before) // 2):
    with (path.parent / "other").open("wb") as file:
        file.write(b"x" * (shutil.disk_usage(path.parent).free - left))
    fail_to_take_step("No space left on device")
    (path.parent / "other").unlink()
take_step()
"""


def run_script(*command):
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_a_write_that_fails_leaves_the_old_checkpoint(tmp_path):
    run_script(sys.executable, "-c", FULL_DISK + FILE_SIZE_LIMIT, tmp_path)


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path):
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare, with which to mount a small disk")
    small_disk = ["unshare", "--map-root-user", "--mount", "sh", "-ec"]
    mount = 'mount -t tmpfs -o size=128k tmpfs "$1"; shift; "$@"'
    tried = subprocess.run([*small_disk, mount, "sh", tmp_path, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"a small disk cannot be mounted: {tried.stderr.strip()}")
    run_script(*small_disk, mount, "sh", tmp_path, sys.executable, "-c", FULL_DISK + FILLED_UP, tmp_path)
