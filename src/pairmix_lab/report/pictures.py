"""How every picture is made: one style, and one colour and marker for each contender."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple, ParamSpec

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from pairmix_lab import contenders

Arguments = ParamSpec("Arguments")

WIDE = (12.2, 4.8)
STYLE: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "figure.constrained_layout.use": True,
    "figure.figsize": (6, 4.3),
    "grid.alpha": 0.25,
    "legend.fontsize": "small",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "svg.hashsalt": "pairmix",  # the same results give the same file
}


class Picture(NamedTuple):
    """A figure with the name of its file and what it shows, in a sentence."""

    name: str
    alt: str
    figure: Figure

    @property
    def is_wide(self) -> bool:
        """Whether it needs the width of two others."""
        return bool(self.figure.get_size_inches()[0] == WIDE[0])

    def as_file(self, form: str) -> bytes:
        """The figure as "svg" or "png"."""
        return as_file(self.figure, form)


def as_file(figure: Figure, form: str) -> bytes:
    """A figure as "svg" or "png"."""
    file = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure.savefig(file, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
    return file.getvalue()


def styled(draw: Callable[Arguments, Figure]) -> Callable[Arguments, Figure]:
    """Let a function draw in this style, and leave matplotlib's own settings as they are."""

    @wraps(draw)
    def drawn(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Figure:
        with mpl.rc_context(STYLE):
            return draw(*args, **kwargs)

    return drawn


def look(label: str) -> dict[str, Any]:
    """The colour, the marker and the line of a contender."""
    contender = contenders.labelled(label)
    return {"color": contender.color, "marker": contender.marker, "linestyle": contender.dash}


def mean_line(axes: Any, x: Any, values: Sequence[Sequence[float]], label: str, **changes: Any) -> None:
    """The mean of the values at every x, and a band from the lowest to the highest."""
    axes.plot(x, [np.mean(many) for many in values], label=label, **{**look(label), **changes})
    lowest, highest = ([limit(many) for many in values] for limit in (min, max))
    axes.fill_between(x, lowest, highest, color=look(label)["color"], alpha=0.18, linewidth=0)


def papers_line(axes: Any, values: Mapping[int, float], label: str) -> None:
    """What the paper reports by width: dotted and hollow."""
    paper_look = {"linestyle": ":", "markerfacecolor": "white", "linewidth": 1.2}
    axes.plot(list(values), list(values.values()), label=f"{label}, paper", **{**look(label), **paper_look})


def width_ticks(axes: Any, widths: Iterable[int]) -> None:
    """A tick for each width."""
    widths = sorted(set(widths))
    axes.set_xticks(widths, [f"{width:,}" for width in widths])
    if len(widths) > 6:
        axes.tick_params("x", rotation=40)
    axes.minorticks_off()


def legend_below(figure: Figure) -> None:
    """A legend of all axes below them, where it hides nothing; an entry that several axes have is there once."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        entries |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    columns = 5 if figure.get_size_inches()[0] >= WIDE[0] else 3
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=columns)
