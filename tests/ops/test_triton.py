"""How the GPU kernels walk a schedule, where they run, and what happens without Triton."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from pairmix import Schedule, doctor, ops
from pairmix.functional import spm
from pairmix.ops import registry, triton
from pairmix.ops.triton.plan import PADDING, make_plan

ROOT = Path(__file__).parents[2]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SCHEDULES = {
    "butterfly": Schedule.butterfly,
    "brick": Schedule.brick,
    "random": Schedule.random,
    "random_blocks": Schedule.random_blocks,
}


@pytest.fixture
def gpu(monkeypatch):
    """As if torch had found a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    registry._warn_once.cache_clear()


@pytest.fixture
def no_triton(monkeypatch):
    monkeypatch.setattr(triton.util, "find_spec", lambda name: None)
    monkeypatch.setattr(triton, "_MISSING", triton._missing())


# What cannot be run in this process: Triton decides when it is imported whether it compiles or interprets.
QUICK = "test_triton_kernels or leading or without_optional or expanded_or_strided or never_the_input"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which test_triton_kernels.py runs")
def test_the_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    files = ["tests/ops/test_triton_kernels.py", "tests/ops/test_parity.py"]
    command = [sys.executable, "-m", "pytest", *files, "--impl", "triton", "-q", "-n", "0", "-k", QUICK]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stdout[-3000:]
    assert "skipped" not in result.stdout


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(("n", "widest"), [(1, 8), (7, 8), (24, 8), (37, 16), (64, 16), (100, 1024), (600, 64)])
def test_tiles_are_closed_and_hold_every_coordinate_once(kind, n, widest):
    schedule = SCHEDULES[kind](n, 7)
    plan = make_plan(schedule.order, widest, min(8, widest))
    stages = 0
    for part in plan:
        assert part.first == stages
        stages = part.last
        assert part.lanes <= max(widest, 8)
        columns = part.columns
        assert sorted(columns[columns != PADDING]) == list(range(n))
        for l in range(part.first, part.last):
            members, partners = part.members[l - part.first], part.partners[l - part.first]
            place = np.argsort(schedule.order[l])
            for tile in range(part.tiles):
                real = np.flatnonzero(columns[tile] != PADDING)
                assert (members[tile, real] == place[columns[tile, real]]).all()
                met = schedule.order[l][(place + n // 2 * np.where(place < n // 2, 1, -1)) % n]
                met = np.where(place == 2 * (n // 2), np.arange(n), met)
                assert (columns[tile, partners[tile, real]] == met[columns[tile, real]]).all()
    assert stages == schedule.stages


@pytest.mark.parametrize(
    ("schedule", "passes"),
    [
        (Schedule.butterfly(2), 1),
        (Schedule.butterfly(1000), 1),
        (Schedule.butterfly(4095), 1),
        (Schedule.butterfly(4096), 1),
        (Schedule.random(4096, 12), 1),
        (Schedule.butterfly(8192), 2),
        (Schedule.butterfly(65536), 2),
        (Schedule.random(5000, 3), 3),
        (Schedule.butterfly(8, 0), 1),
        (Schedule.butterfly(8, 40), 3),
    ],
    ids=str,
)
def test_the_number_of_passes(schedule, passes):
    assert len(make_plan(schedule.order)) == passes


def test_a_butterfly_has_strides_and_reads_no_tables():
    [one] = make_plan(Schedule.butterfly(64).order)
    assert one.strides == (1, 2, 4, 8, 16, 32)
    first, second = make_plan(Schedule.butterfly(64).order, widest=16, narrowest=16)
    assert first.strides == (1, 2, 4, 8)
    assert second.strides == (4, 8)
    [odd] = make_plan(Schedule.butterfly(7).order)
    assert odd.strides == (1, 2, 4, 1)
    swapped = Schedule.from_pairs(4, [[(1, 0), (2, 3)], [(2, 3), (0, 1)], [(0, 2), (1, 3)]])
    assert make_plan(swapped.order)[0].strides == (0, 0, 2)


def test_why_not(gpu):
    assert triton.why_not(CUDA) is None
    assert "TRITON_INTERPRET=1" in triton.why_not(CPU)
    assert "not for meta tensors" in triton.why_not(torch.device("meta"))


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert triton.why_not(CUDA) == "torch finds no GPU"
    assert triton.advice(CUDA) is None


def test_auto_takes_triton_for_cuda_tensors_alone(gpu, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert ops.choose("auto", CUDA).name == "triton"
    assert ops.choose("auto", CPU).name == "cpu"
    assert ops.choose("triton", CPU).name == "triton"


def test_without_triton_the_reference_runs_and_one_warning_says_what_to_install(gpu, no_triton):
    with pytest.warns(UserWarning, match=r"slow: Triton is not installed: pip install 'pairmix\[gpu\]'"):
        assert ops.choose("auto", CUDA).name == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ops.choose("auto", CUDA).name == "reference"
        assert ops.choose("auto", CPU).name == "cpu"
    with pytest.raises(RuntimeError, match=r"impl='triton' cannot run here: Triton is not installed"):
        ops.choose("triton", CUDA)


@pytest.mark.parametrize(("version", "expected"), [("3.3.1", "Triton 3.3.1 is too old"), ("3.5.0", ""), ("3.10", "")])
def test_an_old_triton_is_not_used(version, expected, monkeypatch):
    monkeypatch.setattr(triton.util, "find_spec", lambda name: object())
    monkeypatch.setattr(triton, "_version", lambda: version)
    assert (triton._missing() or "").startswith(expected)
    assert bool(triton._missing()) == bool(expected)


def test_doctor_says_what_is_missing(gpu, no_triton, monkeypatch):
    with pytest.warns(UserWarning, match="Triton is not installed"):
        said = " ".join(doctor.report().split())
    assert "impl \"triton\" not available: Triton is not installed: pip install 'pairmix[gpu]'" in said
    assert '"reference" for CUDA tensors' in said


def test_doctor_names_the_devices(gpu, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "A100")
    said = " ".join(doctor.report().split())
    assert 'impl "triton" available, Triton 3.' in said
    assert "for A100" in said
    assert '"triton" for CUDA tensors' in said


def test_pairmix_does_not_import_triton():
    # The counter of FLOPs of torch itself imports Triton where it is installed.
    code = (
        "import sys, torch.utils.flop_counter; before = {*sys.modules}; import pairmix; print(*{*sys.modules} - before)"
    )
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "pairmix.ops.triton" in modules
    assert not [name for name in modules if name.partition(".")[0] == "triton"]
    assert "pairmix.ops.triton.kernels" not in modules


def test_the_kernels_are_python():
    suffixes = {path.suffix for path in Path(triton.__file__).parent.iterdir() if path.is_file()}
    assert suffixes == {".py"}


def test_a_compiled_graph_copies_no_schedule():
    torch._dynamo.reset()
    schedule, graphs = Schedule.butterfly(6), []
    x, blocks = torch.empty(2, 6, device="meta"), torch.empty(schedule.stages, schedule.n // 2, device="meta")

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compile(lambda x: spm(x, blocks, schedule), backend=backend, fullgraph=True)(x)
    [graph] = graphs
    assert not [node for node in graph.graph.nodes if node.target == "to"]
    [order] = [buffer for buffer in graph.buffers() if buffer.dtype == torch.int32]
    assert order is schedule.on(torch.device("meta")).order


def test_the_order_for_the_host_is_that_of_the_schedule():
    schedule = Schedule.butterfly(6)
    assert schedule.on(torch.device("meta")).host_order() is schedule.order
    assert (schedule.on(CPU).host_order() == schedule.order).all()
