import base64
import re
from html.parser import HTMLParser

import pytest
from synthetic import agnews, everything, gpt, shakespeare, steps, teacher

from pairmix_lab.report import page


class Tags(HTMLParser):
    """Collects the tags of a page with their attributes, and checks that they are closed in order."""

    def __init__(self, html):
        super().__init__()
        self.found, self.open = [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def all(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture
def written(collected, tmp_path):
    def write(*runs):
        page.write(collected(*runs), tmp_path / "new" / "report.html")
        return (tmp_path / "new" / "report.html").read_text()

    return write


SUBSETS = {
    "one run": [teacher("spm")],
    "the demo": [teacher("dense"), teacher("spm")],
    "a softmax only": [agnews("softmax")],
    "one language model": [shakespeare("dense", samples=())],
    "a teacher of its own": [teacher("dense", angle_std=0.7)],
    "variants only": [teacher(block="rotation", pairing="other", angle_std="uniform", width=3)],
    "an unknown layer": [agnews("circulant"), shakespeare("circulant", cell="lstm")],
    "without teacher": [agnews("dense"), shakespeare("spm", width=64)],
    "a GPT without its rivals": [gpt("spm", dense_maps="up,down"), gpt("spm", budget=60.0, tied=True)],
    "with a file of no step times": [teacher(), steps()],
}


@pytest.mark.parametrize("runs", SUBSETS.values(), ids=SUBSETS)
def test_any_subset_makes_a_page(written, runs):
    html = written(*runs)
    ran = {run["config"]["experiment"] for run in runs} - {"steps"}
    assert {tag["id"] for tag in Tags(html).all("section")} & {"teacher", "agnews", "shakespeare", "gpt"} == ran
    assert len(Tags(html).all("img")) >= 2 * len(ran)


def test_the_page_says_what_was_measured(full_page):
    html = full_page.read_text()
    for text in (
        "66.00 ± 1.00", "94.00 ± 1.00", "+28.00 ± 0.00", "+22.11", "1.33 (1.26 to 1.40)", "65,536", "uniform",
        "AG News, 61,297-row part", "not the same steps for all: dense 400, SPM 2,000", "Some CPU", "2.13.0",
        "0123456789abcdef0123456789abcdef01234567", "pairmix train agnews --layer softmax", "pairmix bench steps",
        "To be",
    ):  # fmt: skip
        assert text in html, text


def test_the_page_needs_nothing_else(full_page):
    html = full_page.read_text()
    tags = Tags(html)
    addresses = [tag[name] for _, tag in tags.found for name in ("src", "href", "srcset", "data") if name in tag]
    assert len(addresses) > 10
    assert all(address.startswith(("data:", "#")) for address in addresses)
    assert not tags.all("script")
    assert not re.search(r"@import|url\(", html)
    ids = [tag["id"] for _, tag in tags.found if "id" in tag]
    assert sorted(set(ids)) == sorted(ids)
    assert {address[1:] for address in addresses if address.startswith("#")} <= set(ids)


def test_every_picture_has_words(full_page):
    images = Tags(full_page.read_text()).all("img")
    assert len({image["alt"] for image in images}) == len(images)
    assert all(base64.b64decode(image["src"].partition(",")[2]).startswith(b"<?xml") for image in images)


def test_texts_are_escaped(written):
    evil = "</pre><script>alert('x')</script>{{ 7 * 7 }}"
    run = shakespeare(samples=[evil])
    run["command"] = "pairmix <img src=x onerror=alert(1)>"
    run["machine"]["processor"] = "<b>CPU</b>"
    html = written(run)
    assert not Tags(html).all("script")
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;{{ 7 * 7 }}" in html
    assert "<b>CPU" not in html
    assert "<img src=x" not in html


def test_a_footnote_stands_only_where_it_is_needed(written):
    times = steps({"experiment": "teacher", "width": 256, "layer": "spm", "batch": 256, "ms": 1.0, "ms_iqr": [1, 1]})
    assert "†" not in written(teacher("spm"), times)
    assert "† The median of the training run itself" in written(teacher("spm"))


def test_pictures_are_saved_too(full_page):
    names = {file.name for file in (full_page.parent / "pictures").iterdir()}
    assert {"teacher-accuracy.svg", "teacher-accuracy.png", "agnews-frontier.svg", "teacher-axis-256.png"} <= names
    assert len(names) == 2 * len(Tags(full_page.read_text()).all("img"))
    assert (full_page.parent / "pictures" / "teacher-time.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_results_make_the_same_page(collected, tmp_path):
    for name in ("a.html", "b.html"):
        page.write(collected(*everything()[:6]), tmp_path / name)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_a_failed_page_leaves_the_old_one(collected, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    page.write(collected(teacher()), folder / "report.html")
    before = (folder / "report.html").read_bytes()

    def full_disk(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="no space left"):
        page.write(collected(teacher(), teacher("dense")), folder / "report.html")
    monkeypatch.undo()

    def no_font(picture, form):
        raise RuntimeError("no font")

    monkeypatch.setattr(page.Picture, "as_file", no_font)
    with pytest.raises(RuntimeError, match="no font"):
        page.write(collected(teacher()), folder / "report.html")
    monkeypatch.undo()
    monkeypatch.setattr(page.Picture, "as_file", lambda picture, form: b"<svg/>" if form == "svg" else 1 / 0)
    with pytest.raises(ZeroDivisionError):  # only the pictures beside the page cannot be drawn
        page.write(collected(teacher()), folder / "report.html", folder / "pictures")
    assert (folder / "report.html").read_bytes() == before
    assert [file.name for file in folder.iterdir()] == ["report.html"]


def test_headings_are_grouped():
    header = ["n", "paper: dense", "paper: SPM", "ours: SPM", "seeds"]
    assert page.headings(header) == [("", ["n"]), ("paper", ["dense", "SPM"]), ("ours", ["SPM"]), ("", ["seeds"])]
    assert page.starts(header) == [1, 3, 4]


@pytest.mark.parametrize(
    ("cell", "printed"),
    [("-", "\N{EN DASH}"), ("-0.5", "\N{MINUS SIGN}0.5"), ("+1.0", "+1.0"), ("low-rank", "low-rank")],
)
def test_minus_and_dash_are_not_hyphens(cell, printed):
    assert page.typeset(cell) == printed
