"""A few of the results of fuzz_results.py, which makes thousands."""

import fuzz_results
import pytest


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_a_result_with_something_wrong_is_a_page_or_a_sentence(tmp_path, first):
    answers = [fuzz_results.check(seed, tmp_path / str(seed)) for seed in range(first, first + 20)]
    assert set(answers) == {"page", "refused"}


def test_what_is_wrong_is_decided_by_the_seed():
    texts = [fuzz_results.make_text(seed) for seed in range(50)]
    assert texts == [fuzz_results.make_text(seed) for seed in range(50)]
    assert len(set(texts)) == 50


def test_a_report_that_trusts_everything_is_found_out(tmp_path, monkeypatch):
    monkeypatch.setattr("pairmix_lab.report.schema.check", lambda run, path, kinds: None)
    problems = []
    for seed in range(60):
        try:
            fuzz_results.check(seed, tmp_path / str(seed))
        except Exception as error:
            problems.append(error)
    assert problems
