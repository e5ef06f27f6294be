"""Tables of runs in which every contender has its own learning rate."""

import pytest
from synthetic import gpt, step_time, steps, write

from pairmix_lab.experiments import own_rates
from pairmix_lab.experiments.gpt import EXPERIMENT


def lines(table):
    header, *rest = table
    return [dict(zip(header, line, strict=True)) for line in rest]


@pytest.fixture
def results(tmp_path):
    """Rates 1, 2 and 4 thousandths; dense is best with the second, SPM with the third, in which it has two seeds."""
    losses = {"dense": (2.5, 2.2, 2.4), "spm": (2.3, 2.02, 2.0), "lowrank": (2.9, 2.8, 2.7)}
    for place, lr in enumerate((1e-3, 2e-3, 4e-3)):
        runs = [gpt(layer, lr=lr, loss=values[place], budget=60.0) for layer, values in losses.items()]
        write(tmp_path / "gpt" / f"lr{lr:g}", *runs)
    write(tmp_path / "gpt" / "lr0.004" / "more", gpt("spm", lr=4e-3, loss=1.9, budget=60.0, seed=1))
    times = write(tmp_path / "times", steps(step_time("gpt", "dense", 40, 1.0, batch=8)))
    (next(times.glob("*.json"))).rename(tmp_path / "steps-gpt.json")
    return tmp_path


def test_every_contender_is_shown_with_its_best_rate(results):
    dense, spm, lowrank = lines(own_rates.table("gpt", results))
    assert (dense["rate"], spm["rate"], lowrank["rate"]) == ("0.002", "0.004 (largest)", "0.004 (largest)")
    assert (dense["seeds"], spm["seeds"]) == ("1", "2")
    assert dense["bits per byte"] == "3.174"
    assert spm["bits per byte"] == "2.813 ± 0.102"
    assert (dense["ms per step"], dense["dense / this"]) == ("40.0", "1.00")
    assert dense["case"] == "n = 256, shakespeare, 60 s"


def test_runs_by_the_times_of_another_machine_are_shown_with_these(results):
    write(results / "gpt-avx512", gpt("dense", budget=60.0))
    write(results / "avx512-zen5", steps(step_time("gpt", "dense", 20, 1.0, batch=8)))
    next((results / "avx512-zen5").glob("*.json")).rename(results / "avx512-zen5" / "steps.json")
    (dense,) = lines(own_rates.table("gpt-avx512", results))
    assert dense["ms per step"] == "20.0"


def test_transfer_compares_the_first_seed_at_both_rates(results):
    (line,) = lines(own_rates.transfer(results))
    assert line == {
        **{"case": "GPT, n = 256, shakespeare, 60 s", "layer": "SPM", "rate: dense": "0.002", "rate: own": "0.004"},
        **{"loss: dense's rate": "2.020", "loss: own rate": "2.000", "ratio": "1.010"},
    }


def test_rates_of_embeddings_are_tried_apart(results):
    write(results / "gpt" / "embeddings", gpt("dense", lr=4e-3, loss=1.0, budget=60.0, embedding_rate=20.0))
    dense, *_ = lines(own_rates.table("gpt", results))
    assert (dense["rate"], dense["bits per byte"]) == ("0.004, embeddings x 20", "1.443")
    (line,) = lines(own_rates.transfer(results))
    assert line["rate: dense"] == "0.002"  # the one that all parameters of dense have


def test_a_rate_that_spm_was_not_tried_with_has_no_line(tmp_path):
    write(tmp_path / "gpt", gpt("dense", lr=1e-3), gpt("spm", lr=2e-3))
    assert own_rates.transfer(tmp_path) is None


def test_a_single_rate_of_spm_has_no_line(tmp_path):
    write(tmp_path / "gpt", gpt("dense", lr=1e-3), gpt("spm", lr=1e-3))
    assert own_rates.transfer(tmp_path) is None


def test_all_rates_are_known_that_were_tried(results):
    rates = own_rates.tried(EXPERIMENT, results / "gpt")
    assert {one.label for one in rates} == {"dense", "SPM", "low rank"}
    assert all(list(losses) == [1e-3, 2e-3, 4e-3] for losses in rates.values())


def test_nothing_run_is_no_table(tmp_path):
    assert own_rates.transfer(tmp_path) is None
    assert own_rates.table("elman", tmp_path) is None
