"""The layers that are compared, and the only place that knows them: key, label, colour, and how to build one."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import pairmix
from pairmix.nn import SPMLinear
from pairmix.nn.init import INITS
from pairmix.schedule import Schedule

Build = Callable[[], nn.Module]
"""Makes a layer. It can be pickled, so that another process can make the same one."""


@dataclass(frozen=True)
class Contender:
    """A layer that takes the place of a dense map.

    Attributes:
        key: in options, run names, configs and rows of results.
        label: in tables, pictures and prose.
        color: in every picture.
        marker: in every picture; no two contenders have the same colour and marker.
        dash: of its line, where the line style does not stand for something else.
        build: makes one, from the numbers of features, the number of maps and options; None if there is no layer.
        timed: gives, from the width, a function that makes one for the benchmarks of the operator; needed where `build`
            would add to the time or the memory that is measured.
        settings: what a config must hold, apart from the key, for this variant of the layer.
        runs_at: whether it can run, and makes sense, at a width.
        aliases: its names in older results, and that of a variant in rows of step times.
    """

    key: str
    label: str
    color: str
    marker: str
    dash: str = "-"
    build: Callable[..., nn.Module] | None = None
    timed: Callable[[int], Build] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    runs_at: Callable[[int], bool] = lambda width: True
    aliases: tuple[str, ...] = ()

    @property
    def is_variant(self) -> bool:
        """Whether it is computed in another way than the layer of its key; where it starts makes no variant."""
        return not STRUCTURE.isdisjoint(self.settings)


STRUCTURE = frozenset({"block", "dense_maps", "pairing", "stages"})
"""The settings that change what a layer computes, and its size; others change how it is trained."""


class LowRank(nn.Sequential):
    """`y = A B x + bias` with an inner dimension of `rank`."""

    def __init__(self, in_features: int, out_features: int, rank: int) -> None:
        super().__init__(nn.Linear(in_features, rank, bias=False), nn.Linear(rank, out_features))


class SideBySide(nn.ModuleList):
    """Layers that read the same input; their outputs are side by side."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = [layer(x) for layer in self]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


class Monarch(nn.Module):
    """Two block-diagonal matrices with a transposition between them, by batched matrix products.

    With b blocks of `in_features / b` coordinates, the first maps each onto `m` coordinates; the second reads one of
    each block and gives `out_features / m`.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.blocks = divisor_near_root(in_features)
        between = divisor_near_root(out_features)
        self.block_size = in_features // self.blocks
        self.first = nn.Parameter(torch.randn(self.blocks, self.block_size, between) / self.block_size**0.5)
        self.second = nn.Parameter(torch.randn(between, self.blocks, out_features // between) / self.blocks**0.5)
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor) -> Tensor:
        z = x.view(-1, self.blocks, self.block_size).transpose(0, 1)  # [block, row, place in the block]
        z = torch.bmm(z, self.first).permute(2, 1, 0)  # [place in the block, row, block]
        z = torch.bmm(z, self.second).transpose(0, 1)
        return z.reshape(*x.shape[:-1], self.out_features) + self.bias


def divisor_near_root(n: int) -> int:
    """The divisor of n that is nearest to its square root."""
    return min((d for d in range(1, n + 1) if n % d == 0), key=lambda d: abs(d - math.sqrt(n)))


def equal_rank(in_features: int, out_features: int | None = None, **options: Any) -> int:
    """The smallest rank with which a low-rank layer has at least as many parameters as `SPMLinear`."""
    out_features = in_features if out_features is None else out_features
    size = count_parameters(SPMLinear(in_features, out_features, device="meta", **options))
    return max(1, math.ceil((size - out_features) / (in_features + out_features)))


def count_parameters(model: nn.Module) -> int:
    """The number of parameters, in scalars."""
    return sum(parameter.numel() for parameter in model.parameters())


def has_torch_structured() -> bool:
    """Whether the extra `structured` is installed, and works."""
    try:
        torch_structured_butterfly(2, 2)
    except ImportError:
        return False
    return True


def torch_structured_butterfly(in_features: int, out_features: int) -> nn.Module:
    """The butterfly of torch-structured: the same pairs as SPM's; other widths are padded to a power of two."""
    logging.getLogger("torch_structured").setLevel(logging.ERROR)  # it reports at length that there is no CUDA
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch_structured import Butterfly
    layer: nn.Module = Butterfly(in_features, out_features)
    return layer


def _dense(in_features: int, out_features: int, maps: int, **options: Any) -> nn.Module:
    return nn.Linear(in_features, maps * out_features)


@torch.no_grad()
def _dense_from_identity(in_features: int, out_features: int, maps: int, **options: Any) -> nn.Module:
    layer = nn.Linear(in_features, maps * out_features)
    layer.weight.copy_(torch.eye(out_features, in_features).repeat(maps, 1))
    layer.bias.zero_()
    return layer


def _spm(in_features: int, out_features: int, maps: int, **options: Any) -> nn.Module:
    return SPMLinear(in_features, out_features, maps=maps if maps > 1 else None, **options)


def _companion(in_features: int, out_features: int, maps: int, rank: int | None = None, **options: Any) -> nn.Module:
    rank = equal_rank(in_features, out_features, **options) if rank is None else rank
    return _spm(in_features, out_features, maps, rank=rank, **options)


def _deeper(in_features: int, out_features: int, maps: int, stages: int | None = None, **options: Any) -> nn.Module:
    usual = Schedule.butterfly(max(in_features, out_features), stages).stages
    return _spm(in_features, out_features, maps, stages=2 * usual, **options)


def _mixture(in_features: int, out_features: int, maps: int, stages: int | None = None, **options: Any) -> nn.Module:
    butterfly = Schedule.butterfly(max(in_features, out_features), stages)
    other = Schedule.random(butterfly.n, butterfly.stages, seed=1)
    pairs = Schedule.side_by_side([butterfly, other])
    return _spm(in_features, out_features, maps, width=pairs.n, schedule=pairs, **options)


def _low_rank(in_features: int, out_features: int, maps: int, rank: int | None = None, **options: Any) -> nn.Module:
    rank = equal_rank(in_features, out_features, **options) if rank is None else rank
    return _each(partial(LowRank, rank=rank))(in_features, out_features, maps)


def _low_rank_alone(width: int) -> Build:
    return partial(LowRank, width, width, equal_rank(width))


def _each(build: Callable[[int, int], nn.Module]) -> Callable[..., nn.Module]:
    """Builds from the numbers of features alone, as often as there are maps."""

    def maps_of(in_features: int, out_features: int, maps: int, **options: Any) -> nn.Module:
        layers = [build(in_features, out_features) for _ in range(maps)]
        return layers[0] if maps == 1 else SideBySide(layers)

    return maps_of


# The colours of Okabe and Ito, which colour-blind readers can tell apart, and three dark ones. The markers help too.
DENSE = Contender("dense", "dense", "#d55e00", "s", build=_dense, aliases=("nn.Linear",))
SPM = Contender("spm", "SPM", "#0072b2", "o", build=_spm, aliases=("SPM",))
SPM_ROTATION = Contender("spm", "SPM, rotation", "#56b4e9", "o", settings={"block": "rotation"})
SPM_OTHER_PAIRS = Contender("spm", "SPM, other pairs", "#0072b2", "v", "--", settings={"pairing": "other"})
SPM_ROTATION_OTHER_PAIRS = Contender(
    "spm", "SPM, rotation, other pairs", "#56b4e9", "v", "--", settings={"block": "rotation", "pairing": "other"}
)
SPM_DENSE_ATTENTION = Contender(
    "spm", "SPM, dense attention", "#5d3a9b", "<", "-.", settings={"dense_maps": "qkv,out"},
    aliases=("spm-dense-attention",),
)  # fmt: skip
SPM_DENSE_FEED_FORWARD = Contender(
    "spm", "SPM, dense feed-forward", "#5d3a9b", ">", "-.", settings={"dense_maps": "up,down"},
    aliases=("spm-dense-feed-forward",),
)  # fmt: skip
SPM_STAGES = tuple(
    Contender(
        "spm", f"SPM, {stages} stages", color, "o", settings={"stages": stages}, aliases=(f"spm-{stages}-stages",)
    )
    for stages, color in ((24, "#004488"), (40, "#003366"), (48, "#001f4d"))
)
LOW_RANK_STAGES = tuple(
    Contender(
        "lowrank", f"low rank, size of {stages} stages", color, "^", settings={"stages": stages},
        aliases=(f"lowrank-{stages}-stages",),
    )
    for stages, color in ((24, "#006b4f"), (40, "#00543e"), (48, "#00402f"))
)  # fmt: skip
LOW_RANK = Contender(
    "lowrank", "low rank", "#009e73", "^", build=_low_rank, timed=_low_rank_alone, aliases=("low rank, SPM's size",)
)
COMPANION = Contender("companion", "SPM + low rank", "#004d80", "h", build=_companion)
DEEPER = Contender("deeper", "SPM, twice the stages", "#004488", "D", build=_deeper)
MIXTURE = Contender("mixture", "SPM, sum of two", "#5d3a9b", "P", build=_mixture)
IDENTITY = Contender("identity", "dense from identity", "#e69f00", "D", build=_dense_from_identity)
SOFTMAX = Contender("softmax", "softmax only", "#cc79a7", "P")
RANK_64 = Contender(
    "rank64", "rank 64", "#7a9a01", "v", build=_each(partial(LowRank, rank=64)), runs_at=lambda width: width > 2 * 64,
    aliases=("low rank 64",),
)  # fmt: skip
MONARCH = Contender("monarch", "Monarch", "#7f3c8d", "X", build=_each(Monarch), aliases=("Monarch",))
BUTTERFLY = Contender(
    "butterfly", "torch-structured butterfly", "#8c4a2f", "p", build=_each(torch_structured_butterfly),
    runs_at=lambda width: has_torch_structured(), aliases=("torch-structured",),
)  # fmt: skip
SPM_REFERENCE = Contender(
    "spm-reference", "SPM in plain torch", "#0072b2", "x", "--", build=partial(_spm, impl="reference"),
    aliases=("SPM in plain torch",),
)  # fmt: skip
TORCH_RNN = Contender("torch.nn.RNN", "torch.nn.RNN", "#000000", "*")
ROTATIONS = Contender("rotations", "SPM rotations", "#332288", "o")
LORA = Contender("lora", "LoRA", "#117733", "^")
OFT = Contender("oft", "OFT", "#aa4499", "X")
BOFT = Contender("boft", "BOFT", "#882255", "p")
FULL = Contender("full", "full fine-tuning", "#cc6677", "s")
ADAPTER_STAGES = tuple(
    replace(
        one, label=f"{one.label}, {words}{n} stages", marker=marker, settings={"stages": n}, aliases=(f"{one.key}-{n}",)
    )
    for one, words in ((ROTATIONS, ""), (LORA, "size of "))
    for n, marker in ((4, "v"), (16, "D"))
)
REST = Contender("all but the layer", "all but the layer", "#999999", "x", ":")
"""What would be left of a training step if the layer cost nothing."""

_STARTS: dict[str, dict[str, Any]] = {
    **{init.replace("_", " "): {"init": init} for init in INITS},
    # What all results are of that do not name a start.
    "near identity, common rate": {"init": "near_identity", "layer_rate": 1.0},
}
_START_MARKERS = {"o": "d.8H*D12", "v": "<>^sPp34", "h": "d.8H*D12"}  # by the marker of the layer; more than needed


def _with_starts(layer: Contender) -> list[Contender]:
    """The layer with its own start, and with every other."""
    starts = zip(_STARTS.items(), _START_MARKERS[layer.marker], strict=False)
    return [
        layer,
        *(
            replace(
                layer, label=f"{layer.label}, {words}", marker=marker, settings={**layer.settings, **settings},
                build=None, aliases=(),
            )
            for (words, settings), marker in starts
        ),
    ]  # fmt: skip


CONTENDERS = (
    DENSE,
    *(one for layer in (SPM, SPM_ROTATION, SPM_OTHER_PAIRS, SPM_ROTATION_OTHER_PAIRS) for one in _with_starts(layer)),
    *(*SPM_STAGES, SPM_DENSE_ATTENTION, SPM_DENSE_FEED_FORWARD),
    *_with_starts(COMPANION),
    *(DEEPER, MIXTURE, LOW_RANK, *LOW_RANK_STAGES),
    *(IDENTITY, SOFTMAX, RANK_64, MONARCH, BUTTERFLY, SPM_REFERENCE, TORCH_RNN, REST),
    *(FULL, ROTATIONS, *ADAPTER_STAGES[:2], LORA, *ADAPTER_STAGES[2:], OFT, BOFT),
)
"""All of them, in the order in which they are shown."""

TRAINED = tuple(one.key for one in (DENSE, SPM, COMPANION, LOW_RANK, MONARCH, IDENTITY))
"""The keys of the layers that an experiment can train."""
RANKED = tuple(one.key for one in (COMPANION, LOW_RANK))
"""The keys of the layers that have a rank."""
TIMED = tuple(one.key for one in (DENSE, SPM, LOW_RANK, RANK_64, MONARCH, BUTTERFLY, SPM_REFERENCE))
"""The keys of the layers that the benchmarks of the operator time."""
VARIANT_SETTINGS = frozenset(name for contender in CONTENDERS for name in contender.settings)
"""The settings that tell contenders of the same layer apart."""


def make(key: str, in_features: int, out_features: int | None = None, maps: int = 1, **options: Any) -> nn.Module:
    """Build a layer.

    Args:
        key: of the contender.
        in_features: the number of features it takes.
        out_features: the number that each map gives; None for as many.
        maps: the number of maps of the same input; their outputs are side by side.
        options: of `SPMLinear`; they also decide the number of parameters of the low-rank layer of SPM's size, unless
            `rank` does.
    """
    builds = {contender.key: contender.build for contender in CONTENDERS if contender.build is not None}
    if key not in builds:
        raise ValueError(f"layer must be one of {list(builds)}, got {key!r}")
    layer = builds[key](in_features, in_features if out_features is None else out_features, maps, **options)
    layer.is_compared = True  # type: ignore[assignment]
    return layer


def param_groups(
    model: nn.Module, lr: float, weight_decay: float, scale: float | None, embedding_scale: float | None = None
) -> list[dict[str, Any]]:
    """Groups of parameters for an optimiser.

    Args:
        model: with layers that `make` has built.
        lr: the learning rate.
        weight_decay: of matrices.
        scale: what the rate of those layers is multiplied by; None for what `pairmix.param_groups` says.
        embedding_scale: the same of embeddings; None with a given `scale` for 1.
    """
    if scale is not None and embedding_scale is None:
        embedding_scale = 1.0
    groups = pairmix.param_groups(model, lr, weight_decay, embedding_scale=embedding_scale)
    if scale is None:
        return groups
    compared = {
        parameter for module in model.modules() if hasattr(module, "is_compared") for parameter in module.parameters()
    }
    split = []
    for group in groups:
        for chosen, lr_scale in ((True, scale), (False, group["lr_scale"])):
            params = [parameter for parameter in group["params"] if (parameter in compared) == chosen]
            if params:
                split.append({**group, "params": params, "lr": lr * lr_scale, "lr_scale": lr_scale})
    return split


def timed_at(width: int) -> dict[str, Build]:
    """The layers of `TIMED` that can run here at this width, by key."""
    return {
        contender.key: contender.timed(width) if contender.timed else partial(make, contender.key, width)
        for contender in map(named, TIMED)
        if contender.runs_at(width)
    }


def named(name: str) -> Contender:
    """The contender with this key, or with this name in older results; an unknown name is its own label."""
    for contender in CONTENDERS:
        if name in (contender.key, *contender.aliases):
            return contender
    return _unknown(name)


def of_config(config: Mapping[str, Any]) -> Contender:
    """The contender of a run: its layer, and the variant that has most settings of the config."""
    name = str(config["layer"])
    matching = [
        contender
        for contender in CONTENDERS
        if contender.key == name and contender.settings.items() <= {**config, "layer": name}.items()
    ]
    return max(matching, key=lambda contender: len(contender.settings)) if matching else named(name)


def settings_of(key: str) -> frozenset[str]:
    """Those of `VARIANT_SETTINGS` that make a difference to a layer."""
    return frozenset(name for contender in CONTENDERS if contender.key == key for name in contender.settings)


def timed_as(label: str) -> str:
    """The contender whose training step takes as long: where a layer starts makes no difference to that."""
    contender = labelled(label)
    return label if contender.is_variant else named(contender.key).label


def labelled(label: str) -> Contender:
    """The contender with this label."""
    return next((contender for contender in CONTENDERS if contender.label == label), _unknown(label))


def position(label: str) -> int:
    """Where a contender stands among the others; unknown ones come last."""
    labels = [contender.label for contender in CONTENDERS]
    return labels.index(label) if label in labels else len(labels)


def _unknown(name: str) -> Contender:
    return Contender(name, name, "#555555", "+")
