import xml.etree.ElementTree as ElementTree

import matplotlib as mpl
import pytest
from synthetic import agnews, everything, shakespeare, step_time, steps, teacher

from pairmix_lab.contenders import CONTENDERS
from pairmix_lab.experiments import EXPERIMENTS, teacher_axis
from pairmix_lab.experiments.agnews import EXPERIMENT as AGNEWS
from pairmix_lab.experiments.agnews import pareto
from pairmix_lab.experiments.shakespeare import EXPERIMENT as SHAKESPEARE
from pairmix_lab.experiments.teacher import EXPERIMENT as TEACHER
from pairmix_lab.report import curves
from pairmix_lab.report.experiment import Case
from pairmix_lab.report.pictures import look


def labels(figure):
    return figure.axes[0].get_legend_handles_labels()[1]


def line(figure, label):
    (found,) = [line for line in figure.axes[0].lines if line.get_label() == label]
    return list(found.get_xdata()), list(found.get_ydata())


def test_accuracy_is_drawn_beside_the_papers(collected):
    runs = collected(*(teacher(accuracy=accuracy, seed=seed) for seed, accuracy in enumerate((0.8, 0.9))))
    figure = TEACHER.accuracy_picture(runs)
    assert labels(figure) == ["SPM", "dense, paper", "SPM, paper"]
    assert line(figure, "SPM") == ([256], [pytest.approx(0.85)])
    assert line(figure, "SPM, paper") == ([256, 512, 1024, 2048], [0.9941, 0.975, 0.9426, 0.8165])


def test_seconds_are_steps_times_their_time(collected):
    runs = collected(teacher(ms=5.0, steps=1000))
    case = Case("teacher", 256, 0.1)
    assert line(curves.loss(runs, TEACHER, case, "step"), "SPM")[0] == [1, 500, 1000]
    assert line(curves.loss(runs, TEACHER, case, "seconds"), "SPM")[0] == [0.005, 2.5, 5.0]


def test_only_validated_rows_have_a_validation_loss(collected):
    runs = collected(shakespeare(steps=400))
    assert line(curves.loss(runs, SHAKESPEARE, *runs.cases(SHAKESPEARE), "step"), "SPM")[0] == [1, 200, 400]


def test_uniform_angles_stand_at_the_right_end(collected):
    runs = collected(*(teacher(angle_std=angle) for angle in ("uniform", 0, 0.1, 0.2, 0.8)))
    axes = teacher_axis.picture(runs, teacher_axis.cases(TEACHER, runs)).axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0", "0.1", "0.2", "0.8", "uniform"]
    first, second, third, fourth, last = axes.get_xticks()
    assert [second - first, third - second, fourth - third, last - fourth] == pytest.approx([1, 1, 2, 1])


def test_the_front_is_what_nothing_beats():
    points = [(1, 0.5), (2, 0.4), (2, 0.7), (3, 0.7), (4, 0.9), (0.5, 0.1)]
    assert pareto(points) == [(0.5, 0.1), (1, 0.5), (2, 0.7), (4, 0.9)]


def test_the_frontier_names_every_width(collected):
    figure = AGNEWS.frontier(collected(agnews(width=2048, ms=2.0), agnews("dense", width=4096, ms=9.0)))
    assert [text.get_text() for text in figure.axes[0].texts] == ["4,096", "2,048"]
    assert line(figure, "SPM") == ([2.0], [0.9])


def test_every_contender_has_a_look_of_its_own():
    looks = [look(contender.label) for contender in CONTENDERS]
    assert len({(one["color"], one["marker"]) for one in looks}) == len(CONTENDERS)
    assert look("circulant")["color"]


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_pictures_are_drawings_and_the_same_every_time(collected, experiment):
    runs = collected(*(run for run in everything() if run["config"]["experiment"] in (experiment.name, "steps")))
    pictures = list(experiment.pictures(runs))
    assert len({picture.name for picture in pictures}) == len(pictures) >= 4
    assert all(picture.alt for picture in pictures)
    drawing = pictures[0].as_file("svg")
    assert ElementTree.fromstring(drawing).tag.endswith("svg")
    assert drawing == next(experiment.pictures(runs)).as_file("svg")


def test_matplotlib_is_left_as_it_was(collected):
    with mpl.rc_context({"axes.spines.top": True}):
        picture = next(TEACHER.pictures(collected(teacher())))
        picture.as_file("svg")
        assert not picture.figure.axes[0].spines["top"].get_visible()
        assert mpl.rcParams["axes.spines.top"]


def test_a_layer_that_was_only_timed_is_no_trouble(collected):
    runs = collected(agnews(), steps(step_time("agnews", "circulant", 1.0, width=512)))
    assert len(list(AGNEWS.pictures(runs))) == 5
