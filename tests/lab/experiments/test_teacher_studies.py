import pytest
import synthetic
from synthetic import step_time, steps, teacher

from pairmix_lab.experiments import summary, teacher_axis, teacher_studies
from pairmix_lab.experiments.teacher import EXPERIMENT as TEACHER
from pairmix_lab.report import notes
from pairmix_lab.report.experiment import Case, Study


def tables(runs):
    return {one.name: one for one in TEACHER.tables(runs)}


def pictures(runs):
    return {one.name: one for one in TEACHER.pictures(runs)}


def cells(table, *first):
    """The line that begins with these cells, by heading."""
    (line,) = [line for line in table[1:] if tuple(line[: len(first)]) == first]
    assert len(line) == len(table[0])
    return dict(zip(table[0], line, strict=True))


def line(axes, label):
    (found,) = [line for line in axes.lines if line.get_label() == label]
    return list(found.get_xdata()), list(found.get_ydata())


def test_accuracy_by_rows(collected):
    runs = collected(
        *(teacher("dense", accuracy=0.4 + seed / 10, rows=300, seed=seed) for seed in (0, 1)),
        teacher("lowrank", accuracy=0.3, rows=300),
        teacher(accuracy=0.8, rows=1000),
        teacher(accuracy=0.7, rows=300),
        teacher(accuracy=0.6, rows=300, block="rotation"),
        teacher(accuracy=0.5, rows=300, angle_std="uniform"),
    )
    table = tables(runs)["teacher-rows"].table
    assert [line[:3] for line in table[1:]] == [
        *(["256", "0.1", "300"], ["256", "0.1", "1,000"], ["256", "uniform", "300"])
    ]
    assert cells(table, "256", "0.1", "300") == {
        **{"n": "256", "angles, std": "0.1", "rows": "300", "dense": "45.00 ± 7.07", "SPM": "70.00"},
        **{"SPM, rotation": "60.00", "low rank": "30.00", "seeds": "1, dense 2"},
    }
    assert cells(table, "256", "0.1", "1,000")["dense"] == "-"


def test_sets_are_sorted_by_size(collected):
    runs = collected(*(teacher(rows=rows) for rows in (100_000, 300, 3000, 1000)))
    assert [line[2] for line in tables(runs)["teacher-rows"].table[1:]] == ["300", "1,000", "3,000", "100,000"]


def test_what_was_chosen_on_validation_rows_is_said(collected):
    runs = collected(
        *(teacher("dense", accuracy=a, rows=300, lr=lr) for lr, a in ((0.001, 0.5), (0.003, 0.4))),
        *(teacher(accuracy=a, rows=300, lr=lr) for lr, a in ((0.001, 0.7), (0.003, 0.8))),
    )
    one = tables(runs)["teacher-rows"]
    found = cells(one.table, "256", "0.1", "300")
    assert (found["dense"], found["SPM"]) == ("50.00", "80.00")
    assert (found["learning rate: dense"], found["learning rate: SPM"]) == ("0.001", "0.003")
    assert not any("weight decay" in heading for heading in one.table[0])
    assert "a weight decay of 0 for all" in one.caption
    assert "the learning rate that is best on the validation rows, for each layer and set" in one.caption


def test_studies_are_no_part_of_the_main_comparison(collected):
    main = [teacher("dense", accuracy=0.5), teacher(accuracy=0.9), teacher(accuracy=0.7, angle_std="uniform")]
    studies = [
        teacher(accuracy=0.1, rows=300),
        teacher(accuracy=0.2, norms=True),
        teacher(accuracy=0.3, rows=9, norms=True),
    ]
    alone, both = collected(*main), collected(*main, *studies)
    for name in ("teacher-accuracy", "teacher-cost", "teacher-axis"):
        assert tables(both)[name] == tables(alone)[name]
    assert TEACHER.headline(both) == TEACHER.headline(alone)
    assert teacher_axis.cases(TEACHER, both) == teacher_axis.cases(TEACHER, alone)
    assert tables(both).keys() - tables(alone).keys() == {"teacher-rows", "teacher-norms"}
    assert both.left_out == []


def test_studies_alone_have_their_own_tables_only(collected):
    runs = collected(teacher(rows=300), teacher(norms=True), steps(step_time("teacher", "spm", 1.0)))
    assert list(tables(runs)) == ["teacher-rows", "teacher-norms"]
    assert list(pictures(runs)) == ["teacher-rows-256-0.1", "teacher-norms-256-0.1"]
    assert TEACHER.headline(runs) is None


def test_a_study_is_named():
    case = Case("teacher", 256, 0.1, Study("rows", 3000))
    assert TEACHER.case_name(case) == "n = 256, 3,000 rows"
    assert TEACHER.case_name(case._replace(setting="uniform", study=Study("norms"))) == "n = 256, angles uniform, norms"


def test_notes_say_which_sets_had_other_rates(collected):
    found = notes.notes(collected(teacher(rows=300), teacher("dense", rows=300, weight_decay=0.1)))
    assert "Compositional teacher, n = 256, 300 rows: not the same weight_decay for all: dense 0.1, SPM 0.0." in found


def test_a_picture_for_each_teacher(collected):
    runs = collected(
        *(
            teacher(accuracy=0.5 + seed / 10 + rows / 10_000, rows=rows, seed=seed, angle_std=angle)
            for rows in (1000, 300)
            for seed in (0, 1)
            for angle in (0.1, "uniform")
        )
    )
    found = pictures(runs)
    assert list(found) == ["teacher-rows-256-0.1", "teacher-rows-256-uniform"]
    (axes,) = found["teacher-rows-256-0.1"].figure.axes
    assert axes.get_xscale() == "log"
    assert line(axes, "SPM") == ([300, 1000], [pytest.approx(0.58), pytest.approx(0.65)])
    (band,) = axes.collections
    assert (band.get_datalim(axes.transData).y0, band.get_datalim(axes.transData).y1) == pytest.approx((0.53, 0.7))


def test_norms_at_the_start_in_the_end_and_at_their_largest(collected):
    second = teacher(norms=True, seed=1)
    for row in second["rows"]:
        row["operator_norm"] *= 3
    runs = collected(teacher(norms=True), second, teacher("lowrank", norms=True))
    table = tables(runs)["teacher-norms"].table
    assert cells(table, "256", "0.1", "SPM") == {
        **{"n": "256", "angles, std": "0.1", "layer": "SPM"},
        **{"operator norm: start": "2.00", "operator norm: end": "6.00", "operator norm: largest": "6.00"},
        **{"condition: start": "2.00", "condition: end": "2.00", "condition: largest": "7.00"},
        **{"gradient norm: start": "0.500", "gradient norm: end": "0.167", "gradient norm: largest": "0.500"},
        "seeds": "2",
    }


def test_a_norm_that_was_not_measured_is_a_dash(collected):
    run = teacher("lowrank", norms=True)
    for row in run["rows"]:
        del row["condition"]
    found = cells(tables(collected(run))["teacher-norms"].table, "256", "0.1", "low rank")
    assert [found[f"condition: {moment}"] for moment in ("start", "end", "largest")] == ["-", "-", "-"]
    assert found["operator norm: end"] == "3.00"


def test_norms_by_step(collected):
    runs = collected(teacher(norms=True, steps=1000), teacher("dense", norms=True, steps=1000))
    left, right = pictures(runs)["teacher-norms-256-0.1"].figure.axes
    assert (left.get_ylabel(), right.get_ylabel()) == ("operator norm", "gradient norm")
    assert line(left, "SPM") == ([1, 500, 1000], [1, 2, 3])
    assert line(right, "dense") == ([1, 500, 1000], [0.5, 0.25, pytest.approx(0.5 / 3)])


@pytest.mark.parametrize("name", ["teacher-rows", "teacher-norms"])
def test_pages_find_the_table_of_a_study_in_its_folder(tmp_path, name):
    study = {"rows": 300} if name == "teacher-rows" else {"norms": True}
    synthetic.write(tmp_path / name / "0.003", teacher(accuracy=0.5, **study))
    synthetic.write(tmp_path / name / "0.01", teacher(accuracy=0.6, lr=0.01, **study))
    assert TEACHER.table(name, tmp_path)[0][:2] == ["n", "angles, std"]
    assert TEACHER.table("teacher-accuracy", tmp_path) is None
    assert name in TEACHER.table_names


def test_the_axis_shows_the_starts_of_spm_together(collected):
    runs = collected(
        teacher("lowrank"),
        *(teacher(block=block, init=init) for block in ("general", "rotation") for init in ("own", "near_identity")),
    )
    assert teacher_axis.table(runs, teacher_axis.cases(TEACHER, runs))[0] == [
        *("n", "angles, std", "low rank", "SPM, teacher's pairs: general", "SPM, teacher's pairs: rotation"),
        *("SPM, near identity, teacher's pairs: general", "SPM, near identity, teacher's pairs: rotation", "seeds"),
    ]


def test_the_main_tables_show_every_start(collected):
    runs = collected(teacher(accuracy=0.9), teacher(accuracy=0.8, init="near_identity"), teacher(block="rotation"))
    found = cells(TEACHER.accuracy(runs), "256")
    assert (found["ours: SPM"], found["ours: SPM, near identity"]) == ("90.00", "80.00")
    assert "ours: SPM, rotation" not in found


def test_the_summary_shows_every_start_that_was_run(tmp_path):
    old = teacher(accuracy=0.7, width=1024)
    del old["config"]["init"], old["config"]["layer_rate"]
    runs = old, teacher("dense", accuracy=0.5, width=1024), teacher(width=1024, angle_std="uniform")
    synthetic.write(tmp_path / "teacher-own", *runs)
    header, near, far = summary.table(tmp_path)
    assert header == ["task", "n", "dense", "SPM", "SPM, near identity, common rate"]
    assert near[1:] == ["1,024", "50.00", "-", "70.00"]
    assert far[1:] == ["1,024", "-", "90.00", "-"]


def test_a_config_belongs_to_one_study():
    assert teacher_studies.study({}) is None
    assert teacher_studies.study({"rows": None, "norms": False}) is None
    assert teacher_studies.study({"rows": 300, "norms": True}) == Study("rows", 300)
    assert teacher_studies.study({"norms": True}) == Study("norms")
