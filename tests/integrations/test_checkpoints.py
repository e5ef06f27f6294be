"""Through every loader, a checkpoint gives the numbers that it was saved with, or an error before the first number."""

import copy
import json
import re
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcp_state_dict

from pairmix import Schedule, SPMLinear

accelerate = pytest.importorskip("accelerate")
lightning = pytest.importorskip("lightning")
safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

ANOTHER = r"the checkpoint is of another layer: schedule is Schedule.random\(n=8, stages=3, seed=0\) there"
RECIPE = Path(__file__).parents[2] / "docs" / "transformers.md"
X = torch.linspace(-1, 1, 16).reshape(2, 8)


class Model(lightning.LightningModule):
    def __init__(self, seed=0):
        super().__init__()
        self.seed = seed
        self.layers = nn.Sequential(SPMLinear(8, 8, schedule=Schedule.random(8, 3, seed=seed)), nn.Linear(8, 4))

    def forward(self, x):
        return self.layers(x)


def empty(model):
    with torch.device("meta"):
        return type(model)(model.seed)


def torch_file(saved, model, folder):
    torch.save(saved.state_dict(), folder / "model.pt")
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    return model


def assigned(saved, model, folder):
    model = empty(model)
    model.load_state_dict(saved.state_dict(), assign=True)
    return model


def safetensors_model(saved, model, folder):
    safetensors.save_model(saved, str(folder / "model.safetensors"))
    safetensors.load_model(model, str(folder / "model.safetensors"))
    return model


def accelerate_in_model(saved, model, folder):
    accelerate.Accelerator().save_model(saved, folder)
    accelerate.load_checkpoint_in_model(model, folder)
    return model


def accelerate_by_device(saved, model, folder):
    accelerate.Accelerator().save_model(saved, folder)
    accelerate.load_checkpoint_in_model(model, folder, device_map={"": "cpu"}, dtype=torch.float32)
    return model


def accelerate_dispatched(saved, model, folder):
    accelerate.Accelerator().save_model(saved, folder)
    return accelerate.load_checkpoint_and_dispatch(empty(model), folder, device_map={"": "cpu"})


def accelerate_from_disk(saved, model, folder):
    accelerate.Accelerator().save_model(saved, folder)
    there = {"layers.0": "disk", "layers.1": "cpu"}
    return accelerate.load_checkpoint_and_dispatch(
        empty(model), folder, device_map=there, offload_folder=folder / "offload", offload_buffers=True
    )


def accelerate_state(saved, model, folder):
    accelerator = accelerate.Accelerator()
    accelerator.prepare(saved)
    accelerator.save_state(folder)
    other = accelerate.Accelerator()
    other.prepare(model)
    other.load_state(folder)
    return model


def lightning_checkpoint(saved, model, folder):
    trainer = lightning.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", barebones=True)
    trainer.strategy.connect(saved)
    trainer.save_checkpoint(folder / "model.ckpt")
    return Model.load_from_checkpoint(folder / "model.ckpt", seed=model.seed)


def distributed_in_place(saved, model, folder):
    dcp.save({"model": saved.state_dict()}, checkpoint_id=folder)
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    return model


def distributed(saved, model, folder):
    dcp.save({"model": dcp_state_dict.get_model_state_dict(saved)}, checkpoint_id=folder)
    state = {"model": dcp_state_dict.get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=folder)
    dcp_state_dict.set_model_state_dict(model, state["model"])
    return model


LOADERS = [
    torch_file, assigned, safetensors_model, accelerate_in_model, accelerate_by_device, accelerate_dispatched,
    accelerate_from_disk, accelerate_state, lightning_checkpoint, distributed_in_place, distributed,
]  # fmt: skip


@pytest.mark.parametrize("load", LOADERS)
def test_the_right_one_gives_the_same_numbers(load, tmp_path):
    saved = Model()
    model = load(saved, Model(), tmp_path)
    assert model(X).equal(saved(X))
    assert model(X).equal(saved(X))


@pytest.mark.parametrize("load", LOADERS)
def test_a_wrong_one_gives_no_number(load, tmp_path):
    with pytest.raises(RuntimeError, match=ANOTHER):
        load(Model(0), Model(1), tmp_path)(X)


@pytest.fixture(scope="module")
def recipe():
    """The classes of the page on transformers."""
    (source, *_) = re.findall(r"```python\n(.*?)```", RECIPE.read_text(), re.DOTALL)
    module = types.ModuleType("recipe")
    exec(source, module.__dict__)
    return module


SIZES = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_inner": 24, "n_layer": 2, "n_head": 2}
IDS = torch.arange(8)[None]


class TestTransformers:
    @pytest.fixture
    def saved(self, recipe, tmp_path):
        """A model whose every number is random, in a folder."""
        config = recipe.SPMGPT2Config(**SIZES, eos_token_id=0, bos_token_id=0, spm={"schedule": "random", "stages": 5})
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.5)
        model.save_pretrained(tmp_path)
        return model

    @staticmethod
    def load(folder, **options):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()

    @staticmethod
    def change_config(folder, **changes):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    @staticmethod
    def drop(folder, *parts):
        """Remove tensors from the file."""
        path = folder / "model.safetensors"
        kept = {name: value for name, value in safetensors.load_file(path).items() if not name.endswith(parts)}
        safetensors.save_file(kept, path, metadata={"format": "pt"})

    def test_the_right_one_gives_the_same_numbers(self, recipe, saved, tmp_path):
        model = self.load(tmp_path)
        assert type(model) is recipe.SPMGPT2LMHeadModel
        assert (model.config.n_inner, model.config.spm) == (24, saved.config.spm)
        assert model(IDS).logits.equal(saved(IDS).logits)
        assert model.generate(IDS, max_new_tokens=4, do_sample=False).shape == (1, 12)
        half = self.load(tmp_path, dtype=torch.bfloat16).transformer.h[0].mlp.c_fc
        assert (half.coeffs.dtype, half.description.dtype) == (torch.bfloat16, torch.uint8)

    def test_another_schedule_is_an_error(self, saved, tmp_path):
        self.change_config(tmp_path, spm={"schedule": "brick", "stages": 5})
        model = self.load(tmp_path)
        for call in (model, torch.compile(model, backend="eager")):
            with pytest.raises(RuntimeError, match=r"another layer: schedule is Schedule.random.* there and .*brick"):
                call(IDS)

    def test_training_is_resumed(self, saved, tmp_path):
        def train(model, optimizer):
            model(IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        model = self.load(tmp_path)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        train(model, optimizer)
        model.save_pretrained(tmp_path / "later")
        resumed = self.load(tmp_path / "later")
        theirs = torch.optim.Adam(resumed.parameters(), 1e-2)
        theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(model, optimizer)
        train(resumed, theirs)
        assert resumed(IDS).logits.equal(model(IDS).logits)

    def test_what_is_missing_starts_as_the_layer_does(self, saved, tmp_path):
        first, second = saved.transformer.h[0].mlp.c_fc, saved.transformer.h[1].mlp.c_proj
        self.drop(tmp_path, "h.0.mlp.c_fc.coeffs", *(f"h.1.mlp.c_proj.{name}" for name in second.state_dict()))
        model = self.load(tmp_path)
        loaded, started = model.transformer.h[0].mlp.c_fc, model.transformer.h[1].mlp.c_proj
        for name, value in first.state_dict().items():
            assert loaded.state_dict()[name].equal(value) == (name != "coeffs"), name
        loaded.coeffs.data.abs_()
        torch.testing.assert_close(loaded.coeffs, torch.full_like(loaded.coeffs, 0.5**0.5))
        second.reset_parameters()
        for name in ("d_in", "d_out", "bias"):
            assert getattr(started, name).equal(getattr(second, name)), name
        assert model(IDS).logits.isfinite().all()

    def test_a_description_survives_what_is_initialised_beside_it(self, saved, tmp_path):
        self.drop(tmp_path, "h.0.mlp.c_fc.coeffs")
        self.change_config(tmp_path, spm={"schedule": "brick", "stages": 5})
        with pytest.raises(RuntimeError, match="the checkpoint is of another layer"):
            self.load(tmp_path)(IDS)

    @pytest.mark.parametrize("of_its_own", [False, True])
    def test_a_stock_class_is_an_error(self, saved, tmp_path, of_its_own):
        options = {"config": transformers.GPT2Config(**SIZES)} if of_its_own else {}
        message = "ignore_mismatched_sizes" if of_its_own else "load it with SPMGPT2LMHeadModel"
        for stock in (transformers.GPT2LMHeadModel, transformers.GPT2Model):
            with pytest.raises(Exception, match=message):
                stock.from_pretrained(tmp_path, **options)
