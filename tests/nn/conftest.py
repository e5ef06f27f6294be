import pytest
import torch

import plain_rnn


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=plain_rnn.NETWORKS)
def cell(request):
    return request.param
