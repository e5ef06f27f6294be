import re
import runpy
from pathlib import Path

import pytest

import pairmix

ROOT = Path(__file__).parent.parent
fill_tables = runpy.run_path(str(ROOT / "docs" / "fill_tables.py"))
FILLED = fill_tables["PAGES"]
SITE = runpy.run_path(str(ROOT / "docs" / "site_files.py"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = sorted((ROOT / "src/pairmix").rglob("*.py"))


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def anchors(page):
    """What a link can lead to in a page: its headings, as GitHub and the site name them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", FILLED, ids=name_of)
def test_tables_are_those_of_the_results(path):
    assert fill_tables["filled"](path.read_text()) == path.read_text(), "run: .venv/bin/python docs/fill_tables.py"


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path):
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", path.read_text()):
        page = path.parent / target if target else path
        assert page.exists(), target
        if anchor:
            assert anchor in anchors(page), f"{target}#{anchor}"


@pytest.mark.parametrize("path", FILLED, ids=name_of)
def test_files_that_are_linked_are_in_the_site(path):
    """Those of folders; the site knows its own pages."""
    site = [ROOT / "docs", *(found for one in SITE["OTHERS"] for found in ROOT.glob(one))]
    for target in re.findall(r"\]\(([^)#:]+)", path.read_text()):
        file = (path.parent / target).resolve()
        assert file.suffix == ".md" or any(file.is_relative_to(one) for one in site), target


def test_every_make_target_that_is_mentioned_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in PAGES:
        mentioned = set(re.findall(r"(?:^|`)make ([a-z-]+)", path.read_text(), re.MULTILINE))
        assert mentioned <= targets, name_of(path)


def test_every_page_is_in_the_menu_of_the_site():
    menu = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    shown = [name_of(path).removeprefix("docs/").replace("README", "index") for path in PAGES]
    assert sorted(menu) == sorted(shown)


def test_every_public_name_is_in_the_api_reference():
    documented = re.findall(r"^::: ([\w.]+)", "".join(path.read_text() for path in PAGES), re.MULTILINE)
    modules = {"functional", "nn"}
    assert {f"pairmix.{name}" for name in pairmix.__all__ if name not in modules} <= set(documented)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_docstrings_are_text_that_the_site_can_show(path):
    assert re.findall(r"\.\. math::|:\w+:`|^ *Example:$", path.read_text(), re.MULTILINE) == []
