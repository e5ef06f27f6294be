import hashlib
import math

import pytest
import torch
from small_runs import assert_same, stop_at
from torch.nn import functional as F

from pairmix_lab.contenders import TRAINED, count_parameters
from pairmix_lab.experiments import shakespeare
from pairmix_lab.experiments.data import DataError
from pairmix_lab.experiments.language_models import CELLS
from pairmix_lab.experiments.options import grid
from pairmix_lab.experiments.shakespeare import Config, Task
from pairmix_lab.training.loop import train

COUNTING = bytes(range(250))  # every byte says where it is; 225 for training
VALID = COUNTING[225:]


@pytest.fixture
def make(tmp_path, monkeypatch):
    """An experiment on some text."""
    monkeypatch.setattr(shakespeare, "generate", lambda model, prompt, length, seed: prompt)

    def make(text=COUNTING, **options):
        (tmp_path / "shakespeare").mkdir(exist_ok=True)
        (tmp_path / "shakespeare" / "input.txt").write_bytes(text)
        return Task(Config(**{"width": 8, "batch": 16, "length": 8, "stages": 3, **options}), tmp_path)

    return make


def started(experiment):
    torch.manual_seed(0)
    return experiment.build()


def read_by(model, call):
    """The inputs that the model is given in a call."""
    seen = []
    hook = model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.inference_mode():  # as in training
        call(model)
    hook.remove()
    return seen


def test_batches_depend_on_seed_and_step_alone(make):
    first = make()
    first.batch(5)
    inputs, labels = first.batch(3)
    again, same_labels = make(layer="dense").batch(3)
    assert inputs.equal(again)
    assert labels.equal(same_labels)
    assert not inputs.equal(first.batch(4)[0])
    assert not inputs.equal(make(seed=1).batch(3)[0])
    assert not inputs.equal(make(seed=2**31 - 1).batch(3)[0])


def test_labels_are_the_bytes_after_the_inputs(make):
    inputs, labels = make().batch(1)
    assert inputs.shape == labels.shape == (16, 8)
    assert labels.equal(inputs + 1)
    assert inputs[:, 1:].equal(labels[:, :-1])


def test_training_reads_the_first_nine_tenths_to_both_ends(make):
    inputs, labels = (torch.cat(part) for part in zip(*map(make().batch, range(1, 200)), strict=True))
    assert (int(inputs.min()), int(labels.max())) == (0, 224)


def test_validation_reads_the_last_tenth_only_and_always_the_same(make):
    one, other = make(validation_batches=20), make(validation_batches=20, seed=1)
    model = started(one)
    seen = torch.cat(read_by(model, one.validate))
    assert seen.shape == (20 * 16, 8)
    assert (int(seen.min()), int(seen.max())) == (225, 248)  # the last one is a label
    assert torch.cat(read_by(model, other.validate)).equal(seen)


@pytest.mark.parametrize("length", [3, 8, 24], ids=lambda length: f"{24 // length} sequences")
def test_in_the_end_the_whole_validation_part_is_counted(make, length):
    check_end(make(length=length, batch=2))


@pytest.mark.parametrize("length", [7, 10, 23])
def test_in_the_end_what_does_not_fill_a_sequence_is_counted_too(make, length):
    check_end(make(length=length, batch=2))


@torch.inference_mode()
def check_end(experiment):
    model, length = started(experiment), experiment.config.length
    seen = read_by(model, experiment.conclude)
    assert torch.cat([part.flatten() for part in seen]).tolist() == list(VALID[:-1])
    loss = 0.0
    for start in range(0, 24, length):
        part = torch.tensor(list(VALID[start : start + length + 1]))
        loss += float(F.cross_entropy(model(part[None, :-1])[0], part[1:], reduction="sum")) / 24
    outcome = experiment.conclude(model)
    assert outcome["valid_loss"] == pytest.approx(loss, rel=1e-5)
    assert outcome["valid_bpc"] == pytest.approx(loss / math.log(2), rel=1e-5)


@torch.inference_mode()
def test_what_is_said_in_the_end(make):
    experiment = make(cell="gru")
    model = started(experiment)
    outcome = experiment.conclude(model)
    assert outcome.keys() == {"valid_loss", "valid_bpc", "mixer_parameters", "data", "samples"}
    assert outcome["mixer_parameters"] == count_parameters(model.mixer.u) == 3 * (3 * 4 * 4 + 3 * 8)
    assert outcome["samples"] == ["\n", "\n"]


@torch.inference_mode()
def test_samples_are_what_the_model_writes(make, monkeypatch):
    monkeypatch.undo()
    experiment = make()
    first, second = experiment.conclude(started(experiment))["samples"]
    assert len(first) == len(second) == 501
    assert first != second


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("layer", TRAINED)
def test_a_regular_text_is_learnt(make, cell, layer):
    options = {"width": 64, "stages": 6} if cell == "attention" else {"width": 16}
    experiment = make(b"a strong" * 100, cell=cell, layer=layer, steps=60, lr=1e-2, **options)
    trained = train(experiment)
    first, last = trained.rows[0], trained.rows[-1]
    assert first["valid_loss"] > math.log(8)
    assert last["valid_loss"] < 0.5 * math.log(8)
    assert last["valid_bpc"] == pytest.approx(last["valid_loss"] / math.log(2))
    assert trained.outcome["valid_loss"] < 0.5 * math.log(8)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("layer", TRAINED)
def test_a_stopped_run_resumes(make, tmp_path, cell, layer):
    options = {"cell": cell, "layer": layer, "width": 64, "steps": 3}
    expected = train(make(**options))
    stop_at(2, make(**options), tmp_path / "run")
    assert_same(train(make(**options), tmp_path / "run", resume=True), expected)


@pytest.mark.parametrize("text", [b"short", bytes(80)], ids=len)
def test_a_text_that_is_too_short_is_refused(make, text):
    with pytest.raises((ValueError, DataError), match=rf"too short.* {len(text) - int(0.9 * len(text))} bytes"):
        make(text)


def test_it_knows_the_hash_of_its_text(make):
    assert make().data == {"shakespeare/input.txt": f"sha256:{hashlib.sha256(COUNTING).hexdigest()}"}


def test_the_shortest_text(make):
    experiment = make(bytes(range(90)))  # nine bytes for validation
    assert read_by(started(experiment), experiment.validate)[0].tolist() == [list(range(81, 89))] * 16


@pytest.mark.parametrize(
    ("options", "complaint"), [({"layer": "softmax"}, "layer .* got 'softmax'"), ({"cell": "lstm"}, "cell .* 'lstm'")]
)
def test_bad_values_are_refused(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        Config(**options)


def test_every_config_of_a_grid_has_a_name_of_its_own():
    options = {"cell": tuple(CELLS), "width": (8, 16), "block": ("general", "rotation"), "seed": (0, 10)}
    configs = grid(Config, layer=tuple(TRAINED), **options)
    assert len({config.name for config in configs}) == len(configs) == 3 * 2 * 2 * (len(TRAINED) + 1)


def test_the_real_text(data_folder):
    experiment = Task(Config(), data_folder)
    assert (len(experiment.train), len(experiment.valid)) == (1_003_854, 111_540)
    assert bytes(experiment.train[:14].tolist()) == b"First Citizen:"
