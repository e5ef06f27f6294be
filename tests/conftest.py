from pathlib import Path

import pytest
import torch

from kernels import running, using
from pairmix import _kernels, ops


def pytest_addoption(parser):
    parser.addoption("--data", type=Path, help="the folder with agnews/ and shakespeare/, for tests of the real data")
    parser.addoption("--aoti", action="store_true", help="also compile with AOTInductor, which takes minutes")
    parser.addoption("--impl", help="the implementation to test; without it, all that take CPU tensors")


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


@pytest.fixture(scope="session")
def builds(request):
    """All implementations to test, the kernels once for each instruction set, for `kernels.using`."""
    return chosen_builds(request.config)


@pytest.fixture
def impl(implementation):
    """The name of an implementation: the test runs once for each of `builds`."""
    with using(implementation) as name:
        yield name


def pytest_generate_tests(metafunc):
    if "target" in metafunc.fixturenames:
        metafunc.parametrize("target", chosen_targets(metafunc.config), indirect=True)
    if "implementation" in metafunc.fixturenames:
        metafunc.parametrize("implementation", chosen_builds(metafunc.config))
    if "impl_name" in metafunc.fixturenames:
        metafunc.parametrize("impl_name", chosen_impls(metafunc.config))


def chosen_targets(config):
    only = config.getoption("--target")
    return _kernels.targets() if only is None else [only]


def chosen_impls(config):
    only = config.getoption("--impl")
    if only not in (None, *ops.IMPLS):
        raise pytest.UsageError(f"--impl must be one of {list(ops.IMPLS)}, got {only!r}")
    if only is not None:
        return [only]
    return [name for name, impl in ops.IMPLS.items() if impl.why_not(torch.device("cpu")) is None]


def chosen_builds(config):
    """The implementations, the compiled kernels once for each instruction set."""
    builds = {name: [name] for name in chosen_impls(config)}
    if "cpu" in builds:
        builds["cpu"] = [f"cpu {target}" for target in chosen_targets(config)]
    return [build for group in builds.values() for build in group]


@pytest.fixture
def fused(monkeypatch):
    """The calls in which the compiled kernels computed a whole feed-forward block."""
    kernels = pytest.importorskip("pairmix._kernels")
    calls, real = [], kernels.feed_forward

    def counted(*arguments):
        y = real(*arguments)
        if y is not None:
            calls.append(arguments)
        return y

    monkeypatch.setattr(kernels, "feed_forward", counted)
    return calls


def pytest_collection_modifyitems(items):
    """Begin with the longest test, so that in the end no process waits for it alone."""
    items.sort(key=lambda item: item.name != "test_the_kernels_in_the_interpreter")
