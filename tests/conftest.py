import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)  # the tests themselves run two at a time


def pytest_addoption(parser):
    parser.addoption("--data", type=Path, help="the folder with agnews/ and shakespeare/, for tests of the real data")


@pytest.fixture(scope="session")
def data_folder(request):
    folder = request.config.getoption("--data")
    if folder is None:
        pytest.skip("needs the real data: pytest --data=DIR")
    return folder
