"""Random layers through the compiled kernels, compared with the definition: `make fuzz`.

And random feed-forward blocks, compared with their parts. The layer and the block of a seed are decided by it alone.
What fails is printed with the command that runs it again.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import torch
from torch import Tensor

import oracle
from kernels import running
from pairmix import Schedule, SPMFeedForward, SPMLinear, _kernels
from pairmix.functional import ACTIVATIONS, spm
from plain_feed_forward import assert_as_close_as_its_parts

LARGEST = 600
PRIMES = [n for n in range(2, LARGEST) if all(n % d for d in range(2, int(n**0.5) + 1))]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LAYOUTS = ["contiguous", "transposed", "sliced"]


@dataclass
class Layer:
    """One call of the operator, and how it is made."""

    arguments: oracle.Arguments
    grad: Tensor
    wanted: list[str]
    threads: int
    description: str


def random_width(rng: random.Random) -> int:
    small, any_width = int(LARGEST ** rng.random()), rng.randint(1, LARGEST)
    near_vectors = rng.choice([8, 16]) * rng.randint(1, 37) + rng.randint(-1, 1)
    return rng.choice([small, small | 1, any_width, rng.choice(PRIMES), 2 ** rng.randint(0, 9), near_vectors])


def random_end(rng: random.Random, n: int) -> int:
    """A number of features: that of the coordinates, any smaller one, or one that they are a multiple of."""
    return rng.choice([n, n, rng.randint(1, n), rng.choice([k for k in range(1, n + 1) if n % k == 0])])


def random_leading(rng: random.Random) -> tuple[int, ...]:
    rows = rng.choice([0, 1, rng.randint(1, 5), rng.randint(1, 20), rng.randint(1, 80), rng.randint(80, 300)])
    if rows == 1 and rng.random() < 0.5:
        return ()
    divisors = [d for d in range(1, rows + 1) if rows % d == 0]
    first = rng.choice(divisors or [1])
    return rng.choice([(rows,), (first, rows // first), (1, rows // first, first)])


def renumbered(rng: random.Random, stage: list[list[int]]) -> list[list[int]]:
    stage = rng.choice([stage, rng.sample(stage, len(stage))])
    swapped = rng.choice([0, 0.1, 0.5])
    return [pair[::-1] if rng.random() < swapped else pair for pair in stage]


def random_schedule(rng: random.Random, n: int) -> Schedule:
    deepest = 40 if n * n < 40_000 or rng.random() < 0.05 else 12
    stages = rng.choice([0, 1, 2, (n - 1).bit_length(), rng.randint(0, 12), rng.randint(0, deepest)])
    kind = rng.choice(["butterfly", "butterfly", "brick", "random", "random_blocks", "renumbered", "own"])
    if kind == "random":
        return Schedule.random(n, stages, seed=rng.randrange(100))
    if kind == "random_blocks":
        return Schedule.random_blocks(n, stages, seed=rng.randrange(100), block_size=rng.choice([1, 2, 4, 8, 16, 32]))
    if kind == "renumbered":  # whole vectors still meet, but their coefficients are not neighbours
        pairs = Schedule.butterfly(n, stages).pairs.transpose(0, 2, 1).tolist()
        return Schedule.from_pairs(n, [renumbered(rng, stage) for stage in pairs])
    if kind == "own":
        orders = [rng.sample(range(n), n - n % 2) for _ in range(stages)]
        return Schedule.from_pairs(n, [list(zip(order[::2], order[1::2], strict=True)) for order in orders])
    return getattr(Schedule, kind)(n, stages)


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The same values in memory of another layout, with NaN where nothing may be read."""
    if layout == "transposed":
        backwards = tuple(reversed(range(values.dim())))
        return values.permute(backwards).contiguous().permute(backwards)
    if layout == "sliced":
        padded = torch.full([2 * size + 3 for size in values.shape], torch.nan, dtype=values.dtype)
        inside = padded[tuple(slice(1, 1 + 2 * size, 2) for size in values.shape)]
        return inside.copy_(values)
    return values.contiguous()


def laid_out_or_expanded(rng: random.Random, values: Tensor) -> tuple[Tensor, str]:
    """Also expanded along some dimension, which leaves other values."""
    layout = rng.choice(["contiguous", *LAYOUTS, "expanded"])
    if layout == "expanded" and values.numel():
        dim = rng.randrange(values.dim())
        return values.narrow(dim, 0, 1).expand_as(values), f"expanded in {dim}"
    return laid_out(values, layout), layout


def random_layer(seed: int) -> Layer:
    rng = random.Random(seed)
    n = random_width(rng)
    block, dtype = rng.choice(["general", "rotation"]), rng.choice(DTYPES)
    arguments = oracle.random_arguments(
        random_schedule(rng, n),
        block,
        in_features=random_end(rng, n),
        out_features=random_end(rng, n),
        leading=random_leading(rng),
        dtype=dtype,
        residual=rng.choice(["scale", "pass"]),
        seed=seed,
    )
    for name in ("d_in", "d_out", "bias"):
        if rng.random() < 0.3:
            setattr(arguments, name, None)
    wanted = [name for name in arguments.tensors if rng.random() < 0.7]
    for name, tensor in arguments.tensors.items():
        if name != "x":
            layout = rng.choice(LAYOUTS) if rng.random() < 0.2 else "contiguous"
            setattr(arguments, name, laid_out(tensor.detach(), layout).requires_grad_(name in wanted))
    x, x_layout = laid_out_or_expanded(rng, arguments.x.detach())
    arguments.x = x.detach().requires_grad_("x" in wanted)
    shape = (*x.shape[:-1], arguments.out_features)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    grad, grad_layout = laid_out_or_expanded(rng, grad)
    threads = rng.randint(1, 3)
    description = (
        f"{arguments.schedule} {block} {dtype} {tuple(x.shape)} -> {tuple(shape)}, x {x_layout}, grad {grad_layout}, "
        f"given {[*arguments.tensors]}, wanted {wanted}, {threads} threads"
    )
    return Layer(arguments, grad, wanted, threads, description)


@dataclass
class Block:
    """One call of a feed-forward block, and how it is made."""

    module: SPMFeedForward
    x: Tensor
    grad: Tensor
    threads: int
    description: str


def random_block(seed: int) -> Block:
    rng, generator = random.Random(f"block {seed}"), torch.Generator().manual_seed(seed)
    hidden, dtype, gated = random_width(rng), rng.choice(DTYPES), rng.random() < 0.5
    features = rng.choice([hidden, max(1, hidden // 4), rng.randint(1, hidden), random_width(rng)])
    n, kind, residual = max(features, hidden), rng.choice(["general", "rotation"]), rng.choice(["scale", "pass"])
    up, down = random_schedule(rng, n), random_schedule(rng, n)
    down = rng.choice([up, up, down])
    made = SPMFeedForward(features, hidden, rng.choice(ACTIVATIONS), gated=gated, device="meta")
    common = {"block": kind, "residual": residual, "init": "identity", "dtype": torch.float64, "impl": "cpu"}
    made.up = SPMLinear(features, hidden, rng.random() < 0.7, schedule=up, maps=2 if gated else None, **common)
    made.down = SPMLinear(hidden, features, rng.random() < 0.7, schedule=down, **common)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    for parameter in made.parameters():
        parameter.data = (parameter.data + rng.choice([0.1, 0.3]) * values(*parameter.shape)).to(dtype)
        parameter.requires_grad_(rng.random() < 0.8)
    scale = rng.choice([1e-3, 1.0, 30.0 if dtype in (torch.float32, torch.float64) else 1.0])
    shape, threads = (*random_leading(rng), features), rng.randint(1, 3)
    x, x_layout = laid_out_or_expanded(rng, (scale * values(*shape)).to(dtype))
    grad, grad_layout = laid_out_or_expanded(rng, values(*shape).to(dtype))
    wanted = [name for name, parameter in made.named_parameters() if parameter.requires_grad]
    description = (
        f"block: {made.activation}, gated {gated}, {up} and {down} {kind} {dtype} {shape} * {scale}, hidden {hidden}, "
        f"x {x_layout}, grad {grad_layout}, wanted {wanted}, {threads} threads"
    )
    return Block(made, x, grad, threads, description)


def check_block(seed: int, targets: Sequence[str]) -> str | None:
    """What is wrong with the feed-forward block of this seed on one of these instruction sets."""
    block = random_block(seed)
    for target in targets:
        try:
            with running(target, block.threads):
                assert_as_close_as_its_parts(block.module, block.x, block.grad)
        except Exception as error:
            return f"{target}: {error or type(error).__name__} ({block.description})"
    return None


def run(layer: Layer, impl: str = "cpu") -> dict[str, Tensor]:
    """The output and the wanted gradients, by the kernels."""
    a = layer.arguments
    y = spm(a.x, a.blocks, a.schedule, d_in=a.d_in, d_out=a.d_out, bias=a.bias, residual_scale=a.residual_scale,
            out_features=a.out_features, impl=impl)  # fmt: skip
    if not layer.wanted:
        return {"output": y}
    gradients = torch.autograd.grad(y, [a.tensors[name] for name in layer.wanted], layer.grad)
    return {"output": y.detach(), **dict(zip(layer.wanted, gradients, strict=True))}


def check(seed: int, targets: Sequence[str] = tuple(_kernels.targets())) -> str | None:
    """What is wrong with the layer or the block of this seed on one of these instruction sets; None if nothing is."""
    torch.set_num_threads(1)
    layer = random_layer(seed)
    answers = oracle.answers(layer.arguments, layer.grad)
    try:
        for target in targets:
            with running(target, layer.threads):
                results = run(layer)
            for name, actual in results.items():
                oracle.assert_matches(actual, answers[name], f"{target}: {name}")
    except Exception as error:
        return f"{error or type(error).__name__} ({layer.description})"
    return check_block(seed, targets)


def check_triton(seed: int) -> str | None:
    """What is wrong with the layer of this seed, computed by the GPU kernels, in tiles of random sizes."""
    import triton_kernels

    torch.set_num_threads(1)
    layer = random_layer(seed)
    answers = oracle.answers(layer.arguments, layer.grad)
    tiles = triton_kernels.random_tiles(random.Random(f"tiles {seed}"), layer.arguments.schedule.stages)
    try:
        on_device = dataclasses.replace(
            layer,
            arguments=triton_kernels.on_device(layer.arguments),
            grad=layer.grad.to(triton_kernels.DEVICE),
        )
        with triton_kernels.using(tiles):
            results = run(on_device, "triton")
        for name, actual in results.items():
            oracle.assert_matches(actual.cpu(), answers[name], name)
    except Exception as error:
        return f"{error or type(error).__name__} ({layer.description}, {tiles})"
    return None


CHECKS = {"cpu": check, "triton": check_triton}


def check_all(first: int, count: int, jobs: int, impl: str = "cpu") -> int:
    """Check the layers of the seeds from `first` on; the number of those that fail."""
    start, failures, seed = time.monotonic(), 0, first
    # All processes together have more threads than there are cores: those that wait must not spin.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as executor:
        try:
            for done, problem in enumerate(executor.map(CHECKS[impl], range(first, first + count)), 1):
                if problem:
                    failures += 1
                    print(f"make fuzz SEED={seed} COUNT=1 IMPL={impl}    # {problem}", flush=True)
                seed += 1
                if done % max(1, count // 20) == 0:
                    seconds = time.monotonic() - start
                    print(f"{done:,} of {count:,} layers, {failures} failed, {seconds:.0f} s", flush=True)
        except BrokenProcessPool:
            failures += 1
            print(f"make fuzz SEED={seed} COUNT={jobs} IMPL={impl}    # the process died at one of these", flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first layer")
    parser.add_argument("--count", type=int, default=20_000, help="how many layers")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many processes")
    parser.add_argument("--impl", choices=CHECKS, default="cpu", help="triton needs a GPU, or TRITON_INTERPRET=1")
    arguments = parser.parse_args()
    return 1 if check_all(arguments.seed, arguments.count, arguments.jobs, arguments.impl) else 0


if __name__ == "__main__":
    sys.exit(main())
