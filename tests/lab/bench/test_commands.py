"""What all benchmarks do before and after they measure."""

import sys

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from pairmix import ops
from pairmix_lab import cli, results
from pairmix_lab.bench import (
    kernels_caches,
    operator_conditions,
    operator_cuda,
    operator_grid,
    operator_latency,
    operator_scaling,
    operator_variants,
)
from pairmix_lab.bench.benchmarks import BENCHMARKS

MODULES = {
    "gpu-static": cli.bench.bench_gpu_static,
    "init": cli.bench.bench_init,
    "kernels": cli.bench.bench_kernels,
    "kernels --caches": kernels_caches,
    "operator": cli.bench.bench_operator,
    "operator --conditions": operator_conditions,
    "operator --device cuda": operator_cuda,
    "operator --grid": operator_grid,
    "operator --latency": operator_latency,
    "operator --scaling": operator_scaling,
    "operator --variants": operator_variants,
    "modules": cli.bench.bench_modules,
    "onnx": cli.bench.bench_onnx,
    "steps": cli.bench.bench_steps,
}


@pytest.fixture(params=MODULES)
def bench(request, monkeypatch, tmp_path):
    """Runs a benchmark that does as `measure` says, with tmp_path / "out" for its results."""

    def run(measure):
        monkeypatch.setattr(MODULES[request.param], "run", measure)
        for module in (cli.bench.bench_init, cli.bench.bench_steps):
            monkeypatch.setattr(module, "hashes", lambda config, folder: {})  # there is no data
        return CliRunner().invoke(cli.app, ["bench", *request.param.split(), "--out", str(tmp_path / "out")])

    return run


def check_error(result, complaint, folder):
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert f"Error: {complaint}" in " ".join(result.output.split())
    assert not list(folder.iterdir())


def test_nothing_is_measured_for_a_result_that_cannot_be_traced(bench, monkeypatch, tmp_path):
    def refuse(out):
        assert out == tmp_path / "out"
        raise ValueError("the work tree has changes")

    monkeypatch.setattr(results, "check_traceable", refuse)
    measured = []
    check_error(bench(lambda *arguments: iter(measured.append(arguments) or ())), "the work tree has changes", tmp_path)
    assert measured == []


def test_what_cannot_be_measured_is_said_in_a_sentence(bench, tmp_path):
    def measure(*arguments):
        raise ValueError("a width of 10^12 is too much")
        yield

    check_error(bench(measure), "a width of 10^12 is too much", tmp_path)


def test_a_folder_that_cannot_be_made_is_said_in_a_sentence(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(cli.bench, "_live", lambda measured, table: [])
    monkeypatch.setattr(cli.bench, "show", lambda table: None)

    def full(*arguments, **data):
        raise OSError("no space left")

    monkeypatch.setattr(results, "save", full)
    check_error(bench(lambda *arguments: iter(())), "no space left", tmp_path)


def test_the_command_is_the_one_that_was_typed(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["/bin/pairmix", "bench", "what was", "typed"])
    monkeypatch.setattr(cli.bench, "_live", lambda measured, table: [])
    monkeypatch.setattr(cli.bench, "show", lambda table: None)
    saved = []
    monkeypatch.setattr(results, "save", lambda path, command, *rest, **data: saved.append(command))
    for benchmark in BENCHMARKS.values():
        monkeypatch.setattr(benchmark, "picture", lambda rows: Figure())
    result = bench(lambda *arguments: iter(()))
    assert result.exit_code == 0, result.output
    assert saved == ["pairmix bench 'what was' typed"]


@pytest.mark.parametrize("command", ["kernels", "kernels --caches", "operator", "operator --grid", "modules", "steps"])
def test_the_kernels_of_another_instruction_set_can_be_measured(command, monkeypatch, tmp_path):
    before, used = ops.cpu.instruction_set(), []

    def measure(*arguments):
        used.append(ops.cpu.instruction_set())
        raise ValueError("measured enough")
        yield

    monkeypatch.setattr(MODULES[command], "run", measure)
    arguments = ["bench", *command.split(), "--out", str(tmp_path / "out"), "--instruction-set"]
    check_error(CliRunner().invoke(cli.app, [*arguments, "baseline"]), "measured enough", tmp_path)
    assert used == ["baseline"]
    assert ops.cpu.instruction_set() == before

    refused = CliRunner().invoke(cli.app, [*arguments, "avx1024"])
    assert refused.exit_code == 2
    assert "avx1024" in refused.output
    assert used == ["baseline"]


def test_a_gpu_has_no_instruction_set_to_choose():
    refused = CliRunner().invoke(cli.app, ["bench", "operator", "--device", "cuda", "--instruction-set", "avx2"])
    assert refused.exit_code == 2
    assert "--device cuda does not accept --instruction-set" in " ".join(refused.output.replace("│", " ").split())
