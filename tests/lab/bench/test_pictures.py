"""The pictures of benchmarks look like those of the page: one style, and a contender has one colour."""

import matplotlib as mpl
import pytest

from pairmix_lab import contenders, results
from pairmix_lab.bench import operator, operator_latency, operator_scaling, steps
from pairmix_lab.bench.benchmarks import BENCHMARKS
from pairmix_lab.report.pictures import STYLE, as_file


def times(ms, speedup=2.0):
    return {"ms": ms, "ms_iqr": [0.9 * ms, 1.1 * ms], "speedup": speedup, "speedup_iqr": [0.9 * speedup, 1.1 * speedup]}


def operator_rows(*layers, threads=(1,)):
    return [
        {"n": n, "layer": layer, "threads": number, "train": times(n / 100), "inference": times(n / 300)}
        for number in threads
        for n in (64, 128)
        for layer in layers
    ]


def colours(axes):
    return {line.get_label(): line.get_color() for line in axes.lines if not line.get_label().startswith("_")}


@pytest.mark.parametrize("benchmark_", [operator, operator_latency])
def test_a_contender_has_its_colour_also_under_an_older_name(benchmark_):
    figure = benchmark_.picture(operator_rows("nn.Linear", "spm", "low rank 64"))
    expected = {one.label: one.color for one in (contenders.DENSE, contenders.SPM, contenders.RANK_64)}
    assert all(colours(axes) == expected for axes in figure.axes)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(expected)


def test_fewer_threads_are_dashed():
    figure = operator.picture(operator_rows("dense", "spm", threads=(1, 2)))
    styles = {line.get_label(): line.get_linestyle() for line in figure.axes[0].lines}
    assert styles["SPM, 2 threads"] == "-"
    assert styles["SPM, 1 thread"] == "--"


def test_a_step_has_the_colours_of_the_page():
    rows = [
        {"experiment": "teacher", "width": 64, "layer": layer, **times(1.0)} for layer in ("dense", "spm", "lowrank")
    ]
    (axes,) = steps.picture(rows).axes
    assert axes.get_title("left") == "Compositional teacher"
    assert colours(axes) == {one.label: one.color for one in (contenders.DENSE, contenders.SPM, contenders.LOW_RANK)}


def test_the_style_is_that_of_the_page_and_matplotlib_is_left_alone():
    rows = [{"n": n, "threads": 1, "train": times(n / 100), "exponent": 1.0} for n in (64, 128)]
    with mpl.rc_context({"axes.spines.top": True}):
        (axes,) = operator_scaling.picture(rows).axes
        assert mpl.rcParams["axes.spines.top"]
    assert axes.spines["top"].get_visible() == STYLE["axes.spines.top"]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_published_results_can_be_drawn(name, pytestconfig):
    path = pytestconfig.rootpath / "results" / f"{name}.json"
    if not path.exists():
        pytest.skip("not measured yet")
    rows = results.load(path)["rows"]
    assert as_file(BENCHMARKS[name].picture(rows), "png").startswith(b"\x89PNG")
