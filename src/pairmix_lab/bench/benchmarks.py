"""All benchmarks, by the names of their files in results/.

Each is a module with a `Config`, `run` to measure it, `table` for the terminal, `picture`, and all its `TABLES` by the
names under which pages ask for them.
"""

from __future__ import annotations

from types import ModuleType

from pairmix_lab.bench import (
    fit,
    gpu_static,
    init,
    kernels,
    kernels_caches,
    modules,
    onnx,
    operator,
    operator_conditions,
    operator_cuda,
    operator_grid,
    operator_latency,
    operator_scaling,
    operator_variants,
    steps,
)

BENCHMARKS: dict[str, ModuleType] = {
    "fit": fit,
    "gpu-static": gpu_static,
    "init": init,
    "kernels": kernels,
    "kernels-caches": kernels_caches,
    "operator": operator,
    "operator-conditions": operator_conditions,
    "operator-cuda": operator_cuda,
    "operator-grid": operator_grid,
    "operator-latency": operator_latency,
    "operator-scaling": operator_scaling,
    "operator-variants": operator_variants,
    "modules": modules,
    "onnx": onnx,
    "steps": steps,
}
