"""Write the tables of README and docs from the files in results/.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. Experiments and benchmarks say which names there are.
FOLDER/NAME is made from results/FOLDER.
"""

from __future__ import annotations

import re
from pathlib import Path

from pairmix_lab import results
from pairmix_lab.bench.benchmarks import BENCHMARKS
from pairmix_lab.experiments import EXPERIMENTS, own_rates, summary
from pairmix_lab.report import tables

ROOT = Path(__file__).parent.parent
ACROSS = {**summary.TABLES, **own_rates.TABLES}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def table(name: str) -> tables.Table | None:
    """A table by its name; None if there is nothing to make it from."""
    below, _, name = name.rpartition("/")
    folder = ROOT / "results" / below
    for experiment in EXPERIMENTS:
        if name in experiment.table_names:
            return experiment.table(name, folder)
    for benchmark, module in BENCHMARKS.items():
        if name in module.TABLES:
            path = folder / f"{benchmark}.json"
            return module.TABLES[name](results.load(path)["rows"]) if path.exists() else None
    if name in ACROSS:
        return ACROSS[name](folder)
    raise ValueError(f"there is no table {name!r}; there are {', '.join(names())}")


def names() -> list[str]:
    """The names of all tables."""
    makers = [*(experiment.table_names for experiment in EXPERIMENTS), *(one.TABLES for one in BENCHMARKS.values())]
    return [name for maker in (*makers, ACROSS) for name in maker]


def filled(page: str) -> str:
    """The page with its tables as the results are now."""

    def filled_in(match: re.Match[str]) -> str:
        lines = table(match["name"])
        text = "Not measured yet." if lines is None else tables.markdown(lines)
        return f"<!-- table: {match['name']} -->\n{text}\n<!-- end -->"

    return re.sub(r"<!-- table: (?P<name>[\w/-]+) -->\n.*?<!-- end -->", filled_in, page, flags=re.DOTALL)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text()))
