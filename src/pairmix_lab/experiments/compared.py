"""What runs have in common that compare layers: which layer, how it is made, and how fast it learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from pairmix.nn.init import INITS
from pairmix_lab import contenders
from pairmix_lab.training.loop import LARGEST_SIZE, Recipe

OWN = "own"
"""In the place of an initialisation: the one that the library, or the model, chooses by itself."""


@dataclass(frozen=True, kw_only=True)
class Compared(Recipe):
    """A run of one layer.

    Attributes:
        layer: the key of the contender.
        width: of the layer.
        block: of SPM.
        stages: of SPM, also of the one whose size a low-rank layer has; None for the fewest that reach everything.
        init: of SPM, or `"own"` for the default.
        rank: of a low-rank layer, or of the one beside an SPM; None for as many parameters as SPM has.
        layer_rate: what the learning rate of the layer is multiplied by; None for what `pairmix.param_groups` says.
        embedding_rate: the same of embeddings; None with a given `layer_rate` for 1.
    """

    layer: str = contenders.SPM.key
    width: int
    block: str = "general"
    stages: int | None = None
    init: str = OWN
    rank: int | None = None
    layer_rate: float | None = None
    embedding_rate: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("init", (OWN, *INITS))
        self._check_choice("block", ("general", "rotation"))
        self._check_at_most("width", LARGEST_SIZE)
        for name in ("rank", "layer_rate", "embedding_rate"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, or None, got {value}")
        if self.rank is not None and self.layer not in contenders.RANKED:
            raise ValueError(f"rank is for the layers {', '.join(contenders.RANKED)}, got {self.rank} for {self.layer}")

    def make(self, out_features: int | None = None, in_features: int | None = None, **more: Any) -> nn.Module:
        """The layer, from and onto `width` features if nothing else is said."""
        options: dict[str, Any] = {"block": self.block, "stages": self.stages, **more}
        if self.init != OWN:
            options["init"] = self.init
        if self.rank is not None:
            options["rank"] = self.rank
        return contenders.make(self.layer, in_features or self.width, out_features or self.width, **options)

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """The parameters of a model for the optimiser."""
        return contenders.param_groups(model, self.lr, self.weight_decay, self.layer_rate, self.embedding_rate)

    @property
    def kind(self) -> str:
        """The layer and its variant, for the names of files."""
        return self.layer + "-rotation" * (self.block == "rotation") + self.variant

    @property
    def variant(self) -> str:
        """What is not the default of the experiment, for the names of files; empty if all is."""
        words = {"stages": "stages", "init": "", "rank": "rank", "layer_rate": "x", "embedding_rate": "embeddings"}
        defaults = {name: type(self).__dataclass_fields__[name].default for name in words}
        given = {name: getattr(self, name) for name in words if getattr(self, name) != defaults[name]}
        return "".join(f"-{words[name]}{value:g}" if words[name] else f"-{value}" for name, value in given.items())

    @classmethod
    def completed(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        is_spm = config.get("layer") == contenders.SPM.key
        return {
            "init": "near_identity" if is_spm else OWN,
            "rank": None,
            "layer_rate": 1.0 if is_spm else None,
            "embedding_rate": None,
            **super().completed(config),
        }
