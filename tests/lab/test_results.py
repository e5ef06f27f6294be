import json
import subprocess
import sys

import pytest
from torch import distributed

from pairmix import doctor, ops
from pairmix_lab import results


def test_a_run_is_written_with_everything_needed_to_repeat_it(tmp_path):
    path = tmp_path / "new" / "run.json"
    results.save(path, "pairmix demo", {"seed": 3}, [{"layer": "SPM", "ms": 1.5}])
    run = results.load(path)
    assert run["schema"] == 2
    assert run["command"] == "pairmix demo"
    assert run["config"] == {"seed": 3}
    assert run["rows"] == [{"layer": "SPM", "ms": 1.5}]
    assert run["versions"]["torch"]
    assert run["machine"]["threads"] >= 1
    assert set(run) == {"schema", "command", "config", "rows", "machine", "versions", "commit", "finished"}
    assert [file.name for file in path.parent.iterdir()] == ["run.json"]


def test_hashes_of_the_data_are_written(tmp_path):
    hashes = {"agnews/train.csv": "sha256:0123", "agnews/test.csv": "sha256:4567"}
    results.save(tmp_path / "run.json", "pairmix train agnews", {}, [], data=hashes)
    assert results.load(tmp_path / "run.json")["data"] == hashes


@pytest.mark.parametrize(("reason", "kernels"), [(None, "avx2"), ("not compiled", "none")])
def test_the_machine_names_both_instruction_sets(monkeypatch, reason, kernels):
    monkeypatch.setattr(ops.cpu, "_missing", reason)
    monkeypatch.setattr(ops.cpu, "instruction_set", lambda: "avx2")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    machine = doctor.machine()
    assert (machine["instruction_set"], machine["kernels"]) == ("AVX512", kernels)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "run.json"
    results.save(path, "old", {}, [])
    before = path.read_text()
    with pytest.raises(TypeError):
        results.save(path, "new", {"not json": object()}, [])
    assert path.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_results_of_before_there_were_schemas_are_read(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"config": {}, "rows": []}))
    assert results.load(path) == {"config": {}, "rows": []}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"rows": []}', "is not a result of pairmix: it has no config"),
        ('{"config": [], "rows": []}', "is not a result of pairmix: config must be an object, got a list"),
        ('{"config": {}, "rows": null}', "is not a result of pairmix: rows must be a list, got null"),
        ('{"schema": 3, "config": {}, "rows": []}', "has schema 3; this version of pairmix reads 1 and 2"),
        ('{"config": ', "cannot be read, it is cut off or not JSON"),
        ("[" * 100_000, "cannot be read, it is cut off or not JSON"),
        ("\udcff", "cannot be read, it is cut off or not JSON"),
    ],
    ids=["no config", "list", "null", "newer", "cut off", "deep", "bytes"],
)
def test_a_foreign_file_is_refused(tmp_path, text, complaint):
    path = tmp_path / "other.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=rf"other\.json {complaint}"):
        results.load(path)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["/some/bin/pairmix", "bench", "steps", "--data", "my data"], "pairmix bench steps --data 'my data'"),
        (["/src/pairmix/__main__.py", "bench", "init"], "pairmix bench init"),
        (["/src/other/__main__.py", "x"], "/src/other/__main__.py x"),
        (["my_pairmix.py"], "my_pairmix.py"),
    ],
)
def test_the_command_line_is_as_it_was_typed(monkeypatch, argv, line):
    monkeypatch.setattr(sys, "argv", argv)
    assert results.command_line() == line


def test_the_command_line_of_several_processes(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/src/pairmix/__main__.py", "train", "teacher"])
    monkeypatch.setattr(distributed, "is_torchelastic_launched", lambda: True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert results.command_line() == "torchrun --nproc-per-node 2 -m pairmix train teacher"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A clean work tree that pairmix runs from."""
    root = tmp_path / "clone"
    for name, text in {
        **{"src/pairmix_lab/results.py": "", "pyproject.toml": "", "docs/speed.md": "", "results/init.json": "{}"},
        ".gitignore": "runs/\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false", "commit", "-q", "-m", "all")
    monkeypatch.setattr(results, "__file__", str(root / "src" / "pairmix_lab" / "results.py"))
    monkeypatch.chdir(root)
    return root


def git(root, *arguments):
    subprocess.run(["git", "-C", root, *arguments], check=True)


CHANGES = ["src/pairmix_lab/results.py", "pyproject.toml", "docs/speed.md", "src/new.py"]


def test_a_commit_is_clean_whatever_was_measured(repository):
    (repository / "results" / "init.json").write_text("new")
    (repository / "results" / "new.json").write_text("new")
    (repository / "runs").mkdir()
    (repository / "runs" / "run.json").write_text("ignored")
    assert len(results.commit()) == 40
    results.check_traceable(repository / "results")


@pytest.mark.parametrize("changed", CHANGES)
def test_a_change_anywhere_marks_the_commit(repository, changed):
    (repository / changed).write_text("changed")
    assert results.commit().endswith("+")


@pytest.mark.parametrize("out", ["results", "results/teacher-lr/0.01", "elsewhere", "."])
@pytest.mark.parametrize("changed", CHANGES)
def test_results_of_a_changed_work_tree_do_not_go_into_it(repository, out, changed):
    (repository / changed).write_text("changed")
    with pytest.raises(ValueError, match=rf"{changed.split('/')[0]}.*commit .*--out"):
        results.check_traceable(repository / out)


@pytest.mark.parametrize("out", ["runs", "runs/teacher", "../outside"])
def test_results_of_a_changed_work_tree_may_go_elsewhere(repository, out):
    (repository / "pyproject.toml").write_text("changed")
    results.check_traceable(repository / out)


def test_an_installed_package_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "__file__", str(tmp_path / "site-packages" / "pairmix" / "results.py"))
    assert results.commit() is None
    results.check_traceable(tmp_path / "results")
