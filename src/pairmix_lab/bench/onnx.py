"""How fast is a layer in onnxruntime?

A dense layer, and SPM stage by stage and with its stages merged, as ONNX models. Beside them SPM in torch, with kernels
that onnxruntime does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from pairmix.nn import MergedStages, SPMLinear
from pairmix_lab.bench.pictures import column, if_several, logarithmic
from pairmix_lab.bench.timing import current_threads, interleaved, measured, settings
from pairmix_lab.report import tables
from pairmix_lab.report.pictures import legend_below, styled

DENSE, STAGES, MERGED, KERNELS = "dense", "stages", "merged", "torch"
LABELS = {
    DENSE: "nn.Linear, onnxruntime",
    STAGES: "SPM, onnxruntime",
    MERGED: "SPM merged, onnxruntime",
    KERNELS: "SPM, torch",
}
_COLORS = {DENSE: "tab:gray", STAGES: "tab:orange", MERGED: "tab:red", KERNELS: "tab:blue"}


@dataclass(frozen=True)
class Config:
    """What is compared; `seconds` is for each width and batch."""

    widths: tuple[int, ...] = (256, 1024, 4096)
    batches: tuple[int, ...] = (1, 64)
    seconds: float = 10.0
    threads: tuple[int, ...] = field(default_factory=current_threads)


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Compare at every width and batch; a row for every layer."""
    for setting in settings(config.threads):
        for n in config.widths:
            spm = SPMLinear(n, n)
            models = {DENSE: nn.Linear(n, n), STAGES: spm, MERGED: MergedStages(spm)}
            for batch in config.batches:
                x = torch.randn(batch, n)
                calls = {name: _onnx_call(model, x, setting["threads"]) for name, model in models.items()}
                with torch.inference_mode():
                    samples = interleaved({**calls, KERNELS: partial(spm, x)}, config.seconds)
                for name in LABELS:
                    sizes = {"n": n, "batch": batch, "layer": name}
                    yield {**setting, **sizes, "inference": measured(samples, name, DENSE)}


def _onnx_call(model: nn.Module, x: Tensor, threads: int) -> Callable[[], object]:
    """A call of the model in onnxruntime, on this input."""
    try:
        import onnxruntime
    except ModuleNotFoundError:
        raise ValueError("bench onnx needs onnxruntime: pip install onnx onnxscript onnxruntime") from None
    program = torch.onnx.export(model.eval(), (x,), dynamo=True, verbose=False)
    assert program is not None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Its threads would go on spinning while the others are timed.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(
        program.model_proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feed = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, feed)


def table(rows: tables.Rows) -> tables.Table:
    """The time of every layer, and its ratio to that of the dense one."""
    return tables.table(
        rows,
        [
            ("n", lambda row: f"{row['n']:,}"),
            ("batch", lambda row: f"{row['batch']:,}"),
            ("layer", lambda row: LABELS[row["layer"]]),
            ("µs", lambda row: tables.with_quartiles(row["inference"], "ms", 1e3)),
            ("times as fast as dense", lambda row: tables.with_quartiles(row["inference"], "speedup")),
        ],
    )


@styled
def picture(rows: tables.Rows) -> Figure:
    """The time of every layer against the width, for every batch."""
    batches, threads = column(rows, "batch"), sorted(column(rows, "threads"), reverse=True)
    figure = Figure(figsize=(12, 4.5))
    panels = figure.subplots(1, len(batches), squeeze=False)[0]
    for axes, batch in zip(panels, batches, strict=True):
        for layer in column(rows, "layer"):
            for number, dash in zip(threads, ("-", "--", ":"), strict=False):
                wanted = (layer, batch, number)
                chosen = [row for row in rows if (row["layer"], row["batch"], row["threads"]) == wanted]
                times = [1e3 * row["inference"]["ms"] for row in chosen]
                label = LABELS[layer] + if_several(threads, number)
                axes.plot([row["n"] for row in chosen], times, dash, color=_COLORS[layer], marker="o", label=label)
        logarithmic(axes, rows)
        axes.set_ylabel(f"{batch} row{'s' * (batch > 1)}, µs")
    legend_below(figure)
    return figure


TABLES = {"onnx": table}
