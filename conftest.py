"""Examples in README and docs are tests, random numbers are the same in every run, `--target` chooses the kernels."""

import random

import numpy as np
import pytest
import torch
from hypothesis import settings
from sybil import Document, Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

torch.set_num_threads(1)  # the tests themselves run two at a time
settings.register_profile("the same in every run", derandomize=True, deadline=None)
settings.load_profile("the same in every run")


def seed_everything():
    """Start all random numbers anew, so that no test depends on those that ran before it."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - tests have generators of their own, but libraries may not
    random.seed(0)


@pytest.fixture(autouse=True)
def _the_same_random_numbers():
    seed_everything()


class Page(Document):
    """Its examples build on each other: the process that runs one has run all those before it."""

    last = -1

    def evaluate(self, example, evaluator):
        """Evaluate what comes before the example too, if another process got it."""
        for each in self.examples():
            if self.last < each.start <= example.start:
                self.last = each.start
                seed_everything()
                super().evaluate(each, each.region.evaluator)


pytest_collect_file = Sybil([PythonCodeBlockParser()], patterns=["*.md"], document_types={".md": Page}).pytest()


def pytest_addoption(parser):
    """Add `--target`."""
    parser.addoption(
        "--target", help="the instruction set to test; without it, the best one and all others where they differ"
    )


def pytest_configure(config):
    """Run the kernels of `--target`, in every worker."""
    name = config.getoption("--target")
    if name is None:
        return
    from pairmix import _kernels

    if name not in _kernels.targets():
        raise pytest.UsageError(f"--target must be one of {_kernels.targets()} on this machine, got {name!r}")
    _kernels.use_target(name)
