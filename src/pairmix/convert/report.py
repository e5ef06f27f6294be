"""What was done to a model, as a table."""

from __future__ import annotations

from dataclasses import dataclass, field

from pairmix.tables import aligned


@dataclass(frozen=True)
class Replaced:
    """A module that was replaced.

    Attributes:
        name: where it is in the model.
        before: its class.
        after: the class of its twin.
        parameters: their numbers, before and after.
        multiply_adds: of its linear maps for one input row, before and after; for a recurrent network, one step.
        error: of the twin's maps as `pairmix.fit` measures them; None if they start anew.
    """

    name: str
    before: str
    after: str
    parameters: tuple[int, int]
    multiply_adds: tuple[int, int]
    error: float | None = None


@dataclass(frozen=True)
class Left:
    """A module that could have been replaced.

    Attributes:
        name: where it is in the model.
        kind: its class.
        why: why it was left as it is.
    """

    name: str
    kind: str
    why: str


@dataclass
class Conversion:
    """What `convert_` or `restore_` did. Printed, it is a table.

    Attributes:
        replaced: the modules that were replaced.
        left: those that were not.
    """

    replaced: list[Replaced] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [["module", "before", "after", "parameters", "", "multiply-adds", "", "error"]]
        lines += [
            [
                *(one.name, one.before, one.after),
                *(f"{number:,}" for number in (*one.parameters, *one.multiply_adds)),
                "" if one.error is None else f"{one.error:.2g}",
            ]
            for one in self.replaced
        ]
        if self.replaced:
            columns = zip(*([*one.parameters, *one.multiply_adds] for one in self.replaced), strict=True)
            lines.append(["all", "", "", *(f"{sum(column):,}" for column in columns), ""])
        if all(line[-1] == "" for line in lines[1:]):
            lines = [line[:-1] for line in lines]
        table = aligned(lines) if self.replaced else ["nothing was replaced"]
        kept = aligned([["left as it is", "kind", "why"], *([one.name, one.kind, one.why] for one in self.left)])
        return "\n".join([*table, "", *kept] if self.left else table)

    __repr__ = __str__
