import csv
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from small_runs import assert_same, stop_at
from synthetic import step_time, steps
from typer.testing import CliRunner

from pairmix_lab import cli
from pairmix_lab.bench import steps as bench_steps
from pairmix_lab.experiments import adapters_task
from pairmix_lab.experiments.adapters import EXPERIMENT, RATES
from pairmix_lab.experiments.adapters_task import LAYERS, Config, Task, base_model, trained, training_bytes
from pairmix_lab.training.loop import train

pytest.importorskip("peft")

SMALL = {"width": 64, "depth": 1, "length": 16, "batch": 4, "steps": 3, "base_steps": 2, "validation_batches": 2}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A play, and news of a hundred items; the current folder, and that of what is computed once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PAIRMIX_CACHE", str(tmp_path / "cache"))
    adapters_task._untuned.cache_clear()
    for name in ("agnews", "shakespeare"):
        (tmp_path / "data" / name).mkdir(parents=True)
    (tmp_path / "data" / "shakespeare" / "input.txt").write_bytes(b"To be, or not to be. " * 80)
    with (tmp_path / "data" / "agnews" / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows((1, f"title {number}", f"description {number}") for number in range(100))
    return tmp_path


@pytest.fixture
def make(folder):
    return lambda **options: Task(Config(**{**SMALL, **options}), folder / "data")


def bases(folder):
    return sorted((folder / "cache" / "bases").iterdir())


@pytest.mark.parametrize("layer", LAYERS)
def test_what_is_trained_learns_and_the_rest_stays(make, folder, layer):
    task = make(layer=layer, steps=15, lr=3e-2 if layer != "full" else 3e-3)
    base = base_model(task.config, folder / "data")
    model, (text, _) = task.build(), task.batch(1)
    torch.testing.assert_close(model(text), base(text))

    result = train(task)
    before, after = (set_of(model) for model in (base, result.model))
    if layer == "full":
        assert not before & after
    else:
        assert before <= after
    assert result.outcome["valid_bpc"] < result.outcome["untuned_bpc"] - 0.03


def set_of(model):
    """The values of all matrices, to find those that are the same in another model."""
    return {tuple(parameter.flatten().tolist()) for parameter in model.parameters() if parameter.numel() > 1000}


@pytest.mark.parametrize("layer", ["rotations", "boft", "oft"])
def test_a_stopped_run_resumes(make, tmp_path, layer):
    expected = train(make(layer=layer, steps=4))
    stop_at(2, make(layer=layer, steps=4), tmp_path / "run")
    assert_same(train(make(layer=layer, steps=4), tmp_path / "run", resume=True), expected)


@pytest.mark.parametrize(("stages", "angles"), [(None, 3 * 6 * 32 + 8 * 128), (4, 4 * (3 * 32 + 128))])
def test_the_others_have_about_the_size_of_rotations(make, stages, angles):
    def size(layer):
        return sum(parameter.numel() for parameter in trained(make(layer=layer, stages=stages, base_steps=0).build()))

    assert size("rotations") == angles
    for layer in ("lora", "oft", "boft"):
        assert 0.5 < size(layer) / angles < 2, layer


def test_the_base_is_trained_once(make, folder, monkeypatch):
    make().build()
    (path,) = bases(folder)
    assert path.name.startswith("shakespeare-dense-64-depth1-length16-2steps-seed0-")
    monkeypatch.setattr(adapters_task, "train", None)
    first, second = make(layer="lora").build(), make(layer="full").build()
    matrices = [next(iter(model.blocks)).up.weight for model in (first, second)]
    assert torch.equal(*matrices)
    assert not torch.equal(make(base_steps=0).build().blocks[0].up.weight, matrices[0])


def test_what_the_base_learned_makes_it_another(make, folder):
    make().build()
    make(base_seed=1).build()
    (folder / "data" / "shakespeare" / "input.txt").write_bytes(b"Words, words, words. " * 80)
    make().build()
    assert len(bases(folder)) == 3


def test_a_damaged_base(make, folder):
    make().build()
    (path,) = bases(folder)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="is damaged; without it the base model is trained again"):
        make().build()


def test_rotations_need_no_more_memory_than_lora_of_their_size(make):
    sizes = {}
    for layer in ("rotations", "lora", "boft", "full"):
        task = make(layer=layer, base_steps=0)
        sizes[layer] = training_bytes(task.build(), task.batch(1))
    assert sizes["rotations"] <= sizes["lora"] < sizes["full"]
    assert sizes["rotations"] < sizes["boft"]


def test_only_rotations_and_lora_have_stages():
    chosen = [(config.layer, config.stages, config.lr) for config in EXPERIMENT.configs()]
    sized = [(layer, stages, RATES[layer]) for layer in ("rotations", "lora") for stages in (None, 4, 16)]
    assert sorted(chosen, key=str) == sorted(
        [*sized, *((layer, None, RATES[layer]) for layer in ("oft", "boft", "full"))], key=str
    )
    assert {config.lr for config in EXPERIMENT.configs(lr=0.5)} == {0.5}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 100}, "width must be a multiple of 64"),
        ({"layer": "dense"}, "layer must be one of .* got 'dense'"),
        ({"text": "poems"}, "text must be one of"),
        ({"base_steps": -1}, "base_steps must be at least 0, got -1"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Config(**settings)


def test_without_peft(make, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ValueError, match=r"lora is of PEFT: pip install 'pairmix\[integrations\]'"):
        make(layer="lora").build()


def test_the_command_and_its_report(folder):
    def run(command):
        result = CliRunner().invoke(cli.make_app(), shlex.split(command))
        assert result.exit_code == 0, result.output
        return " ".join(re.sub("[│╭╮╰╯─┃━]", " ", result.output).split())

    said = run(
        "train adapters --data data --widths 64 --depth 1 --length 16 --batch 4 --steps 3 --base-steps 2 "
        "--layers rotations,lora,full --stages own,4 --seeds 0,1 --lrs 0.01"
    )
    assert "bits a byte" in said
    assert len(list(Path("runs/adapters").rglob("*.json"))) == 5 * 2
    table = EXPERIMENT.table("adapters", Path("runs"))
    assert [line[1] for line in table] == [
        *("trained", "no fine-tuning", "full fine-tuning", "SPM rotations", "SPM rotations, 4 stages"),
        *("LoRA", "LoRA, size of 4 stages"),
    ]
    assert [line[3] for line in table[2:]] == ["2"] * 5
    run("report runs/adapters -o report.html --pictures pictures")
    assert {path.stem for path in Path("pictures").iterdir()} == {
        *("adapters-64", "adapters-64-loss-by-step", "adapters-64-loss-by-seconds")
    }
    stored = json.loads(next(Path("runs/adapters").rglob("rotations-64*.json")).read_text())
    assert stored["outcome"]["trained_parameters"] == 3 * 6 * 32 + 8 * 128


def test_steps_are_timed_without_a_trained_base(folder):
    cases = bench_steps.all_cases()["adapters"]
    small = bench_steps.StepCases(
        (64,), ("rotations", "lora"), {**cases.settings, "depth": 1, "length": 16, "batch": 4}, others=cases.others
    )
    config = bench_steps.Config(cases={"adapters": small}, seconds=0, threads=(1,))
    rows = list(bench_steps.run(config, folder / "data"))
    names = [
        "rotations",
        "lora",
        *(f"{layer}-{stages}" for layer in ("rotations", "lora") for stages in (4, 16)),
    ]
    assert [row["layer"] for row in rows] == names
    labels = [line[2] for line in bench_steps.table(rows)[1:]]
    assert labels[:3] == ["SPM rotations", "LoRA", "SPM rotations, 4 stages"]
    assert not (folder / "cache").exists()


def test_step_times_stand_beside_those_of_lora_of_the_same_size(tmp_path):
    rows = [
        step_time("adapters", layer, ms, batch=8)
        for layer, ms in (("rotations", 60.0), ("lora", 80.0), ("rotations-4", 50.0), ("lora-4", 100.0))
    ]
    assert EXPERIMENT.table("adapters-steps", tmp_path) is None
    (tmp_path / "steps-adapters.json").write_text(json.dumps(steps(*rows)))
    table = EXPERIMENT.table("adapters-steps", tmp_path)
    assert [line[-1] for line in table[1:]] == ["0.750", "1.00", "0.500", "1.00"]
    assert table[1][2] == "60.0 (54.0 to 66.0)"
