"""What the kernels are compiled to, without a GPU: for looking at registers, memory and instructions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from pairmix.ops.registry import Parameters
from pairmix.ops.triton.gradients import Backward
from pairmix.ops.triton.launch import Operator
from pairmix.schedule import Schedule

_POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
}


class Variant(NamedTuple):
    """A kernel as one launch compiles it.

    Attributes:
        kernel: the jitted function.
        signature: the type of every argument, as `triton.compiler.ASTSource` takes it.
        constants: the values of those that are known when it is compiled.
        aligned: the arguments that are multiples of 16.
        options: the number of warps, and the like.
    """

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: list[str]
    options: dict[str, int]

    def compile(self, backend: str, arch: int | str, warp_size: int = 32) -> Any:
        """Compile it for a target: `("cuda", 80)`, `("cuda", 90)` or `("hip", "gfx942", 64)`."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        attributes = {(self.kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in self.aligned}
        source = ASTSource(self.kernel, self.signature, constexprs=self.constants, attrs=attributes)
        options = dict(self.options)
        if "num_warps" in options:  # which is for warps of 32 threads
            options["num_warps"] = max(1, options["num_warps"] * 32 // warp_size)
        return triton.compile(source, target=GPUTarget(backend, arch, warp_size), options=options)


def variants(
    schedule: Schedule,
    block: str = "general",
    dtype: torch.dtype = torch.bfloat16,
    *,
    in_features: int | None = None,
    out_features: int | None = None,
    maps: int = 1,
    rows: int = 4096,
) -> list[Variant]:
    """The kernels of forward and of a backward of everything, in the order of their launches, parameters in float32."""
    n, stages = schedule.n, schedule.stages
    in_features, out_features = in_features or n, out_features or n

    def parameter(*shape: int) -> Tensor:
        return torch.empty(maps, *shape, device="meta")

    blocks = parameter(stages, n // 2) if block == "rotation" else parameter(stages, 4, n // 2)
    scale = parameter(stages) if n % 2 else None
    parameters = Parameters(blocks, parameter(n), parameter(n), parameter(out_features), scale)
    x = torch.empty(rows, in_features, dtype=dtype, device="meta")
    operator = _Recorded(x, parameters, schedule.on(x.device), block, out_features)
    operator.run(operator.x, 0, len(operator.passes))
    needs = Parameters(True, True, True, True, scale is not None)
    Backward(operator, x.new_empty(rows, maps * out_features), True, needs).run()
    return operator.launched


class _Recorded(Operator):
    """An operator that launches nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.launched: list[Variant] = []
        super().__init__(*arguments)

    def launch(self, kernel: Any, grid: Any, *arguments: Any, **options: Any) -> None:
        named = dict(zip(kernel.arg_names, arguments, strict=False))
        named |= {name: options.pop(name) for name in kernel.arg_names if name in options}
        signature, constants, aligned = {}, {}, []
        for name in kernel.arg_names:
            value = named[name]
            if isinstance(value, Tensor):
                signature[name] = _POINTERS[value.dtype]
                aligned.append(name)
            elif value is None or name.isupper() or value == 1:  # Triton compiles ones as constants, too
                signature[name], constants[name] = "constexpr", value
            else:
                signature[name] = "i32"
                aligned += [name] if value % 16 == 0 else []
        self.launched.append(Variant(kernel, signature, constants, aligned, options))
