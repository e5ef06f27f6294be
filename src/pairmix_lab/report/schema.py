"""The fields that a result must have. Tables and pictures are made only from results that have been checked."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from pairmix_lab.results import in_words

STEPS = "steps"
"""In the place of an experiment's name: the result has times of training steps."""


def check(run: Mapping[str, Any], path: Path, kinds: Mapping[str, Shape]) -> None:
    """Make sure that a loaded result can be reported.

    Args:
        run: the result.
        path: its file.
        kinds: what a result must be, by the experiment that it names; others need little.

    Raises:
        ValueError: names the file, the field, what it must be and what it is.
    """
    try:
        kinds.get(str(run["config"].get("experiment")), OTHER).check("", run)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


class Shape(Protocol):
    """What a part of a result must be."""

    @property
    def words(self) -> str:
        """For a message: it must be ..."""

    def check(self, where: str, value: Any) -> None:
        """Raise a ValueError that says where it is not so."""


@dataclass(frozen=True)
class Value:
    """What is no object, by a test."""

    words: str
    holds: Callable[[Any], bool]

    def check(self, where: str, value: Any) -> None:
        if not self.holds(value):
            raise ValueError(f"{where} must be {self.words}, got {in_words(value)}")


@dataclass(frozen=True)
class ListOf:
    """A list whose items have a shape."""

    item: Shape
    words: str = "a list"
    least: int = 0

    def check(self, where: str, value: Any) -> None:
        Value(self.words, lambda value: isinstance(value, list) and len(value) >= self.least).check(where, value)
        for number, item in enumerate(value):
            self.item.check(f"{where}[{number}]", item)


@dataclass(frozen=True)
class Object:
    """Fields that must be there, fields that may be there, and what all others are if that matters."""

    needed: Mapping[str, Shape]
    optional: Mapping[str, Shape] = field(default_factory=dict)
    others: Shape | None = None
    words: str = "an object"

    def check(self, where: str, value: Any) -> None:
        Value(self.words, lambda value: isinstance(value, dict)).check(where, value)
        prefix = f"{where}." if where else ""
        for name, shape in {**self.needed, **self.optional}.items():
            if name in value:
                shape.check(prefix + name, value[name])
            elif name in self.needed:
                raise ValueError(f"{prefix}{name} is missing, it must be {shape.words}")
        if self.others is not None:
            for name in sorted(value.keys() - self.needed.keys() - self.optional.keys()):
                TEXT.check(f"{where} has a key that", name)
                self.others.check(prefix + name, value[name])


def _is_number(value: Any, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _is_text(value: Any) -> bool:
    # JSON can hold half of a surrogate pair, a file cannot.
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def _is_setting(value: Any) -> bool:
    return value is None or isinstance(value, bool) or _is_text(value) or _is_number(value, -LARGEST, LARGEST)


def _is_time(value: Any) -> bool:
    try:
        datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return False
    return True


def whole(least: int, most: int) -> Value:
    """A whole number in a range; true and false are none, though Python counts with them."""
    return Value(
        f"a whole number in {least}..{most}", lambda value: isinstance(value, int) and _is_number(value, least, most)
    )


def number(least: float, most: float) -> Value:
    """A number in a range, which is finite so."""
    return Value(f"a number in {least:g}..{most:g}", lambda value: _is_number(value, least, most))


def nullable(shape: Value) -> Value:
    """Or null."""
    return Value(f"null or {shape.words}", lambda value: value is None or shape.holds(value))


LARGEST = 1e38  # of float32, about; its square is still finite
TEXT = Value("text", _is_text)
# In the names of files and the labels of pictures, where a $ would begin a formula.
NAME = Value(
    "a name of letters, digits, spaces and . _ - (at most 40)",
    lambda value: isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,39}", value) is not None,
)
TIME = Value("a time such as 2025-01-01T00:00:00+00:00", _is_time)
FLAG = Value("true or false", lambda value: isinstance(value, bool))
WIDTH, COUNT, AT_LEAST_ONE = whole(1, 2**31 - 1), whole(0, 2**53 - 1), whole(1, 2**53 - 1)
SHARE, POSITIVE, NOT_NEGATIVE = number(0, 1), number(1e-12, 1e12), number(0, LARGEST)
LOSS = Value(  # a run may diverge
    f"{NOT_NEGATIVE.words} or NaN",
    lambda value: NOT_NEGATIVE.holds(value) or (isinstance(value, float) and math.isnan(value)),
)
QUARTILES = Value(
    f"two numbers in {POSITIVE.words.split()[-1]}, the lower first",
    lambda value: (
        isinstance(value, list) and len(value) == 2 and all(map(POSITIVE.holds, value)) and value[0] <= value[1]
    ),
)
SETTING = Value(
    "null, true, false, text, a finite number, or a list of them",
    lambda value: all(map(_is_setting, value)) if isinstance(value, list) else _is_setting(value),
)

_ABOUT = {"command": TEXT, "finished": TIME}
_ORIGIN: dict[str, Shape] = {
    "machine": Object({}, others=SETTING),
    "versions": Object({}, others=SETTING),
    "commit": nullable(TEXT),
    "data": Object({}, others=TEXT),
}
OTHER = Object(_ABOUT)


def training(config: Mapping[str, Shape], outcome: Mapping[str, Shape], row: Mapping[str, Shape]) -> Object:
    """A training run, with fields of its experiment; all settings of a run are shown, so all are checked."""
    recipe = {"layer": NAME, "width": WIDTH, "seed": COUNT, "steps": AT_LEAST_ONE, "batch": AT_LEAST_ONE}
    settings = {"lr": NOT_NEGATIVE, "decay": TEXT, "warmup": COUNT, "clip": nullable(POSITIVE), "init": TEXT}
    settings |= {
        "stages": nullable(COUNT),
        "rank": nullable(COUNT),
        "layer_rate": nullable(POSITIVE),
        "embedding_rate": nullable(POSITIVE),
    }
    settings |= {"weight_decay": NOT_NEGATIVE, "rows": nullable(AT_LEAST_ONE), "norms": FLAG, "dropout": SHARE}
    ended: dict[str, Shape] = {"finished": FLAG, "step": COUNT, "data": TEXT, "samples": ListOf(TEXT)}
    norms = dict.fromkeys(("operator_norm", "condition", "gradient_norm"), NOT_NEGATIVE)
    history = Object({"step": AT_LEAST_ONE, "train_loss": LOSS}, {"valid_loss": nullable(LOSS), **norms, **row})
    return Object(
        {
            **_ABOUT,
            "config": Object({**recipe, **config}, settings, others=SETTING),
            "outcome": Object({"ms_per_step": POSITIVE, "parameters": COUNT, **outcome}, ended),
            "rows": ListOf(history, "a list that is not empty", least=1),
        },
        _ORIGIN,
    )


def step_times(settings: Mapping[str, Shape]) -> Object:
    """Times of training steps; a row may have settings that tell cases of one width apart."""
    row = Object(
        {"experiment": TEXT, "width": WIDTH, "layer": NAME, "batch": AT_LEAST_ONE, "ms": POSITIVE, "ms_iqr": QUARTILES},
        {"speedup": nullable(POSITIVE), "speedup_iqr": nullable(QUARTILES), "threads": AT_LEAST_ONE, **settings},
    )
    return Object({**_ABOUT, "rows": ListOf(row)}, _ORIGIN)
