import csv
from dataclasses import replace
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from oracle import assert_agrees
from pairmix_lab import cli, contenders, results
from pairmix_lab.bench import steps
from pairmix_lab.bench.steps import Config
from pairmix_lab.contenders import REST
from pairmix_lab.experiments import EXPERIMENTS
from pairmix_lab.experiments.language_models import LanguageModel, TorchRNN

MORE_STAGES = ("spm-24-stages", "spm-48-stages")
LIMITS = {"dense_up_to": 8, "seconds": 0.0, "threads": (1,)}


def tiny(teacher=(), agnews=(), shakespeare=(), gpt=(), **settings):
    """Small widths of each experiment."""
    widths = {"teacher": teacher, "agnews": agnews, "shakespeare": shakespeare, "gpt": gpt}
    cases = {name: replace(one, widths=widths.get(name, ())) for name, one in steps.all_cases().items()}
    cases["shakespeare"] = replace(cases["shakespeare"], settings={"cell": "rnn", **settings})
    cases["gpt"] = replace(cases["gpt"], settings={"depth": 1, "length": 8} if gpt else {})
    return {"cases": cases, **LIMITS}


TINY = tiny(teacher=(8,), agnews=(8, 16), shakespeare=(16,))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Some data of both kinds."""
    monkeypatch.setenv("PAIRMIX_CACHE", str(tmp_path / "cache"))
    for name in ("agnews", "shakespeare"):
        (tmp_path / name).mkdir()
    for name in ("train.csv", "test.csv"):
        with (tmp_path / "agnews" / name).open("w", newline="") as file:
            csv.writer(file).writerows((number % 4 + 1, f"word{number}", "more") for number in range(40))
    (tmp_path / "shakespeare" / "input.txt").write_bytes(bytes(range(256)) * 10)
    return tmp_path


def test_rows(folder):
    rows = list(steps.run(Config(**TINY), folder))
    assert [(row["experiment"], row["width"], row["layer"]) for row in rows] == [
        *(("teacher", 8, layer) for layer in ("dense", "spm", "lowrank", REST.key)),
        *(("agnews", 8, layer) for layer in ("dense", "spm", "lowrank", "softmax", REST.key)),
        *(("agnews", 16, layer) for layer in ("spm", "lowrank", "softmax", REST.key)),
        *(("shakespeare", 16, layer) for layer in ("spm", "lowrank", *MORE_STAGES, "torch.nn.RNN")),
    ]
    for row in rows:
        assert row.keys() >= {"threads", "impl", "batch", "samples", "ms", "ms_iqr"}
        assert row["ms_iqr"][0] <= row["ms"] <= row["ms_iqr"][1]
        assert row["ms"] > 0
        assert ("update" in row) == (row["layer"] == "spm")
        assert row["batch"] == (32 if row["experiment"] == "shakespeare" else 256)
        assert ("speedup" in row) == (row["width"] <= 8)
        assert row["layer"] != "dense" or row["speedup"] == 1
        assert row.get("cell") == ("rnn" if row["experiment"] == "shakespeare" else None)


@pytest.mark.parametrize("cell", ["gru", "attention"])
def test_only_the_elman_cell_is_compared_with_torchs(folder, cell):
    config = Config(**{**tiny(shakespeare=(64,), cell=cell), "dense_up_to": 64})
    rows = list(steps.run(config, folder))
    assert [(row["layer"], row["cell"]) for row in rows] == [
        (layer, cell) for layer in ("dense", "spm", "lowrank", *MORE_STAGES)
    ]


def test_models_of_the_gpt_in_which_some_maps_are_dense_are_timed_too(folder):
    rows = list(steps.run(Config(**{**tiny(gpt=(64,)), "dense_up_to": 64}), folder))
    layers = ["dense", "spm", "companion", "lowrank", "monarch", "spm-dense-attention", "spm-dense-feed-forward"]
    assert [row["layer"] for row in rows] == layers
    assert {row["batch"] for row in rows} == {8}
    assert [line[2] for line in steps.table(rows)[-2:]] == ["SPM, dense attention", "SPM, dense feed-forward"]


def test_every_layer_takes_the_same_batch(folder, monkeypatch):
    seen = []

    def timed(model, optimizer, inputs, labels, lr, clip):
        seen.append((len(model), inputs, labels))

    monkeypatch.setattr(steps, "timed_step", timed)
    list(steps.run(Config(**tiny(teacher=(8,)))))
    _, first, first_labels = seen[0]
    assert all(inputs.data_ptr() == first.data_ptr() and labels is first_labels for _, inputs, labels in seen)
    # Without the layer the gradient of what it would have given is still computed.
    assert {(modules, inputs.requires_grad) for modules, inputs, _ in seen} == {(3, False), (2, True)}


def test_torchs_rnn_is_the_dense_model():
    torch.manual_seed(0)
    ours, theirs = LanguageModel(partial(contenders.make, "dense", 7), 7, "rnn"), TorchRNN(7)
    theirs.load_state_dict(
        {
            "rnn.weight_ih_l0": ours.table.weight.T,
            "rnn.bias_ih_l0": torch.zeros(7),
            "rnn.weight_hh_l0": ours.mixer.u.weight,
            "rnn.bias_hh_l0": ours.mixer.u.bias,
            "head.weight": ours.head.weight,
            "head.bias": ours.head.bias,
        }
    )
    text = torch.randint(256, (3, 9))
    result = ours(text)
    assert_agrees(result, lambda dtype: theirs.to(dtype)(text))


def test_summary():
    def row(layer, ms, width=8, **more):
        return {"experiment": "teacher", "width": width, "threads": 2, "layer": layer, "ms": ms, **more}

    times = [row("dense", 8.0, speedup=1.0), row("spm", 2.0, speedup=4.0), row(REST.key, 0.5, speedup=16.0)]
    header, both, alone = steps.summary([*times, row("spm", 3.0, width=1024), row("lowrank", 5.0, width=1024)])
    assert dict(zip(header, both, strict=True)) == {
        **{"experiment": "Compositional teacher", "n": "8", "dense, ms": "8.00", "low rank": "-", "SPM": "2.00"},
        **{"all but the layer": "0.500", "**dense / SPM**": "**4.00**"},
    }
    assert alone == ["Compositional teacher", "1,024", "-", "5.00", "3.00", "-", "-"]


def command(*arguments):
    return CliRunner().invoke(cli.app, ["bench", "steps", *map(str, arguments)])


def test_command(folder, monkeypatch):
    monkeypatch.setattr(steps, "Config", partial(Config, **TINY))
    result = command("--data", folder, "--out", folder, "--seconds", 0, "--threads", 1)
    assert result.exit_code == 0, result.output
    saved = results.load(folder / "steps.json")
    assert saved["config"] == {
        **{"experiment": "steps", "keep_memory": False, "cell": "rnn", "dense_up_to": 8, "seconds": 0, "threads": [1]},
        **{"teacher_widths": [8], "agnews_widths": [8, 16], "shakespeare_widths": [16], "gpt_widths": []},
        **{"adapters_widths": [], "base_steps": 0},
    }
    assert {row["experiment"] for row in saved["rows"]} == {"teacher", "agnews", "shakespeare"}
    assert (folder / "steps.png").read_bytes().startswith(b"\x89PNG")
    assert "torch.nn.RNN" in result.output


def test_one_experiment_alone(folder, monkeypatch):
    monkeypatch.setattr(steps, "Config", partial(Config, **TINY))
    result = command("--experiment", "teacher", "--out", folder, "--seconds", 0)
    assert result.exit_code == 0, result.output
    assert not (folder / "steps.json").exists()
    saved = results.load(folder / "steps-teacher.json")
    assert {row["experiment"] for row in saved["rows"]} == {"teacher"}
    result = command(
        "--experiment", "teacher", "--layers", "spm,lowrank", "--widths", "6", "--out", folder, "--seconds", 0
    )
    assert result.exit_code == 0, result.output
    saved = results.load(folder / "steps-teacher.json")
    assert [(row["layer"], row["width"]) for row in saved["rows"]] == [
        (layer, 6) for layer in ("spm", "lowrank", REST.key)
    ]
    alone = command("--layers", "spm", "--out", folder)
    assert alone.exit_code == 2
    assert "--layers and --widths are of one --experiment" in " ".join(alone.output.split())
    wrong = command("--experiment", "cifar", "--out", folder)
    assert wrong.exit_code == 2
    assert "got 'cifar'" in wrong.output


@pytest.mark.parametrize("flag", [(), ("--keep-memory",)])
def test_freed_memory_is_kept_only_if_asked_for(folder, monkeypatch, flag):
    calls = []
    monkeypatch.setattr(cli.bench.allocator, "keep_freed_memory", lambda: calls.append("kept"))
    monkeypatch.setattr(steps, "Config", partial(Config, **tiny(teacher=(8,))))
    assert command("--out", folder, "--seconds", 0, *flag).exit_code == 0
    assert len(calls) == len(flag)
    assert results.load(folder / "steps.json")["config"]["keep_memory"] == bool(flag)


def test_without_the_data_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "Config", partial(Config, **tiny(agnews=(8, 16), shakespeare=(16,))))
    result = command("--data", tmp_path, "--out", tmp_path, "--seconds", 0)
    assert result.exit_code == 1
    assert "pass --data DIR" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [("--seconds", "-1"), ("--threads", "0")])
def test_bad_arguments(arguments):
    result = command(*arguments)
    assert result.exit_code == 2
    assert f"got {arguments[1]}" in result.output.replace("'", "")


def test_update_with_one_parameter_a_layer(folder):
    teacher = next(one for one in EXPERIMENTS if one.name == "teacher")
    task = teacher.task(teacher.config(layer="spm", width=8), folder)
    model = task.build()
    groups = task.groups(model)
    merged = steps._one_for_each_layer(model, groups)

    def numbers(groups):
        return [(group["lr_scale"], sum(parameter.numel() for parameter in group["params"])) for group in groups]

    assert numbers(merged) == numbers(groups)
    assert [len(group["params"]) for group in groups] == [4, 1, 1]  # coeffs, d_in, d_out and bias; the head's two
    assert [len(group["params"]) for group in merged] == [1, 1, 1]


def test_only_the_update_that_is_called_so_is_not_fused(folder, monkeypatch):
    fused = []

    def measured(calls, *arguments, **options):
        if steps.NOT_FUSED in calls:
            fused.extend(call.__self__.param_groups[0]["fused"] for call in calls.values())
        return {name: {0: 1.0, 1: 1.0} for name in calls}

    monkeypatch.setattr(steps, "interleaved", measured)
    list(steps.run(Config(**tiny(teacher=(8,))), folder))
    assert fused == [True, True, None]


def test_table_of_updates():
    times = {
        steps.AS_THEY_ARE: {"ms": 0.08, "ms_iqr": [0.07, 0.09]},
        steps.NOT_FUSED: {"ms": 0.2, "ms_iqr": [0.1, 0.3]},
        steps.ONE_EACH: {"ms": 0.06, "ms_iqr": [0.05, 0.07]},
    }
    row = {"experiment": "teacher", "width": 256, "threads": 2, "ms": 0.5}
    _, line = steps.updates([{**row, "layer": "dense"}, {**row, "layer": "spm", "update": times}])
    assert line[2:] == ["0.500", "80.0 (70.0 to 90.0)", "200 (100 to 300)", "60.0 (50.0 to 70.0)", "4.0%"]
