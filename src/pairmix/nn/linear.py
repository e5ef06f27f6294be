"""The layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from pairmix import functional
from pairmix.nn import depth
from pairmix.nn import init as initial
from pairmix.nn.description import Described, of_schedule
from pairmix.nn.inputs import forward_special
from pairmix.schedule import Schedule

_SCHEDULES: dict[str, Callable[[int, int | None], Schedule]] = {
    "butterfly": Schedule.butterfly,
    "brick": Schedule.brick,
    "random": Schedule.random,
    "random_blocks": Schedule.random_blocks,
}

_Parameters, _tuple = functional.Parameters, tuple.__new__  # a named tuple makes itself in Python, which takes longer


class SPMOptions(TypedDict, total=False):
    """The options of SPMLinear that modules made of it hand on; they are explained there."""

    block: str
    stages: int | None
    schedule: str | Schedule
    residual: str
    init: str | Callable[[Tensor], Any]
    rank: int
    impl: str


class SPMLinear(Described):
    """A linear layer of pairwise mixing stages, in place of `torch.nn.Linear`.

        z_0 = d_in * tile(x)        z_l = B_l z_(l-1)        y = fold(d_out * z_L) + bias

    The width is `n = max(in_features, out_features)`, or more if asked for. Every stage applies `n // 2` independent
    2x2 blocks, so the layer costs O(n L) time and parameters instead of O(n^2).

    Args:
        in_features: size of each input sample.
        out_features: size of each output sample.
        bias: whether to add a learned bias, which starts at zero.
        device: where the parameters live.
        dtype: their dtype.
        block: `"general"` (four numbers per pair) or `"rotation"` (one angle per pair; the mixing is orthogonal).
        stages: the number of stages; None for the fewest with which every output depends on every input.
        schedule: `"butterfly"`, `"random_blocks"`, `"random"` (seed 0), `"brick"` or a `Schedule` of width n.
        residual: what happens to the coordinate that an odd width leaves over at each stage: `"scale"` multiplies it
            by a learned number, `"pass"` leaves it as it is.
        init: `"hadamard"`, `"random_rotation"`, `"near_identity"`, `"identity"`, or a function that fills a tensor
            of angles `[L, n // 2]` in place, such as those in `pairmix.nn.init`. General blocks start as the
            same rotations, so the mixing always starts orthogonal. The default suits a layer in the place of a dense
            one; a chain that is to stay near the identity should start there.
        gain: what the output starts multiplied by, through `d_out`; below one for the last map of a residual branch.
        rank: that of a low-rank map beside the mixing, `y = SPM(x) + up (down x)`, which starts at zero; 0 for none.
        width: the number of coordinates that are mixed, at least `max(in_features, out_features)`. With a multiple of
            both, and `Schedule.side_by_side`, the layer is a sum of several mixers with pairings of their own.
        maps: for several operators of this kind that read the same input, how many. They are computed in one call, and
            their outputs are side by side. None for one operator.
        impl: which implementation computes it: `"auto"` chooses, and one asked for by name never falls back to another.

    Shape:
        - input: `(*, in_features)`, with any number of leading dimensions
        - output: `(*, out_features)`, or `(*, maps * out_features)`

    Attributes:
        coeffs: `[L, 4, n // 2]`, rows a, b, c, d (`block="general"`). With `maps`, all parameters have that dimension
            in front.
        angles: `[L, n // 2]` (`block="rotation"`).
        d_in: `[n]`.
        d_out: `[n]`.
        bias: `[out_features]`, or None.
        residual_scale: `[L]`, or None unless n is odd and `residual="scale"`.
        down: `[rank, in_features]`, or None for `rank=0`.
        up: `[out_features, rank]`, or None for `rank=0`.
        description: what the parameters mean, for checkpoints: uint8 `[256]`, JSON padded with zeros. A buffer.

    Examples:
        >>> layer = SPMLinear(1000, 1000)
        >>> layer(torch.randn(32, 1000)).shape
        torch.Size([32, 1000])
        >>> layer
        SPMLinear(in_features=1000, out_features=1000, bias=True, width=1000, stages=10, block=general,
            schedule=butterfly, parameters=23,000 (dense 1,001,000))
    """

    bias: nn.Parameter | None
    residual_scale: nn.Parameter | None
    down: nn.Parameter | None
    up: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        block: str = "general",
        stages: int | None = None,
        schedule: str | Schedule = "butterfly",
        residual: str = "scale",
        init: str | Callable[[Tensor], Any] = initial.DEFAULT,
        gain: float = 1.0,
        rank: int = 0,
        width: int | None = None,
        maps: int | None = None,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        _check_choice("block", block, ("general", "rotation"))
        _check_choice("residual", residual, ("scale", "pass"))
        if isinstance(init, str):
            _check_choice("init", init, initial.INITS)
        for name, number in (("in_features", in_features), ("out_features", out_features), ("maps", maps)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        if rank < 0:
            raise ValueError(f"rank must be at least 0, got {rank}")
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"dtype must be a floating-point one, got {dtype}")
        if not (isinstance(gain, int | float) and math.isfinite(gain)):
            raise ValueError(f"gain must be a finite number, got {gain!r}")
        self.in_features = in_features
        self.out_features = out_features
        self.schedule = make_schedule(schedule, _width(in_features, out_features, width), stages)
        self.block = block
        self.residual = residual
        self.init = init
        self.gain = gain
        self.rank = rank
        self.maps = maps
        self.impl = impl

        def parameter(*shape: int) -> nn.Parameter:
            front = () if maps is None else (maps,)
            return nn.Parameter(torch.empty((*front, *shape), device=device, dtype=dtype))

        n, half = self.width, self.width // 2
        if block == "general":
            self.coeffs = parameter(self.stages, 4, half)
        else:
            self.angles = parameter(self.stages, half)
        self.d_in = parameter(n)
        self.d_out = parameter(n)
        self.register_parameter("bias", parameter(out_features) if bias else None)
        has_scale = n % 2 == 1 and residual == "scale"
        self.register_parameter("residual_scale", parameter(self.stages) if has_scale else None)
        self.register_parameter("down", parameter(rank, in_features) if rank else None)
        self.register_parameter("up", parameter(out_features, rank) if rank else None)
        functional.choose_impl(impl, self.d_in.device)  # a wrong name should fail here, not in the first forward
        self.reset_parameters()

    @property
    def width(self) -> int:
        """The number of coordinates that are mixed."""
        return self.schedule.n

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.schedule.stages

    @property
    def multiply_adds(self) -> int:
        """Of one input row: four of every pair and stage, those of the diagonals, and those of the low-rank map."""
        of_stage = 4 * (self.width // 2) + (self.residual_scale is not None)
        of_low_rank = self.rank * (self.in_features + self.out_features)
        return (self.maps or 1) * (self.stages * of_stage + 2 * self.width + of_low_rank)

    @property
    def weight(self) -> Tensor:
        """`to_dense()`, for code that reads the weight of an `nn.Linear`. Computed each time, and not a parameter."""
        return self.to_dense()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the parameters anew, as `init` says."""
        fill = initial.INITS[self.init] if isinstance(self.init, str) else self.init
        if self.block == "general":
            angles = torch.empty_like(self.coeffs[..., 0, :])
            fill(angles)
            self.coeffs.copy_(initial.coefficients(angles))
        else:
            fill(self.angles)
        nn.init.ones_(self.d_in)
        initial.output_scale_(self.d_out, self.out_features).mul_(self.gain)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.residual_scale is not None:
            nn.init.ones_(self.residual_scale)
        if self.down is not None and self.up is not None:
            nn.init.normal_(self.down, std=self.in_features**-0.5)
            nn.init.zeros_(self.up)
        self._describe()

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is not Tensor:
            special: Tensor | None = forward_special(self, x)
            if special is not None:
                return special
        if x.dim() == 0 or x.size(-1) != self.in_features:
            raise ValueError(f"expected an input of shape (*, {self.in_features}), got {tuple(x.shape)}")
        y = functional.mix(x, self._tensors(), self.schedule, self.block, self.out_features, self.maps, self.impl)
        return functional.add_low_rank(y, x, self.down, self.up) if self.rank else y

    def to_dense(self) -> Tensor:
        """The matrix that this layer stands for, `[out_features, in_features]`: `layer(x) == x @ W.T + bias`.

        Those of several maps are below each other, as the gates are in the weights of torch's recurrent networks.

        Examples:
            >>> SPMLinear(2, 2, init="identity").to_dense().tolist()
            [[1.0, 0.0], [0.0, 1.0]]
        """
        unit_vectors = torch.eye(self.in_features, device=self.d_in.device, dtype=self.d_in.dtype)
        parameters = self._tensors()._replace(bias=None)
        columns = functional.mix(
            unit_vectors, parameters, self.schedule, self.block, self.out_features, self.maps, self.impl
        )
        if self.rank:
            columns = functional.add_low_rank(columns, unit_vectors, self.down, self.up)
        return columns.T

    def _tensors(self) -> functional.Tensors:
        """The parameters as the operator takes them, if what was loaded last are those of such a layer."""
        self._check_description()
        # Attributes of a module are found late, and a few of them take as long as a small layer.
        blocks = "coeffs" if self.block == "general" else "angles"
        try:
            own = self._parameters
            return _tuple(_Parameters, (own[blocks], own["d_in"], own["d_out"], own["bias"], own["residual_scale"]))
        except KeyError:  # some are computed: by a parametrization, by FSDP
            _check_computed(self, blocks)
            names = (blocks, "d_in", "d_out", "bias", "residual_scale")
            return _Parameters(*(getattr(self, name) for name in names))

    def operator(self) -> dict[str, Any]:
        """What the functions of `pairmix.functional` take of this layer: parameters, schedule, block and impl."""
        taken = {**self._tensors()._asdict(), "schedule": self.schedule, "block": self.block, "impl": self.impl}
        return {**taken, "down": self.down, "up": self.up} if self.rank else taken

    @torch.no_grad()
    def deepen_(self, stages: int, optimizer: torch.optim.Optimizer | None = None) -> SPMLinear:
        """Add stages at the end that start as the identity: the layer computes what it did before, and can learn more.

        Args:
            stages: how many. Their pairs are those that come next in the schedule.
            optimizer: one that trains this layer: it goes on with the longer parameters and its moments of the others.
                Without it, make a new one: the parameters are new tensors.

        Examples:
            >>> layer = SPMLinear(64, 64)
            >>> x, before = torch.randn(8, 64), layer.stages
            >>> y = layer(x)
            >>> torch.allclose(layer.deepen_(6)(x), y), layer.stages - before
            (True, 6)
        """
        added = self.schedule.extended(stages)
        depth.change_stages_(self, lambda values, start: depth.appended(values, start, stages), optimizer)
        self.schedule = added
        self._describe()
        return self

    @torch.no_grad()
    def prune_(self, tolerance: float = 0.0, optimizer: torch.optim.Optimizer | None = None) -> list[int]:
        """Remove the stages that are the identity, or near it.

        Args:
            tolerance: how far an entry of a stage's blocks may be from that of the identity.
            optimizer: one that trains this layer: it goes on with the parameters that are left. Without it, make a new
                one: the parameters are new tensors.

        Returns:
            The removed stages, counted from 0.
        """
        if not tolerance >= 0:
            raise ValueError(f"tolerance must be at least 0, got {tolerance}")
        far = (~(depth.distances_from_identity(self) <= tolerance)).tolist()  # a stage with NaN is no identity
        left = [stage for stage in range(self.stages) if far[stage]]
        depth.change_stages_(self, lambda values, start: values[left], optimizer)
        self.schedule = self.schedule.only(left)
        self._describe()
        return [stage for stage in range(len(far)) if not far[stage]]

    def extra_repr(self) -> str:
        bias = self.bias is not None
        parameters = sum(parameter.numel() for parameter in self.parameters())
        dense = (self.maps or 1) * self.out_features * (self.in_features + bias)
        maps = "" if self.maps is None else f"maps={self.maps}, "
        rank = f"rank={self.rank}, " if self.rank else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, {maps}bias={bias}, width={self.width}, "
            f"stages={self.stages}, block={self.block}, schedule={self.schedule.kind}, {rank}"
            f"parameters={parameters:,} (dense {dense:,})"
        )

    def _meaning(self) -> dict[str, Any]:
        meaning = {
            "in_features": self.in_features,
            "out_features": self.out_features,
            "maps": self.maps,
            "block": self.block,
            "schedule": of_schedule(self.schedule),
        }
        return {**meaning, "residual": self.residual} if self.width % 2 else meaning


def _check_computed(layer: nn.Module, blocks: str) -> None:
    """Refuse a spectral norm of the blocks: it would divide all stages by that of a matrix that they are not."""
    parametrizations = getattr(layer, "parametrizations", {})
    names = [type(one).__name__ for one in parametrizations[blocks]] if blocks in parametrizations else []
    if "_SpectralNorm" in names or f"{blocks}_u" in layer._buffers:
        raise ValueError(f"spectral_norm on {blocks} of an SPM layer is not that of its matrix; bound d_out instead")


def _width(in_features: int, out_features: int, width: int | None) -> int:
    least = max(in_features, out_features)
    if width is not None and width < least:
        raise ValueError(f"width must be at least {least} = max(in_features, out_features), got {width}")
    return least if width is None else width


def make_schedule(schedule: str | Schedule, n: int, stages: int | None) -> Schedule:
    """The schedule of a layer of width `n`, from the options of `SPMLinear`."""
    if isinstance(schedule, str):
        _check_choice("schedule", schedule, _SCHEDULES)
        return _SCHEDULES[schedule](n, stages)
    if schedule.n != n:
        raise ValueError(f"the layer has the width {n}, its schedule has {schedule.n}")
    if stages not in (None, schedule.stages):
        raise ValueError(f"stages={stages}, but the given {schedule} has {schedule.stages}")
    return schedule


def _check_choice(name: str, value: object, choices: Any) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {list(choices)}, got {value!r}")
