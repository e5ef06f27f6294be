import hashlib
import os
import re
import socket
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pairmix_lab.experiments.agnews import AGNEWS, read_agnews
from pairmix_lab.experiments.data import DataError, Dataset, fetch
from pairmix_lab.experiments.shakespeare import SHAKESPEARE, read_shakespeare

BODY = bytes(range(256)) * 1000
HASHES = {"train.csv": f"md5:{hashlib.md5(BODY).hexdigest()}", "test.csv": f"sha256:{hashlib.sha256(b'').hexdigest()}"}


class Answer(BaseHTTPRequestHandler):
    """Answers as the server's attributes say, and closes the connection."""

    def do_GET(self):
        self.server.requests.append(self.path)
        self.send_response(self.server.status)
        if self.server.length is not None:
            self.send_header("Content-Length", str(self.server.length))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        server.requests, server.status, server.body, server.length = [], 200, BODY, len(BODY)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """An empty cache, so that no test can touch the user's own, and no proxy between the tests and the server."""
    monkeypatch.setenv("PAIRMIX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "cache"


def dataset_at(port):
    return Dataset("agnews", f"http://127.0.0.1:{port}", HASHES)


def files_in(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def says_both_ways(error, url):
    return url in str(error) and "--data DIR, with agnews/train.csv and agnews/test.csv inside" in str(error)


def test_a_file_is_downloaded_once(server, cache_folder):
    dataset = dataset_at(server.server_port)
    path = fetch(dataset, "train.csv")
    assert path == cache_folder / "agnews" / "train.csv"
    assert files_in(cache_folder) == {"agnews/train.csv": BODY}
    server.body = b"the server is not asked again"
    assert fetch(dataset, "train.csv") == path
    assert path.read_bytes() == BODY
    assert server.requests == ["/train.csv"]


def test_the_cache_is_the_users_unless_it_is_named(server, tmp_path, monkeypatch):
    monkeypatch.delenv("PAIRMIX_CACHE")
    monkeypatch.setattr("pooch.os_cache", lambda project: tmp_path / "home" / project)
    path = fetch(dataset_at(server.server_port), "train.csv")
    assert path == tmp_path / "home" / "pairmix" / "agnews" / "train.csv"


def test_a_bar_shows_the_download_and_only_that(server, capsys):
    fetch(dataset_at(server.server_port), "train.csv")
    assert re.search(r"agnews/train\.csv.* 256\.0/256\.0 kB", capsys.readouterr().err)
    fetch(dataset_at(server.server_port), "train.csv")
    assert capsys.readouterr() == ("", "")


def test_a_server_need_not_say_how_long_the_file_is(server):
    server.length = None
    assert fetch(dataset_at(server.server_port), "train.csv").read_bytes() == BODY


FAULTS = {
    "wrong body": ({"body": BODY[::-1]}, "the download does not match its checksum .*md5:"),
    "cut": ({"body": BODY[:100_000]}, r"the connection was cut .*100000 bytes read, 156000 more expected"),
    "cut, unnoticed": ({"body": BODY[:100_000], "length": None}, "the download does not match its checksum"),
    "cut at once": ({"body": b""}, "the connection was cut"),
    "not found": ({"status": 404}, "the server refused it .*404"),
    "broken server": ({"status": 500}, "the server refused it .*500"),
}


@pytest.mark.parametrize("old", [{}, {"agnews/train.csv": b"an older copy"}], ids=["new", "old copy"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_download_changes_nothing(server, cache_folder, fault, old):
    changes, reason = FAULTS[fault]
    vars(server).update(changes)
    for name, content in old.items():
        (cache_folder / name).parent.mkdir(parents=True)
        (cache_folder / name).write_bytes(content)
    before = set(threading.enumerate())
    dataset = dataset_at(server.server_port)
    with pytest.raises(DataError, match=rf"^agnews/train\.csv could not be downloaded: {reason}") as error:
        fetch(dataset, "train.csv")
    assert says_both_ways(error.value, f"{dataset.home}/train.csv")
    assert server.requests == ["/train.csv"]
    assert files_in(cache_folder) == old
    for drawing in set(threading.enumerate()) - before:
        drawing.join(timeout=5)
        assert not drawing.is_alive(), "the bar is drawn for ever"


def test_a_failed_download_can_be_repeated(server):
    dataset = dataset_at(server.server_port)
    server.body = BODY[:-1]
    with pytest.raises(DataError):
        fetch(dataset, "train.csv")
    server.body = BODY
    assert fetch(dataset, "train.csv").read_bytes() == BODY


def test_a_spoilt_copy_is_downloaded_again(server):
    dataset = dataset_at(server.server_port)
    fetch(dataset, "train.csv").write_bytes(BODY[:10])
    assert fetch(dataset, "train.csv").read_bytes() == BODY


def test_without_a_connection(cache_folder):
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        dataset = dataset_at(nobody_listens.getsockname()[1])
        with pytest.raises(DataError, match=r"could not be downloaded: there is no connection .*refused") as error:
            fetch(dataset, "train.csv")
    assert says_both_ways(error.value, f"{dataset.home}/train.csv")
    assert files_in(cache_folder) == {}


FETCH_WITH_LITTLE_SPACE = """
import resource, sys
from pairmix_lab.experiments.data import DataError, Dataset, fetch

resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    fetch(Dataset("agnews", sys.argv[1], {"train.csv": sys.argv[2], "test.csv": ""}), "train.csv")
except DataError as error:
    print(error)
"""


def test_without_space_on_the_disk(server, cache_folder):
    """A limit on the size of files stands for the full disk: writing fails in the same way."""
    home = dataset_at(server.server_port).home
    command = [sys.executable, "-c", FETCH_WITH_LITTLE_SPACE, home, HASHES["train.csv"]]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"could not be downloaded: the folder {cache_folder / 'agnews'} cannot be used" in printed
    assert "File too large" in printed
    assert says_both_ways(printed, f"{home}/train.csv")
    assert files_in(cache_folder) == {}


def test_a_cache_that_cannot_be_made(server, cache_folder):
    cache_folder.write_text("not a folder")
    with pytest.raises(DataError, match=r"the folder .*agnews cannot be used; set PAIRMIX_CACHE to another") as error:
        fetch(dataset_at(server.server_port), "train.csv")
    assert says_both_ways(error.value, "/train.csv")
    assert cache_folder.read_text() == "not a folder"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_is_not_ours(server, cache_folder):
    (cache_folder / "agnews").mkdir(parents=True)
    (cache_folder / "agnews").chmod(0o500)
    with pytest.raises(DataError, match=r"the folder .*agnews cannot be used; .*Permission denied"):
        fetch(dataset_at(server.server_port), "train.csv")


def test_a_folder_of_the_users_is_taken_as_it_is(server, cache_folder, tmp_path):
    own = tmp_path / "own" / "agnews" / "train.csv"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"a part of the original")
    assert fetch(dataset_at(server.server_port), "train.csv", tmp_path / "own") == own
    assert own.read_bytes() == b"a part of the original"
    assert server.requests == []
    assert not cache_folder.exists()


def test_a_file_missing_in_the_users_folder_is_not_downloaded(server, tmp_path):
    dataset = dataset_at(server.server_port)
    missing = re.escape(str(tmp_path / "own" / "agnews" / "train.csv"))
    with pytest.raises(DataError, match=f"^{missing} is missing") as error:
        fetch(dataset, "train.csv", tmp_path / "own")
    assert says_both_ways(error.value, f"{dataset.home}/train.csv")
    assert server.requests == []


def test_agnews_rows_become_texts_and_labels(tmp_path):
    path = tmp_path / "train.csv"
    path.write_bytes(
        b'"3","A ""quoted"" title","A text, with a comma"\r\n'
        b'"4","Two","lines\r\nof text"\n'
        b'"1","Back","A second\\team for  #36;10 \\"\n'
        b'"2",""," Title and text in one "\n'
        b"1,Unquoted,Z\xc3\xbcrich"
    )
    assert read_agnews(path) == (
        [
            'A "quoted" title A text, with a comma',
            "Two lines\r\nof text",
            "Back A second\\team for  #36;10 \\",
            "Title and text in one",
            "Unquoted Zürich",
        ],
        [2, 3, 0, 1, 0],
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'"1","a","b"\n"2","only a title"\n', r", line 2: expected class, title and description, got \['2', 'only a"),
        (b'"1","a","b","c"\n', r", line 1: expected class, .* got \['1', 'a', 'b', 'c'\]"),
        (b'"1","a","b"\n\n"2","a","b"\n', r", line 2: expected class, .* got \[\]"),
        (b'"1","a","two\nlines"\n"5","a","b"\n', ", line 3: expected a class from 1 to 4, got '5'"),
        (b'"0","a","b"\n', ", line 1: expected a class from 1 to 4, got '0'"),
        (b"Class Index,Title,Description\n", ", line 1: expected a class from 1 to 4, got 'Class Index'"),
        (b'"1","a","b"\n"2","a","cut sho', ", line 2: unexpected end of data"),
        (b'"1","a","b"\n"2","a","Z\xfcrich"\n', ", after line 0: .*can't decode byte 0xfc"),
        (b"", " is empty"),
    ],
    ids=["few columns", "many columns", "blank line", "class 5", "class 0", "header", "cut", "not UTF-8", "empty"],
)
def test_a_malformed_agnews_file_is_refused(tmp_path, content, message):
    path = tmp_path / "train.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(str(path)) + message):
        read_agnews(path)


def test_shakespeare_is_read_byte_for_byte(tmp_path):
    path = tmp_path / "input.txt"
    path.write_bytes(b"First Citizen:\r\n\xff")
    assert read_shakespeare(path) == b"First Citizen:\r\n\xff"
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"input\.txt is empty"):
        read_shakespeare(path)


@pytest.mark.parametrize("read", [read_agnews, read_shakespeare])
def test_what_cannot_be_read_is_refused(tmp_path, read):
    with pytest.raises(DataError, match=re.escape(f"{tmp_path} cannot be read")):
        read(tmp_path)


def test_the_real_agnews_test_set(data_folder):
    path = fetch(AGNEWS, "test.csv", data_folder)
    assert f"md5:{hashlib.md5(path.read_bytes()).hexdigest()}" == AGNEWS.hashes["test.csv"]
    texts, labels = read_agnews(path)
    assert len(texts) == 7600
    assert Counter(labels) == dict.fromkeys(range(4), 1900)
    assert texts[0].startswith("Fears for T N pension after talks Unions representing workers")


def test_the_real_shakespeare(data_folder):
    text = read_shakespeare(fetch(SHAKESPEARE, "input.txt", data_folder))
    assert len(text) == 1_115_394
    assert f"sha256:{hashlib.sha256(text).hexdigest()}" == SHAKESPEARE.hashes["input.txt"]
