import runpy
from pathlib import Path

import pytest

fill_tables = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "fill_tables.py"))


def test_every_name_is_of_one_table():
    names = fill_tables["names"]()
    assert len(set(names)) == len(names)
    assert {
        "init",
        "init-rates",
        "operator-summary",
        "modules-attention",
        "steps",
        "teacher-lr",
        "shakespeare-steps",
    } <= set(names)


def test_an_unknown_name_is_an_error():
    with pytest.raises(ValueError, match=r"no table 'teacher-acuracy'; there are teacher-accuracy, "):
        fill_tables["filled"]("<!-- table: teacher-acuracy -->\n<!-- end -->")


@pytest.mark.parametrize("name", fill_tables["names"]())
def test_a_table_without_results_says_so(tmp_path, name):
    fill_tables["table"].__globals__["ROOT"], root = tmp_path, fill_tables["ROOT"]
    try:
        page = fill_tables["filled"](f"before\n<!-- table: {name} -->\nold\n<!-- end -->\nafter\n")
    finally:
        fill_tables["table"].__globals__["ROOT"] = root
    assert page == f"before\n<!-- table: {name} -->\nNot measured yet.\n<!-- end -->\nafter\n"
