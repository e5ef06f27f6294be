"""Write the tables of README and docs from the files in results/.

A table stands between `<!-- table: NAME -->` and `<!-- end -->` and is made from results/NAME.json.
"""

from __future__ import annotations

import re
from pathlib import Path

from pairmix import results
from pairmix.report import tables

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TABLES = {"demo": tables.students, "init": tables.initialisations}


def filled(page: str) -> str:
    """The page with its tables as the results are now."""

    def table(match: re.Match[str]) -> str:
        name = match["name"]
        rows = results.load(ROOT / "results" / f"{name}.json")["rows"]
        return f"<!-- table: {name} -->\n{tables.markdown(TABLES[name](rows))}\n<!-- end -->"

    return re.sub(r"<!-- table: (?P<name>\w+) -->\n.*?<!-- end -->", table, page, flags=re.DOTALL)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text()))
