"""What is said of runs of the GPT, most of all at equal training time."""

import math

import pytest
from synthetic import everything, gpt, step_time, steps, write

from pairmix_lab.experiments import equal_time, summary
from pairmix_lab.experiments.equal_time import Setting
from pairmix_lab.experiments.gpt import EXPERIMENT
from pairmix_lab.report import notes
from pairmix_lab.report.experiment import Case


def case(width=256, setting="shakespeare, 60 s"):
    return Case("gpt", width, setting)


def tables(runs):
    return {one.name: one.table for one in EXPERIMENT.tables(runs)}


def lines(table):
    header, *rest = table
    return [dict(zip(header, line, strict=True)) for line in rest]


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (Setting("shakespeare", 60, "s"), "shakespeare, 60 s"),
        (Setting("agnews", 0.25, "s", ("depth 2", "tied")), "agnews, 0.25 s, depth 2, tied"),
        (Setting("agnews", 123456, "steps", ("dense qkv out",)), "agnews, 123,456 steps, dense qkv out"),
    ],
)
def test_a_setting_is_text_and_back(setting, text):
    assert str(setting) == text
    assert Setting.of(case(setting=text)) == setting


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({}, "shakespeare, 1,000 steps"),
        ({"budget": 60.0, "dense_maps": "qkv,out"}, "shakespeare, 60 s"),
        ({"budget": 60.0, "depth": 2, "length": 128, "tied": True}, "shakespeare, 60 s, depth 2, length 128, tied"),
        ({"text": "agnews", "dense_maps": "qkv"}, "agnews, 1,000 steps, dense qkv"),
        ({"layer": "lowrank", "dense_maps": "qkv,out"}, "shakespeare, 1,000 steps, dense qkv out"),
    ],
)
def test_a_case_tells_texts_times_and_models_apart(collected, changes, setting):
    runs = collected(gpt(**changes))
    assert runs.cases(EXPERIMENT) == [case(setting=setting)]


def test_models_with_dense_maps_are_contenders_of_their_own(collected):
    runs = collected(*(gpt(dense_maps=maps) for maps in ("", "qkv,out", "up,down")), gpt("dense"))
    assert runs.contenders(runs.cases(EXPERIMENT)) == [
        *("dense", "SPM", "SPM, dense attention", "SPM, dense feed-forward")
    ]


def test_cases_are_sorted_by_budget_as_a_number(collected):
    runs = collected(*(gpt(budget=budget, width=width) for budget in (1000.0, 60.0) for width in (256, 128)))
    settings = ["shakespeare, 60 s"] * 2 + ["shakespeare, 1,000 s"] * 2
    assert runs.cases(EXPERIMENT) == [case(*one) for one in zip((128, 256, 128, 256), settings, strict=True)]


def test_where_training_ended(collected):
    runs = collected(
        *(gpt(loss=loss, seed=seed, budget=60.0, steps=3000) for seed, loss in enumerate((2.0, 2.2))),
        gpt("dense", loss=2.5, budget=60.0, steps=1500, ms=50.0),
        gpt("dense", text="agnews", ms=7.0),
        steps(step_time("gpt", "dense", 40, 1.0, batch=8), step_time("gpt", "spm", 20, 2.0, batch=8)),
    )
    news, dense, spm = lines(tables(runs)["gpt"])
    assert (news["text"], news["budget"], news["ms per step"]) == ("agnews", "-", "40.0")
    assert (dense["text"], dense["budget"], dense["n"], dense["steps"]) == ("shakespeare", "60 s", "256", "1,500")
    assert (spm["layer"], spm["steps"], spm["seeds"], spm["nats"]) == ("SPM", "3,000", "2", "2.100 ± 0.141")
    assert spm["bits"] == f"{2.1 / math.log(2):.3f} ± {math.sqrt(0.02) / math.log(2):.3f}"
    assert (spm["ms per step"], spm["dense / this"]) == ("20.0", "2.00 (1.90 to 2.10)")
    assert spm["parameters"] == "786,432"


def test_the_time_of_the_usual_model_is_not_that_of_another(collected):
    times = steps(step_time("gpt", "spm", 20, batch=8))
    runs = collected(gpt(ms=5.0, depth=2), gpt(ms=5.0), times)
    assert [line["ms per step"] for line in lines(tables(runs)["gpt"])] == ["20.0", "5.00†"]


FRONTIER = [
    *(("dense", 60.0, 128, 2.0), ("dense", 60.0, 256, 2.4), ("dense", 600.0, 128, 1.8), ("dense", 600.0, 256, 1.7)),
    *(("spm", 60.0, 256, 2.1), ("spm", 60.0, 512, math.nan), ("spm", 600.0, 512, 1.6)),
]


@pytest.fixture
def frontier(collected):
    return collected(
        *(
            gpt(layer, budget=budget, width=width, loss=loss + shift, seed=seed)
            for layer, budget, width, loss in FRONTIER
            for seed, shift in enumerate((-0.1, 0.1))
        ),
        gpt(width=1024, loss=0.5),  # without a budget
    )


def test_the_frontier_has_the_best_width_of_each_budget(frontier):
    found = lines(tables(frontier)["gpt-frontier"])
    assert [(line["budget"], line["layer"], line["best n"], line["of"], line["nats"]) for line in found] == [
        ("60 s", "dense", "128", "128, 256", "2.000 ± 0.141"),
        ("60 s", "SPM", "256", "256, 512", "2.100 ± 0.141"),
        ("600 s", "dense", "256", "128, 256", "1.700 ± 0.141"),
        ("600 s", "SPM", "512", "512", "1.600 ± 0.141"),
    ]
    assert found[0]["bits"].startswith(f"{2 / math.log(2):.3f}")
    assert {line["text"] for line in found} == {"shakespeare"}


def test_the_frontier_is_drawn_with_its_widths(frontier):
    (budgets,) = equal_time.by_budget(frontier.cases(EXPERIMENT)).values()
    (axes,) = equal_time.frontier_picture(frontier, "title", budgets).axes
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert drawn == {
        "dense": ([60, 600], [pytest.approx(2.0), pytest.approx(1.7)]),
        "SPM": ([60, 600], [pytest.approx(2.1), pytest.approx(1.6)]),
    }
    assert [text.get_text() for text in axes.texts] == ["128", "256", "256", "512"]


def test_a_contender_that_always_diverged_has_no_point(collected):
    runs = collected(gpt(budget=60.0, loss=math.nan), gpt("dense", budget=60.0))
    (budgets,) = equal_time.by_budget(runs.cases(EXPERIMENT)).values()
    (axes,) = equal_time.frontier_picture(runs, "title", budgets).axes
    assert [len(line.get_xdata()) for line in axes.lines] == [1, 0]
    assert [line["nats"] for line in lines(tables(runs)["gpt-frontier"])] == ["2.000", "nan"]


def test_the_seconds_until_a_model_is_as_good_as_dense(collected):
    """A loss falls by one in every quarter of the steps."""
    runs = collected(
        *(gpt("dense", budget=budget, loss=2.5, steps=1000, ms=60.0) for budget in (6.0, 60.0)),
        *(gpt(budget=60.0, loss=loss, steps=4000, ms=99.0, seed=seed) for seed, loss in enumerate((1.3, 1.5))),
        gpt("lowrank", budget=60.0, loss=2.6, ms=15.0),
        gpt("dense", budget=60.0, loss=1.0, width=512, ms=60.0),
        gpt(width=1024, budget=60.0),  # has no dense to compare with
        steps(step_time("gpt", "spm", 15.0, batch=8)),
    )
    first, second = lines(tables(runs)["gpt-time-to-dense"])
    assert first == {
        **{"text": "shakespeare", "n": "256", "budget": "60 s", "loss of dense": "2.500"},
        **{"dense, s": "60.0", "SPM, s": "45.0", "low rank, s": "-"},  # three quarters of 4,000 steps of 15 ms
    }
    assert (second["n"], second["dense, s"], second["SPM, s"]) == ("512", "60.0", "-")


def test_without_budgets_there_is_one_table(collected):
    assert list(tables(collected(gpt("dense"), gpt()))) == ["gpt"]


def test_pictures_are_of_the_longest_runs(collected):
    runs = collected(
        *(gpt(budget=budget, width=width) for budget in (60.0, 600.0) for width in (128, 256)),
        gpt(text="agnews", steps=1234, tied=True),
    )
    assert [picture.name for picture in EXPERIMENT.pictures(runs)] == [
        "gpt-frontier-shakespeare",
        *(f"gpt-agnews-1234steps-tied-256-loss-by-{by}" for by in ("step", "seconds")),
        *(f"gpt-shakespeare-600s-{width}-loss-by-{by}" for width in (128, 256) for by in ("step", "seconds")),
    ]


def test_the_headline(collected):
    bits = 1 / math.log(2)
    runs = collected(
        *(gpt(layer, budget=budget, width=width, loss=loss, ms=ms)
          for layer, loss, ms in (("dense", 2.0, 40.0), ("spm", 1.5, 10.0))
          for width in (256, 512)
          for budget in (60.0, 600.0)),
        *(gpt(layer, budget=600.0, width=1024) for layer in ("dense", "spm")),
    )  # fmt: skip
    found = EXPERIMENT.headline(runs)
    assert found.title == "GPT, n = 512, shakespeare, 600 s"
    assert found.gap == (f"{-0.5 * bits:+.2f}", "bits per byte")
    assert found.ratio == "4.00"
    assert found.table[1:3] == [
        ["dense, bits per byte", f"{2 * bits:.3f}"],
        ["SPM, bits per byte", f"{1.5 * bits:.3f}"],
    ]
    alone = EXPERIMENT.headline(collected(gpt()))
    assert (alone.gap[0], alone.ratio) == ("-", "-")


def test_notes_say_what_a_budget_is(collected):
    assert any("as many steps as fit into it" in note for note in notes.notes(collected(gpt())))


def test_all_tables_have_the_names_that_pages_ask_for(collected):
    assert list(tables(collected(*everything()))) == EXPERIMENT.table_names


def test_in_short(tmp_path):
    name = "small GPT, 30 s of training: bits per byte (less is better)"
    assert summary.table(tmp_path) is None
    write(tmp_path / "gpt", gpt(budget=60.0, width=512))
    assert summary.table(tmp_path) is None  # not the case that is shown
    write(tmp_path / "gpt", *(gpt(layer, budget=30.0, width=512) for layer in ("dense", "spm")))
    bits = f"{2 / math.log(2):.2f}"
    assert summary.table(tmp_path) == [["task", "n", "dense", "SPM"], [name, "512", bits, bits]]


def test_words_for_the_terminal():
    outcome = {"valid_loss": 1.5, "valid_bpc": 1.5 / math.log(2)}
    assert EXPERIMENT.in_words(outcome) == "1.500 nats, 2.164 bits a byte of the validation part"
