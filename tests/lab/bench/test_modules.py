import pytest
import torch
from typer.testing import CliRunner

from pairmix_lab import cli, results
from pairmix_lab.bench import memory, modules
from pairmix_lab.bench.modules import Case

KINDS = ("RNN", "GRU", "LSTM", "attention", "encoder layer", "feed-forward")
TINY = tuple(Case(kind, 8, 3, 2) for kind in KINDS)


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch):
    monkeypatch.setattr(modules, "peak_of_training", lambda *arguments: 12345)


def test_every_kind_is_compared_with_torch_s():
    rows = list(modules.run(modules.Config(cases=TINY, seconds=0.0, threads=(1,))))
    for case in TINY:
        theirs, *all_ours = [row for row in rows if row["kind"] == case.kind]
        assert len(all_ours) == (2 if case.kind == "feed-forward" else 1)
        for ours in all_ours:
            assert ours["module"] in (f"SPM{theirs['module']}", "SPMLinear, GELU, SPMLinear", "SPMFeedForward")
            assert ours["bytes_kept"] > 0
            for task in ("train", "inference"):
                assert theirs[task]["speedup"] == 1
                low, high = ours[task]["speedup_iqr"]
                assert 0 < low <= ours[task]["speedup"] <= high
    recurrent = modules.of_kinds(modules.table, "GRU", "LSTM")(rows)
    assert [line[0] for line in recurrent[1:]] == ["GRU", "SPMGRU", "LSTM", "SPMLSTM"]


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.kind)
def test_modules_are_layers(case):
    for build in case.builds.values():
        assert build()(torch.randn(case.shape)).shape == case.shape


def test_a_block_in_one_call_keeps_its_input_only():
    rows = list(modules.run(modules.Config(cases=TINY[-1:], seconds=0.0, threads=(1,))))
    _, in_parts, whole = rows
    assert [row["module"] for row in rows] == ["Linear, GELU, Linear", "SPMLinear, GELU, SPMLinear", "SPMFeedForward"]
    assert whole["parameters"] == in_parts["parameters"]
    assert whole["bytes_kept"] == 4 * 3 * 2 * 8 < in_parts["bytes_kept"]


def test_the_peak_of_a_module():
    case = Case("GRU", 512, 4, 2)
    weights = 4 * 6 * case.size**2
    assert memory.peak_of_training(case.builds["GRU"], *case.shape) > 2 * weights  # they and their gradients


def command(*arguments):
    return CliRunner().invoke(cli.app, ["bench", "modules", *arguments])


def test_command(tmp_path, monkeypatch):
    monkeypatch.setattr(modules.Config, "cases", TINY)
    result = command("--kind", "GRU", "--seconds", "0", "--threads", "1", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    saved = results.load(tmp_path / "modules.json")
    assert [row["module"] for row in saved["rows"]] == ["GRU", "SPMGRU"]
    assert (tmp_path / "modules.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "complaint"), [("--kind CNN", "got 'CNN'"), ("--seconds -1", "got -1"), ("--threads 0", "got '0'")]
)
def test_bad_options(tmp_path, arguments, complaint):
    result = command(*arguments.split(), "--out", str(tmp_path))
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.replace("│", "").split())
    assert not list(tmp_path.iterdir())
