"""The results that are kept have the names of their runs: `make reproduce` would leave them as they are."""

from pathlib import Path

import pytest

from pairmix_lab import results
from pairmix_lab.experiments import EXPERIMENTS

FOLDER = Path(__file__).parents[3] / "results"


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_a_stored_result_has_the_name_of_its_run(experiment):
    for path in FOLDER.glob(f"{experiment.name}*/**/*.json"):
        config = experiment.config(**experiment.completed(results.load(path)["config"]))
        assert path.stem == config.name, path
