"""Write the tables of README and docs from the files in results/.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from pairmix_lab import results
from pairmix_lab.report import experiments, tables
from pairmix_lab.report.runs import Case, collect

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RECURRENT, ATTENTION = ("RNN", "GRU", "LSTM"), ("attention", "encoder layer")
# The file in results/ that a table is made from, and what makes it.
TABLES = {
    "init": ("init", tables.initialisations),
    "operator": ("operator", tables.operator),
    "operator-summary": ("operator", tables.operator_summary),
    "operator-memory": ("operator", tables.operator_memory),
    "operator-bounds": ("operator", tables.operator_bounds),
    "operator-grid": ("operator-grid", tables.operator_grid),
    "operator-latency": ("operator-latency", tables.operator_latency),
    "operator-scaling": ("operator-scaling", tables.operator_scaling),
    "operator-variants": ("operator-variants", tables.operator_variants),
    "steps": ("steps", tables.steps),
    "steps-summary": ("steps", tables.steps_summary),
    "modules": ("modules", tables.modules),
    "modules-recurrent": ("modules", tables.of_kinds(tables.modules, *RECURRENT)),
    "modules-recurrent-memory": ("modules", tables.of_kinds(tables.modules_memory, *RECURRENT)),
    "modules-attention": ("modules", tables.of_kinds(tables.modules, *ATTENTION)),
    "modules-attention-memory": ("modules", tables.of_kinds(tables.modules_memory, *ATTENTION)),
}
EXPERIMENTS = {
    "teacher-accuracy": partial(experiments.accuracy, experiment="teacher"),
    "teacher-cost": partial(experiments.cost, experiment="teacher"),
    "teacher-axis": experiments.teacher_axis,
    "agnews-accuracy": partial(experiments.accuracy, experiment="agnews"),
    "agnews-cost": partial(experiments.cost, experiment="agnews"),
    "shakespeare": experiments.shakespeare,
    "shakespeare-steps": partial(experiments.shakespeare_steps, case=Case("shakespeare", 4096, cell="rnn")),
}
RATES = ("teacher-lr", "agnews-lr")  # folders with a folder for each learning rate


def table(name: str) -> tables.Table | None:
    """A table by its name; None if there is nothing to make it from."""
    folder = ROOT / "results"
    if name in RATES:
        by_rate = sorted((float(path.name), path) for path in (folder / name).glob("*") if any(path.glob("*.json")))
        return experiments.learning_rates({rate: collect([path]) for rate, path in by_rate}) if by_rate else None
    if name in EXPERIMENTS:
        found = sorted((folder / name.split("-")[0]).glob("*.json"))
        return EXPERIMENTS[name](collect([*found, *folder.glob("steps.json")])) if found else None
    file, make = TABLES[name]
    path = folder / f"{file}.json"
    return make(results.load(path)["rows"]) if path.exists() else None


def filled(page: str) -> str:
    """The page with its tables as the results are now."""

    def filled_in(match: re.Match[str]) -> str:
        lines = table(match["name"])
        text = "Not measured yet." if lines is None else tables.markdown(lines)
        return f"<!-- table: {match['name']} -->\n{text}\n<!-- end -->"

    return re.sub(r"<!-- table: (?P<name>[\w-]+) -->\n.*?<!-- end -->", filled_in, page, flags=re.DOTALL)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text()))
