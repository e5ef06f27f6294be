from functools import partial

import pytest
import synthetic
from synthetic import agnews, shakespeare, steps, teacher

from pairmix_lab.experiments import EXPERIMENTS
from pairmix_lab.experiments.agnews import EXPERIMENT as AGNEWS
from pairmix_lab.experiments.teacher import EXPERIMENT as TEACHER
from pairmix_lab.report import runs as report_runs
from pairmix_lab.report.experiment import Case, Study

MAIN = Case("teacher", 256, 0.1)
collect = partial(report_runs.collect, experiments=EXPERIMENTS)


def seeds(runs, case, name):
    return [run["config"]["seed"] for run in runs.of(case, name)]


def test_folders_are_searched_and_a_file_counts_once(tmp_path):
    synthetic.write(tmp_path / "a" / "deep", teacher(seed=1))
    synthetic.write(tmp_path / "b", teacher(seed=0), agnews())
    (tmp_path / "b" / "notes.txt").write_text("not a result")
    runs = collect([tmp_path / "b", tmp_path, tmp_path / "b" / "000.json", tmp_path / "a" / ".." / "b"])
    assert seeds(runs, MAIN, "SPM") == [0, 1]
    assert runs.cases(AGNEWS) == [Case("agnews", 256)]
    assert len(runs.files) == 3
    assert runs.left_out == []


def test_runs_are_sorted_by_what_they_compare(collected):
    runs = collected(
        teacher(angle_std="uniform"), teacher(angle_std=0.5), teacher(angle_std=0.05), teacher("dense", angle_std=0.5)
    )
    assert [case.setting for case in runs.cases(TEACHER)] == [0.05, 0.5, "uniform"]
    assert runs.contenders(runs.cases(TEACHER)) == ["dense", "SPM"]
    assert runs.of(Case("teacher", 256, 7.0), "SPM") == []


def test_the_last_run_of_a_seed_counts(collected):
    old = teacher(accuracy=0.1, finished="2025-01-01T00:00:00+00:00")
    new = teacher(accuracy=0.9, finished="2025-01-02T00:00:00+00:00")
    runs = collected(new, old)
    assert [run["outcome"]["test_accuracy"] for run in runs.of(MAIN, "SPM")] == [0.9]
    assert (
        "1 result of other settings than the longest, or the best on validation rows, or repeated later"
        in runs.left_out[0]
    )


def test_the_longest_runs_count(collected):
    runs = collected(teacher(seed=0), teacher(seed=1), *(teacher(seed=seed, steps=10) for seed in (2, 3, 4)))
    assert seeds(runs, MAIN, "SPM") == [0, 1]
    assert len(runs.files) == 2
    assert "3 results of other settings" in runs.left_out[0]


@pytest.mark.parametrize("setting", [{"lr": 1.0}, {"batch": 8}, {"stages": 3}, {"decay": "constant"}], ids=str)
def test_only_runs_of_the_same_settings_are_averaged(collected, setting):
    runs = collected(teacher(seed=0), teacher(seed=1), teacher(seed=2, **setting))
    assert seeds(runs, MAIN, "SPM") == [0, 1]
    assert "1 result of other settings" in runs.left_out[0]


@pytest.mark.parametrize("setting", ["lr", "weight_decay", "layer_rate"])
def test_of_several_settings_the_best_on_validation_rows_counts(collected, setting):
    """The validation rows choose, though the test rows would choose otherwise."""
    tried = {0.1: (0.7, 0.95), 0.2: (0.8, 0.9), 0.3: (0.6, 0.99)}
    runs = []
    for value, (valid, test) in tried.items():
        for seed in (0, 1):
            run = teacher(accuracy=valid + 0.02 * seed, seed=seed, **{setting: value})
            runs.append(run | {"outcome": {**run["outcome"], "test_accuracy": test}})
    found = collected(*runs)
    assert [run["outcome"]["test_accuracy"] for run in found.of(MAIN, "SPM")] == [0.9, 0.9]
    assert {run["config"][setting] for run in found.of(MAIN, "SPM")} == {0.2}
    assert "4 results of other settings" in found.left_out[0]


def test_a_choice_with_more_seeds_counts_before_a_better_one(collected):
    """One lucky seed says little."""
    runs = collected(*(teacher(accuracy=0.8, seed=seed) for seed in (0, 1)), teacher(accuracy=0.9, seed=0, lr=0.01))
    assert seeds(runs, MAIN, "SPM") == [0, 1]


@pytest.mark.parametrize("times", [("2025-01-01", "2025-01-02"), ("2025-01-02", "2025-01-01")], ids=str)
def test_a_choice_that_was_never_validated_is_the_last_one(collected, times):
    first, second = (f"{day}T00:00:00+00:00" for day in times)
    without = teacher(lr=0.1, finished=first)
    for row in without["rows"]:
        del row["valid_accuracy"]
    runs = collected(teacher(accuracy=0.01, finished=second), without)
    assert runs.of(MAIN, "SPM")[0]["config"]["lr"] == 0.003


def test_an_experiment_without_accuracy_goes_by_the_loss(collected):
    better, worse = shakespeare(bpc=2.0), shakespeare(bpc=3.0)
    worse["config"]["lr"] = better["config"]["lr"] / 2
    runs = collected(better, worse | {"finished": "2025-01-02T00:00:00+00:00"})
    assert [run["outcome"]["valid_bpc"] for run in runs.of(Case("shakespeare", 4096, "gru"), "SPM")] == [2.0]


def test_results_that_name_no_start_have_the_one_of_their_time(collected):
    old, new = teacher(seed=0, block="rotation"), teacher(seed=0)
    del old["config"]["init"], old["config"]["layer_rate"]
    old_dense = teacher("dense")
    del old_dense["config"]["init"], old_dense["config"]["layer_rate"]
    runs = collected(old, new, old_dense)
    assert runs.contenders([MAIN]) == ["dense", "SPM", "SPM, rotation, near identity, common rate"]


def test_the_time_of_a_step_does_not_depend_on_the_start(collected):
    runs = collected(
        teacher(init="near_identity"), teacher(rows=300), steps(synthetic.step_time("teacher", "spm", 1.5))
    )
    assert runs.step_time(MAIN, "SPM, near identity")["ms"] == 1.5
    assert runs.step_time(MAIN._replace(study=Study("rows", 300)), "SPM")["ms"] == 1.5
    assert runs.only_timed(MAIN) == []
    assert runs.step_time(MAIN, "SPM, rotation") is None


def test_runs_on_other_data_are_not_averaged(collected):
    other = agnews(seed=2)
    other["outcome"]["data"] = "AG News"
    runs = collected(agnews(seed=0), agnews(seed=1), other)
    assert seeds(runs, Case("agnews", 256), "SPM") == [0, 1]


def test_a_run_that_is_not_finished_is_left_out(collected):
    stopped, without_word = teacher(seed=1), teacher(seed=2)
    stopped["outcome"]["finished"] = False
    del without_word["outcome"]["finished"]
    runs = collected(teacher(seed=0), stopped, without_word)
    assert seeds(runs, MAIN, "SPM") == [0, 2]
    assert runs.left_out == ["Left out: 1 result not finished."]


def test_results_of_other_benchmarks_are_counted(collected):
    runs = collected(teacher(), *[synthetic.result({"width": 256}, [])] * 2)
    assert runs.left_out == ["Left out: 2 results of other benchmarks."]
    assert len(runs.files) == 1


def test_the_last_step_times_count_at_the_batch_of_training(collected):
    old = steps(synthetic.step_time("teacher", "spm", 9.0), finished="2025-01-01T00:00:00+00:00")
    new = steps(synthetic.step_time("teacher", "spm", 1.0), finished="2025-01-03T00:00:00+00:00")
    other_batch = synthetic.step_time("teacher", "dense", 5.0, batch=8)
    threads = [synthetic.step_time("teacher", "lowrank", 4.0 / count, threads=count) for count in (2, 1)]
    runs = collected(new, old, steps(other_batch, *threads), teacher(), shakespeare())
    assert {name: row["ms"] for (_, name), row in runs.steps.items()} == {"SPM": 1.0, "low rank": 2.0}


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere is not there"):
        collect([tmp_path / "nowhere"])


@pytest.mark.parametrize("runs", [[], [steps()], [synthetic.result({}, [])]], ids=["nothing", "times only", "others"])
def test_no_training_run_is_an_error(tmp_path, runs):
    with pytest.raises(ValueError, match=r"no finished training run in .*empty"):
        collect([synthetic.write(tmp_path / "empty", *runs)])
    with pytest.raises(ValueError, match="no path at all"):
        collect([])


@pytest.mark.parametrize("text", ["{", "[1, [2]]", "3", '{"rows": []}', '{"config": 1, "rows": []}', "\udcff"])
def test_a_foreign_file_is_named(tmp_path, text):
    synthetic.write(tmp_path, teacher())
    (tmp_path / "foreign.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"foreign\.json (is not a result of pairmix|cannot be read)"):
        collect([tmp_path])


def test_a_folder_is_no_result_whatever_its_name(tmp_path):
    synthetic.write(tmp_path, teacher())
    (tmp_path / "folder.json").mkdir()
    assert len(collect([tmp_path]).files) == 1
