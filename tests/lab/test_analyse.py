"""What could stand for the matrices of a checkpoint."""

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from pairmix_lab import analyse, cli
from pairmix_lab.bench import fit as bench_fit


def of_low_rank(n, rank):
    return torch.randn(n, rank) @ torch.randn(rank, n)


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = {
        "up.weight": torch.eye(32) + 0.01 * torch.randn(32, 32),
        "down.weight": of_low_rank(32, 3),
        "down.bias": torch.randn(32),
        "tiny.weight": torch.randn(4, 4),
        "steps": torch.ones(32, 32, dtype=torch.int64),
    }
    save_file(tensors, path)
    return path


def test_every_matrix_has_a_line(checkpoint):
    result = CliRunner().invoke(cli.app, ["analyse", str(checkpoint), "--steps", "5"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert "up.weight" in result.output
    assert "down.weight" in result.output
    assert not any(name in result.output for name in ("bias", "tiny", "steps"))


def test_only_names_that_match(checkpoint):
    result = CliRunner().invoke(cli.app, ["analyse", str(checkpoint), "--match", "up.*", "--steps", "0"])
    assert "up.weight" in result.output
    assert "down" not in result.output


def test_errors_tell_what_would_fit():
    near = analyse.analysed("near", torch.eye(32) + 0.01 * torch.randn(32, 32), steps=20)
    low = analyse.analysed("low", of_low_rank(32, 3), steps=20)
    assert near.spm < 0.1 < near.low_rank
    assert low.low_rank < 1e-5 < low.spm
    assert low.both < 1e-3
    assert near.flatness > 0.95
    assert low.flatness < 0.15


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("model.safetensors", ["--match", "nothing"], "that matches 'nothing'"),
        ("text.safetensors", [], "is no safetensors file"),
        ("missing.safetensors", [], "No such file"),
    ],
)
def test_what_cannot_be_analysed(checkpoint, name, arguments, message):
    (checkpoint.parent / "text.safetensors").write_text("not a checkpoint")
    result = CliRunner().invoke(cli.app, ["analyse", str(checkpoint.parent / name), *arguments])
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())


def test_the_benchmark_has_a_row_for_every_matrix():
    cases = (("Hadamard", 16, 16), ("product of stages", 32, 16), ("near the identity", 16, 16), ("random", 16, 16))
    rows = list(bench_fit.run(bench_fit.Config(steps=2, cases=cases)))
    table = bench_fit.table(rows)
    assert [line[0] for line in table[1:]] == [kind for kind, *_ in cases]
    assert rows[0]["fewest"] < 1e-5
    assert bench_fit.picture(rows).axes
    for kind, make in bench_fit.KINDS.items():
        assert make(16, 16).shape == (16, 16), kind
