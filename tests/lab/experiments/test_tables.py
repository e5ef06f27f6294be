import math

import pytest
from synthetic import agnews, result, shakespeare, step_time, steps, teacher

from pairmix_lab.experiments import teacher_axis
from pairmix_lab.experiments.agnews import EXPERIMENT as AGNEWS
from pairmix_lab.experiments.shakespeare import EXPERIMENT as SHAKESPEARE
from pairmix_lab.experiments.teacher import EXPERIMENT as TEACHER
from pairmix_lab.report import notes
from pairmix_lab.report.experiment import Case


def cells(table, first):
    """The line that begins with these cells, by heading."""
    first = (first,) if isinstance(first, str) else first
    (line,) = [line for line in table[1:] if tuple(line[: len(first)]) == first]
    assert len(line) == len(table[0])
    return dict(zip(table[0], line, strict=True))


def test_accuracy_is_the_mean_and_the_deviation_over_seeds(collected):
    dense = [teacher("dense", accuracy=accuracy, seed=seed) for seed, accuracy in enumerate((0.60, 0.62, 0.64))]
    spm = [teacher("spm", accuracy=accuracy, seed=seed) for seed, accuracy in enumerate((0.90, 0.93, 0.96))]
    line = cells(TEACHER.accuracy(collected(*dense, *spm)), "256")
    assert line == {
        "n": "256",
        **{"paper: dense": "77.30", "paper: SPM": "99.41", "paper: gap": "+22.11"},
        **{"ours: dense": "62.00 ± 2.00", "ours: SPM": "93.00 ± 3.00", "ours: gap": "+31.00 ± 1.00"},
        "seeds": "3",
    }


def test_what_was_not_run_is_a_dash_and_what_the_paper_lacks_too(collected):
    table = TEACHER.accuracy(collected(teacher("spm", accuracy=0.9, width=128)))
    assert [line[0] for line in table[1:]] == ["128", "256", "512", "1,024", "2,048"]
    assert list(cells(table, "128").values()) == ["128", "-", "-", "-", "-", "90.00", "-", "1"]
    assert list(cells(table, "256").values())[4:] == ["-", "-", "-", "-"]


def test_dense_is_compared_with_spm_from_another_start_where_no_other_ran(collected):
    runs = collected(
        teacher("dense", accuracy=0.5), teacher("spm", accuracy=0.9, init="near_identity", layer_rate=None)
    )
    header, *_ = TEACHER.accuracy(runs)
    assert header[4:] == ["ours: dense", "ours: SPM, near identity", "ours: gap", "seeds"]
    assert list(cells(TEACHER.accuracy(runs), "256").values())[4:7] == ["50.00", "90.00", "+40.00"]
    assert cells(TEACHER.cost(runs), "256")["ours, ms: dense / SPM"] != "-"


def test_the_gap_is_of_seeds_that_both_have(collected):
    spm = [teacher("spm", accuracy=0.5 + seed / 10, seed=seed) for seed in range(3)]
    together = collected(teacher("dense", accuracy=0.4, seed=1), *spm)
    assert cells(TEACHER.accuracy(together), "256")["ours: gap"] == "+20.00"
    assert cells(TEACHER.accuracy(together), "256")["seeds"] == "1, SPM 3"
    apart = collected(teacher("dense", accuracy=0.7, seed=9), *spm)
    assert cells(TEACHER.accuracy(apart), "256")["ours: gap"] == "-10.00"


def test_other_layers_have_columns_where_they_ran(collected):
    layers = {"lowrank": 0.88, "identity": 0.87, "softmax": 0.86}
    runs = collected(agnews(width=65536), *(agnews(layer, accuracy=a, width=4096) for layer, a in layers.items()))
    line = cells(AGNEWS.accuracy(runs), "4,096")
    assert [line[f"ours: {name}"] for name in ("low rank", "dense from identity", "softmax only")] == [
        *("88.00", "87.00", "86.00")
    ]
    assert cells(AGNEWS.accuracy(runs), "65,536")["ours: low rank"] == "-"
    assert not any("softmax" in title for title in AGNEWS.cost(runs)[0] if "parameters" in title)


def test_times_measured_in_turns_win_and_others_are_marked(collected):
    runs = collected(
        teacher("dense", ms=8.0),
        teacher("spm", ms=5.0),
        teacher("lowrank", ms=4.0),
        teacher("dense", ms=90.0, width=512),
        teacher("spm", ms=30.0, width=512),
        teacher("spm", ms=50.0, width=512, seed=1),
        steps(step_time("teacher", "dense", 2.0, 1.0), step_time("teacher", "spm", 1.6, 1.25)),
    )
    table = TEACHER.cost(runs)
    line = cells(table, "256")
    assert [line[f"paper, ms: {name}"] for name in ("dense", "SPM", "dense / SPM")] == ["2.775", "5.396", "0.514"]
    assert [line[f"ours, ms: {name}"] for name in ("dense", "SPM", "low rank")] == ["2.00", "1.60", "4.00†"]
    assert line["ours, ms: dense / SPM"] == "1.25 (1.19 to 1.31)"
    assert line["parameters of the layer: dense"] == "65,536"
    line = cells(table, "512")
    assert [line[f"ours, ms: {name}"] for name in ("dense", "SPM", "dense / SPM")] == ["90.0†", "40.0†", "2.25†"]


def test_a_ratio_never_mixes_times_of_two_kinds(collected):
    """SPM was timed on a quiet machine, dense only in training: the ratio is of training."""
    runs = collected(teacher("dense", ms=8.0), teacher("spm", ms=4.0), steps(step_time("teacher", "spm", 1.0)))
    line = cells(TEACHER.cost(runs), "256")
    assert (line["ours, ms: SPM"], line["ours, ms: dense / SPM"]) == ("1.00", "2.00†")


def test_a_ratio_never_mixes_times_of_two_machines(collected):
    """The ratio is that on the one machine that trained both."""
    here, there = (teacher("spm", ms=ms, seed=seed) for seed, ms in enumerate((4.0, 1.0)))
    there["machine"]["instruction_set"] = "AVX512"
    dense = teacher("dense", ms=8.0)
    assert cells(TEACHER.cost(collected(dense, here, there)), "256")["ours, ms: dense / SPM"] == "2.00†"
    assert cells(TEACHER.cost(collected(dense, there)), "256")["ours, ms: dense / SPM"] == "-"


def test_a_width_that_was_only_timed_has_a_cost(collected):
    runs = collected(agnews(width=2048), steps(step_time("agnews", "spm", 5.0, width=8192)))
    assert cells(AGNEWS.cost(runs), "8,192")["ours, ms: SPM"] == "5.00"
    assert [line[0] for line in AGNEWS.accuracy(runs)[1:]] == ["2,048", "4,096"]


def test_the_main_table_of_the_teacher_has_no_variants(collected):
    runs = collected(
        teacher(accuracy=0.9), teacher(accuracy=0.8, block="rotation"), teacher(accuracy=0.7, pairing="other"),
        teacher(accuracy=0.6, angle_std="uniform"), teacher(accuracy=0.5, width=512),
    )  # fmt: skip
    assert cells(TEACHER.accuracy(runs), "256")["ours: SPM"] == "90.00"
    assert not any("rotation" in title or "pairs" in title for title in TEACHER.accuracy(runs)[0])
    table = teacher_axis.table(runs, teacher_axis.cases(TEACHER, runs))
    assert [line[:2] for line in table[1:]] == [["256", "0.1"], ["256", "uniform"]]
    line = cells(table, ("256", "0.1"))
    assert [line[f"SPM, {name}"] for name in ("teacher's pairs: general", "teacher's pairs: rotation")] == [
        *("90.00", "80.00")
    ]
    assert line["SPM, other pairs: general"] == "70.00"
    assert cells(table, ("256", "uniform"))["SPM, other pairs: general"] == "-"


def test_no_axis_for_the_main_comparison_alone(collected):
    tables = TEACHER.tables(collected(teacher(), teacher("dense")))
    assert [table.name for table in tables] == ["teacher-accuracy", "teacher-cost"]


def test_shakespeare_in_the_end(collected):
    runs = collected(
        shakespeare("dense", bpc=3.1, ms=900.0, steps=400),
        *(shakespeare("spm", bpc=bpc, steps=800, seed=seed) for seed, bpc in enumerate((2.8, 3.0))),
        steps(step_time("shakespeare", "spm", 90.0, 10.0, width=4096, batch=32, cell="gru")),
    )
    table = SHAKESPEARE.ends(runs)
    assert cells(table, "SPM, paper")["BPC"] == "2.98"
    assert cells(table, "SPM, paper")["dense / this"] == "3.81"
    line = cells(table, "SPM")
    assert (line["steps"], line["seeds"], line["BPC"]) == ("800", "2", "2.900 ± 0.141")
    assert (line["ms per step"], line["dense / this"]) == ("90.0", "10.0 (9.50 to 10.5)")
    assert cells(table, "dense")["ms per step"] == "900†"


def test_a_network_that_was_only_timed_stands_among_the_others(collected):
    times = step_time("shakespeare", "torch.nn.RNN", 80.0, 1.25, width=4096, batch=32, cell="rnn")
    runs = collected(shakespeare("dense", cell="rnn"), shakespeare("spm", cell="gru"), steps(times))
    assert cells(SHAKESPEARE.ends(runs), "torch.nn.RNN") == {
        **{"layer": "torch.nn.RNN", "cell": "rnn", "n": "4,096", "steps": "-", "seeds": "-", "NLL": "-", "BPC": "-"},
        **{"ms per step": "80.0", "dense / this": "1.25 (1.19 to 1.31)", "parameters": "-"},
    }


def test_shakespeare_by_step(collected):
    runs = collected(shakespeare("dense", bpc=3.0, steps=200), shakespeare("spm", bpc=2.0, steps=400))
    (case,) = runs.cases(SHAKESPEARE)
    table = SHAKESPEARE.by_step(runs, case)
    assert [line[0] for line in table[1:]] == ["1", "200", "400", "600", "800", "1,000"]
    line = cells(table, "400")
    assert [line[f"paper, SPM: {name}"] for name in ("NLL", "BPC", "ms")] == ["2.87", "4.14", "5,729"]
    bits = 2.0 + 3 * math.exp(-4)
    assert [line[f"ours, SPM: {name}"] for name in ("NLL", "BPC")] == [f"{bits * math.log(2):.3f}", f"{bits:.3f}"]
    assert line["ours, dense: NLL"] == "-"
    narrow = collected(shakespeare(width=64))
    assert SHAKESPEARE.by_step(narrow, narrow.cases(SHAKESPEARE)[0])[0] == [
        *("step", "ours, SPM: NLL", "ours, SPM: BPC")
    ]


def test_a_run_that_diverged_is_shown(collected):
    runs = collected(*(shakespeare(bpc=bpc, seed=seed) for seed, bpc in enumerate((3.0, math.nan))))
    assert cells(SHAKESPEARE.ends(runs), "SPM")["BPC"] == "nan ± nan"


def test_the_headline_is_of_the_widest_comparison_with_the_paper(collected):
    runs = collected(
        *(teacher(layer, width=width) for layer in ("dense", "spm") for width in (256, 512, 600)), teacher(width=2048)
    )
    assert TEACHER.headline_case(runs) == Case("teacher", 512, 0.1)
    only_one = collected(teacher(width=64, angle_std=0.5))
    assert TEACHER.headline(only_one).title == "Compositional teacher, n = 64, angles 0.5"
    assert TEACHER.headline(only_one).table[1] == ["dense, %", "-", "-"]
    assert (TEACHER.headline(only_one).gap[0], TEACHER.headline(only_one).ratio) == ("-", "-")


def test_the_headline_is_of_spm_from_another_start_if_no_other_ran(collected):
    near = {"init": "near_identity", "layer_rate": None}
    runs = collected(teacher("dense", accuracy=0.5), teacher("spm", accuracy=0.9, **near))
    found = TEACHER.headline(runs)
    assert found.table[2][0::2] == ["SPM, near identity, %", "90.00"]
    assert (found.gap, found.ratio) == (("+40.00", "points of accuracy"), "1.00")
    both = collected(*(teacher(accuracy=accuracy, **start) for accuracy, start in ((0.9, near), (0.7, {}))))
    assert TEACHER.headline(both).table[2][0::2] == ["SPM, %", "70.00"]


def test_the_headline_of_shakespeare_compares_equal_steps(collected):
    found = SHAKESPEARE.headline(
        collected(shakespeare("dense", bpc=3.0, ms=50, steps=400), shakespeare("spm", bpc=2.5, ms=10, steps=2000))
    )
    assert found.gap == ("-0.50", "bits per character")
    assert found.ratio == "5.00"
    assert found.table[1:] == [
        ["dense, BPC", "3.08", "3.00"],
        ["SPM, BPC", "2.98", "2.50"],
        ["after steps", "800; 1,000", "400; 2,000"],
        ["gap, equal steps", "-0.05 at 800", "-0.50 at 400"],
        ["times as fast", "3.81", "5.00†"],
    ]


def test_notes_say_what_is_not_alike(collected):
    runs = collected(
        agnews("dense"), agnews("spm"), *(shakespeare("dense", cell=cell, steps=200) for cell in ("rnn", "gru")),
        *(shakespeare("spm", cell=cell, steps=400) for cell in ("rnn", "gru")),
    )  # fmt: skip
    found = " ".join(notes.notes(runs))
    assert "120,000 rows of AG News. Ours: AG News, 61,297-row part." in found
    cases = "Shakespeare, n = 4,096, rnn; Shakespeare, n = 4,096, gru"
    assert f"{cases}: not the same steps for all: dense 200, SPM 400." in found
    assert "Not run: Compositional teacher, GPT, Adapters." in found
    assert "2.58 nats are 3.72 bits, printed is 3.03" in found
    assert "Left out: 1 result of other benchmarks." in notes.notes(collected(agnews(), result({"width": 256}, [])))
    assert not any("not the same" in note for note in notes.notes(collected(agnews("dense"), agnews("spm"))))


def test_choices_name_the_layers_that_differ(collected):
    runs = collected(
        shakespeare("dense", steps=200), shakespeare("spm", steps=400), teacher(seed=1), teacher("dense", stages=None),
        teacher(seed=0, betas=[0.9, 0.99]),
    )  # fmt: skip
    table = notes.choices(runs)
    assert table[0] == ["", "Compositional teacher", "Shakespeare"]
    assert cells(table, "steps")["Shakespeare"] == "200 (dense); 400 (SPM)"
    assert cells(table, "seed")["Compositional teacher"] == "0, 1"
    assert cells(table, "stages")["Compositional teacher"] == "12"
    assert cells(notes.choices(collected(teacher(stages=None))), "stages")["Compositional teacher"] == "default"
    assert cells(table, "cell")["Compositional teacher"] == "-"
    assert cells(table, "betas")["Compositional teacher"] == "[0.9, 0.99]"


def test_every_machine_and_commit_is_named(collected):
    other = teacher(seed=1)
    other |= {"machine": {**other["machine"], "cores": 64}, "commit": None}
    hashed = teacher(seed=2) | {"data": {"agnews/train.csv": "sha256:01"}}
    table = notes.provenance(collected(teacher(seed=0), other, hashed))
    by_name = {line[0]: line[1:] for line in table}
    assert by_name["cores"] == ["2", "64"]
    assert by_name["commits"] == ["0123456789abcdef0123456789abcdef01234567", "an installed package"]
    assert by_name["results"] == ["2", "1"]
    assert by_name["data"] == ["agnews/train.csv sha256:01", "-"]


@pytest.mark.parametrize("experiment", [TEACHER, AGNEWS], ids=lambda experiment: experiment.name)
def test_the_papers_own_ratios_come_out(experiment):
    printed = {256: 0.51, 512: 1.07, 1024: 1.81, 2048: 3.42 if experiment is TEACHER else 3.63, 4096: 7.03}
    for width, layers in experiment.paper.items():
        assert round(layers["dense"].ms / layers["SPM"].ms, 2) == printed[width]
