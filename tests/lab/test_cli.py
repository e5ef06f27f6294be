import csv
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from typer.testing import CliRunner

from pairmix_lab import cli, results
from pairmix_lab.experiments import EXPERIMENTS, agnews, gpt_task, shakespeare
from pairmix_lab.training import allocator, loop

BY_NAME = {one.name: one for one in EXPERIMENTS}
TINY = {
    "teacher": "--widths 8 --seeds 0 --layers dense,spm --steps 2 --batch 4",
    "agnews": "--widths 8 --seeds 0 --layers softmax,spm --steps 2 --batch 4 --data {data}",
    "shakespeare": "--widths 8 --seeds 0 --layers dense,spm --steps 2 --batch 4 --length 4 --data {data}",
    "gpt": "--widths 64 --seeds 0 --layers dense,spm --steps 2 --batch 2 --length 4 --depth 1 --data {data}",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder in which the commands run, with some data of both kinds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PAIRMIX_CACHE", str(tmp_path / "cache"))
    for name in ("agnews", "shakespeare"):
        (tmp_path / "data" / name).mkdir(parents=True)
    for name in ("train.csv", "test.csv"):
        with (tmp_path / "data" / "agnews" / name).open("w", newline="") as file:
            csv.writer(file).writerows((number % 4 + 1, f"word{number}", "more") for number in range(40))
    (tmp_path / "data" / "shakespeare" / "input.txt").write_bytes(bytes(range(100)))
    monkeypatch.setattr(shakespeare, "generate", lambda model, prompt, length, seed: b"To be")
    monkeypatch.setattr(gpt_task, "generate", lambda model, prompt, size, samples: [b"To be"])
    return tmp_path


def run(command):
    """What `pairmix` does with this."""
    return CliRunner().invoke(cli.app, shlex.split(command))


def train(experiment, more=""):
    return run(f"train {experiment} {TINY[experiment].format(data='data')} --out runs {more}")


def words(result):
    """What it said, without what depends on the width of the terminal."""
    return " ".join(re.sub("[│╭╮╰╯─┃━]", " ", result.output).split())


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def saved(folder):
    return {path.stem: results.load(path) for path in sorted(folder.glob("*.json"))}


def test_demo_compares_and_can_be_run_again(folder):
    for steps in (200, 100):  # the second time there is something to clear away
        result = run(f"demo --out out --steps {steps} --width 64")
        assert result.exit_code == 0, result.output
        dense, spm = saved(folder / "out").values()
        assert (dense["config"]["layer"], spm["config"]["layer"]) == ("dense", "spm")
        assert dense["config"]["steps"] == spm["outcome"]["step"] == steps
        assert spm["outcome"]["mixer_parameters"] < dense["outcome"]["mixer_parameters"] == 64 * 65
        for one in (dense, spm):
            assert f"{one['outcome']['test_accuracy']:.1%}" in words(result)
        page = (folder / "out" / "report.html").read_text()
        assert page.startswith("<!doctype html>")
        assert f"{100 * spm['outcome']['test_accuracy']:.2f}" in page


@pytest.mark.parametrize("experiment", TINY)
class TestTrain:
    def test_results_are_written_and_shown(self, folder, experiment):
        result = train(experiment)
        assert result.exit_code == 0, result.output
        runs = saved(folder / "runs").values()
        first = "softmax" if experiment == "agnews" else "dense"
        assert sorted(one["config"]["layer"] for one in runs) == sorted([first, "spm"])
        for one in runs:
            outcome = one["outcome"]
            assert outcome["step"] == one["rows"][-1]["step"] == 2
            shown = f"{outcome['valid_bpc']:.3f}" if "valid_bpc" in outcome else f"{outcome['test_accuracy']:.1%}"
            assert shown in words(result)
        assert ("paper" in words(result)) == (experiment != "gpt")
        assert "pairmix report runs -o report.html" in words(result)

    def test_resume_leaves_what_is_finished(self, folder, experiment):
        assert train(experiment).exit_code == 0
        before = contents(folder / "runs")
        result = train(experiment, "--resume --seeds 0,1")
        assert result.exit_code == 0, result.output
        after = contents(folder / "runs")
        assert before.items() < after.items()
        assert {one["config"]["seed"] for one in saved(folder / "runs").values()} == {0, 1}

    def test_a_second_run_changes_nothing(self, folder, experiment):
        assert train(experiment).exit_code == 0
        before = contents(folder / "runs")
        result = train(experiment)
        assert result.exit_code == 1
        assert "is of an earlier run: --resume leaves it as it is, --out chooses another place" in words(result)
        assert contents(folder / "runs") == before

    def test_resume_does_not_take_other_settings_for_the_same_run(self, folder, experiment):
        assert train(experiment).exit_code == 0
        before = contents(folder / "runs")
        result = train(experiment, "--resume --lr 0.5")
        assert result.exit_code == 1
        assert "here" in words(result)
        assert "lr is 0.0" in words(result)
        assert contents(folder / "runs") == before

    def test_every_result_has_the_command_line(self, folder, experiment, monkeypatch):
        monkeypatch.setattr(results, "command_line", lambda: "torchrun -m pairmix train as typed")
        assert train(experiment).exit_code == 0
        assert [one["command"] for one in saved(folder / "runs").values()] == ["torchrun -m pairmix train as typed"] * 2

    def test_every_model_gets_the_rate_that_is_best_on_validation(self, folder, experiment):
        result = train(experiment, "--lrs 1e-9,0.01 --seeds 0,1 --steps 30")
        assert result.exit_code == 0, result.output
        tried = {lr: saved(folder / "runs" / lr) for lr in ("lr1e-09", "lr0.01")}
        first = {name for name in tried["lr1e-09"] if name.endswith("seed0")}
        assert len(first) == 2
        for name in first:
            scores = {lr: BY_NAME[experiment].validation_score(found[name]) for lr, found in tried.items()}
            best = max(scores, key=scores.get)
            second = name.replace("seed0", "seed1")
            assert [lr for lr, found in tried.items() if second in found] == [best]
        before = contents(folder / "runs")
        again = train(experiment, "--lrs 1e-9,0.01 --seeds 0,1 --steps 30 --resume")
        assert again.exit_code == 0, again.output
        assert contents(folder / "runs") == before

    def test_a_rate_that_diverges_is_not_chosen(self, folder, experiment, monkeypatch):
        step = loop.timed_step

        def unstable(model, optimizer, inputs, labels, lr, clip):
            loss, milliseconds = step(model, optimizer, inputs, labels, lr, clip)
            return math.nan if lr > 0.1 else loss, milliseconds

        monkeypatch.setattr(loop, "timed_step", unstable)
        result = train(experiment, "--lrs 0.5,0.001 --seeds 0,1")
        assert result.exit_code == 0, result.output
        assert "the loss is nan at step 1" in words(result)
        assert not saved(folder / "runs" / "lr0.5")
        assert {one["config"]["seed"] for one in saved(folder / "runs" / "lr0.001").values()} == {0, 1}

    def test_a_rate_whose_validation_is_not_a_number_is_not_chosen(self, folder, experiment, monkeypatch):
        def score(self, run):
            return math.nan if run["config"]["lr"] == 0.5 else -1.0

        monkeypatch.setattr(type(BY_NAME[experiment]), "validation_score", score)
        result = train(experiment, "--lrs 0.5,0.001 --seeds 0,1")
        assert result.exit_code == 0, result.output
        assert {one["config"]["seed"] for one in saved(folder / "runs" / "lr0.5").values()} == {0}
        assert {one["config"]["seed"] for one in saved(folder / "runs" / "lr0.001").values()} == {0, 1}

    def test_both_blocks_in_one_grid(self, folder, experiment):
        result = train(experiment, "--blocks general,rotation")
        assert result.exit_code == 0, result.output
        kinds = [(one["config"]["layer"], one["config"]["block"]) for one in saved(folder / "runs").values()]
        assert kinds.count(("spm", "general")) == kinds.count(("spm", "rotation")) == 1

    @pytest.mark.parametrize(
        ("option", "complaint"),
        [
            ("--layers dense,sparse", "'sparse'"),
            ("--layers dense,", "''"),
            ("--widths 0", "'0'"),
            ("--widths 8,x", "'x'"),
            ("--seeds -1", "'-1'"),
            ("--seeds 1.5", "'1.5'"),
            ("--seeds 2147483648", "got 2147483648"),
            ("--blocks round", "'round'"),
            ("--steps 0", "got 0"),
            ("--batch 0", "got 0"),
            ("--lr nan", "got nan"),
            ("--lr x", "--lr"),
            ("--threads 0", "--threads"),
            ("--threads 100000000000", "--threads"),
            ("--widths 2147483648", "got 2147483648"),
            pytest.param(f"--widths {'9' * 5000}", "must be whole numbers", id="a width of 5000 digits"),
            ("--batch 2147483648", "got 2147483648"),
            ("--steps 1000001", "got 1000001"),
        ],
    )
    def test_bad_values(self, folder, experiment, option, complaint):
        check_refusal(folder, train(experiment, option), complaint)


def check_refusal(folder, result, complaint):
    assert result.exit_code == 2
    assert complaint in words(result)
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("value", ["far", "-0.1", "nan", "inf", "0.1,,0.2"])
def test_bad_angles(folder, value):
    check_refusal(folder, train("teacher", f"--angle-stds {value}"), "''" if ",," in value else value)


@pytest.mark.parametrize(
    ("experiment", "option", "complaint"),
    [
        ("teacher", "--pairings some", "'some'"),
        ("agnews", "--stages -1", "--stages"),
        ("shakespeare", "--cell lstm", "'lstm'"),
        ("shakespeare", "--length 0", "--length"),
        ("shakespeare", "--layers softmax", "'softmax'"),
        ("gpt", "--layers identity", "'identity'"),
        ("gpt", "--widths 100", "got 100"),
        ("gpt", "--depth 0", "--depth"),
        ("gpt", "--dense-maps out,in", "'in'"),
        ("gpt", "--text poems", "'poems'"),
        ("gpt", "--seconds 0", "'0'"),
        ("gpt", "--seconds 1,x", "'x'"),
        ("gpt", "--seconds 60", "results/steps-gpt.json cannot be read"),
    ],
)
def test_bad_values_of_one_experiment(folder, experiment, option, complaint):
    check_refusal(folder, train(experiment, option), complaint)


@pytest.mark.parametrize("experiment", ["agnews", "shakespeare"])
def test_without_the_data_it_says_both_ways_to_get_it(folder, experiment):
    result = train(experiment, "--data nowhere")
    assert result.exit_code == 1
    assert f"nowhere/{experiment}/" in words(result)
    assert "leave out --data: it is downloaded from https://" in words(result)
    assert f"pass --data DIR, with {experiment}/" in words(result)
    assert not (folder / "runs").exists()


CHANGED = {"agnews": "train.csv", "shakespeare": "input.txt"}


@pytest.mark.parametrize("state", ["finished", "stopped"])
@pytest.mark.parametrize("experiment", CHANGED)
def test_resume_does_not_go_on_with_other_data(folder, experiment, state):
    assert train(experiment).exit_code == 0
    if state == "stopped":  # as if killed between the last checkpoint and the result
        for path in (folder / "runs").glob("*.json"):
            path.unlink()
    before = contents(folder / "runs")
    file = folder / "data" / experiment / CHANGED[experiment]
    file.write_bytes(file.read_bytes().replace(b"\x39", b"\x38"))
    agnews._hashed.cache_clear()  # a new process would have nothing in it
    result = train(experiment, "--resume")
    assert result.exit_code == 1
    assert f"is of another run: {experiment}/{CHANGED[experiment]} is 'sha256:" in words(result)
    assert contents(folder / "runs") == before


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ("--widths 30000000 --layers dense", "a width of 30000000"),  # over a petabyte
        ("--widths 2000000000 --layers identity", "a width of 2000000000"),  # more than can be counted
        ("--batch 2000000000 --widths 100000 --layers lowrank", "a batch of 2000000000"),
    ],
)
def test_what_needs_too_much_memory_is_said_in_a_sentence(folder, options, value):
    result = run(f"train teacher --seeds 0 --out runs {options}")
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "needs more memory than there is, with a width of " in words(result)
    assert value in words(result)
    assert not (folder / "runs").exists()


def test_a_demo_that_needs_too_much_memory(folder):
    result = run("demo --out out --width 30000000")
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "needs more memory than there is, with a width of 30000000" in words(result)


FULL_DISK = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)), -1))
from pairmix.__main__ import main
main()
"""


@pytest.mark.parametrize("space", [0, 60, 200, 10_000])
def test_a_disk_that_is_full_from_the_start(tmp_path, space):
    command = "train teacher --widths 32 --layers spm --seeds 0 --steps 10 --batch 4 --threads 1 --out"
    finished = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(space), *command.split(), tmp_path / "runs"],
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 1
    (sentence,) = finished.stderr.strip().splitlines()
    assert sentence.startswith(f"Error: {tmp_path / 'runs'}")
    assert "File too large" in sentence
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    for path in left:
        assert "tfevents" in path.name  # whole lines of the history, and nothing else
        assert list(EventFileLoader(str(path)).Load())[1:]
    assert not left or space >= 100


def test_a_text_that_is_too_short(folder):
    result = train("shakespeare", "--length 50")
    assert result.exit_code == 1
    assert "the text is too short: its validation part has 10 bytes" in words(result)


@pytest.mark.parametrize("content", ["{}", "[]", "not JSON"])
def test_a_foreign_file_beside_the_results_is_named_and_left_out(folder, content):
    (folder / "runs").mkdir()
    (folder / "runs" / "notes.json").write_text(content)
    result = train("teacher")
    assert result.exit_code == 0, result.output
    (folder / "runs" / "notes.json").rename(folder / "notes.json")
    for one in saved(folder / "runs").values():
        assert f"{100 * one['outcome']['test_accuracy']:.2f}" in words(result)
    assert "Not in the table: runs/notes.json" in words(result)
    assert (folder / "notes.json").read_text() == content


def test_the_table_shows_the_runs_of_this_command(folder):
    assert train("teacher").exit_code == 0
    result = train("teacher", "--widths 10")
    assert result.exit_code == 0, result.output
    table = words(result).partition("paper")[2]
    assert "10" in table
    assert " 8 " not in table


def test_the_command_line_as_typed_is_recorded(tmp_path):
    options = "--widths 8 --layers spm,dense --seeds 0 --steps 2 --batch 4 --threads 1 --keep-memory"
    command = f"train teacher {options} --out {tmp_path}"
    subprocess.run([sys.executable, "-m", "pairmix", *command.split()], check=True, capture_output=True)
    assert {one["command"] for one in saved(tmp_path).values()} == {f"pairmix {command}"}


@pytest.mark.parametrize("experiment", TINY)
def test_the_allocator_is_changed_only_if_asked(folder, monkeypatch, experiment):
    calls = []
    monkeypatch.setattr(allocator, "keep_freed_memory", lambda: calls.append(experiment))
    assert train(experiment).exit_code == 0
    assert calls == []
    assert train(experiment, "--seeds 1 --keep-memory").exit_code == 0
    assert calls == [experiment]


def test_a_demo_leaves_the_allocator_alone(folder, monkeypatch):
    monkeypatch.setattr(allocator, "keep_freed_memory", lambda: pytest.fail("it was not asked for"))
    result = run("demo --out out --steps 2 --width 8")
    assert result.exit_code == 0, result.output


def test_report(folder):
    for experiment in TINY:
        assert train(experiment).exit_code == 0
    result = run("report runs -o page/report.html")
    assert result.exit_code == 0, result.output
    assert "Wrote page/report.html" in words(result)
    page = (folder / "page" / "report.html").read_text()
    for title in ("Compositional teacher", "AG News", "Shakespeare", "GPT"):
        assert title in page


def test_report_with_pictures(folder, monkeypatch):
    assert train("teacher").exit_code == 0
    written = []
    monkeypatch.setattr(cli.report.page, "write", lambda runs, *paths: written.append(paths))  # pictures take seconds
    result = run("report runs --pictures pictures")
    assert "Wrote report.html and the pictures in pictures" in words(result)
    assert written == [(Path("report.html"), Path("pictures"))]


@pytest.mark.parametrize("what", ["nowhere", "[nowhere]", "data"])
def test_report_of_nothing(folder, what):
    result = run(f"report {what}")
    assert result.exit_code == 1
    assert what in words(result)
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("command", ["demo --steps 0", "demo --width x", "dance", "train", "train dance", "report"])
def test_bad_arguments(folder, command):
    assert run(command).exit_code == 2
