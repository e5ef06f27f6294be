"""Adapters as files: what is read is what was written, or nothing is changed."""

import copy
import json

import pytest
import torch
from torch import nn

from adapted import assert_unchanged, network, state, turn, turned
from pairmix import Schedule, adapters


@pytest.mark.parametrize(
    "schedule",
    ["butterfly", "brick", "random", "random_blocks", Schedule.from_pairs(16, [[(i, i + 8) for i in range(8)]])],
)
def test_files(tmp_path, schedule):
    path = tmp_path / "folder" / "adapter.safetensors"
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(3, 16)
    adapters.add(model, ["0", "1"], name="poems", scale=True, where="output", schedule=schedule)
    turn(model, "poems")
    adapters.save(model, path, "poems")
    assert [file.name for file in path.parent.iterdir()] == [path.name]

    fresh = nn.Sequential(*(copy.deepcopy(layer.base) for layer in model))
    assert adapters.load(fresh, path) == "poems"
    assert torch.equal(fresh(x), model(x))
    assert adapters.load(fresh, path, name="other") == "other"
    assert torch.equal(fresh(x), model(x))
    assert adapters.names(fresh) == ["poems", "other"]

    known = adapters.parameters(fresh, "poems")
    for parameter in known:
        nn.init.zeros_(parameter)
    adapters.load(fresh, path)
    assert all(a is b for a, b in zip(known, adapters.parameters(fresh, "poems"), strict=True))
    adapters.use(fresh, "poems")
    assert torch.equal(fresh(x), model(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(16, 32)), "it is for the layers 2, which are not there or cannot be adapted"),
        (lambda: network(18), "0: the width is 16 there and 18 here"),
        (lambda: turned(where="output"), "0: where is input there and output here; width is 16 there and 32 here"),
        (lambda: turned(stages=3), "0: stages is 4 there and 3 here; schedule is .* there and .* here"),
        (lambda: turned(scale=True), "0: scale is False there and True here"),
    ],
)
def test_a_file_of_another_adapter(make, message, tmp_path):
    path = tmp_path / "adapter.safetensors"
    adapters.save(turned(), path)
    model = make()
    before = state(model)
    with pytest.raises(ValueError, match=f"adapter.safetensors does not fit this model: {message}"):
        adapters.load(model, path)
    assert_unchanged(model, before)


def test_a_file_for_fewer_layers(tmp_path):
    path, model = tmp_path / "adapter.safetensors", network()
    adapters.add(model, ["0"])
    adapters.save(model, path)
    with pytest.raises(ValueError, match="the adapter is on other layers; only here: 2"):
        adapters.load(turned(), path)


def changed_tensors(path, change):
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(path, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
    change(tensors, metadata)
    save_file(tensors, path, metadata)


def other_pairs(tensors, metadata):
    about = json.loads(metadata["pairmix"])
    about["schedules"][about["layers"]["0"]["schedule"]] = Schedule.brick(16, 4).to_dict()
    metadata["pairmix"] = json.dumps(about)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, metadata: tensors.pop("2.angles"), "2: it has no schedule of width 32 for its None stages"),
        (lambda tensors, metadata: tensors.update(more=torch.ones(1)), "it has too many tensors: more"),
        (lambda tensors, metadata: tensors.update({"0.angles": torch.ones(4, 7)}), r"0.angles is .* of shape \(4, 7\)"),
        (lambda tensors, metadata: tensors.update({"0.angles": torch.ones(4, 8).int()}), "in floating point"),
        (lambda tensors, metadata: tensors.update({"0.angles": torch.ones(9, 8)}), "no schedule of width 16 for its 9"),
        (
            lambda tensors, metadata: metadata.update(pairmix=metadata["pairmix"].replace("butterfly", "brick")),
            "it has been changed, or another version of pairmix made it",
        ),
        (lambda tensors, metadata: metadata.update(pairmix=metadata["pairmix"].replace("input", "both")), "got 'both'"),
        (other_pairs, "0: its schedule has another digest than the layer says"),
        (lambda tensors, metadata: metadata.clear(), "its format is None, not 'pairmix adapter 1'"),
        (lambda tensors, metadata: metadata.update(pairmix="{"), "cannot be read"),
        (
            lambda tensors, metadata: metadata.update(pairmix=metadata["pairmix"].replace('"layers": {', '"old": {')),
            "does not describe its layers",
        ),
        (lambda tensors, metadata: metadata.update(pairmix=metadata["pairmix"].replace('"name"', '"old"')), "no name"),
    ],
)
def test_damaged_files(change, message, tmp_path):
    path = tmp_path / "adapter.safetensors"
    adapters.save(turned(), path)
    changed_tensors(path, change)
    model = network()
    before = state(model)
    with pytest.raises(ValueError, match=message):
        adapters.load(model, path)
    assert_unchanged(model, before)


def test_files_that_are_cut_off_or_missing(tmp_path):
    path = tmp_path / "adapter.safetensors"
    with pytest.raises(FileNotFoundError, match="is not there"):
        adapters.load(network(), path)
    adapters.save(turned(), path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="cannot be read"):
        adapters.load(network(), path)


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "adapter.safetensors"
    adapters.save(turned(), path)
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        adapters.save(turned(), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_without_safetensors(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        adapters.save(turned(), tmp_path / "adapter.safetensors")
