import csv
import hashlib
import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from small_runs import assert_same, stop_at

from pairmix_lab.contenders import count_parameters
from pairmix_lab.experiments import agnews, data, epochs
from pairmix_lab.experiments.agnews import MODELS, Config, Task
from pairmix_lab.experiments.data import DataError
from pairmix_lab.experiments.options import grid
from pairmix_lab.training.loop import train

WORDS = {"1": "treaty embassy", "2": "goalkeeper overtime", "3": "dividend merger", "4": "telescope compiler"}
TRAIN, TEST = 200, 40


def write(path, rows, seed=0):
    """Items with words of their class, and some that make every one of them different."""
    random_ = random.Random(seed)
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        for number in range(rows):
            label = random_.choice(list(WORDS))
            csv.writer(file).writerow([label, WORDS[label], f"x{number} x{random_.random()} {WORDS[label]}"])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PAIRMIX_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "agnews" / "train.csv", TRAIN)
    write(tmp_path / "agnews" / "test.csv", TEST, seed=1)
    return tmp_path


def experiment(folder, **options):
    """One that remembers nothing of those before."""
    agnews._hashed.cache_clear()
    epochs.order.cache_clear()
    return Task(Config(**{"width": 512, "batch": 32, **options}), folder)


def items(batches):
    """How often every item is there."""
    return Counter(tuple(row) for inputs, _ in batches for row in inputs.tolist())


def cached(folder):
    return sorted((folder / "cache" / "features").iterdir())


def test_the_train_set_is_split_without_a_rest(folder):
    made = experiment(folder)
    train_items, valid_items, test_items = (items(part.batches(7)) for part in (made.train, made.valid, made.test))
    assert (len(train_items), len(valid_items), len(test_items)) == (190, 10, 40)
    assert not train_items.keys() & valid_items.keys()
    assert made.label == "AG News, 200-row part"


def test_all_seeds_and_layers_are_validated_on_the_same_rows(folder):
    one, other = experiment(folder, seed=0), experiment(folder, seed=1, layer="softmax")
    assert items(one.valid.batches(7)) == items(other.valid.batches(7))


def test_an_epoch_has_every_row_once_and_the_next_one_begins_in_the_same_batch(folder):
    made = experiment(folder)
    inputs, labels = (torch.cat(part) for part in zip(*(made.batch(step) for step in range(1, 19)), strict=True))
    assert len(inputs) == 18 * 32 > 3 * 190
    whole = items(made.train.batches(32))
    epochs = inputs[: 3 * 190].chunk(3)
    assert all(items([(epoch, None)]) == whole for epoch in epochs)
    assert not epochs[0].equal(epochs[1])
    label_of = {tuple(row.tolist()): int(label) for row, label in zip(*made.train.rows(np.arange(190)), strict=True)}
    assert labels.tolist() == [label_of[tuple(row)] for row in inputs.tolist()]


def test_a_batch_larger_than_the_train_set_goes_around(folder):
    inputs, _ = experiment(folder, batch=400).batch(1)
    assert set(items([(inputs, None)]).values()) == {2, 3}


def test_batches_depend_on_seed_and_step_alone(folder):
    first = experiment(folder)
    for step in (9, 2, 7):
        first.batch(step)
    inputs, labels = first.batch(3)
    again, same_labels = experiment(folder).batch(3)
    assert inputs.equal(again)
    assert labels.equal(same_labels)
    assert not inputs.equal(first.batch(4)[0])
    assert not inputs.equal(experiment(folder, seed=1).batch(3)[0])


def test_dropout_leaves_out_features_of_training_rows_and_scales_the_others(folder):
    whole, dropped = experiment(folder), experiment(folder, dropout=0.25)
    (before, labels), (after, same_labels) = whole.batch(3), dropped.batch(3)
    kept = after != 0
    assert labels.equal(same_labels)
    torch.testing.assert_close(after[kept], before[kept] / 0.75)
    found = int((before != 0).sum())
    assert abs(int(kept.sum()) - 0.75 * found) < 5 * math.sqrt(0.25 * 0.75 * found)
    assert after.equal(experiment(folder, dropout=0.25).batch(3)[0])
    assert items(dropped.valid.batches(40)) == items(whole.valid.batches(40))
    assert items(dropped.test.batches(40)) == items(whole.test.batches(40))


def test_every_step_and_seed_leaves_out_other_features(folder, monkeypatch):
    monkeypatch.setattr(epochs, "batch", lambda rows, size, step, seed: np.arange(size))  # always the same rows
    first, again, other = (experiment(folder, dropout=0.5, seed=seed) for seed in (0, 0, 1))
    assert first.batch(1)[0].equal(again.batch(1)[0])
    assert not first.batch(1)[0].equal(first.batch(2)[0])
    assert not first.batch(1)[0].equal(other.batch(1)[0])


@pytest.mark.parametrize("dropout", [-0.1, 1.0, math.nan])
def test_dropout_is_a_part_and_not_the_whole(dropout):
    with pytest.raises(ValueError, match=f"dropout must be at least 0 and below 1, got {dropout}"):
        Config(dropout=dropout)


def test_runs_with_dropout_are_a_case_of_their_own():
    plain, dropped = ({"width": 64, "dropout": dropout} for dropout in (0.0, 0.2))
    assert Config(dropout=0.2).name == "spm-2048-dropout0.2-seed0"
    cases = sorted(map(agnews.EXPERIMENT.case, (dropped, plain)), key=agnews.EXPERIMENT.order)
    names = [agnews.EXPERIMENT.case_name(case) for case in cases]
    assert names == ["n = 64", "n = 64, 20% of the features left out"]
    assert agnews.EXPERIMENT.case(agnews.EXPERIMENT.completed({"width": 64, "layer": "dense"})).setting is None


def test_words_are_hashed_once(folder, monkeypatch):
    before = experiment(folder)

    def fail(**options):
        raise AssertionError("it was hashed before")

    monkeypatch.setattr("sklearn.feature_extraction.text.HashingVectorizer", fail)
    after = experiment(folder)
    assert items(before.test.batches(40)) == items(after.test.batches(40))
    with pytest.raises(AssertionError, match="hashed before"):
        experiment(folder, width=256)


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.99], ids=str)
def test_a_cut_off_cache_is_made_again(folder, part):
    before = experiment(folder)
    contents = {path: path.read_bytes() for path in cached(folder)}
    for path, content in contents.items():
        path.write_bytes(content[: int(part * len(content))])
    after = experiment(folder)
    assert items(before.train.batches(40)) == items(after.train.batches(40))
    assert all(path.stat().st_size == len(content) for path, content in contents.items())


def assert_made_again(folder, before, contents):
    """Neither an error nor other features, and the cache is whole again."""
    after = experiment(folder)
    assert items(before.train.batches(40)) == items(after.train.batches(40))
    assert items(before.test.batches(40)) == items(after.test.batches(40))
    assert {path: path.read_bytes() for path in cached(folder)} == contents


@pytest.mark.parametrize("seed", range(40))
def test_a_cache_with_a_flipped_bit_is_made_again(folder, seed):
    before = experiment(folder)
    contents = {path: path.read_bytes() for path in cached(folder)}
    path, rng = cached(folder)[seed % 2], random.Random(seed)
    content = bytearray(contents[path])
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    assert_made_again(folder, before, contents)


def test_a_cache_under_another_name_is_made_again(folder):
    before = experiment(folder)
    contents = {path: path.read_bytes() for path in cached(folder)}
    one, other = cached(folder)
    one.write_bytes(contents[other])
    other.write_bytes(contents[one])
    assert_made_again(folder, before, contents)


def changed(**arrays):
    """The features with other arrays, which scipy does not look at."""

    def change(features):
        for name, array in arrays.items():
            setattr(features, name, array(getattr(features, name)))
        return features

    return change


WRONG_FEATURES = {
    "too large an index": changed(indices=lambda values: values + 2**30),
    "a negative index": changed(indices=lambda values: values - 2**30),
    "rows that begin behind the end": changed(indptr=lambda values: values + 2**30),
    "rows that go backwards": changed(indptr=lambda values: values[::-1].copy()),
    "another dtype": lambda features: features.astype(np.float64),
    "another layout": lambda features: features.tocsc(),
    "fewer rows": lambda features: features[1:],
    "fewer columns": lambda features: features[:, 1:],
}


@pytest.mark.parametrize("name", WRONG_FEATURES)
def test_a_cache_with_other_features_is_made_again(folder, name):
    before = experiment(folder)
    contents = {path: path.read_bytes() for path in cached(folder)}
    for path, rows in zip(cached(folder), sorted([TRAIN, TEST]), strict=True):
        features = agnews._read_cache(path, (rows, 512))
        if features is None:
            features = agnews._read_cache(path, (TRAIN + TEST - rows, 512))
        agnews._write_cache(path, WRONG_FEATURES[name](features))
        assert path.read_bytes() != contents[path]
    assert_made_again(folder, before, contents)


def test_other_content_has_another_cache_entry(folder):
    experiment(folder)
    assert len(cached(folder)) == 2
    write(folder / "agnews" / "train.csv", TRAIN + 1)
    assert experiment(folder).label == "AG News, 201-row part"
    assert len(cached(folder)) == 3


def test_it_knows_the_hashes_of_its_files(folder):
    expected = {
        f"agnews/{name}": f"sha256:{hashlib.sha256((folder / 'agnews' / name).read_bytes()).hexdigest()}"
        for name in ("train.csv", "test.csv")
    }
    assert experiment(folder).data == expected
    assert data.hashes(agnews.AGNEWS, folder) == expected


def test_the_whole_is_called_by_its_name(folder, monkeypatch):
    monkeypatch.setattr(agnews, "WHOLE", TRAIN)
    assert experiment(folder).label == "AG News"


def test_a_single_row_cannot_be_split(folder):
    write(folder / "agnews" / "train.csv", 1)
    with pytest.raises(DataError, match="too few rows: 1"):
        experiment(folder)


@pytest.mark.parametrize("layer", MODELS)
def test_every_model_learns_what_is_easy(folder, layer):
    made = experiment(folder, layer=layer, width=64, steps=60, lr=1e-2)
    trained = train(made)
    assert trained.outcome["test_accuracy"] > 0.95
    assert trained.rows[-1]["valid_accuracy"] > 0.8
    assert trained.outcome["data"] == made.label
    hidden = 0 if layer == "softmax" else count_parameters(trained.model[0])
    assert trained.outcome["mixer_parameters"] == hidden
    assert trained.outcome["parameters"] == hidden + 4 * 65


@pytest.mark.parametrize("layer", MODELS)
@pytest.mark.parametrize(("width", "dropout"), [(16, 0.0), (17, 0.2)])
def test_a_stopped_run_resumes(folder, layer, width, dropout):
    options = {"layer": layer, "width": width, "dropout": dropout, "steps": 3}
    expected = train(experiment(folder, **options))
    stop_at(2, experiment(folder, **options), folder / "run")
    assert_same(train(experiment(folder, **options), folder / "run", resume=True), expected)


def test_spm_is_as_configured(folder):
    hidden = experiment(folder, stages=3, block="rotation").build()[0]
    assert (hidden.stages, hidden.block) == (3, "rotation")


def test_every_config_of_a_grid_has_a_name_of_its_own():
    configs = grid(Config, layer=tuple(MODELS), width=(8, 16), block=("general", "rotation"), seed=(0, 10))
    assert len({config.name for config in configs}) == len(configs) == 2 * 2 * (len(MODELS) + 1)


def test_only_layers_with_a_rank_get_one():
    configs = grid(Config, layer=("dense", "spm", "lowrank", "companion"), rank=3)
    assert {config.layer: config.rank for config in configs} == {
        "dense": None,
        "spm": None,
        "lowrank": 3,
        "companion": 3,
    }
    assert {config.name for config in configs} == {
        "dense-2048-seed0", "spm-2048-seed0", "lowrank-rank3-2048-seed0", "companion-rank3-2048-seed0",
    }  # fmt: skip
    with pytest.raises(ValueError, match="rank is for the layers companion, lowrank, got 3 for spm"):
        Config(layer="spm", rank=3)


def test_an_unknown_layer_is_refused():
    with pytest.raises(ValueError, match=r"'softmax'.* got 'sparse'"):
        Config(layer="sparse")


def test_the_real_data_is_learnt(data_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("PAIRMIX_CACHE", str(tmp_path))
    made = experiment(data_folder, layer="softmax", width=1024, batch=256, steps=60, lr=1e-2)
    assert made.label == "AG News, 61,297-row part"
    assert train(made).outcome["test_accuracy"] > 0.7
