"""Write the tables of README and docs from the files in results/.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from pathlib import Path

from pairmix import results
from pairmix.report import tables

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RECURRENT, ATTENTION = ("RNN", "GRU", "LSTM"), ("attention", "encoder layer")
# The file in results/ that a table is made from, and what makes it.
TABLES = {
    "demo": ("demo", tables.students),
    "init": ("init", tables.initialisations),
    "operator": ("operator", tables.operator),
    "operator-summary": ("operator", tables.operator_summary),
    "operator-memory": ("operator", tables.operator_memory),
    "operator-bounds": ("operator", tables.operator_bounds),
    "operator-grid": ("operator-grid", tables.operator_grid),
    "operator-latency": ("operator-latency", tables.operator_latency),
    "operator-scaling": ("operator-scaling", tables.operator_scaling),
    "operator-variants": ("operator-variants", tables.operator_variants),
    "modules": ("modules", tables.modules),
    "modules-recurrent": ("modules", tables.of_kinds(tables.modules, *RECURRENT)),
    "modules-recurrent-memory": ("modules", tables.of_kinds(tables.modules_memory, *RECURRENT)),
    "modules-attention": ("modules", tables.of_kinds(tables.modules, *ATTENTION)),
    "modules-attention-memory": ("modules", tables.of_kinds(tables.modules_memory, *ATTENTION)),
}


def filled(page: str) -> str:
    """The page with its tables as the results are now."""

    def table(match: re.Match[str]) -> str:
        name = match["name"]
        file, make = TABLES[name]
        path = ROOT / "results" / f"{file}.json"
        text = tables.markdown(make(results.load(path)["rows"])) if path.exists() else "Not measured yet."
        return f"<!-- table: {name} -->\n{text}\n<!-- end -->"

    return re.sub(r"<!-- table: (?P<name>[\w-]+) -->\n.*?<!-- end -->", table, page, flags=re.DOTALL)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text()))
