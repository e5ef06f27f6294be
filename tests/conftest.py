from pathlib import Path

import pytest

from kernels import running
from pairmix import _kernels


def pytest_addoption(parser):
    parser.addoption("--data", type=Path, help="the folder with agnews/ and shakespeare/, for tests of the real data")


@pytest.fixture(scope="session")
def data_folder(request):
    folder = request.config.getoption("--data")
    if folder is None:
        pytest.skip("needs the real data: pytest --data=DIR")
    return folder


@pytest.fixture(scope="session")
def targets(request):
    """All instruction sets to test, for a test that runs them one after the other."""
    return chosen_targets(request.config)


@pytest.fixture
def target(request):
    """An instruction set whose kernels are in use: the test runs once for each."""
    with running(request.param):
        yield request.param


@pytest.fixture
def impl(build):
    """An implementation: the test runs once for each, and for the kernels once for each instruction set."""
    name, _, target = build.partition(" ")
    with running(target or _kernels.target()):
        yield name


def pytest_generate_tests(metafunc):
    targets = chosen_targets(metafunc.config)
    if "target" in metafunc.fixturenames:
        metafunc.parametrize("target", targets, indirect=True)
    if "build" in metafunc.fixturenames:
        metafunc.parametrize("build", ["reference", *(f"cpu {target}" for target in targets)])


def chosen_targets(config):
    only = config.getoption("--target")
    return _kernels.targets() if only is None else [only]
