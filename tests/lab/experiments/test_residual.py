import math

import pytest
import torch

from pairmix.nn import SPMLinear
from pairmix.nn.init import INITS
from pairmix_lab.contenders import TRAINED, count_parameters
from pairmix_lab.experiments.residual import BRANCHES, Branch
from pairmix_lab.experiments.teacher import Config, Task
from pairmix_lab.training.loop import train

SMALL = {"model": "residual", "width": 32, "classes": 4, "batch": 64, "steps": 60, "lr": 1e-2}


def started(**options):
    torch.manual_seed(0)
    return Task(Config(**{**SMALL, **options})).build()


@pytest.mark.parametrize("layer", TRAINED)
def test_it_learns(layer):
    task = Task(Config(**SMALL, layer=layer, validate_every=60))
    first, *_, last = train(task).rows
    assert abs(first["valid_loss"] - math.log(4)) < 0.5  # a guess, so it starts well
    assert last["valid_loss"] < first["valid_loss"] - 0.1


@pytest.mark.parametrize("init", INITS)
def test_it_starts_no_worse_than_a_guess(init):
    model = started(init=init, width=256)
    x = torch.randn(512, 256)
    with torch.no_grad():
        assert model(x).std() < 0.7  # as that of a dense map of a normed input
        # Branches that are independent of what they are added to; those near the identity are not.
        assert 1 < model[0](x).std() < (2.1 if "identity" in init else 1.3)


def test_a_branch_is_added_to_its_input():
    branch = started()[0][0]
    x = torch.randn(3, 32)
    assert branch(x).equal(x + branch.down(branch.up(branch.norm(x)).relu()))


def test_the_layers_are_those_of_the_config():
    config = Config(**SMALL, init="hadamard", pairing="other", block="rotation")
    torch.manual_seed(0)
    task = Task(config)
    model = task.build()
    layers = [module for module in model.modules() if isinstance(module, SPMLinear)]
    assert len(layers) == 2 * BRANCHES == 6
    for branch in model[0]:
        assert isinstance(branch, Branch)
        for layer, gain in ((branch.up, 1), (branch.down, BRANCHES**-0.5)):
            assert (layer.block, layer.init) == ("rotation", "hadamard")
            assert layer.schedule == task.layer().schedule
            torch.testing.assert_close(layer.d_out, torch.full((32,), float(gain)))
    assert task.conclude(model)["mixer_parameters"] == count_parameters(model[0])


def test_its_files_have_names_of_their_own():
    plain = Config(width=32)
    assert Config(width=32, model="residual").name == f"residual-{plain.name}"
    assert Config.completed({"layer": "spm"})["model"] == plain.model
    with pytest.raises(ValueError, match=r"model must be one of .* got 'deep'"):
        Config(model="deep")
