"""What can be known of the GPU kernels without a GPU?

They are compiled for three of them. The compiled code tells registers, spills, shared memory and instructions; the
launches tell how many bytes are read and written; and data sheets, how long that would take at best. Nothing here is
measured on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from importlib import metadata, util
from itertools import product
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from pairmix_lab.bench.gpu_compile import GPUS, Gpu, compiled
from pairmix_lab.bench.gpu_launches import (
    BUTTERFLY,
    DIRECTIONS,
    RANDOM,
    Call,
    Case,
    Launch,
    Traffic,
    recorded,
    traffic,
)
from pairmix_lab.bench.jobs import Finished, processes, submitted
from pairmix_lab.bench.pictures import column
from pairmix_lab.report import tables
from pairmix_lab.report.pictures import legend_below, styled, width_ticks

DTYPES = ("float32", "bfloat16", "float16")
PREDICTED = "predicted from data sheets, never measured"
"""What tables and pictures say beside every time."""
TARGETED_RATIO = {"forward": 1.3, "backward": 1.6}
"""As many times the bytes that it needs a single pass should move from and to DRAM at most."""


@dataclass(frozen=True)
class Config:
    """What is compiled, for how many rows; `random_widths` are those with random pairs."""

    widths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    random_widths: tuple[int, ...] = (1024,)
    dtypes: tuple[str, ...] = DTYPES
    blocks: tuple[str, ...] = ("general", "rotation")
    targets: tuple[str, ...] = tuple(GPUS)
    batch: int = 16_384

    @property
    def cases(self) -> list[tuple[Case, str]]:
        """All calls, with the targets that they are compiled for."""
        schedules = [*((n, BUTTERFLY) for n in self.widths), *((n, RANDOM) for n in self.random_widths)]
        return [
            (Case(n, pairs, block, dtype, direction), target)
            for dtype, block, (n, pairs), direction, target in product(
                self.dtypes, self.blocks, schedules, DIRECTIONS, self.targets
            )
        ]


def run(
    config: Config, finished: Finished, jobs: int = 1, on_case: Callable[[], object] = lambda: None
) -> list[dict[str, Any]]:
    """Compile everything; a row for every call and target.

    Args:
        config: what to compile.
        finished: has what is not to be compiled again, and gets the rest.
        jobs: how many processes compile at once.
        on_case: called for every case when it is compiled.

    Raises:
        ValueError: without Triton, where it would not compile the defaults, or if a process was killed.
    """
    _check_environment()
    found: dict[tuple[Case, str], list[dict[str, Any]]] = {}
    missing = []
    for one in config.cases:
        described = _described(one, config)
        if described in finished:
            found[one] = finished[described]
            on_case()
        else:
            missing.append(one)
    try:
        with processes(jobs) as pool:
            futures = submitted(pool, compile_call, ((*one, config.batch) for one in missing))
            waiting = dict(zip(futures, missing, strict=True))
            while waiting:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    one = waiting.pop(future)
                    found[one] = future.result()
                    finished.add(_described(one, config), found[one])
                    on_case()
    except BrokenProcessPool as error:
        raise ValueError(
            "a process that compiled was killed, for lack of memory perhaps: --resume goes on, also with fewer --jobs"
        ) from error
    return [_row(*one, config.batch, found[one]) for one in config.cases]


def _check_environment() -> None:
    if util.find_spec("triton") is None:
        raise ValueError("bench gpu-static needs Triton's compiler: pip install 'pairmix[gpu]'")
    for name, why in {
        "TRITON_INTERPRET": "it compiles, it does not interpret",
        "PAIRMIX_AUTOTUNE": "it compiles the default configurations only",
    }.items():
        if os.environ.get(name) == "1":
            raise ValueError(f"bench gpu-static does not run with {name}=1: {why}")


def _described(one: tuple[Case, str], config: Config) -> dict[str, Any]:
    case, target = one
    return {**asdict(case), "target": target, "batch": config.batch, "triton": metadata.version("triton")}


def _recorded(case: Case, target: str, batch: int) -> Call:
    gpu = GPUS[target]
    return recorded(case, batch, gpu.multiprocessors, gpu.warp_size)


def compile_call(case: Case, target: str, batch: int) -> list[dict[str, Any]]:
    """Compile all kernels of a call, in the order of their launches."""
    launches = _recorded(case, target, batch).launches
    return [{"kernel": launch.name, "grid": launch.grid, **compiled(launch, target)} for launch in launches]


def _row(case: Case, target: str, batch: int, kernels: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    gpu = GPUS[target]
    call = _recorded(case, target, batch)
    moved = [traffic(launch) for launch in call.launches]
    described = [
        {
            **kernel,
            "rows": launch.arguments.get("R"),
            "held": launch.arguments.get("HELD"),
            "of_cache_traffic": of_cache_traffic(kernel, launch, one),
        }
        for kernel, launch, one in zip(kernels, call.launches, moved, strict=True)
    ]
    return {
        **asdict(case),
        "stages": case.schedule.stages,
        "batch": batch,
        "target": target,
        "gpu": gpu.name,
        "kernels": described,
        "needed_bytes": call.needed_bytes,
        "dram_bytes": sum(one.dram(gpu.cache_bytes) for one in moved),
        "cache_traffic_bytes": sum(one.cached for one in moved),
        "reused_bytes": max(one.reused for one in moved),
        "predicted": predicted(gpu, call.needed_bytes, moved),
    }


def of_cache_traffic(kernel: Mapping[str, Any], launch: Launch, computed: Traffic) -> float | None:
    """The bytes of all loads and stores in the code of a pass, over those that were computed from sizes.

    More than 1 means that several threads load the same word. None for other kernels.
    """
    if not computed.multiply_adds:
        return None
    widths = {"16 bytes": 16, "8 bytes": 8, "4 bytes or fewer": 4}
    of_a_thread = sum(
        count * widths[kind.partition(", ")[2]]
        for kind, count in kernel["instructions"].items()
        if kind.startswith("global")
    )
    row_tiles = -(-launch.arguments["rows"] // launch.arguments["R"])
    times = row_tiles * launch.grid[1] * launch.grid[2]
    return float(of_a_thread * kernel["threads"] * times / computed.cached)


def predicted(gpu: Gpu, needed_bytes: int, moved: Iterable[Traffic]) -> dict[str, Any]:
    """How long the launches take at best, one after the other, and what of each takes longest.

    Launching is not counted. `of_memcpy` is the time in which DRAM moves what the call needs, over that time.
    """
    seconds, bounds = 0.0, []
    for one in moved:
        times = {
            "DRAM": one.dram(gpu.cache_bytes) / gpu.dram_rate,
            "cache": one.cached / gpu.cache_rate,
            "arithmetic": one.multiply_adds / gpu.multiply_add_rate,
        }
        bounds.append(max(times, key=times.__getitem__))
        seconds += max(times.values())
    return {"ms": 1e3 * seconds, "of_memcpy": needed_bytes / gpu.dram_rate / seconds, "bounds": bounds}


def spilling(rows: tables.Rows) -> list[str]:
    """The kernels that spill registers at single-tile widths; there should be none."""
    return [
        f"{kernel['kernel']} for {row['target']}, n = {row['n']}, {row['pairs']}, {row['block']}, {row['dtype']}: "
        f"{kernel['spilled_bytes']} bytes"
        for row in rows
        for kernel in row["kernels"]
        if kernel["spilled_bytes"] and 256 <= row["n"] <= 4096
    ]


def table(rows: tables.Rows) -> tables.Table:
    """The default tiles, registers, spills, shared memory and occupancy of the kernels of stages, by width and target.

    A line is for all dtypes and blocks, and for all passes: the fewest and the most.
    """
    return _lines(
        rows,
        {
            "rows of a tile": lambda some: _range(some, "rows"),
            "threads": lambda some: _range(some, "threads"),
            "registers": lambda some: _range(some, "registers"),
            "spilled bytes": lambda some: _range(some, "spilled_bytes"),
            "shared, KiB": lambda some: _range(some, "shared_bytes", 2**-10),
            "occupancy": lambda some: _range(some, "occupancy", 100, "%"),
        },
        keys=("n", "pairs", "direction", "target"),
    )


def instructions_table(rows: tables.Rows) -> tables.Table:
    """Instructions in the code of the kernels of stages, for float32 and general blocks."""
    chosen = [row for row in rows if (row["dtype"], row["block"]) == ("float32", "general")]
    kinds = list(chosen[0]["kernels"][0]["instructions"]) if chosen else []
    cells = {
        kind: lambda some, kind=kind: str(
            sum(kernel["instructions"][kind] for row in some for kernel in _of_stages(row))
        )
        for kind in kinds
    }
    others = {
        "bytes of global loads and stores / computed": lambda some: _range(some, "of_cache_traffic"),
        "compiled in, s": lambda some: _range(some, "compile_seconds"),
    }
    return _lines(chosen, {**cells, **others}, keys=("n", "pairs", "direction", "target"))


def bytes_table(rows: tables.Rows) -> tables.Table:
    """Bytes from and to DRAM, and between the cache and the multiprocessors, as multiples of those that are needed."""

    def ratio(row: tables.Row) -> str:
        times: float = row["dram_bytes"] / row["needed_bytes"]
        is_over = row["n"] <= 4096 and times > TARGETED_RATIO[row["direction"]]
        return f"{times:.2f}" + " (over)" * is_over

    return _beside_each_other(
        rows,
        {
            "DRAM": ratio,
            "cache": lambda row: f"{row['cache_traffic_bytes'] / row['needed_bytes']:.1f}",
            "used again": lambda row: tables.mebibytes(row["reused_bytes"]),
        },
    )


def prediction_table(rows: tables.Rows) -> tables.Table:
    """The share of memcpy that a call would reach at best, and what would limit it: by data sheets alone."""
    return _beside_each_other(
        rows,
        {
            f"of memcpy at best, {PREDICTED}": lambda row: f"{row['predicted']['of_memcpy']:.0%}",
            "limited by": lambda row: ", ".join(tables.distinct(row["predicted"]["bounds"])),
        },
    )


def _beside_each_other(rows: tables.Rows, cells: Mapping[str, Callable[[tables.Row], str]]) -> tables.Table:
    """A line for every call with general blocks, with columns for every GPU; float16 is as bfloat16."""
    chosen = [row for row in rows if row["block"] == "general" and row["dtype"] != "float16"]
    gpus = column(chosen, "gpu")

    def cell(gpu: str, of: Callable[[tables.Row], str]) -> Callable[[tables.Rows], str]:
        return lambda some: next((of(row) for row in some if row["gpu"] == gpu), "-")

    columns = {f"{gpu}: {title}": cell(gpu, of) for gpu in gpus for title, of in cells.items()}
    return _lines(chosen, columns, keys=("n", "pairs", "dtype", "direction"))


def _lines(rows: tables.Rows, cells: Mapping[str, Callable[[tables.Rows], str]], keys: Sequence[str]) -> tables.Table:
    """A line for every combination of the keys that there is."""
    groups: dict[tuple[Any, ...], list[tables.Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    lines = [
        [f"{value:,}" if isinstance(value, int) else str(value) for value in values]
        + [cell(some) for cell in cells.values()]
        for values, some in groups.items()
    ]
    return [[*keys, *cells], *lines]


def _of_stages(row: tables.Row) -> list[dict[str, Any]]:
    return [kernel for kernel in row["kernels"] if kernel["kernel"] == f"{row['direction']}_pass"]


def _range(rows: tables.Rows, value: str, unit: float = 1, suffix: str = "") -> str:
    """The least and the greatest value of all kernels of stages; one number if they are the same."""
    values = [kernel[value] * unit for row in rows for kernel in _of_stages(row)]
    low, high = (f"{limit:.3g}" for limit in (min(values), max(values)))
    return f"{low}{suffix}" if low == high else f"{low} to {high}{suffix}"


_COLORS = ("tab:green", "tab:olive", "tab:red")


@styled
def picture(rows: tables.Rows) -> Figure:
    """The predicted share of memcpy, and the bytes beside those needed, against the width: float32, general blocks."""
    figure = Figure(figsize=(12, 4.8))
    of_memcpy, times_needed = figure.subplots(1, 2)
    chosen = [row for row in rows if (row["dtype"], row["block"], row["pairs"]) == ("float32", "general", BUTTERFLY)]
    for gpu, color in zip(column(chosen, "gpu"), _COLORS, strict=False):
        for direction, dash in zip(DIRECTIONS, ("-", "--"), strict=True):
            line = [row for row in chosen if (row["gpu"], row["direction"]) == (gpu, direction)]
            widths = [row["n"] for row in line]
            look: Any = {"color": color, "linestyle": dash, "marker": "o", "label": f"{gpu}, {direction}"}
            of_memcpy.plot(widths, [row["predicted"]["of_memcpy"] for row in line], **look)
            times_needed.plot(widths, [row["dram_bytes"] / row["needed_bytes"] for row in line], **look)
    of_memcpy.set(ylim=(0, 1.05), ylabel="of memcpy at best", title=PREDICTED)
    of_memcpy.yaxis.set_major_formatter(PercentFormatter(1))
    times_needed.set(ylim=(0, None), ylabel="DRAM bytes / bytes needed", title="from the sizes of the launches")
    for axes in (of_memcpy, times_needed):
        axes.set(xscale="log", xlabel="n")
        width_ticks(axes, column(chosen, "n"))
    legend_below(figure)
    return figure


TABLES = {
    "gpu-static": table,
    "gpu-static-instructions": instructions_table,
    "gpu-static-bytes": bytes_table,
    "gpu-static-prediction": prediction_table,
}
