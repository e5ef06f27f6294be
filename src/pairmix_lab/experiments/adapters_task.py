"""A trained GPT that learns another text: what of it is trained, and how it is judged."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as saved
from torch import Tensor, nn

from pairmix import Schedule, adapters
from pairmix_lab import contenders, files
from pairmix_lab.experiments import data, gpt, gpt_task
from pairmix_lab.experiments.texts import TextTask
from pairmix_lab.experiments.transformer import GPT, MAPS
from pairmix_lab.training import locks
from pairmix_lab.training.loop import Batch, train

TARGETS = list(MAPS)
OF_PEFT = tuple(one.key for one in (contenders.LORA, contenders.OFT, contenders.BOFT))
LAYERS = (contenders.ROTATIONS.key, *OF_PEFT, contenders.FULL.key)
MOST_VALIDATED = 50_000
"""Bytes of the validation part: with BOFT a forward takes as long as ten others."""


@dataclass(frozen=True, kw_only=True)
class Config(gpt_task.GPTConfig):
    """Fine-tuning of a GPT.

    Attributes:
        layer: what is trained, of `LAYERS`.
        base_text: what it has learned before.
        base_steps: in how many steps; 0 for a base with random weights, whose steps take as long.
        base_seed: which random start and which batches the base had.
        stages: of rotations, also of those whose size LoRA has; None for the fewest that reach everything.
    """

    experiment: str = "adapters"
    layer: str = contenders.ROTATIONS.key
    text: str = "agnews"
    base_text: str = "shakespeare"
    base_steps: int = 2000
    base_seed: int = 0
    steps: int = 500
    lr: float = 1e-2
    validate_every: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("layer", LAYERS)
        self._check_choice("base_text", gpt_task.TEXTS)
        for name in ("base_steps", "base_seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")

    @property
    def name(self) -> str:
        """What its files are called."""
        changed = {"depth": self.depth, "length": self.length, "base_steps": self.base_steps}
        shape = "".join(
            f"-{name.replace('_', '')}{value}" for name, value in changed.items() if value != getattr(Config, name)
        )
        return f"{self.kind}-{self.width}{shape}-{self.steps}steps-seed{self.seed}"

    @property
    def base(self) -> gpt_task.Config:
        """How the base was trained."""
        plain = gpt_task.Config(
            layer=contenders.DENSE.key, width=self.width, depth=self.depth, length=self.length, text=self.base_text,
            steps=max(1, self.base_steps), seed=self.base_seed,
        )  # fmt: skip
        return gpt.planned(plain, None, [], Path())


class Task(TextTask):
    """The base model, what is trained of it, and the new text."""

    def __init__(self, config: Config, folder: Path | None = None) -> None:
        self.folder = folder
        train, valid, self.label, self.data = gpt_task.read(config.text, folder)
        super().__init__(config, train, valid[:MOST_VALIDATED])

    def build(self) -> nn.Module:
        model = base_model(self.config, self.folder)
        torch.manual_seed(self.config.seed)  # whether or not the base had to be trained first
        tune(model, self.config.layer, self.config.stages)
        return model

    def conclude(self, model: nn.Module) -> dict[str, Any]:
        with torch.inference_mode(False), torch.enable_grad():
            memory = training_bytes(model, self.batch(1))
        return {
            **self.validate_all(model),
            "trained_parameters": sum(parameter.numel() for parameter in trained(model)),
            "training_bytes": memory,
            "untuned_bpc": _untuned(_alike(self.config), self.folder),
            "data": f"{self.label}, after {self.config.base_text}",
        }


def tune(model: GPT, layer: str, stages: int | None = None) -> None:
    """Freeze a model but for what is to be trained, which is added to it in place; before training it changes nothing.

    Args:
        model: whose maps are dense.
        layer: the key of the contender.
        stages: of rotations. All others but full fine-tuning have about their number of parameters.
    """
    sizes = [(one.in_features, one.out_features) for block in model.blocks for one in _maps(block)]
    budget = sum(_chain(taken, stages) for taken, _ in sizes)
    if layer == contenders.ROTATIONS.key:
        adapters.add(model, TARGETS, stages=stages)
    elif layer in OF_PEFT:
        _inject(model, layer, sizes, budget)


def base_model(config: Config, folder: Path | None = None) -> GPT:
    """The model that has learned the base text. It is trained the first time it is asked for, and kept."""
    base = config.base
    torch.manual_seed(base.seed)
    model = gpt_task.build(base)
    if config.base_steps:
        path = _trained_base(base, folder)
        try:
            model.load_state_dict(load_file(path))
        except (SafetensorError, RuntimeError) as error:
            raise ValueError(f"{path} is damaged; without it the base model is trained again: {error}") from error
    return model


def training_bytes(model: nn.Module, batch: Batch) -> int:
    """The bytes that a training step holds beside the weights when backward begins.

    That is what the forward keeps for it, and gradients and moments of what is trained.
    """
    kept: dict[int, int] = {}
    owned = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _graph = model(batch[0])  # as long as it is there, so is what it keeps: no two have the same address
    return sum(kept.values()) + sum(3 * parameter.nbytes for parameter in trained(model))


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _maps(block: nn.Module) -> list[nn.Linear]:
    found = [block.get_submodule(name) for name in MAPS]
    return [layer for layer in found if isinstance(layer, nn.Linear)]


def _chain(width: int, stages: int | None) -> int:
    """The angles of the rotations before a map."""
    return Schedule.butterfly(width, stages).stages * (width // 2)


def _inject(model: GPT, layer: str, sizes: list[tuple[int, int]], budget: int) -> None:
    """Put adapters of PEFT into the maps of a model: of the sizes that it offers, the one nearest to the budget."""
    try:
        import peft
    except ImportError as error:
        raise ValueError(f"{layer} is of PEFT: pip install 'pairmix[integrations]'") from error
    config: Any
    if layer == contenders.LORA.key:
        rank = _nearest(
            range(1, 1 + min(map(min, sizes))), lambda rank: sum(rank * sum(size) for size in sizes), budget
        )
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS)
    elif layer == contenders.OFT.key:
        block = _nearest(_BLOCKS, lambda block: sum(taken * (block - 1) // 2 for taken, _ in sizes), budget)
        config = peft.OFTConfig(r=0, oft_block_size=block, target_modules=TARGETS)
    else:
        block = _nearest(_BLOCKS, lambda block: sum(taken * block + given for taken, given in sizes), budget)
        config = peft.BOFTConfig(boft_block_size=block, target_modules=TARGETS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # BOFT says that there is no CUDA, without which it has one factor
        peft.inject_adapter_in_model(config, model)


_BLOCKS = (2, 4, 8, 16, 32, 64)


def _nearest(choices: Iterable[int], size: Callable[[int], int], budget: int) -> int:
    return min(choices, key=lambda choice: abs(math.log(size(choice) / budget)))


def _trained_base(base: gpt_task.Config, folder: Path | None) -> Path:
    """The file of a trained base, in the folder of what is computed once."""
    *_, hashes = gpt_task.read(base.text, folder)
    about = json.dumps({**asdict(base), **hashes}, sort_keys=True)
    path = data.cache() / "bases" / f"{base.name}-{hashlib.sha256(about.encode()).hexdigest()[:12]}.safetensors"
    if path.exists():
        return path
    run = path.with_suffix("")
    with locks.held(run):
        Console(stderr=True).print(f"Training the base model for {base.steps:,} steps, once: {path}", highlight=False)
        model = train(gpt_task.Task(base, folder), run, resume=True).model
        with files.atomic(path) as file:
            file.write(saved(dict(model.state_dict()), {"about": about}))
    shutil.rmtree(run, ignore_errors=True)
    return path


def _alike(config: Config) -> Config:
    """The same for all runs that have the same base and the same text."""
    return replace(config, layer=contenders.FULL.key, stages=None, lr=1.0, steps=1, warmup=0, seed=0)


@lru_cache(maxsize=8)
def _untuned(config: Config, folder: Path | None) -> float:
    """The bits per byte of the new text that the base needs."""
    with torch.inference_mode():
        return Task(config, folder).validate_all(base_model(config, folder))["valid_bpc"]
