"""Options that the commands of experiments share, and how lists among them are read."""

from __future__ import annotations

import math
import reprlib
from itertools import product
from typing import Annotated, Any

import typer

from pairmix.nn.init import INITS as STARTS
from pairmix_lab import contenders
from pairmix_lab.experiments.compared import OWN

BLOCKS = ("general", "rotation")
INITS = (OWN, *STARTS)

Layers = Annotated[str, typer.Option(help=f"Which layers to compare, of {', '.join(contenders.TRAINED)}.")]
Widths = Annotated[str, typer.Option(help="The widths, such as 256,1024.")]
Seeds = Annotated[str, typer.Option(help="The seeds, such as 0,1,2: each is a run of its own.")]
Blocks = Annotated[str, typer.Option(help="The blocks of SPM: general, rotation or both.")]
Stages = Annotated[int | None, typer.Option(min=0, help="The stages of SPM.")]
Steps = Annotated[int, typer.Option(help="Training steps.")]
BatchSize = Annotated[int, typer.Option(help="Rows of a step, over all processes.")]
Rate = Annotated[float, typer.Option(help="The learning rate of Adam.")]
Inits = Annotated[str, typer.Option(help=f"Where SPM starts, of {', '.join(INITS)}.")]
LayerRate = Annotated[
    float | None, typer.Option(help="What the learning rate of SPM is multiplied by; chosen by its size if not given.")
]
EmbeddingRate = Annotated[
    float | None, typer.Option(help="What the learning rate of embeddings is multiplied by; chosen if not given.")
]
Rank = Annotated[
    int | None, typer.Option(min=1, help="The rank of low-rank layers; as many parameters as SPM if not given.")
]
Decay = Annotated[str, typer.Option(help="How the learning rate falls: constant or cosine.")]
Warmup = Annotated[int, typer.Option(min=0, help="Steps over which the learning rate rises to its value.")]
Clip = Annotated[float | None, typer.Option(help="The largest norm of all gradients together; any if not given.")]
WeightDecay = Annotated[float, typer.Option(help="The weight decay of matrices.")]


def words(option: str, text: str, choices: Any = None) -> tuple[str, ...]:
    """The parts of a list such as dense,spm."""
    parts = tuple(part.strip() for part in text.split(","))
    for part in parts:
        if not part or (choices is not None and part not in choices):
            expected = "names with commas between them" if choices is None else ", ".join(choices)
            raise typer.BadParameter(f"must be of {expected}; got {part!r}", param_hint=option)
    return parts


def whole_numbers(option: str, text: str, least: int = 1) -> tuple[int, ...]:
    """The numbers of a list such as 256,1024."""
    numbers = []
    for word in text.split(","):
        try:
            number = int(word) if word.strip().isdecimal() else None
        except ValueError:  # Python reads no more than 4,300 digits
            number = None
        if number is None or number < least:
            raise typer.BadParameter(
                f"must be whole numbers of at least {least}, such as 1,2; got {reprlib.repr(word)}", param_hint=option
            )
        numbers.append(number)
    return tuple(numbers)


def positive_numbers(option: str, text: str) -> tuple[float, ...]:
    """The numbers of a list such as 0.5,60."""
    numbers = []
    for word in words(option, text):
        try:
            number = float(word)
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            raise typer.BadParameter(f"must be numbers above 0, such as 0.5,60; got {word!r}", param_hint=option)
        numbers.append(number)
    return tuple(numbers)


def grid(config: type[Any], **options: Any) -> list[Any]:
    """A config for every combination of the options that have several values."""
    configs = []
    for values in product(*(value if isinstance(value, tuple) else (value,) for value in options.values())):
        chosen = dict(zip(options, values, strict=True))
        without_effect = contenders.VARIANT_SETTINGS - contenders.settings_of(chosen["layer"])
        if chosen["layer"] not in contenders.RANKED:
            without_effect |= {"rank"}
        chosen = {name: value for name, value in chosen.items() if name not in without_effect}
        try:
            configs.append(config(**chosen))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    return list(dict.fromkeys(configs))
