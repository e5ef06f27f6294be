import pytest
import torch
from typer.testing import CliRunner

from pairmix_lab import cli, results
from pairmix_lab.bench import memory, modules
from pairmix_lab.bench.modules import Case

TINY = tuple(Case(kind, 8, 3, 2) for kind in ("RNN", "GRU", "LSTM", "attention", "encoder layer"))


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch):
    monkeypatch.setattr(modules, "peak_of_training", lambda *arguments: 12345)


def test_every_kind_is_compared_with_torch_s():
    rows = list(modules.run(modules.Config(cases=TINY, seconds=0.0, threads=(1,))))
    assert [row["kind"] for row in rows] == [case.kind for case in TINY for _ in range(2)]
    for theirs, ours in zip(rows[::2], rows[1::2], strict=True):
        assert ours["module"] == f"SPM{theirs['module']}"
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
