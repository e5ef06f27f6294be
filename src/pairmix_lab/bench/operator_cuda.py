"""How fast is the operator on a GPU?

SPM by the Triton kernels, a dense layer and other structured layers, in the precisions that people use, beside a copy
of the input: what the memory allows at best.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, NamedTuple, Protocol

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from pairmix import ops
from pairmix_lab import contenders
from pairmix_lab.bench.pictures import column, logarithmic
from pairmix_lab.bench.timing import MIN_ROUNDS, TASKS, Samples, measured, training_step
from pairmix_lab.contenders import DENSE, LOW_RANK, MONARCH, SPM, count_parameters
from pairmix_lab.report import tables
from pairmix_lab.report.pictures import legend_below, look, styled

MEMCPY = "memcpy"
"""What copies x; there are rows of it beside those of layers."""
FLUSHED_BYTES = 512 << 20
"""Written before every call: more than the caches of any GPU hold, so that a call finds nothing of the last one."""
_IMPL = "triton"
_WARM_UPS = 3


class Precision(NamedTuple):
    """The dtype of x and of parameters, and what `torch.set_float32_matmul_precision` says."""

    label: str
    dtype: torch.dtype
    matmul: str


PRECISIONS = {
    "float32": Precision("float32", torch.float32, "highest"),
    "tf32": Precision("TF32", torch.float32, "high"),
    "bfloat16": Precision("bfloat16", torch.bfloat16, "highest"),
}


_LAYERS = [
    (contender.key, key)
    for key in PRECISIONS
    for contender in (DENSE, SPM, LOW_RANK, MONARCH)
    if not (contender is SPM and key == "tf32")  # it multiplies no matrices
]
_COPIES = [(MEMCPY, "float32"), (MEMCPY, "bfloat16")]


class Event(Protocol):
    """What is used of `torch.cuda.Event`."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any, /) -> float: ...


@dataclass(frozen=True)
class Config:
    """What is compared, and for how long: `seconds` is for each width."""

    widths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    batch: int = 16_384
    seconds: float = 20.0


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Compare at every width; a row for every layer in every precision.

    Raises:
        ValueError: without a GPU, or without Triton.
    """
    reason = ops.IMPLS[_IMPL].why_not(torch.device("cuda"))
    if reason is not None:
        raise ValueError(f"bench operator --device cuda measures on a GPU, and cannot here: {reason}")
    other = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    timer = partial(event_times, make_event=partial(torch.cuda.Event, enable_timing=True), flush=other.zero_)
    about = {**_device(), "threads": torch.get_num_threads()}
    for n in config.widths:
        for row in compared(n, config.batch, config.seconds, torch.device("cuda"), timer):
            yield {**about, **row}


def _device() -> dict[str, Any]:
    """What a row says of the GPU, and of what computes on it."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": metadata.version("torch"),
        "triton": metadata.version("triton"),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def event_times(
    calls: Mapping[str, Callable[[], object]],
    seconds: float,
    *,
    make_event: Callable[[], Event],
    flush: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Take turns until the time is over, for `MIN_ROUNDS` rounds at least; the times are the device's own.

    Before every call the caches are flushed. While the device does that, the host has time to launch the call.

    Args:
        calls: what to call, by name.
        seconds: how long to measure.
        make_event: makes an event that tells the time.
        flush: fills the caches with other data.
        clock: tells the time of the host in seconds.
    """
    for call in calls.values():
        for _ in range(_WARM_UPS):  # kernels are compiled, and libraries choose theirs
            call()
    samples: Samples = {name: {} for name in calls}
    shuffle = random.Random(0)
    number, end = 0, clock() + seconds
    while number < MIN_ROUNDS or clock() < end:
        events = {}
        for name in shuffle.sample(list(calls), len(calls)):
            start, stop = make_event(), make_event()
            flush()
            start.record()
            calls[name]()
            stop.record()
            events[name] = start, stop
        for name, (start, stop) in events.items():
            stop.synchronize()
            samples[name][number] = start.elapsed_time(stop) / 1e3
        number += 1
    return samples


def compared(
    n: int, batch: int, seconds: float, device: torch.device, timer: Callable[..., Samples]
) -> list[dict[str, Any]]:
    """The rows of a width.

    Args:
        n: the width.
        batch: the number of rows.
        seconds: how long to measure.
        device: where.
        timer: times calls for so many seconds, as `event_times`.
    """
    inputs = {key: torch.randn(batch, n, device=device, dtype=one.dtype) for key, one in PRECISIONS.items()}
    layers = {(layer, key): _build(layer, n).to(device, PRECISIONS[key].dtype) for layer, key in _LAYERS}
    rows: dict[tuple[str, str], dict[str, Any]] = {
        (layer, key): {"n": n, "batch": batch, "layer": layer, "precision": key} for layer, key in (*_LAYERS, *_COPIES)
    }
    for name, layer in layers.items():
        rows[name]["parameters"] = count_parameters(layer)
    for task in TASKS:
        make_step: Callable[..., Callable[[], object]] = training_step if task == "train" else partial
        calls = {_name(*one): _copy(inputs[one[1]]) for one in _COPIES}
        for one, layer in layers.items():
            calls[_name(*one)] = _in_precision(make_step(layer, inputs[one[1]]), PRECISIONS[one[1]].matmul)
        with torch.inference_mode(task == "inference"), _matmul_precision_kept():
            samples = timer(calls, seconds / len(TASKS))
        for (layer_key, key), row in rows.items():
            copy = measured(samples, _name(MEMCPY, "float32" if key == "tf32" else key))
            row[task] = measured(samples, _name(layer_key, key), _name(DENSE.key, key))
            row[task]["times_memcpy"] = row[task]["ms"] / copy["ms"]
    return list(rows.values())


def _build(layer: str, n: int) -> nn.Module:
    return contenders.make(layer, n, impl=_IMPL) if layer == SPM.key else contenders.make(layer, n)


def _name(layer: str, precision: str) -> str:
    return f"{layer} {precision}"


def _copy(x: Tensor) -> Callable[[], object]:
    return partial(torch.empty_like(x).copy_, x)


@contextmanager
def _matmul_precision_kept() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _in_precision(call: Callable[[], object], matmul: str) -> Callable[[], object]:
    """The call, with matrix products as wanted: torch has one setting for all."""

    def step() -> None:
        torch.set_float32_matmul_precision(matmul)
        call()

    return step


def _label(row: tables.Row) -> str:
    name = MEMCPY if row["layer"] == MEMCPY else contenders.named(row["layer"]).label
    return f"{name}, {PRECISIONS[row['precision']].label}"


def table(rows: tables.Rows) -> tables.Table:
    """The time of every layer, beside dense in the same precision and beside a copy of x in the same dtype."""
    return tables.table(
        rows,
        [
            ("n", lambda row: f"{row['n']:,}"),
            ("layer", _label),
            *(
                column
                for task, name in TASKS.items()
                for column in (
                    (f"{name}, ms", _time(task)),
                    ("times as fast as dense", _speedup(task)),
                    ("times memcpy", _times_memcpy(task)),
                )
            ),
        ],
    )


def _time(task: str) -> Callable[[tables.Row], str]:
    return lambda row: tables.with_quartiles(row[task], "ms")


def _speedup(task: str) -> Callable[[tables.Row], str]:
    return lambda row: "-" if row["layer"] == MEMCPY else tables.with_quartiles(row[task], "speedup")


def _times_memcpy(task: str) -> Callable[[tables.Row], str]:
    return lambda row: tables.number(row[task]["times_memcpy"])


@styled
def picture(rows: tables.Rows) -> Figure:
    """The time of every layer, and its ratio to that of a copy, against the width; a style of line a precision."""
    figure = Figure(figsize=(12.2, 8))
    panels = figure.subplots(2, 2, sharex=True)
    for (times, ratios), (task, name) in zip(panels, TASKS.items(), strict=True):
        for axes, value, label in ((times, "ms", f"{name}, ms"), (ratios, "times_memcpy", f"{name}, times memcpy")):
            _draw(axes, rows, task, value)
            axes.set_ylabel(label)
    for axes in panels[0]:
        axes.set_xlabel("")  # it is below the others
    gpus = ", ".join(column(rows, "gpu"))
    figure.suptitle(f"{gpus}, {rows[0]['batch']:,} rows")
    legend_below(figure)
    return figure


def _draw(axes: Any, rows: tables.Rows, task: str, value: str) -> None:
    dashes = dict(zip(PRECISIONS, ("-", ":", "--"), strict=True))
    for label in tables.distinct(map(_label, rows)):
        line = [row for row in rows if _label(row) == label]
        if value == "times_memcpy" and line[0]["layer"] == MEMCPY:
            continue
        style = {**look(contenders.named(line[0]["layer"]).label), "linestyle": dashes[line[0]["precision"]]}
        axes.plot([row["n"] for row in line], [row[task][value] for row in line], label=label, **style)
    if value == "times_memcpy":
        axes.axhline(1, color="grey", linewidth=1)
    logarithmic(axes, rows)


TABLES = {"operator-cuda": table}
