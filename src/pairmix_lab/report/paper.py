"""What the paper reports in its section 9, Experiments."""

from __future__ import annotations

import math
from typing import NamedTuple


class Classified(NamedTuple):
    """One layer at one width: its test accuracy, and the milliseconds of a training step."""

    accuracy: float
    ms: float


class Evaluated(NamedTuple):
    """One row of a table of language modelling: losses in nats, and bits per character."""

    step: int
    train_nll: float
    valid_nll: float
    valid_bpc: float
    ms: float


# By experiment, width and layer.
CLASSIFIED = {
    "teacher": {
        256: {"dense": Classified(0.7730, 2.775), "SPM": Classified(0.9941, 5.396)},
        512: {"dense": Classified(0.8103, 9.793), "SPM": Classified(0.9750, 9.147)},
        1024: {"dense": Classified(0.8920, 33.603), "SPM": Classified(0.9426, 18.529)},
        2048: {"dense": Classified(0.5744, 125.109), "SPM": Classified(0.8165, 36.561)},
    },
    "agnews": {
        2048: {"dense": Classified(0.8700, 127.306), "SPM": Classified(0.9290, 35.029)},
        4096: {"dense": Classified(0.8917, 484.117), "SPM": Classified(0.9570, 68.824)},
    },
}
AG_NEWS_TRAIN_ROWS = 120_000

SHAKESPEARE_WIDTH = 4096
SHAKESPEARE = {
    "dense": [
        Evaluated(1, 5.56, 6.54, 9.44, 22828),
        Evaluated(200, 2.20, 2.28, 3.30, 23130),
        Evaluated(400, 2.10, 2.26, 3.26, 23052),
        Evaluated(600, 2.11, 2.17, 3.13, 22216),
        Evaluated(800, 2.02, 2.14, 3.08, 21884),
    ],
    "SPM": [
        Evaluated(1, 5.53, 4.23, 6.10, 4901),
        Evaluated(200, 3.21, 3.19, 4.61, 5725),
        Evaluated(400, 2.90, 2.87, 4.14, 5729),
        Evaluated(600, 2.71, 2.64, 3.81, 5730),
        Evaluated(800, 2.57, 2.58, 3.03, 5736),
        Evaluated(1000, 1.59, 2.09, 2.98, 5738),
    ],
}


def inconsistent() -> list[tuple[str, Evaluated]]:
    """The rows in which bits per character are not the loss in bits, by more than rounding explains."""
    rounding = 0.005 / math.log(2) + 0.005
    return [
        (layer, row)
        for layer, rows in SHAKESPEARE.items()
        for row in rows
        if abs(row.valid_nll / math.log(2) - row.valid_bpc) > rounding + 1e-9
    ]
