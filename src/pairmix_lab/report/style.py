"""How the pictures of experiments look. A layer has the same colour and marker in all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from pairmix_lab.report.runs import DENSE, IDENTITY, SPM

Arguments = ParamSpec("Arguments")

# The palette of Okabe and Ito, which colour-blind readers can tell apart; the markers help too, and without colour.
LOOKS: dict[str, dict[str, Any]] = {
    DENSE: {"color": "#d55e00", "marker": "s"},
    SPM: {"color": "#0072b2", "marker": "o"},
    "SPM, rotation": {"color": "#56b4e9", "marker": "o"},
    "SPM, other pairs": {"color": "#0072b2", "marker": "v", "linestyle": "--"},
    "SPM, rotation, other pairs": {"color": "#56b4e9", "marker": "v", "linestyle": "--"},
    "low rank": {"color": "#009e73", "marker": "^"},
    IDENTITY: {"color": "#e69f00", "marker": "D"},
    "softmax only": {"color": "#cc79a7", "marker": "P"},
}
OTHER_LOOK = {"color": "#555555", "marker": "x"}
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


def styled(draw: Callable[Arguments, Figure]) -> Callable[Arguments, Figure]:
    """Let a function draw in this style, and leave matplotlib's own settings as they are."""

    @wraps(draw)
    def drawn(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Figure:
        with mpl.rc_context(STYLE):
            return draw(*args, **kwargs)

    return drawn


def look(name: str) -> dict[str, Any]:
    """The colour, the marker and the line of a contender."""
    return LOOKS.get(name, OTHER_LOOK)


def mean_line(axes: Any, x: Any, values: Sequence[Sequence[float]], name: str, **changes: Any) -> None:
    """The mean of the values at every x, and a band from the lowest to the highest."""
    axes.plot(x, [np.mean(many) for many in values], label=name, **{**look(name), **changes})
    lowest, highest = ([limit(many) for many in values] for limit in (min, max))
    axes.fill_between(x, lowest, highest, color=look(name)["color"], alpha=0.18, linewidth=0)


def papers_line(axes: Any, values: Mapping[int, float], name: str) -> None:
    """What the paper reports by width: dotted and hollow."""
    paper_look = {"linestyle": ":", "markerfacecolor": "white", "linewidth": 1.2}
    axes.plot(list(values), list(values.values()), label=f"{name}, paper", **{**look(name), **paper_look})
