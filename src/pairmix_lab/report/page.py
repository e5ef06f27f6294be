"""One page about the paper's experiments, with all that it needs inside it."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import accumulate, groupby
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template

from pairmix_lab.files import atomic
from pairmix_lab.report import notes
from pairmix_lab.report.cells import MARK
from pairmix_lab.report.experiment import Reported
from pairmix_lab.report.pictures import Picture
from pairmix_lab.report.runs import Runs
from pairmix_lab.report.tables import Table


@dataclass(frozen=True)
class Section:
    """An experiment on the page.

    Attributes:
        name: of the experiment in the results.
        title: for the reader.
        text: what was done.
        tables: each with a caption.
        pictures: with their alternative texts.
    """

    name: str
    title: str
    text: str
    tables: list[tuple[str, Table]]
    pictures: list[Picture]


def write(runs: Runs, path: Path, pictures: Path | None = None) -> None:
    """Write the page, whole or not at all.

    Args:
        runs: those that it is about.
        path: the HTML file.
        pictures: a folder for all pictures of the page, as SVG and PNG; None for none.
    """
    ran = [experiment for experiment in runs.experiments if runs.cases(experiment)]
    sections = [section(runs, experiment) for experiment in ran]
    html = _template().render(
        headlines=[found for experiment in ran if (found := experiment.headline(runs)) is not None],
        sections=sections,
        samples=list(samples(runs)),
        choices=notes.choices(runs),
        notes=notes.notes(runs),
        provenance=notes.provenance(runs),
        commands=notes.commands(runs),
        mark=MARK,
    )
    contents = {path: html.encode()}
    if pictures is not None:
        for picture in (picture for part in sections for picture in part.pictures):
            contents |= {pictures / f"{picture.name}.{form}": picture.as_file(form) for form in ("svg", "png")}
    for name, content in contents.items():  # all of them are made before the first is written
        with atomic(name) as file:
            file.write(content)


def section(runs: Runs, experiment: Reported) -> Section:
    """The tables and pictures of an experiment that was run."""
    tables = [(one.caption, one.table) for one in experiment.tables(runs)]
    return Section(experiment.name, experiment.title, experiment.text, tables, list(experiment.pictures(runs)))


def samples(runs: Runs) -> Iterator[tuple[str, list[str]]]:
    """The texts that models wrote: a title, and the texts of the first seed."""
    for experiment in runs.experiments:
        for case in runs.cases(experiment):
            for name in runs.contenders([case]):
                first = runs.of(case, name)[0]
                texts = first["outcome"].get("samples", [])
                if texts:
                    yield f"{name}, {experiment.case_name(case)}, after {first['config']['steps']:,} steps", texts


def headings(header: list[str]) -> list[tuple[str, list[str]]]:
    """The groups of a table's columns, from left to right; a column of no group is a group without a name."""
    split = [(group, name) for group, _, name in (title.rpartition(": ") for title in header)]
    return [(group, [name for _, name in columns]) for group, columns in groupby(split, key=lambda column: column[0])]


def starts(header: list[str]) -> list[int]:
    """The columns that begin a group, after the first."""
    sizes = [len(names) for _, names in headings(header)]
    return list(accumulate(sizes))[:-1]


def data_uri(picture: Picture) -> str:
    """The picture as an address that needs no file. As an image, its ids cannot clash with another's."""
    return "data:image/svg+xml;base64," + b64encode(picture.as_file("svg")).decode()


def typeset(cell: str) -> str:
    """The cell with a dash and a minus as they are printed."""
    if cell == "-":
        return "\N{EN DASH}"
    return re.sub(r"^-(?=\d)", "\N{MINUS SIGN}", cell)


def is_marked(table: Table) -> bool:
    """Whether a footnote is needed."""
    return any(MARK in cell for line in table for cell in line)


def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    for filter_ in (headings, starts, typeset, data_uri, is_marked):
        environment.filters[filter_.__name__] = filter_
    return environment.from_string(files("pairmix_lab.report").joinpath("page.html.jinja").read_text("utf-8"))
