"""What is shown of the starts that were compared, and the command."""

import pytest
from small_grids import NEAR, TEXT, TINY, grid
from typer.testing import CliRunner

from pairmix_lab import cli, results
from pairmix_lab.bench import init
from pairmix_lab.bench.jobs import Finished
from pairmix_lab.experiments import agnews, teacher


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
