"""Times on a GPU, by events that are made up: there may be no GPU."""

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from pairmix import ops
from pairmix_lab import cli, contenders, results
from pairmix_lab.bench import operator_cuda
from pairmix_lab.bench.timing import MIN_ROUNDS
from pairmix_lab.report.pictures import as_file

SYNTHETIC = "synthetic, not a GPU"
"""In the place of the device's name: these rows are made up."""


class FakeDevice:
    """Work is queued, and takes time when somebody waits for it: as on a GPU, the host is ahead."""

    def __init__(self):
        self.now, self.queue, self.done = 0.0, [], []

    def work(self, name, ms=1.0):
        def call():
            self.queue.append((name, ms))

        return call

    def event(self):
        return FakeEvent(self)

    def catch_up(self):
        for work, ms in self.queue:
            if isinstance(work, FakeEvent):
                work.ms = self.now
            else:
                self.done.append(work)
                self.now += ms
        self.queue.clear()


class FakeEvent:
    def __init__(self, device):
        self.device, self.ms = device, None

    def record(self):
        self.device.queue.append((self, 0.0))

    def synchronize(self):
        self.device.catch_up()

    def elapsed_time(self, end):
        return end.ms - self.ms


def event_times(device, calls, seconds=0.0, clock=lambda: 0.0):
    return operator_cuda.event_times(
        calls, seconds, make_event=device.event, flush=device.work("flush", 100.0), clock=clock
    )


class TestEventTimes:
    def test_times_are_those_of_the_calls_alone(self):
        device = FakeDevice()
        samples = event_times(device, {"short": device.work("short", 2.0), "long": device.work("long", 7.0)})
        assert samples == {
            "short": dict.fromkeys(range(MIN_ROUNDS), pytest.approx(2e-3)),
            "long": dict.fromkeys(range(MIN_ROUNDS), pytest.approx(7e-3)),
        }

    def test_caches_are_flushed_before_every_call_and_all_take_turns(self):
        device = FakeDevice()
        event_times(device, {name: device.work(name) for name in "abc"})
        measured = device.done[-6 * MIN_ROUNDS :]
        assert measured[::2] == ["flush"] * 3 * MIN_ROUNDS
        rounds = [tuple(measured[start + 1 : start + 6 : 2]) for start in range(0, len(measured), 6)]
        assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
        assert len(set(rounds)) > 1

    def test_what_is_made_once_is_not_counted(self):
        device = FakeDevice()
        first = [1000.0]
        samples = event_times(device, {"compiled": lambda: device.work("it", first.pop() if first else 1.0)()})
        assert max(samples["compiled"].values()) == pytest.approx(1e-3)

    def test_rounds_go_on_until_the_time_is_over(self):
        device, ticks = FakeDevice(), iter(range(1000))
        samples = event_times(device, {"it": device.work("it")}, seconds=40.0, clock=lambda: float(next(ticks)))
        assert MIN_ROUNDS < len(samples["it"]) <= 50


def test_layers_are_compared_in_their_precisions(monkeypatch):
    monkeypatch.setattr(operator_cuda, "_IMPL", "reference")
    wanted = torch.get_float32_matmul_precision()
    device, used, precisions = FakeDevice(), [], {}

    def timer(calls, seconds):
        used.append(seconds)
        for name, call in calls.items():
            call()
            precisions[name] = torch.get_float32_matmul_precision()
        return event_times(device, {name: device.work(name, len(name)) for name in calls})

    rows = operator_cuda.compared(16, 4, 3.0, torch.device("cpu"), timer)
    assert used == [1.5, 1.5]
    assert torch.get_float32_matmul_precision() == wanted
    assert precisions["dense tf32"] == "high"
    assert precisions["dense float32"] == "highest"
    by_name = {(row["layer"], row["precision"]): row for row in rows}
    assert ("spm", "tf32") not in by_name
    assert {key for layer, key in by_name if layer == "dense"} == set(operator_cuda.PRECISIONS)
    assert by_name["spm", "bfloat16"]["train"]["ms"] == pytest.approx(len("spm bfloat16"))
    assert by_name["spm", "bfloat16"]["train"]["speedup"] == pytest.approx(len("dense bfloat16") / len("spm bfloat16"))
    assert by_name["dense", "tf32"]["train"]["times_memcpy"] == pytest.approx(len("dense tf32") / len("memcpy float32"))


def synthetic_rows():
    def times(ms):
        spread = {"ms": ms, "ms_iqr": [ms, ms], "speedup": 2.0, "speedup_iqr": [1.9, 2.1]}
        return {**spread, "times_memcpy": 3 * ms}

    return [
        {"gpu": SYNTHETIC, "threads": 1, "n": n, "batch": 64, "layer": layer, "precision": precision}
        | {"train": times(n / 100), "inference": times(n / 300)}
        for n in (256, 512)
        for layer, precision in (("dense", "tf32"), ("spm", "float32"), ("memcpy", "float32"))
    ]


def test_the_table_names_layers_and_precisions():
    header, *lines = operator_cuda.table(synthetic_rows())
    assert [line[1] for line in lines[:3]] == ["dense, TF32", "SPM, float32", "memcpy, float32"]
    speedup = header.index("times as fast as dense")
    assert lines[0][speedup] == "2.00 (1.90 to 2.10)"
    assert lines[2][speedup] == "-"
    assert lines[0][header.index("times memcpy")] == "7.68"


def test_the_picture_shows_the_device_and_all_layers():
    figure = operator_cuda.picture(synthetic_rows())
    assert SYNTHETIC in figure.get_suptitle()
    times, ratios = ([line.get_label() for line in axes.lines] for axes in figure.axes[:2])
    assert times == ["dense, TF32", "SPM, float32", "memcpy, float32"]
    assert "memcpy, float32" not in ratios
    assert figure.axes[0].lines[1].get_color() == contenders.SPM.color
    assert as_file(figure, "png").startswith(b"\x89PNG")


class TestCommand:
    def run(self, *options):
        return CliRunner().invoke(cli.app, ["bench", "operator", *options])

    def test_without_a_gpu_it_says_so(self, monkeypatch, tmp_path):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        result = self.run("--device", "cuda", "--out", str(tmp_path / "out"))
        assert result.exit_code == 1
        assert "--device cuda measures on a GPU" in " ".join(result.output.split())
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("options", [["--grid"], ["--threads", "1"]])
    def test_what_is_for_cpus_only_is_refused(self, options):
        result = self.run("--device", "cuda", *options)
        assert result.exit_code == 2
        assert f"--device cuda does not accept {options[0]}" in " ".join(result.output.split())

    def test_other_devices_are_refused(self):
        assert "cpu or cuda" in self.run("--device", "mps").output

    def test_the_result_has_a_file_of_its_own(self, monkeypatch, tmp_path):
        monkeypatch.setattr(operator_cuda, "run", lambda config: iter(synthetic_rows()))
        result = self.run("--device", "cuda", "--batch", "64", "--out", str(tmp_path / "out"))
        assert result.exit_code == 0, result.output
        saved = results.load(tmp_path / "out" / "operator-cuda.json")
        assert saved["config"]["batch"] == 64
        assert saved["rows"] == synthetic_rows()


def test_rows_say_which_gpu_and_which_versions_they_are_of(monkeypatch):
    monkeypatch.setitem(ops.IMPLS, "triton", replace(ops.IMPLS["triton"], why_not=lambda device: None))
    monkeypatch.setattr(operator_cuda.torch, "empty", lambda *sizes, **options: torch.zeros(1))
    monkeypatch.setattr(operator_cuda, "compared", lambda n, *rest: [{"n": n}])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: SYNTHETIC)
    rows = list(operator_cuda.run(operator_cuda.Config(widths=(8, 16))))
    assert [row["n"] for row in rows] == [8, 16]
    for row in rows:
        assert row["gpu"] == SYNTHETIC
        assert row["torch"] == torch.__version__
        assert {"triton", "cuda", "hip", "threads"} <= row.keys()


def test_spm_is_computed_by_the_kernels_for_gpus():
    assert operator_cuda._IMPL in ops.IMPLS
    assert ops.IMPLS[operator_cuda._IMPL].preferred_on == "cuda"
