"""What a GPU kernel becomes when it is compiled: registers, spills, shared memory, instructions. It needs no GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pairmix_lab.bench.gpu_launches import Launch


class Gpu(NamedTuple):
    """What data sheets say of a GPU; a multiprocessor is a compute unit there, if it is AMD's.

    Attributes:
        name: of the product.
        backend: Triton's name of the vendor's backend.
        arch: what Triton compiles for.
        warp_size: threads that run in lockstep.
        multiprocessors: how many there are.
        registers: of 4 bytes, in each of the four parts of a multiprocessor.
        threads: at most in a multiprocessor.
        shared_bytes: shared memory of a multiprocessor.
        reserved_bytes: of it for each program.
        cache_bytes: of the largest cache that all multiprocessors share.
        dram_rate: bytes of memory per second.
        cache_rate: bytes of that cache per second.
        multiply_add_rate: in float32, without tensor cores, per second.
    """

    name: str
    backend: str
    arch: int | str
    warp_size: int
    multiprocessors: int
    registers: int
    threads: int
    shared_bytes: int
    reserved_bytes: int
    cache_bytes: int
    dram_rate: float
    cache_rate: float
    multiply_add_rate: float


# A100 80GB: NVIDIA's data sheet, and the white paper of the Ampere architecture, which gives 5,120 bytes of L2 a clock,
# at 1.41 GHz. H100 SXM: NVIDIA's data sheet and the white paper of Hopper, which gives no rate of L2: that of the A100
# is taken, which is less. MI300X: AMD's data sheet, and the white paper of CDNA 3 for the Infinity Cache, which is
# slower than the L2 caches but holds what they do not. Limits of occupancy: the tuning guides of CUDA, and LLVM's guide
# to the AMDGPU backend.
GPUS = {
    "sm_80": Gpu(
        "A100 80GB", "cuda", 80, 32, 108, 16_384, 2_048, 164 << 10, 1 << 10, 40 << 20, 2.039e12, 7.2e12, 9.75e12
    ),
    "sm_90": Gpu(
        "H100 SXM", "cuda", 90, 32, 132, 16_384, 2_048, 228 << 10, 1 << 10, 50 << 20, 3.35e12, 7.2e12, 33.5e12
    ),
    "gfx942": Gpu("MI300X", "hip", "gfx942", 64, 304, 32_768, 2_048, 64 << 10, 0, 256 << 20, 5.3e12, 17.2e12, 81.7e12),
}
"""By target."""
_MOST_PROGRAMS = 32
_REGISTER_GRANULE = 8
_PARTS = 4


def compiled(launch: Launch, target: str) -> dict[str, Any]:
    """Compile a kernel as this launch would, and tell what it needs.

    The specialisation (which sizes are multiples of 16, which pointers are aligned) is Triton's own.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    gpu, kernel = GPUS[target], launch.kernel
    gpu_target = GPUTarget(gpu.backend, gpu.arch, gpu.warp_size)
    backend = make_backend(gpu_target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(**launch.arguments, **launch.options)
    options, signature, constants, attributes = kernel._pack_args(
        backend, launch.arguments | launch.options, bound, specialization, options
    )
    source = ASTSource(kernel, signature, constants, attributes)
    start = time.perf_counter()
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True  # from the cache it would take no time
        result = triton.compile(source, target=gpu_target, options=options.__dict__)
    seconds = time.perf_counter() - start
    threads = options.num_warps * gpu.warp_size
    found = _of_nvidia(result.asm["cubin"]) if gpu.backend == "cuda" else _of_amd(result.asm["amdgcn"])
    programs = resident_programs(gpu, found["registers"], threads, result.metadata.shared)
    return {
        **found,
        "threads": threads,
        "shared_bytes": result.metadata.shared,
        "programs": programs,
        "occupancy": programs * threads / gpu.threads,
        "compile_seconds": seconds,
    }


def resident_programs(gpu: Gpu, registers: int, threads: int, shared_bytes: int) -> int:
    """How many programs of a kernel a multiprocessor runs at once: what its registers and shared memory allow."""
    of_a_warp = -(-max(1, registers) // _REGISTER_GRANULE) * _REGISTER_GRANULE * gpu.warp_size
    by_registers = _PARTS * (gpu.registers // of_a_warp) // (threads // gpu.warp_size)
    by_shared = gpu.shared_bytes // max(1, shared_bytes + gpu.reserved_bytes)
    return min(_MOST_PROGRAMS, gpu.threads // threads, by_registers, by_shared)


def _of_nvidia(cubin: bytes) -> dict[str, Any]:
    from triton import knobs

    tool = knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        usage, code = (
            subprocess.run([tool, option, file], check=True, capture_output=True, text=True).stdout
            for option in ("-res-usage", "-sass")
        )
    return {**nvidia_resources(usage), "instructions": instruction_counts(nvidia_mnemonics(code), NVIDIA)}


def _of_amd(code: str) -> dict[str, Any]:
    return {**amd_resources(code), "instructions": instruction_counts(amd_mnemonics(code), AMD)}


def nvidia_resources(usage: str) -> dict[str, int]:
    """Registers and spilled bytes of a thread, from what `cuobjdump -res-usage` prints."""
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return {"registers": found["REG"], "spilled_bytes": found["STACK"] + found["LOCAL"]}


def amd_resources(code: str) -> dict[str, int]:
    """Registers and spilled bytes of a thread, from the metadata at the end of the assembly.

    Scalar registers that spill into vector registers do not count: they need no memory.
    """
    names = ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
    found = {name: int(re.findall(rf"^\s+\.{name}:\s+(\d+)", code, re.MULTILINE)[-1]) for name in names}
    spilled_bytes = max(4 * found["vgpr_spill_count"], found["private_segment_fixed_size"])
    return {"registers": found["vgpr_count"], "spilled_bytes": spilled_bytes}


def nvidia_mnemonics(code: str) -> list[str]:
    """The names of the instructions in what `cuobjdump -sass` prints."""
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", code)


def amd_mnemonics(code: str) -> list[str]:
    """The names of the instructions in assembly."""
    return re.findall(r"^\s+([a-z]\w+)(?:\s|$)", code, re.MULTILINE)


NVIDIA = {
    r"LDG\.E.*\.128": "global loads, 16 bytes",
    r"LDG\.E.*\.64": "global loads, 8 bytes",
    r"LDG\.": "global loads, 4 bytes or fewer",
    r"STG\.E.*\.128": "global stores, 16 bytes",
    r"STG\.E.*\.64": "global stores, 8 bytes",
    r"STG\.": "global stores, 4 bytes or fewer",
    r"LDSM?\b": "shared loads",
    r"STSM?\b": "shared stores",
    r"SHFL": "shuffles",
    r"BAR\.": "barriers",
    r"FFMA": "multiply-adds",
    r"(LDL|STL)\b": "spill loads and stores",
}
"""Kinds of instructions by how their names begin; the first that fits is taken."""
AMD = {
    r"(buffer|global|flat)_load_dwordx4": "global loads, 16 bytes",
    r"(buffer|global|flat)_load_dwordx[23]": "global loads, 8 bytes",
    r"(buffer|global|flat)_load": "global loads, 4 bytes or fewer",
    r"(buffer|global|flat)_store_dwordx4": "global stores, 16 bytes",
    r"(buffer|global|flat)_store_dwordx[23]": "global stores, 8 bytes",
    r"(buffer|global|flat)_store": "global stores, 4 bytes or fewer",
    r"ds_(bpermute|permute|swizzle)|v_\w+_dpp": "shuffles",
    r"ds_(read|load)": "shared loads",
    r"ds_(write|store)": "shared stores",
    r"s_barrier": "barriers",
    r"v_pk_fma_f32": "packed multiply-adds",
    r"v_(fma|fmac)_f32": "multiply-adds",
    r"scratch_": "spill loads and stores",
}


def instruction_counts(mnemonics: Iterable[str], kinds: Mapping[str, str]) -> dict[str, int]:
    """How many instructions of each kind there are in the code of a kernel; a packed multiply-add is two."""
    found = Counter(next((kind for start, kind in kinds.items() if re.match(start, name)), "") for name in mnemonics)
    found["multiply-adds"] += 2 * found["packed multiply-adds"]
    return {kind: found[kind] for kind in NVIDIA.values()}
