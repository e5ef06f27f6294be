import pytest

import plain_rnn


@pytest.fixture(params=plain_rnn.NETWORKS)
def cell(request):
    return request.param
