import json

import pytest

from pairmix import results


def test_a_run_is_written_with_everything_needed_to_repeat_it(tmp_path):
    path = tmp_path / "new" / "run.json"
    results.save(path, "pairmix demo", {"seed": 3}, [{"layer": "SPM", "ms": 1.5}])
    run = results.load(path)
    assert run["command"] == "pairmix demo"
    assert run["config"] == {"seed": 3}
    assert run["rows"] == [{"layer": "SPM", "ms": 1.5}]
    assert run["versions"]["torch"]
    assert run["machine"]["threads"] >= 1
    assert set(run) == {"command", "config", "rows", "machine", "versions", "commit", "finished"}
    assert [file.name for file in path.parent.iterdir()] == ["run.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "run.json"
    results.save(path, "old", {}, [])
    before = path.read_text()
    with pytest.raises(TypeError):
        results.save(path, "new", {"not json": object()}, [])
    assert path.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_a_foreign_file_is_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"rows": []}))
    with pytest.raises(ValueError, match=r"other\.json is not a result of pairmix: it has no config"):
        results.load(path)
