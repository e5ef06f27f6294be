"""What a report needs of an experiment. The report itself knows none of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pairmix_lab.report.pictures import Picture
from pairmix_lab.report.schema import Object, Shape
from pairmix_lab.report.tables import NamedTable, Row, Table

if TYPE_CHECKING:
    from pairmix_lab.report.runs import Runs


class Study(NamedTuple):
    """A question apart from the main comparison of an experiment.

    Attributes:
        name: what it is about.
        value: where it stands on the axis that it varies, if there is one.
    """

    name: str
    value: int | None = None

    @property
    def words(self) -> str:
        """For the reader."""
        return self.name if self.value is None else f"{self.value:,} {self.name}"


class Case(NamedTuple):
    """A task on which contenders are compared.

    Attributes:
        experiment: its name.
        width: of the layers.
        setting: what tells cases of one width apart, if anything does.
        study: what sets it apart from the main comparison; None if it belongs to that.
    """

    experiment: str
    width: int
    setting: float | str | None = None
    study: Study | None = None


@dataclass(frozen=True)
class Headline:
    """The result of an experiment in short: SPM compared with dense on one case.

    Attributes:
        title: which experiment, and on what.
        gap: by how much SPM is better or worse, with its unit; a dash if only one of the two ran.
        ratio: how many times as fast its step is.
        table: the same as the paper has it and as it was measured.
    """

    title: str
    gap: tuple[str, str]
    ratio: str
    table: Table


class Reported(ABC):
    """An experiment, as a report sees it.

    Attributes:
        name: in commands, configs and results.
        title: for the reader.
        text: what was done, in a sentence or two.
        setting: the setting of a config that tells cases of one width apart; None if all of them are one case.
        setting_shape: what that setting must be in a result.
        setting_order: values of it that are text, in the order in which they are shown.
        fields: what a result must be.
    """

    name: str
    title: str
    text: str
    setting: str | None = None
    setting_shape: Shape | None = None
    setting_order: Sequence[str] = ()
    fields: Object

    @property
    def table_names(self) -> Sequence[str]:
        """The names under which pages of the documentation may ask for its tables."""
        return ()

    def completed(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The config of a result, with what older versions did not say because they had no choice."""
        return config

    def case(self, row: Row) -> Case:
        """The case of a config, or of a row of step times, which may lack the setting."""
        return Case(self.name, row["width"], row.get(self.setting) if self.setting is not None else None)

    def timed_as(self, case: Case) -> Case:
        """The case of the rows of step times that also hold for this one; the time of a step depends on less."""
        return case._replace(setting=None)

    def order(self, case: Case) -> tuple[object, ...]:
        """By width; without a setting first; then numbers by size; then text; studies by their axis."""
        known, setting = list(self.setting_order), case.setting
        place = known.index(setting) if setting in known else len(known)
        size = setting if isinstance(setting, int | float) else math.inf
        study = ("", 0) if case.study is None else (case.study.name, case.study.value or 0)
        return (case.width, setting is not None, size, place, str(setting), study)

    def case_name(self, case: Case) -> str:
        """The case in words."""
        return f"n = {case.width:,}" + ("" if case.setting is None else f", {case.setting}")

    def validation_score(self, run: Mapping[str, Any]) -> float:
        """How well a run did on validation rows in the end, by which settings are chosen; more is better."""
        losses = (row.get("valid_loss") for row in reversed(run["rows"]))
        return -next((loss for loss in losses if loss is not None), math.nan)

    @abstractmethod
    def tables(self, runs: Runs) -> Iterable[NamedTable]:
        """The tables of the page."""

    @abstractmethod
    def pictures(self, runs: Runs) -> Iterable[Picture]:
        """The pictures of the page."""

    def headline(self, runs: Runs) -> Headline | None:
        """The result in short; None if there is no such comparison."""
        return None

    def notes(self, runs: Runs) -> Iterable[str]:
        """What a reader must know of it; each a sentence or two."""
        return ()
