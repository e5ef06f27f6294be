import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from pairmix import SPMLinear, ops
from pairmix_lab import cli, results
from pairmix_lab.bench import (
    bounds,
    memory,
    operator,
    operator_conditions,
    operator_grid,
    operator_latency,
    operator_scaling,
    operator_variants,
)
from pairmix_lab.bench.memory import peak_of_training
from pairmix_lab.bench.operator_variants import Kind
from pairmix_lab.bench.timing import MIN_ROUNDS, interleaved, measured, ratios, settings, training_step
from pairmix_lab.contenders import (
    DENSE,
    LOW_RANK,
    SPM,
    LowRank,
    count_parameters,
    timed_at,
)
from pairmix_lab.report import tables

TINY = {"seconds": 0.0, "threads": (1,)}


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch):
    monkeypatch.setattr(memory, "peak_of_training", lambda *arguments: 12345)


class FakeClock:
    """Time passes only when a function is called."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def call(self, name, seconds):
        def run():
            self.calls.append(name)
            self.now += seconds

        return run

    def __call__(self):
        self.now += 1e-9
        return self.now


class TestInterleaved:
    def time(self, seconds, **durations):
        clock = FakeClock()
        calls = {name: clock.call(name, duration) for name, duration in durations.items()}
        return interleaved(calls, seconds, block=0.01, clock=clock), clock

    def test_times_are_right_and_rounds_are_shared(self):
        samples, _ = self.time(1.0, fast=0.001, slow=0.02)
        assert measured(samples, "fast", "slow")["ms"] == pytest.approx(1.0, rel=1e-3)
        assert measured(samples, "slow")["ms"] == pytest.approx(20.0, rel=1e-3)
        assert ratios(samples, "slow", "fast") == pytest.approx([20.0] * len(samples["fast"]), rel=1e-3)
        assert samples["fast"].keys() == samples["slow"].keys()

    def test_fast_calls_are_repeated_and_everyone_takes_turns(self):
        samples, clock = self.time(1.0, fast=0.001, slow=0.02)
        rounds = len(samples["fast"])
        measuring = clock.calls[-11 * rounds :]
        assert measuring.count("fast") == 10 * rounds
        assert measuring.count("slow") == rounds
        for number in range(rounds):
            assert set(measuring[11 * number : 11 * number + 11]) == {"fast", "slow"}

    def test_the_budget_is_kept(self):
        samples, clock = self.time(3.0, one=0.01, other=0.02)
        assert 3.0 <= clock.now < 3.2
        assert len(samples["one"]) == 100

    def test_there_are_enough_rounds_however_short_the_time(self):
        samples, _ = self.time(0.0, one=0.01)
        assert len(samples["one"]) >= 2
        assert max(samples["one"]) < MIN_ROUNDS

    def test_the_slow_are_sampled_less_but_always_with_the_fast(self):
        samples, clock = self.time(10.0, fast=0.01, slow=2.0)
        assert 2 <= len(samples["slow"]) < len(samples["fast"]) / 3
        assert samples["slow"].keys() <= samples["fast"].keys()
        assert len(ratios(samples, "fast", "slow")) == len(ratios(samples, "slow", "fast")) == len(samples["slow"])
        assert clock.now < 20.0


def test_a_training_step_starts_without_gradients():
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    step = training_step(layer, x)
    step()
    once = layer.weight.grad.clone()
    step()
    assert torch.equal(layer.weight.grad, once)
    assert x.grad is None


def test_threads_are_restored():
    before = torch.get_num_threads()
    assert [(setting["threads"], torch.get_num_threads()) for setting in settings((1, 2))] == [(1, 1), (2, 2)]
    assert torch.get_num_threads() == before


def test_names_of_kinds():
    assert Kind(8, 8).name == "8"
    assert Kind(4, 8, block="rotation", dtype="bfloat16").name == "4 -> 8 rotation bfloat16"
    assert Kind(64, 64, schedule="brick").layer().stages == 6


class TestMemory:
    x = torch.randn(32, 64)

    @pytest.mark.parametrize("make_layer", [partial(nn.Linear, 64, 64), partial(SPMLinear, 64, 64)])
    def test_only_x_is_kept(self, make_layer):
        assert memory.bytes_kept(make_layer(), self.x) == self.x.nbytes

    def test_what_is_computed_on_the_way_counts(self):
        assert memory.bytes_kept(LowRank(64, 64, 8), self.x) == self.x.nbytes + 32 * 8 * 4

    def test_peak_grows_by_what_training_needs(self):
        layer, size = partial(nn.Linear, 2048, 2048), 2048 * 2048 * 4
        peak = peak_of_training(layer, 8, 2048)
        assert peak is None or 2 * size <= peak < 4 * size  # the weight and its gradient

    def test_a_process_that_was_killed_is_out_of_memory(self):
        with pytest.raises(MemoryError, match=r"3 training steps on an input of shape \(8, 16\) .* killed"):
            peak_of_training(killed, 8, 16)


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


class TestBounds:
    layer, x = SPMLinear(64, 64), torch.randn(10, 64)

    def test_multiply_adds_can_be_measured(self):
        assert 1e8 < ops.cpu.multiply_adds_per_second() < 1e15

    def reached(self, task="train", spm=(1.0, 1.0), copy=(0.1, 0.1), multiply_adds=(1e6, 1e6)):
        return bounds.reached(self.layer, self.x, task, spm, copy, multiply_adds)

    def test_reached(self):
        row = self.reached()
        assert row["of_arithmetic"] == pytest.approx(16 * 32 * 6 * 10 / 1e6)
        parameter_bytes = 4 * count_parameters(self.layer)
        assert row["of_bandwidth"] == pytest.approx((5 + 2 * parameter_bytes / self.x.nbytes) / 2 * 0.1)
        row = self.reached("inference", spm=(0.5, 0.5))
        assert row["of_arithmetic"] == pytest.approx(4 * 32 * 6 * 10 / 1e6 / 0.5)
        assert row["of_bandwidth"] == pytest.approx(0.2)
        assert row["disturbed_bounds"] == []

    def test_a_bound_that_is_beaten_is_none(self):
        assert self.reached(copy=(9.0, 9.0))["disturbed_bounds"] == ["bandwidth"]
        assert self.reached(multiply_adds=(1e3, 1e3))["disturbed_bounds"] == ["arithmetic"]

    def test_a_bound_that_varies_is_none(self):
        quiet, busy = [1.0, 1.1, 1.2, 1.3], [1.0, 1.0, 2.0, 2.0]
        for samples, disturbed in ((quiet, []), (busy, ["arithmetic", "bandwidth"])):
            row = self.reached(copy=[0.01 * time for time in samples], multiply_adds=[1e6 * rate for rate in samples])
            assert row["disturbed_bounds"] == disturbed

    def test_without_kernels_there_is_none_of_arithmetic(self, monkeypatch):
        monkeypatch.setattr(ops.cpu, "_missing", "not compiled")
        assert bounds.calls(self.x, []).keys() == {"copy"}
        assert self.reached(multiply_adds=())["of_arithmetic"] is None

    def test_bounds_take_turns_with_the_layers(self, monkeypatch):
        seen = {}

        def time_layers(cases, task, seconds, **others):
            seen[task] = set(others)
            for call in others.values():
                call()
                call()
            return {name: {0: 1.0, 1: 1.0} for name in (*cases, *others)}

        monkeypatch.setattr(operator, "time_layers", time_layers)
        monkeypatch.setattr(ops.cpu, "multiply_adds_per_second", lambda: 1e9)
        rows = list(operator.run(operator.Config(widths=(8,), batch=4, **TINY)))
        assert seen == {task: {"copy", "multiply_adds"} for task in ("train", "inference")}
        (spm,) = (row for row in rows if row["layer"] == SPM.key)
        assert spm["train"]["multiply_adds_per_second"] == 1e9

    def test_the_table_shows_no_share_of_a_disturbed_bound(self):
        share = {"multiply_adds_per_second": 1e9, "bytes_per_second": 1e9, "of_arithmetic": 0.5, "of_bandwidth": 1.25}
        row = {"n": 8, "threads": 1, "train": {**share, "disturbed_bounds": ["bandwidth"]}, "inference": share}
        table = operator.bounds_table([row])
        assert table[1][3:] == ["50%", "disturbed", "50%", "125%"]
        assert tables.markdown(table).endswith("\n\n" + tables.DISTURBED_NOTE)
        assert tables.DISTURBED_NOTE not in tables.markdown(operator.bounds_table([row | {"train": share}]))


def check_measured(measured, *names):
    for name in ("ms", *names):
        low, high = measured[f"{name}_iqr"]
        assert 0 < low <= measured[name] <= high


class TestRows:
    def test_operator(self):
        rows = list(operator.run(operator.Config(widths=(130,), batch=4, **TINY)))
        assert [row["layer"] for row in rows] == list(timed_at(130))
        for row in rows:
            assert row.keys() >= {"threads", "impl", "n", "batch", "parameters", "bytes_kept", "peak_bytes"}
            assert (row["train"].keys() >= {"of_arithmetic", "of_bandwidth"}) == (row["layer"] == SPM.key)
            for task in ("train", "inference"):
                check_measured(row[task], "speedup")
                assert row["layer"] != DENSE.key or row[task]["speedup"] == 1

    def test_grid_leaves_out_what_takes_too_long(self):
        config = operator_grid.Config(widths=(8,), batches=(1, 4), schedules=("butterfly", "brick"), **TINY)
        rows = list(operator_grid.run(config))
        assert [(row["batch"], row["schedule"]) for row in rows] == [
            (batch, schedule) for batch in (1, 4) for schedule in ("butterfly", "brick")
        ]
        check_measured(rows[-1]["train"], "speedup")
        impatient = operator_grid.Config(widths=(8,), batches=(1, 4), too_long=1e-12, **TINY)
        assert {row["batch"] for row in operator_grid.run(impatient)} == {1}

    def test_conditions(self, monkeypatch):
        monkeypatch.setattr(operator_conditions, "ROUNDS", 1)
        rows = list(operator_conditions.run(operator_conditions.Config(widths=(8,), batch=4, **TINY)))
        assert [row["layer"] for row in rows] == [DENSE.key, SPM.key]
        assert rows[0]["alone"]["times_alone"] == 1
        for condition in operator_conditions.CONDITIONS:
            assert rows[1][condition]["samples"] == 2
            assert rows[1][condition]["times_alone"] == rows[1][condition]["mean_ms"] / rows[1]["alone"]["mean_ms"]

    def test_a_busy_program_runs_until_the_end(self):
        with operator_conditions.busy_program() as program:
            assert program.poll() is None
        assert program.poll() is not None

    @pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux what runs")
    def test_the_busy_program_does_not_outlive_a_killed_benchmark(self):
        code = """
import os, signal
from pairmix_lab.bench.operator_conditions import busy_program
with busy_program() as program:
    print(program.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
        killed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert killed.returncode == -signal.SIGKILL
        status, deadline = Path(f"/proc/{killed.stdout.strip()}/status"), time.monotonic() + 60
        with suppress(FileNotFoundError):  # when nobody is left who would ask how it ended
            while "zombie" not in status.read_text():
                assert time.monotonic() < deadline
                time.sleep(0.01)

    def test_latency(self):
        rows = list(operator_latency.run(operator_latency.Config(widths=(8,), **TINY)))
        assert [row["layer"] for row in rows] == [DENSE.key, SPM.key, LOW_RANK.key]
        check_measured(rows[1]["inference"], "speedup")
        check_measured(rows[1]["train"], "speedup")
        header, *_ = operator_latency.table(rows)
        older = [{key: value for key, value in row.items() if key != "train"} for row in rows]
        assert operator_latency.table(older)[0] == header[:4]
        assert "forward + backward, µs" in header[4:]

    def test_scaling(self):
        rows = list(operator_scaling.run(operator_scaling.Config(widths=(8, 16), batch=4, **TINY)))
        assert [(row["n"], row["stages"], row["peak_bytes"]) for row in rows] == [(8, 3, 12345), (16, 4, 12345)]
        assert rows[0]["exponent"] == rows[1]["exponent"]

    def test_the_exponent_is_that_of_the_data(self):
        widths = (1024, 2048, 4096, 8192)
        assert operator_scaling.fitted_exponent(widths, [3e-4 * n**1.5 for n in widths]) == pytest.approx(1.5)

    def test_variants(self):
        pairs = ((Kind(4, 8), Kind(8, 8)), (Kind(8, 8, dtype="bfloat16"), Kind(8, 8)))
        rows = list(operator_variants.run(operator_variants.Config(pairs=pairs, batch=4, **TINY)))
        assert [(row["variant"], row["base"]) for row in rows] == [("4 -> 8", "8"), ("8 bfloat16", "8")]
        check_measured(rows[0]["inference"], "cost")


def command(*arguments):
    return CliRunner().invoke(cli.app, ["bench", "operator", *arguments])


@pytest.mark.parametrize(("mode", "threads"), [("", "1"), ("--latency", "1,2"), ("--scaling", "1")])
def test_command(tmp_path, mode, threads):
    options = f"--widths 8,16 --seconds 0 --threads {threads} --out {tmp_path}"
    result = command(*mode.split(), *options.split())
    assert result.exit_code == 0, result.output
    name = f"operator{mode[1:]}"
    saved = results.load(tmp_path / f"{name}.json")
    assert saved["config"]["widths"] == [8, 16]
    expected = {(int(number), n) for number in threads.split(",") for n in (8, 16)}
    assert {(row["threads"], row["n"]) for row in saved["rows"]} == expected
    assert ("threads" in result.output) == (threads == "1,2")
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("mode", "module"), [("--grid", operator_grid), ("--variants", operator_variants)])
def test_command_of_other_modes(tmp_path, monkeypatch, mode, module):
    small = (
        {"pairs": ((Kind(4, 4), Kind(8, 8)),)} if module is operator_variants else {"batches": (1, 2), "widths": (8,)}
    )
    monkeypatch.setattr(cli.bench, "_config", lambda config, options, name: config(**small, **options))
    result = command(mode, "--seconds", "0", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert (tmp_path / f"operator{mode[1:]}.png").exists()


def test_without_kernels_it_runs_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(ops.cpu, "_missing", "not compiled")
    result = command("--widths", "8", "--seconds", "0", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "not compiled" in " ".join(result.output.split())
    assert {row["impl"] for row in results.load(tmp_path / "operator.json")["rows"]} == {"reference"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--grid --latency", "choose one of --grid and --latency"),
        ("--widths 0", "got '0'"),
        ("--widths 8,x", "got 'x'"),
        ("--threads 0", "got '0'"),
        ("--threads 1,", "got ''"),
        ("--threads 1.5", "got '1.5'"),
        ("--batch 0", "got 0"),
        ("--batch 2147483648", "got 2147483648"),
        ("--widths 8,2147483648", "got 2147483648"),
        ("--threads 100000000000000000000", "got 100000000000000000000"),
        ("--seconds nan", "got nan"),
        ("--seconds -1", "got -1"),
        ("--latency --batch 8", "--latency does not accept --batch"),
        ("--variants --widths 8", "--variants does not accept --widths"),
        ("--scaling --widths 8", "got [8]"),
    ],
)
def test_bad_arguments(arguments, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where it would write if it ran
    result = command(*arguments.split())
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.replace("│", " ").split())
