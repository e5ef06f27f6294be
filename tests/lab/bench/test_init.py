"""Starts are compared with each other: real processes train, are killed, and others go on."""

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pairmix.nn.init import INITS
from pairmix_lab import cli, results
from pairmix_lab.bench import init
from pairmix_lab.bench.init import Config, best_rate, trained
from pairmix_lab.bench.jobs import Finished, processes, submitted
from pairmix_lab.experiments import agnews, shakespeare, teacher
from pairmix_lab.experiments.experiment import StartCase

PATIENCE = 120  # seconds, after which something hangs
STARTS = [*INITS, "dense"]
TINY = {"steps": 3, "batch": 8}
NEAR = StartCase("near", lrs=(1e-3, 1e-2), settings=TINY, widths=(8,))
TEXT = StartCase("text", lrs=(1e-3,), settings={**TINY, "length": 8, "stages": None}, widths=(8, 12))


def grid(*cases, **options):
    return Config(cases=cases or ((teacher.EXPERIMENT, NEAR),), **{"seeds": (0, 1), **options})


@pytest.fixture
def data(tmp_path):
    (tmp_path / "data" / "shakespeare").mkdir(parents=True)
    (tmp_path / "data" / "shakespeare" / "input.txt").write_bytes(bytes(range(256)) * 10)
    return tmp_path / "data"


@pytest.fixture
def part(tmp_path):
    return tmp_path / "out" / "init.part.jsonl"


@pytest.fixture
def here(monkeypatch):
    """Runs are trained in this process: another one takes seconds to start. Gives the runs that were trained."""
    trained_here = []

    def submitted(pool, work, calls):
        futures = []
        for arguments in calls:
            trained_here.append(arguments[1])
            futures.append(Future())
            futures[-1].set_result(work(*arguments))
        return futures

    monkeypatch.setattr(init, "processes", lambda jobs: nullcontext())
    monkeypatch.setattr(init, "submitted", submitted)
    return trained_here


def test_every_experiment_has_cases_with_names_of_their_own():
    cases = init.all_cases()
    names = [case.name for _, case in cases]
    assert {"teacher near the identity", "MLP with residual branches", "AG News", "Elman", "GRU"} <= set(names)
    assert len(set(names)) == len(names)
    assert not any("," in name for name in names)  # --cases is a list with commas
    for candidate in Config().candidates:
        assert candidate.width in (256, 1024)
        config = candidate.config(candidate.case.lrs[0], seed=0)
        assert config.stages is None  # the library's own default
        assert config.validate_every == config.steps  # no time is lost on more


def test_a_whole_grid_in_two_processes(part, data):
    config = grid((teacher.EXPERIMENT, NEAR), (shakespeare.EXPERIMENT, TEXT))
    calls = []
    rows = init.run(config, Finished(part), data, jobs=2, on_run=lambda: calls.append("run"))
    expected = {("near", 8, lr) for lr in NEAR.lrs} | {("text", width, 1e-3) for width in TEXT.widths}
    for start in STARTS:
        own = [row for row in rows if start in (row["layer"], row["init"])]
        assert {(row["case"], row["width"], row["lr"]) for row in own if row["seed"] == 0} == expected
        for case in {("near", 8), ("text", 8), ("text", 12)}:
            chosen = [row for row in own if (row["case"], row["width"]) == case and row["chosen"]]
            assert [row["seed"] for row in chosen] == [0, 1]  # and both with the same rate
            assert len({row["lr"] for row in chosen}) == 1
    assert len(rows) == len(calls) == config.runs == 5 * (2 + 1) + 2 * 5 * (1 + 1)
    assert all(("valid_accuracy" in row) == (row["case"] == "near") for row in rows)
    assert all(math.isfinite(row[key]) for row in rows for key in ("first_loss", "valid_loss"))
    assert {row["block"] for row in rows} == {"general"}
    # In the order of the grid, whichever run was finished first.
    assert [row["case"] for row in rows] == sorted(row["case"] for row in rows)


def test_an_outcome_is_that_of_training_here():
    config = grid().candidates[0].config(1e-2, seed=1)
    outcome = trained(teacher.EXPERIMENT, config)
    run = init.Run(teacher.EXPERIMENT.task(config), init.Processes(), None, resume=False)
    run.advance()
    model, task = run.state.model, run.task
    assert outcome["first_loss"] == task.validate(model)["valid_loss"]
    run.advance()
    run.advance()
    assert outcome["valid_loss"] == task.validate(model)["valid_loss"]
    assert outcome["valid_accuracy"] == task.validate(model)["valid_accuracy"]


@pytest.mark.parametrize(
    ("losses", "rate"),
    [
        ({1e-3: 2.0, 1e-2: 1.0, 1e-1: 3.0}, 1e-2),
        ({1e-1: 1.0, 1e-3: 1.0, 1e-2: 1.0}, 1e-3),
        ({1e-3: 2.0, 1e-2: None}, 1e-3),
        ({1e-3: math.nan, 1e-2: 7.0, 1e-1: math.inf}, 1e-2),
        ({1e-3: None, 1e-2: math.nan}, None),
    ],
    ids=["least", "tie", "diverged", "not finite", "all diverged"],
)
def test_the_rate_with_the_least_loss_is_chosen(losses, rate):
    assert best_rate(losses) == rate


def test_the_rate_is_chosen_with_the_first_seed_on_validation(part, here, monkeypatch):
    def outcome(experiment, config, folder):  # by the other numbers, or with the other seed, it would be the other rate
        is_best = config.lr == (1e-2 if config.init == "hadamard" else 1e-3)
        loss = 1.0 if is_best == (config.seed == 0) else 2.0
        return {"first_loss": 5.0 + is_best, "valid_loss": loss, "valid_accuracy": 0.5 - 0.1 * is_best}

    monkeypatch.setattr(init, "trained", outcome)
    rows = init.run(grid(), Finished(part))
    for row in rows:
        assert row["chosen"] == (row["lr"] == (1e-2 if row["init"] == "hadamard" else 1e-3))
    assert [row["lr"] for row in rows if (row["init"], row["seed"]) == ("hadamard", 1)] == [1e-2]
    assert len(here) == len(rows) == 5 * 3


def test_a_start_that_diverges_with_every_rate_is_not_run_with_other_seeds(part, here, monkeypatch):
    def outcome(experiment, config, folder):
        return {"first_loss": 5.0, "valid_loss": None if config.init == "identity" else config.lr}

    monkeypatch.setattr(init, "trained", outcome)
    rows = init.run(grid(), Finished(part))
    lost = [row for row in rows if row["init"] == "identity"]
    assert [(row["seed"], row["lr"], row["chosen"]) for row in lost] == [(0, 1e-3, False), (0, 1e-2, False)]
    assert len(rows) == len(here) == 5 * 3 - 1


@pytest.mark.parametrize("lr", [1e38, 1e-3])
def test_a_run_that_diverges_is_infinitely_bad_and_no_error(lr):
    case = StartCase("wild", lrs=(lr,), settings={**TINY, "steps": 20, "decay": "constant"}, widths=(8,))
    (candidate, *_) = grid((teacher.EXPERIMENT, case)).candidates
    outcome = trained(teacher.EXPERIMENT, candidate.config(lr, seed=0))
    assert (outcome["valid_loss"] is None) == (lr == 1e38)
    json.dumps(outcome, allow_nan=False)


class Failing(teacher.Task):
    """The last of its three batches is bad."""

    def batch(self, step):
        inputs, labels = super().batch(step)
        if step == 3:
            return self.last_batch(inputs, labels)
        return inputs, labels


class NotANumber(Failing):
    def last_batch(self, inputs, labels):
        return inputs * math.nan, labels


class NoBatch(Failing):
    def last_batch(self, inputs, labels):
        raise ValueError("there is no such batch")


def test_a_run_that_diverges_late_has_begun_well(monkeypatch):
    monkeypatch.setattr(teacher, "Task", NotANumber)
    outcome = trained(teacher.EXPERIMENT, grid().candidates[0].config(1e-3, seed=0))
    assert outcome == {"first_loss": pytest.approx(2.3, abs=0.5), "valid_loss": None, "valid_accuracy": None}


def test_other_errors_of_a_run_are_errors(monkeypatch):
    monkeypatch.setattr(teacher, "Task", NoBatch)
    with pytest.raises(ValueError, match="there is no such batch"):
        trained(teacher.EXPERIMENT, grid().candidates[0].config(1e-3, seed=0))


def test_finished_runs_are_not_run_again(part, here):
    config = grid(seeds=(0,))
    rows = init.run(config, Finished(part))
    assert len(part.read_text().splitlines()) == len(here) == config.runs == 10
    assert init.run(config, Finished(part, resume=True)) == rows
    assert len(here) == 10
    with pytest.raises(ValueError, match="is of an earlier command: --resume goes on"):
        Finished(part)
    # A run with another setting is another run.
    longer = replace(NEAR, settings={**TINY, "steps": 4})
    init.run(grid((teacher.EXPERIMENT, longer), seeds=(0,)), Finished(part, resume=True))
    assert len(here) == 20


def test_other_data_makes_another_run(part, data, here):
    config = grid((shakespeare.EXPERIMENT, replace(TEXT, widths=(8,))), seeds=(0,))
    for _ in range(2):
        init.run(config, Finished(part, resume=True), data)
    assert len(here) == 5
    (data / "shakespeare" / "input.txt").write_bytes(bytes(range(255, -1, -1)) * 10)
    init.run(config, Finished(part, resume=True), data)
    assert len(here) == 10
    more = grid((teacher.EXPERIMENT, NEAR), *config.cases, seeds=(0,))  # which read other files, or none
    init.run(more, Finished(part, resume=True), data)
    assert len(here) == 20
    init.run(grid(seeds=(0,)), Finished(part, resume=True))
    assert len(here) == 20


@pytest.mark.parametrize("tail", ['{"run": {"n": 2}, "outc', '{"run": {"n": 2}}', "[]", "\udcff"])
def test_a_line_that_was_cut_off_is_left_out(part, tail):
    Finished(part).add({"n": 1}, 0.5)
    with part.open("ab") as file:
        file.write(tail.encode("utf-8", "surrogateescape"))
    finished = Finished(part, resume=True)
    assert {"n": 1} in finished
    assert {"n": 2} not in finished
    finished.add({"n": 2, "seed": 0}, 0.25)
    again = Finished(part, resume=True)
    assert (again[{"n": 1}], again[{"seed": 0, "n": 2}]) == (0.5, 0.25)


LONG = grid((teacher.EXPERIMENT, replace(NEAR, settings={"steps": 200, "batch": 8})))
forkserver = multiprocessing.get_context("forkserver")  # imports once: a new process is there in a moment
forkserver.set_forkserver_preload(["pairmix_lab.bench.init"])


def run_long(part):
    init.run(LONG, Finished(part, resume=True), jobs=2)


def lines_of(part):
    return part.read_text().splitlines() if part.exists() else []


def wait_until(condition, is_alive=lambda: True):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert is_alive(), "it ended before"
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(1e-3)


def test_a_grid_that_was_killed_is_resumed(part):
    process = forkserver.Process(target=run_long, args=(part,))
    process.start()
    wait_until(lambda: len(lines_of(part)) >= 3, process.is_alive)
    process.kill()
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL
    before = lines_of(part)
    assert 3 <= len(before) < LONG.runs

    rows = init.run(LONG, Finished(part, resume=True), jobs=2)
    assert lines_of(part)[: len(before)] == before
    assert len(lines_of(part)) == LONG.runs  # none of them twice
    for lr, found in zip(NEAR.lrs, rows, strict=False):
        alone = trained(teacher.EXPERIMENT, LONG.candidates[0].config(lr, seed=0))
        assert {key: found[key] for key in alone} == pytest.approx(alone, rel=1e-3)


def begin_and_wait(folder):
    """Start processes that tell their numbers."""
    with processes(2) as pool:
        submitted(pool, tell_and_sleep, [(folder,)] * 4)
        time.sleep(PATIENCE)


def tell_and_sleep(folder):
    (folder / str(os.getpid())).touch()
    time.sleep(PATIENCE)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    try:  # in a container nobody may be there to reap an orphan
        return state.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return not Path("/proc").exists()


def test_processes_end_when_the_one_that_started_them_is_killed(tmp_path):
    process = forkserver.Process(target=begin_and_wait, args=(tmp_path,))
    process.start()
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, process.is_alive)
    started = [int(path.name) for path in tmp_path.iterdir()]
    assert all(map(is_running, started))
    process.kill()
    wait_until(lambda: not any(map(is_running, started)))


def begin_and_fail(folder):
    """Start processes that have much to do; how they take Ctrl-C, which reaches all of them in a terminal."""
    with processes(2) as pool:
        (handler,) = submitted(pool, signal.getsignal, [(signal.SIGINT,)])
        submitted(pool, tell_and_sleep, [(folder,)] * 4)
        wait_until(lambda: len(list(folder.iterdir())) == 2)
        raise LookupError(handler.result())


def test_processes_end_at_once_after_an_error(tmp_path):
    before, start = signal.getsignal(signal.SIGINT), time.monotonic()
    with pytest.raises(LookupError) as error:
        begin_and_fail(tmp_path)
    assert time.monotonic() - start < PATIENCE  # for which each of them would sleep
    assert not any(is_running(int(path.name)) for path in tmp_path.iterdir())
    assert error.value.args == (signal.SIG_IGN,)  # it is for the process that started them
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_stops_the_command_and_its_processes(part):
    words = f"-m pairmix bench init --widths 16 --jobs 2 --out {part.parent}".split()
    with subprocess.Popen(
        [sys.executable, *words, "--cases", "teacher near the identity"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a group of its own: a terminal sends Ctrl-C to all of it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # ignored if the tests run with &
    ) as process:
        wait_until(lambda: lines_of(part), lambda: process.poll() is None)
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert "The same command with --resume goes on from there." in " ".join(said.split())
    assert 1 <= len(lines_of(part)) < 30
    assert [path.name for path in part.parent.iterdir()] == [part.name]


def kill_itself(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_is_said_in_a_sentence(part, monkeypatch):
    monkeypatch.setattr(init, "trained", kill_itself)
    with pytest.raises(ValueError, match=r"a process that trained was killed.* --resume goes on"):
        init.run(grid(), Finished(part))


def row(case, init, loss, lr=1e-3, seed=0, chosen=True, **more):
    start = {"layer": "spm", "init": init, "block": "general"}
    if init == "dense":
        start |= {"layer": "dense", "init": "own"}
    about = {"case": case, "width": 1024, "seed": seed, "lr": lr, "first_loss": 5.0, "chosen": chosen}
    return {**about, **start, "valid_loss": loss, **more}


ROWS = [
    *(row("text", "hadamard", 9.0, lr=1e-2, chosen=False), row("text", "hadamard", 2.0)),
    *(row("text", "hadamard", 2.2, seed=1), row("text", "hadamard", 1.0, lr=1e-4, chosen=False)),
    *(row("text", "identity", None, lr=1e-2, chosen=False), row("text", "identity", 1.0)),
    row("text", "identity", None, seed=1),
    *(row("text", "dense", 1.5, lr=lr, chosen=lr == 1e-2) for lr in (1e-3, 1e-2)),
    row("news", "hadamard", 0.5, valid_accuracy=0.875),
    row("news", "identity", None, chosen=False),
    row("news", "hadamard", 0.25, block="rotation", valid_accuracy=0.9),
]


def test_summary():
    assert init.summary(ROWS) == [
        ["case", "n", "hadamard", "identity", "dense", "hadamard, rotation"],
        ["text", "1,024", "**2.100 ± 0.141**", "1.000, 1 diverged", "1.500", "-"],
        ["news", "1,024", "0.500", "diverged", "-", "**0.250**"],
    ]


def test_equal_starts_are_both_the_best():
    assert init.summary([row("text", "hadamard", 1.0), row("text", "identity", 1.0)])[1][2:] == ["**1.000**"] * 2


def test_accuracies():
    header, *lines = init.accuracies(ROWS)
    assert header == ["case", "n", "hadamard", "identity", "hadamard, rotation"]
    assert lines == [["news", "1,024", "87.5", "-", "90.0"]]


def test_rates():
    header, *lines = init.rates(ROWS)
    assert header[2:] == ["hadamard", "identity", "dense", "hadamard, rotation"]
    assert [line[2:] for line in lines] == [
        ["0.001", "0.001 (smallest)", "0.01 (largest)", "-"],
        ["0.001", "diverged", "-", "0.001"],
    ]


def test_table():
    header, *lines = init.table(ROWS)
    assert header[2:] == ["start", "rate", "first loss", "loss", "accuracy, %"]
    assert [line[0] for line in lines] == ["text"] * 3 + ["news"] * 3
    assert lines[0][2:] == ["hadamard", "0.001", "5.000 ± 0.000", "2.100 ± 0.141", "-"]
    assert lines[3][2:] == ["hadamard", "0.001", "5.000", "0.500", "87.5"]


def test_picture():
    figure = init.picture(ROWS)
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert set(panels) == {"text", "news"}
    points = {name: sorted(axes.lines[0].get_xdata()) for name, axes in panels.items()}
    assert points == {"text": [1.0, 1.5, 2.0, 2.2], "news": [0.25, 0.5]}


def command(*arguments):
    return CliRunner().invoke(cli.app, ["bench", "init", *map(str, arguments)])


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(init, "all_cases", lambda: ((teacher.EXPERIMENT, NEAR), (agnews.EXPERIMENT, TEXT)))


def test_command(tiny, here, tmp_path):
    result = command(
        "--cases", "near", "--out", tmp_path, "--widths", "8,10", "--seeds", "3", "--blocks", "general,rotation"
    )
    assert result.exit_code == 0, result.output
    saved = results.load(tmp_path / "init.json")
    assert saved["config"] == {
        **{"experiment": "init", "seeds": [3], "blocks": ["general", "rotation"], "threads": 1},
        "cases": [{"experiment": "teacher", "name": "near", "lrs": [0.001, 0.01], "settings": TINY, "widths": [8, 10]}],
    }
    assert saved["data"] == {}
    assert len(saved["rows"]) == 2 * 2 * (2 * 4 + 1)
    assert {(row["width"], row["seed"]) for row in saved["rows"]} == {(8, 3), (10, 3)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["init.json", "init.png"]
    assert "hadamard" in result.output


def test_the_command_resumes_only_if_asked_to(tiny, here, tmp_path):
    options = ("--cases", "near", "--out", tmp_path)
    finished = Finished(tmp_path / "init.part.jsonl")
    init.run(grid(seeds=(0,)), finished)
    result = command(*options, "--seeds", "0,1")
    assert result.exit_code == 1
    assert "--resume goes on with it" in " ".join(result.output.split())
    assert not (tmp_path / "init.json").exists()
    assert command(*options, "--seeds", "0,1", "--resume").exit_code == 0
    assert len(here) == len(results.load(tmp_path / "init.json")["rows"]) == 5 * 3
    assert not finished.path.exists()


@pytest.mark.parametrize(
    "arguments", [("--cases", "far"), ("--jobs", "-1"), ("--seeds", "x"), ("--widths", "0"), ("--blocks", "cube")]
)
def test_bad_arguments(tiny, arguments):
    result = command(*arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.output
