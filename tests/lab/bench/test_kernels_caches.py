import pytest
from typer.testing import CliRunner

from pairmix import ops
from pairmix_lab import cli
from pairmix_lab.bench import kernels_caches
from pairmix_lab.bench.kernels_caches import AS_THEY_ARE, OTHERS
from pairmix_lab.report.pictures import as_file


def small(**changes):
    return kernels_caches.Config(**{"widths": (8, 16), "batch": 4, "seconds": 0.0, "threads": (1,), **changes})


@pytest.fixture
def used(monkeypatch):
    """The sizes of caches that were used while something was timed."""
    used, use = [], ops.cpu.use_caches
    monkeypatch.setattr(ops.cpu, "use_caches", lambda *sizes: used.append(sizes) or use(*sizes))
    return used


def test_a_row_for_every_width_and_size_of_the_caches(used):
    l1, l2 = ops.cpu.caches()
    rows = list(kernels_caches.run(small()))
    sizes = (AS_THEY_ARE, *OTHERS)
    assert [(row["n"], row["l1_factor"], row["l2_factor"]) for row in rows] == [(n, *s) for n in (8, 16) for s in sizes]
    assert {(l1 * one, l2 * two) for one, two in sizes} == set(used)
    assert all(row[direction]["ms"] > 0 for row in rows for direction in ("forward", "backward"))
    assert [row["forward"]["speedup"] for row in rows if (row["l1_factor"], row["l2_factor"]) == AS_THEY_ARE] == [1, 1]


def test_the_caches_are_this_machines_again_also_after_an_error(used):
    before = ops.cpu.caches()
    running = kernels_caches.run(small())
    next(running)
    running.close()
    assert len(set(used)) > 1
    assert ops.cpu.caches() == before


def test_table_and_picture():
    rows = list(kernels_caches.run(small()))
    table = kernels_caches.table(rows)
    assert len(table) == 1 + len(rows)
    l1, l2 = (size >> 10 for size in ops.cpu.caches())
    assert table[2][2:4] == [f"0.5 x {l1} KiB", f"1 x {l2} KiB"]
    assert as_file(kernels_caches.picture(rows), "png")


def test_options_of_the_other_question_are_refused():
    for option in (["--blocks", "rotation"], ["--stage-width", "64"]):
        result = CliRunner().invoke(cli.app, ["bench", "kernels", "--caches", *option])
        assert result.exit_code == 2
        assert f"--caches does not accept {option[0]}" in " ".join(result.output.replace("│", "").split())
