import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
fill_tables = runpy.run_path(str(ROOT / "docs" / "fill_tables.py"))
PAGES = fill_tables["PAGES"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_tables_are_those_of_the_results(path):
    assert fill_tables["filled"](path.read_text()) == path.read_text(), "run: .venv/bin/python docs/fill_tables.py"


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_every_make_target_that_is_mentioned_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        assert set(re.findall(r"^make ([a-z]+)|`make ([a-z]+)`", path.read_text(), re.MULTILINE)) <= {
            pair for target in targets for pair in ((target, ""), ("", target))
        }
