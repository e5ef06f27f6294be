import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pairmix_lab import files

KILLED_WHILE_WRITING = """
import os, pathlib, runpy, signal, sys
files = runpy.run_path(sys.argv[1])
with files["atomic"](pathlib.Path(sys.argv[2])) as file:
    file.write(b"half of the new one")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write_half(path, error):
    with files.atomic(path) as file:
        file.write(b"half of the new one")
        raise error


def test_a_file_is_there_when_all_of_it_is(tmp_path):
    path = tmp_path / "new" / "folder" / "file"
    with files.atomic(path) as file:
        file.write(b"one half, ")
        file.flush()
        assert not path.exists()
        file.write(b"the other")
    assert path.read_bytes() == b"one half, the other"
    assert names(path.parent) == ["file"]


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with files.atomic(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["file"]


def test_everybody_may_read_it(tmp_path):
    with files.atomic(tmp_path / "file") as file:
        file.write(b"")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644


@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt, SystemExit])
def test_after_an_error_the_old_file_is_as_it_was(tmp_path, error):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(error):
        write_half(path, error)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize(("owner", "name"), [(os, "fsync"), (Path, "replace")])
def test_a_disk_that_fails_at_the_end_leaves_the_old_file(tmp_path, monkeypatch, owner, name):
    def fail(*arguments):
        raise OSError(5, "Input/output error")

    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(OSError, match="Input/output error"), files.atomic(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_it_takes_the_place_only_once_it_is_on_the_disk(tmp_path, monkeypatch):
    calls = []
    replace = Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: calls.append(("fsync", os.fstat(number).st_size)))
    monkeypatch.setattr(Path, "replace", lambda part, path: (calls.append("replace"), replace(part, path)))
    with files.atomic(tmp_path / "file") as file:
        file.write(b"new")
    assert calls[:2] == [("fsync", len(b"new")), "replace"]


def test_a_killed_process_leaves_the_old_file_and_what_sweep_removes(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    code = [sys.executable, "-c", KILLED_WHILE_WRITING, files.__file__, str(path)]
    assert subprocess.run(code, timeout=60).returncode == -9
    assert path.read_bytes() == b"old"
    assert len(names(tmp_path)) == 2
    files.sweep(path)
    assert names(tmp_path) == ["file"]
    assert path.read_bytes() == b"old"


def test_sweep_leaves_other_files_alone(tmp_path):
    others = ["file", "file.json", "other.part", "myfile.part"]
    for name in [*others, "fileabc.part", "filexyz.part"]:
        (tmp_path / name).touch()
    files.sweep(tmp_path / "file")
    assert names(tmp_path) == sorted(others)


def test_sweep_of_a_folder_that_is_not_there(tmp_path):
    files.sweep(tmp_path / "nowhere" / "file")
    assert names(tmp_path) == []


def test_a_full_disk_says_which_file_did_not_fit(tmp_path):
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/file'"), files.atomic(tmp_path / "file"):
        raise OSError(28, "No space left on device")
