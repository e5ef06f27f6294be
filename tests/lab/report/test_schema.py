"""A result that the tables and pictures cannot use is refused in a sentence that names the file and the field."""

import math
import re

import pytest
import synthetic
from synthetic import agnews, shakespeare, step_time, steps, teacher
from typer.testing import CliRunner

from pairmix_lab import cli
from pairmix_lab.experiments import EXPERIMENTS
from pairmix_lab.report import page
from pairmix_lab.report.runs import collect

GONE = ...  # which no JSON holds
RUNS = {"teacher": teacher, "agnews": agnews, "shakespeare": shakespeare}


def changed(run, field, value):
    """The run with another value there, or without one."""
    *way, last = re.findall(r"\w+", field)
    inner = run
    for name in way:
        inner = inner[int(name) if name.isdecimal() else name]
    last = int(last) if last.isdecimal() else last
    if value is GONE:
        del inner[last]
    else:
        inner[last] = value
    return run


def refusal(folder, run):
    """What is said of a run after the name of its file."""
    synthetic.write(folder, teacher(seed=7), run)
    with pytest.raises(ValueError, match=r"^\S*001\.json: ") as error:
        collect([folder], EXPERIMENTS)
    return str(error.value).partition("001.json: ")[2]


WIDTH, COUNT = "a whole number in 1..2147483647", "a whole number in 0..9007199254740991"
STEPS, SHARE = "a whole number in 1..9007199254740991", "a number in 0..1"
MS, LOSS = "a number in 1e-12..1e+12", "a number in 0..1e+38 or NaN"
NAME = "a name of letters, digits, spaces and . _ - (at most 40)"
TEXT, TIME = "text", "a time such as 2025-01-01T00:00:00+00:00"
ANGLE = '"uniform" or a number in 0..1e+38'
QUARTILES, RATIO = "two numbers in 1e-12..1e+12, the lower first", "a number in 1e-12..1e+12"

BAD = [
    *(("config.width", value, WIDTH) for value in ("256", None, True, 256.0, 0, -8, 2**31, 10**4000, [256], math.nan)),
    ("config.seed", -1, COUNT),
    ("config.seed", [0], COUNT),
    ("config.steps", 0, STEPS),
    ("config.steps", math.inf, STEPS),
    ("config.batch", "many", STEPS),
    ("config.layer", 3, NAME),
    ("config.layer", "", NAME),
    ("config.layer", "$x", NAME),
    ("config.layer", "x" * 41, NAME),
    ("config.lr", [0.1], "a number in 0..1e+38"),
    ("config.lr", math.nan, "a number in 0..1e+38"),
    ("config.stages", {}, f"null or {COUNT}"),
    ("config.decay", [], TEXT),
    ("config.weight_decay", -1.0, "a number in 0..1e+38"),
    ("config.init", ["own"], TEXT),
    ("config.layer_rate", [1.0], f"null or {RATIO}"),
    ("config.embedding_rate", "fast", f"null or {RATIO}"),
    ("config.rows", 0, f"null or {STEPS}"),
    ("config.rows", "many", f"null or {STEPS}"),
    ("config.norms", 1, "true or false"),
    ("config.other", {"a": 1}, "null, true, false, text, a finite number, or a list of them"),
    ("config.other", math.inf, "null, true, false, text, a finite number, or a list of them"),
    ("config.other", 10**400, "null, true, false, text, a finite number, or a list of them"),
    ("config.other", [[1]], "null, true, false, text, a finite number, or a list of them"),
    ("config.other", "\udcff", "null, true, false, text, a finite number, or a list of them"),
    ("outcome", [], "an object"),
    ("outcome.finished", 1, "true or false"),
    ("outcome.step", "all", COUNT),
    ("outcome.ms_per_step", 0, MS),
    ("outcome.ms_per_step", math.inf, MS),
    ("outcome.ms_per_step", True, MS),
    ("outcome.parameters", 1.5, COUNT),
    ("rows", [], "a list that is not empty"),
    ("rows[1]", None, "an object"),
    ("rows[1].step", 0, STEPS),
    ("rows[1].step", "1", STEPS),
    ("rows[1].train_loss", None, LOSS),
    ("rows[1].train_loss", math.inf, LOSS),
    ("rows[1].valid_loss", "low", f"null or {LOSS}"),
    *(
        (f"rows[1].{name}", math.inf, "a number in 0..1e+38")
        for name in ("operator_norm", "condition", "gradient_norm")
    ),
    ("command", 3, TEXT),
    ("command", "\ud800", TEXT),
    ("finished", 3, TIME),
    ("finished", "yesterday", TIME),
    ("machine", None, "an object"),
    ("machine.cores", {}, "null, true, false, text, a finite number, or a list of them"),
    ("versions", "2.13", "an object"),
    ("commit", 3, f"null or {TEXT}"),
    ("data", ["train.csv"], "an object"),
    ("data.x", None, TEXT),
]


@pytest.mark.parametrize("experiment", RUNS)
@pytest.mark.parametrize(("field", "value", "expected"), BAD, ids=repr)
def test_a_bad_value_is_named(tmp_path, experiment, field, value, expected):
    run = changed(RUNS[experiment]() | {"data": {}}, field, value)
    assert refusal(tmp_path, run).startswith(f"{field} must be {expected}, got ")


@pytest.mark.parametrize("experiment", RUNS)
@pytest.mark.parametrize(
    "field",
    [
        *("command", "finished", "outcome", "config.width", "config.seed", "config.steps", "config.batch"),
        *("config.layer", "outcome.ms_per_step", "outcome.parameters", "rows[2].step", "rows[2].train_loss"),
    ],
)
def test_a_missing_value_is_named(tmp_path, experiment, field):
    assert refusal(tmp_path, changed(RUNS[experiment](), field, GONE)).startswith(f"{field} is missing, it must be ")


@pytest.mark.parametrize(
    ("experiment", "field", "value", "complaint"),
    [
        ("teacher", "outcome.test_accuracy", "high", f'must be {SHARE}, got "high"'),
        ("teacher", "outcome.test_accuracy", 1.01, f"must be {SHARE}, got 1.01"),
        ("teacher", "config.angle_std", "far", f'must be {ANGLE}, got "far"'),
        ("teacher", "config.angle_std", -0.1, f"must be {ANGLE}, got -0.1"),
        ("teacher", "config.angle_std", GONE, f"is missing, it must be {ANGLE}"),
        ("agnews", "outcome.test_accuracy", math.nan, f"must be {SHARE}, got NaN"),
        ("agnews", "outcome.mixer_parameters", GONE, f"is missing, it must be {COUNT}"),
        ("agnews", "outcome.data", [1], "must be text, got a list"),
        ("agnews", "rows[0].valid_accuracy", -1, f"must be {SHARE}, got -1"),
        ("shakespeare", "outcome.valid_bpc", GONE, f"is missing, it must be {LOSS}"),
        ("shakespeare", "outcome.valid_loss", "low", f'must be {LOSS}, got "low"'),
        ("shakespeare", "outcome.samples", "To be", 'must be a list, got "To be"'),
        ("shakespeare", "outcome.samples[0]", 3, "must be text, got 3"),
        ("shakespeare", "config.cell", "../../evil", f'must be {NAME}, got "../../evil"'),
        ("shakespeare", "config.cell", "a\nb", f'must be {NAME}, got "a\\nb"'),
        ("shakespeare", "config.cell", GONE, f"is missing, it must be {NAME}"),
    ],
    ids=repr,
)
def test_a_bad_value_of_one_experiment_is_named(tmp_path, experiment, field, value, complaint):
    assert refusal(tmp_path, changed(RUNS[experiment](), field, value)) == f"{field} {complaint}"


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("rows[0]", [], "must be an object, got a list"),
        ("rows[0].experiment", None, "must be text, got null"),
        ("rows[0].width", 256.5, f"must be {WIDTH}, got 256.5"),
        ("rows[0].layer", "<b>", f'must be {NAME}, got "<b>"'),
        ("rows[0].batch", GONE, f"is missing, it must be {STEPS}"),
        ("rows[0].ms", -1.0, f"must be {MS}, got -1.0"),
        ("rows[0].ms_iqr", GONE, f"is missing, it must be {QUARTILES}"),
        ("rows[0].ms_iqr", [1.0], f"must be {QUARTILES}, got a list"),
        ("rows[0].ms_iqr", [2.0, 1.0], f"must be {QUARTILES}, got a list"),
        ("rows[0].speedup", "twice", f'must be null or {RATIO}, got "twice"'),
        ("rows[0].speedup_iqr", [1.0, "2"], f"must be null or {QUARTILES}, got a list"),
        ("rows[0].threads", "2", f'must be {STEPS}, got "2"'),
        ("rows[0].cell", 1, f"must be {NAME}, got 1"),
        ("rows[0].angle_std", [0.1], f"must be {ANGLE}, got a list"),
    ],
    ids=repr,
)
def test_a_bad_time_of_a_step_is_named(tmp_path, field, value, complaint):
    run = changed(steps(step_time("teacher", "spm", 1.0, 2.0)), field, value)
    assert refusal(tmp_path, run) == f"{field} {complaint}"


def test_a_key_that_cannot_be_shown_is_named(tmp_path):
    assert refusal(tmp_path, changed(teacher(), "config", teacher()["config"] | {"\ud800": 1})) == (
        'config has a key that must be text, got "\\ud800"'
    )


def test_a_result_of_the_first_schema_is_as_good(collected):
    run = teacher()
    assert "schema" not in run
    assert collected(run, teacher(seed=1) | {"schema": 2, "data": {"a/b.csv": "sha256:00"}}).left_out == []


@pytest.mark.parametrize(("field", "value"), [("config.cell", "../../evil"), ("outcome.valid_bpc", GONE)])
def test_a_refused_result_leaves_the_page_alone(tmp_path, monkeypatch, field, value):
    monkeypatch.chdir(tmp_path)
    synthetic.write(tmp_path / "runs", changed(shakespeare(), field, value))
    (tmp_path / "report.html").write_text("before")
    result = CliRunner().invoke(cli.app, ["report", "runs", "--pictures", "pictures"])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert f"Error: runs/000.json: {field} " in " ".join(result.output.split())
    assert (tmp_path / "report.html").read_text() == "before"
    assert {path.name for path in tmp_path.rglob("*")} == {"runs", "000.json", "report.html"}


LOWEST = {
    "width": 1,
    "steps": 1,
    "batch": 1,
    "seed": 0,
    "lr": 0,
    "angle_std": 5e-324,
    "ms": 1e-12,
    "share": 0,
    "loss": 0,
}
HIGHEST = {"width": 2**31 - 1, "steps": 2**53 - 1, "batch": 2**53 - 1, "seed": 2**53 - 1, "lr": 1e38, "angle_std": 1e38,
           "ms": 1e12, "share": 1, "loss": 1e38}  # fmt: skip
DIVERGED = {**LOWEST, "angle_std": 0.0, "loss": math.nan}


def extreme(run, to):
    """The run with every number as far as it may go."""
    run["config"] |= {name: to[name] for name in run["config"].keys() & to.keys()}
    run["outcome"] |= {"ms_per_step": to["ms"], "test_accuracy": to["share"]}
    run["outcome"] |= {"valid_loss": to["loss"], "valid_bpc": to["loss"]}
    for row in run["rows"]:
        row |= {"step": to["steps"], "train_loss": to["loss"], "valid_loss": to["loss"]}
    return run


@pytest.mark.parametrize("experiment", RUNS)
def test_what_is_accepted_can_be_drawn(collected, tmp_path, experiment):
    runs = [extreme(RUNS[experiment](layer), to) for layer in ("spm", "dense") for to in (LOWEST, HIGHEST, DIVERGED)]
    times = [
        step_time(experiment, "lowrank", to["ms"], width=to["width"], batch=1) | {"ms_iqr": [to["ms"]] * 2}
        for to in (LOWEST, HIGHEST)
    ]
    page.write(collected(*runs, steps(*times)), tmp_path / "report.html")
    assert "<img" in (tmp_path / "report.html").read_text()
