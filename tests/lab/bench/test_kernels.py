import math

import pytest
import torch
from typer.testing import CliRunner

import pairmix
from pairmix import ops
from pairmix_lab import cli, results
from pairmix_lab.bench import kernels
from pairmix_lab.bench.kernels import FEW, MANY
from pairmix_lab.report import tables
from pairmix_lab.report.pictures import as_file

RATE = 1e9
IN_AND_OUT = {"forward": 3e-5, "backward": 9e-5}
A_STAGE = {"forward": 2e-6, "backward": 8e-6}


@pytest.fixture
def fixed_times(monkeypatch):
    """Calls take what IN_AND_OUT and A_STAGE say, and the machine does RATE. Gives the names of what took turns."""
    names = []

    def interleaved(calls, seconds):
        names.append(set(calls))
        for _ in range(3):
            calls["bound"]()
        stages = {name: int(name.split()[1]) if " " in name else 3 for name in calls if name != "bound"}
        times = {name: IN_AND_OUT[name.split()[0]] + count * A_STAGE[name.split()[0]] for name, count in stages.items()}
        return {name: {0: time, 1: time} for name, time in times.items()}

    monkeypatch.setattr(kernels, "interleaved", interleaved)
    monkeypatch.setattr(ops.cpu, "multiply_adds_per_second", lambda: RATE)
    return names


def small(**changes):
    return kernels.Config(**{"widths": (8,), "stage_width": 8, "batch": 4, "seconds": 0.0, "threads": (1,), **changes})


class TestStageKinds:
    def test_strides_up_to_half_the_width_and_a_random_matching(self):
        kinds = kernels.stage_kinds(8)
        assert list(kinds) == ["stride 1", "stride 2", "stride 4", "random"]
        assert kinds["stride 2"](3).pairs.tolist() == [[[0, 1, 4, 5], [2, 3, 6, 7]]] * 3

    @pytest.mark.parametrize("kind", kernels.stage_kinds(64))
    def test_fewer_stages_are_the_first_of_more(self, kind):
        schedule = kernels.stage_kinds(64)[kind]
        assert schedule(MANY).only(range(FEW)) == schedule(FEW)

    def test_random_stages_differ(self):
        first, second = kernels.stage_kinds(64)["random"](2).order.tolist()
        assert first != second


@pytest.mark.parametrize("block", ["general", "rotation"])
@pytest.mark.parametrize("n", [7, 16])
def test_the_kernels_compute_the_layer_and_all_its_gradients(monkeypatch, block, n):
    made = []

    def layer(*arguments, **options):
        made.append(pairmix.SPMLinear(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(kernels, "SPMLinear", layer)
    calls = kernels.kernel_calls(pairmix.Schedule.butterfly(n), block, batch=3)
    grad, x, *_ = calls["backward"].args
    x = x.clone().requires_grad_()
    y = made[0](x)
    assert torch.equal(calls["forward"](), y)
    y.backward(grad)
    gx, gradients = calls["backward"]()
    assert torch.equal(gx, x.grad)
    expected = {("blocks" if name in ("coeffs", "angles") else name): p.grad for name, p in made[0].named_parameters()}
    computed = {name: gradient[0] for name, gradient in gradients._asdict().items() if gradient is not None}
    assert computed.keys() == expected.keys()
    assert all(torch.equal(computed[name], expected[name]) for name in expected)


def test_a_stage_is_the_difference_and_the_rest_is_what_is_left():
    few = {0: 5.0 + FEW * 2.0, 1: 7.0 + FEW * 3.0, 2: 100.0}
    many = {0: 5.0 + MANY * 2.0, 1: 7.0 + MANY * 3.0}
    assert kernels.stage_and_rest(few, many) == {"stage": {0: 2.0, 1: 3.0}, "rest": {0: 5.0, 1: 7.0}}


class TestRows:
    @pytest.mark.parametrize(("block", "backward"), [("general", 12), ("rotation", 10)])
    def test_shares_of_the_bound(self, fixed_times, block, backward):
        by_width, *by_stage = kernels.run(small(blocks=(block,)))
        assert fixed_times[0] == {"forward", "backward", "bound"}
        both = {f"{direction} {stages}" for direction in A_STAGE for stages in (FEW, MANY)}
        assert fixed_times[1:] == [both | {"bound"}] * len(by_stage)
        for direction, multiply_adds in (("forward", 4), ("backward", backward)):
            of_pairs = multiply_adds * 4 * 4 / RATE  # 4 pairs of 4 rows
            time = IN_AND_OUT[direction] + 3 * A_STAGE[direction]
            assert by_width[direction]["ms"] == pytest.approx(1e3 * time)
            assert by_width[direction]["of_arithmetic"] == pytest.approx(3 * of_pairs / time)
            for row in by_stage:
                assert row[direction]["ms"] == pytest.approx(1e3 * A_STAGE[direction])
                assert row[direction]["rest"]["ms"] == pytest.approx(1e3 * IN_AND_OUT[direction])
                assert row[direction]["of_arithmetic"] == pytest.approx(of_pairs / A_STAGE[direction])
                assert row[direction]["disturbed"] is False

    def test_a_row_for_every_width_stage_block_and_number_of_threads(self, fixed_times):
        rows = list(kernels.run(small(widths=(8, 12), blocks=("general", "rotation"), threads=(1, 2))))
        cases = [(8, None), (12, None), *((8, kind) for kind in kernels.stage_kinds(8))]
        assert [(row["threads"], row["n"], row.get("pairs"), row["block"]) for row in rows] == [
            (threads, *case, block) for threads in (1, 2) for case in cases for block in ("general", "rotation")
        ]
        for row in rows:
            assert row["instruction_set"] == ops.cpu.instruction_set()
            assert (row["impl"], row["batch"], row["multiply_adds_per_second"]) == ("cpu", 4, RATE)

    @pytest.mark.parametrize("rates", [[RATE, RATE, 3 * RATE], [1.0, 1.0, 1.0]], ids=["varies", "is beaten"])
    def test_a_disturbed_bound(self, fixed_times, monkeypatch, rates):
        endless = iter(rates * 100)
        monkeypatch.setattr(ops.cpu, "multiply_adds_per_second", lambda: next(endless))
        rows = list(kernels.run(small()))
        assert all(row[direction]["disturbed"] for row in rows for direction in A_STAGE)

    def test_more_stages_that_took_less_time_are_disturbed(self, fixed_times, monkeypatch):
        monkeypatch.setitem(A_STAGE, "forward", -1e-6)
        row = list(kernels.run(small()))[-1]
        assert row["forward"]["of_arithmetic"] is None
        assert (row["forward"]["disturbed"], row["backward"]["disturbed"]) == (True, False)

    def test_times_that_vary_are_disturbed(self, fixed_times, monkeypatch):
        steady = kernels.interleaved

        def unsteady(calls, seconds):
            samples = steady(calls, seconds)
            return {name: {0: times[0], 1: 3 * times[1]} for name, times in samples.items()}

        monkeypatch.setattr(kernels, "interleaved", unsteady)
        assert all(row[direction]["disturbed"] for row in kernels.run(small()) for direction in A_STAGE)


def test_tables_have_the_rows_of_their_question(fixed_times):
    rows = list(kernels.run(small()))
    name = f"{ops.cpu.instruction_set()}, 1 thread"
    (line,) = kernels.TABLES["kernels"](rows)[1:]
    assert line[:5] == ["8", "general", name, "1.00", "3"]
    assert line[5:7] == ["0.0360 (0.0360 to 0.0360)", "1%"]  # 192 of 36,000 multiply-adds
    assert line[7:] == ["0.114 (0.114 to 0.114)", "1%"]  # 576 of 114,000
    header, *lines = kernels.TABLES["kernels-stages"](rows)
    assert [line[4] for line in lines] == list(kernels.stage_kinds(8))
    shown = dict(zip(header, lines[-1], strict=True))
    assert shown["forward, µs a stage"] == "2.00 (2.00 to 2.00)"
    assert shown["forward, of the bound"] == "3%"  # 64 of 2,000
    assert shown["backward, µs in and out"] == "90.0 (90.0 to 90.0)"


def test_tables_show_no_share_that_was_disturbed(fixed_times):
    rows = list(kernels.run(small()))
    rows[0]["forward"] |= {"disturbed": True}
    rows[-1]["backward"] |= {"of_arithmetic": None, "disturbed": True}
    for table in kernels.TABLES.values():
        assert tables.markdown(table(rows)).endswith(tables.DISTURBED_NOTE)
        assert sum(tables.DISTURBED in line for line in table(rows)) == 1


def test_picture(fixed_times):
    rows = list(kernels.run(small(widths=(8, 16), blocks=("general", "rotation"), threads=(1, 2))))
    rows[0]["forward"] |= {"of_arithmetic": None, "disturbed": True}
    figure = kernels.picture(rows)
    by_width, by_stage = figure.axes
    lines = {line.get_label(): line for line in by_width.lines}
    assert len(lines) == 8
    assert lines["forward, general, 2 threads"].get_linestyle() == "-"
    assert lines["backward, rotation, 1 thread"].get_linestyle() == "--"
    disturbed, share = lines["forward, general, 1 thread"].get_ydata()
    assert math.isnan(disturbed)
    assert share == rows[2]["forward"]["of_arithmetic"]
    assert [tick.get_text() for tick in by_stage.get_xticklabels()] == ["1", "2", "4", "random"]
    assert {tuple(line.get_xdata()) for line in by_stage.lines} == {(0, 1, 2), (3,)}
    assert as_file(figure, "png").startswith(b"\x89PNG")


def command(*arguments):
    return CliRunner().invoke(cli.app, ["bench", "kernels", *arguments])


def test_command(tmp_path):
    options = f"--widths 8,12 --stage-width 4 --batch 4 --blocks rotation --seconds 0 --threads 1 --out {tmp_path}"
    result = command(*options.split())
    assert result.exit_code == 0, result.output
    saved = results.load(tmp_path / "kernels.json")
    assert saved["config"] == {
        "widths": [8, 12],
        "stage_width": 4,
        "batch": 4,
        "blocks": ["rotation"],
        "seconds": 0.0,
        "threads": [1],
    }
    assert [(row["n"], row.get("pairs")) for row in saved["rows"]] == [
        (8, None),
        (12, None),
        (4, "stride 1"),
        (4, "stride 2"),
        (4, "random"),
    ]
    assert (tmp_path / "kernels.png").read_bytes().startswith(b"\x89PNG")


def test_without_kernels_there_is_nothing_to_measure(tmp_path, monkeypatch):
    monkeypatch.setattr(ops.cpu, "_missing", "not compiled")
    result = command("--out", str(tmp_path))
    assert result.exit_code == 1
    assert "Error: bench kernels measures the compiled kernels, and there are none here: not compiled" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--widths 0", "got '0'"),
        ("--stage-width 0", "got 0"),
        ("--stage-width 1", "a power of two, got 1"),
        ("--stage-width 1000", "a power of two, got 1000"),
        ("--batch 0", "got 0"),
        ("--blocks dense", "got 'dense'"),
        ("--seconds nan", "got nan"),
        ("--threads 1.5", "got '1.5'"),
    ],
)
def test_bad_options(tmp_path, arguments, complaint):
    result = command(*arguments.split(), "--out", str(tmp_path))
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.replace("│", " ").split())
    assert not list(tmp_path.iterdir())
