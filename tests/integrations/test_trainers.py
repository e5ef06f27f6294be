"""SPM layers in the training loops of others: Lightning, accelerate, PEFT, and torch's Muon."""

import warnings

import pytest
import torch
from torch import nn

import pairmix
from pairmix import SPMLinear

lightning = pytest.importorskip("lightning")
accelerate = pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")
lora = pytest.importorskip("peft.tuners.lora")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.head = SPMLinear(16, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.head(torch.relu(self.mix(x)))


def rows(count=64):
    x = torch.randn(count, 16)
    return torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.losses = Model(), []
        self.example_input_array = torch.randn(4, 16)

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, _):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(pairmix.param_groups(self, lr=1e-2))


@pytest.mark.filterwarnings("ignore")
class TestLightning:
    def trainer(self, folder, epochs):
        return lightning.Trainer(
            default_root_dir=folder, max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip

    def test_it_trains_saves_and_resumes(self, tmp_path):
        module, loader = Module(), torch.utils.data.DataLoader(rows(), batch_size=16)
        trainer = self.trainer(tmp_path, 3)
        trainer.fit(module, loader)
        assert module.losses[-1] < module.losses[0]
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        resumed = Module()
        self.trainer(tmp_path, 4).fit(resumed, loader, ckpt_path=tmp_path / "last.ckpt")
        assert len(resumed.losses) == 4
        loaded = Module.load_from_checkpoint(tmp_path / "last.ckpt")
        x = torch.randn(3, 16)
        torch.testing.assert_close(loaded(x), module(x))

    def test_the_summary_counts_parameters_and_operations(self):
        summary = lightning.pytorch.utilities.model_summary.ModelSummary(Module(), max_depth=2)
        layer = Module().model.mix
        assert sum(parameter.numel() for parameter in layer.parameters()) in summary.param_nums
        assert summary.total_flops == 2 * 4 * (layer.multiply_adds + 16 * 2)  # of both layers, for four rows


@pytest.mark.filterwarnings("ignore")
def test_accelerate_prepares_and_saves(tmp_path):
    accelerator = accelerate.Accelerator(cpu=True)
    model = Model()
    optimizer = torch.optim.AdamW(pairmix.param_groups(model, lr=1e-2))
    loader = torch.utils.data.DataLoader(rows(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
    accelerator.save_state(tmp_path)
    x = torch.randn(3, 16)
    before = model(x)
    with torch.no_grad():
        model.mix.coeffs.zero_()
    accelerator.load_state(tmp_path)
    torch.testing.assert_close(model(x), before)


class SPMWithLoRA(lora.Linear):
    """As in docs/integrations.md."""

    def merge(self, *args, **kwargs):
        raise NotImplementedError("a low-rank map cannot be merged into the stages of an SPM layer")


class TestLoRA:
    @pytest.mark.filterwarnings("ignore:Unsupported layer type .*SPMLinear")
    def test_a_map_of_low_rank_beside_a_frozen_layer(self):
        config = peft.LoraConfig(target_modules=["mix"], r=2)
        with pytest.raises(ValueError, match="Target module SPMLinear"):
            peft.get_peft_model(Model(), config)
        config._register_custom_module({SPMLinear: SPMWithLoRA})
        plain = Model()
        x = torch.randn(3, 16)
        before = plain(x)
        model = peft.get_peft_model(plain, config)
        torch.testing.assert_close(model(x), before)
        model(x).sum().backward()
        assert {name.split(".")[-3] for name, one in model.named_parameters() if one.requires_grad} == {
            "lora_A",
            "lora_B",
        }
        with pytest.raises(NotImplementedError, match="cannot be merged"):
            model.merge_adapter()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_for_matrices_and_adam_for_the_rest():
    model = nn.Sequential(SPMLinear(16, 16), nn.Linear(16, 16), nn.Linear(16, 2))
    groups = pairmix.param_groups(model, lr=1e-2)
    matrices = [one for group in groups if group["name"] == "matrices" for one in group["params"]]
    others = [group for group in groups if group["name"] != "matrices"]
    optimizers = [torch.optim.Muon(matrices, lr=2e-2), torch.optim.AdamW(others)]
    (x, y), losses = next(iter(torch.utils.data.DataLoader(rows(), batch_size=64))), []
    for _ in range(20):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    with warnings.catch_warnings(), pytest.raises(ValueError, match="2D"):
        torch.optim.Muon(model.parameters())
