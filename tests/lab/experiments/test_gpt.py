import csv
import hashlib
import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import typer
from small_runs import assert_same, stop_at
from synthetic import step_time, steps
from torch.nn import functional as F
from typer.testing import CliRunner

from pairmix_lab import cli, results
from pairmix_lab.experiments import gpt_task
from pairmix_lab.experiments.gpt import EXPERIMENT, RATES, WIDTHS, rate
from pairmix_lab.experiments.gpt_task import LAYERS, Config, Task
from pairmix_lab.experiments.transformer import MAPS
from pairmix_lab.training.loop import train

PLAY = b"To be, or not to be. " * 80
SMALL = {"width": 64, "depth": 1, "length": 16, "batch": 4, "steps": 3, "validation_batches": 2}
ITEMS = [f"title {number} description {number}" for number in range(100)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A play, news of a hundred items, and times of some steps; the current folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("agnews", "shakespeare"):
        (tmp_path / "data" / name).mkdir(parents=True)
    (tmp_path / "data" / "shakespeare" / "input.txt").write_bytes(PLAY)
    write_news(tmp_path)
    write_times(tmp_path, step_time("gpt", "dense", 40.0, batch=8), step_time("gpt", "spm", 12.0, batch=8))
    return tmp_path


def write_news(folder, items=ITEMS):
    with (folder / "data" / "agnews" / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows((1, *item.split(" description ")) for item in items)


def write_times(folder, *rows):
    path = folder / "results" / "steps-gpt.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(steps(*rows)))


@pytest.fixture
def make(folder, monkeypatch):
    """A task on the small texts."""
    monkeypatch.setattr(gpt_task, "generate", lambda model, prompt, size, samples: [prompt] * samples)
    return lambda **options: Task(Config(**{**SMALL, **options}), folder / "data")


def text_of(tensor):
    return bytes(tensor.tolist()).decode()


def configs(**options):
    return EXPERIMENT.configs(**options)


class TestTexts:
    def test_the_last_tenth_of_a_play_is_for_validation(self, make):
        task = make()
        assert text_of(task.train) + text_of(task.valid) == PLAY.decode()
        assert len(task.valid) == len(PLAY) // 10

    def test_an_item_of_news_is_a_line_of_one_part(self, make):
        task = make(text="agnews")
        train, valid = (text_of(part).split("\n") for part in (task.train, task.valid))
        whole = [item.replace(" description", "") for item in ITEMS]
        assert sorted(train + valid) == sorted(whole)
        assert (len(train), len(valid)) == (95, 5)
        assert valid != whole[-5:]  # shuffled
        assert text_of(make(text="agnews", seed=1).valid) == text_of(task.valid)

    def test_an_item_of_several_lines_is_one_line(self, make, folder):
        write_news(folder, [f"title\n{number} description more\nof it" for number in range(100)])
        train = text_of(make(text="agnews").train).split("\n")
        assert len(train) == 95
        assert all(line.startswith("title ") and line.endswith(" more of it") for line in train)

    @pytest.mark.parametrize(("text", "file"), [("shakespeare", "input.txt"), ("agnews", "train.csv")])
    def test_it_knows_the_hash_of_the_file_that_it_reads(self, make, folder, text, file):
        content = (folder / "data" / text / file).read_bytes()
        assert make(text=text).data == {f"{text}/{file}": f"sha256:{hashlib.sha256(content).hexdigest()}"}

    def test_a_long_validation_part_is_cut(self, make, monkeypatch):
        monkeypatch.setattr(gpt_task, "MOST_VALIDATED", 50)
        assert len(make().valid) == 50

    def test_a_text_that_is_too_short_is_refused(self, make):
        with pytest.raises(ValueError, match="too short: its validation part has 168 bytes"):
            make(length=168)

    def test_what_it_is_called(self, make):
        labels = [make(text=text).label for text in ("shakespeare", "agnews")]
        assert labels == ["tiny Shakespeare", "AG News, 100-row part"]

    def test_the_real_texts(self, data_folder):
        plays, news = (Task(Config(text=text), data_folder) for text in ("shakespeare", "agnews"))
        assert (len(plays.train), len(plays.valid)) == (1_003_854, 111_540)
        assert len(news.valid) == 200_000
        assert len(news.train) > 10_000_000


class TestRuns:
    @pytest.mark.parametrize("layer", LAYERS)
    @pytest.mark.parametrize("text", ["shakespeare", "agnews"])
    def test_every_layer_trains(self, make, layer, text):
        trained = train(make(layer=layer, text=text, steps=20, lr=3e-3))
        assert trained.outcome["valid_loss"] < trained.rows[0]["valid_loss"] - 0.5

    @pytest.mark.parametrize("layer", LAYERS)
    @pytest.mark.parametrize("tied", [False, True])
    @torch.inference_mode()
    def test_the_loss_begins_near_that_of_a_guess(self, make, layer, tied):
        task = make(layer=layer, width=256, depth=4, batch=16, tied=tied)
        torch.manual_seed(0)
        (inputs, labels), model = task.batch(1), task.build()
        loss = F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
        assert float(loss) == pytest.approx(math.log(256), abs=0.5)

    @pytest.mark.parametrize("layer", LAYERS)
    @pytest.mark.parametrize("more", [{}, {"tied": True, "dense_maps": "up,down"}], ids=["plain", "tied hybrid"])
    def test_a_stopped_run_resumes(self, make, tmp_path, layer, more):
        options = {"layer": layer, "steps": 4, "warmup": 2, **more}
        expected = train(make(**options))
        stop_at(2, make(**options), tmp_path / "run")
        assert_same(train(make(**options), tmp_path / "run", resume=True), expected)

    @torch.inference_mode()
    def test_what_is_said_in_the_end(self, make):
        task = make(length=20, batch=2)
        torch.manual_seed(0)
        model = task.build()
        outcome = task.conclude(model)
        assert outcome.keys() == {"valid_loss", "valid_bpc", "mixer_parameters", "data", "samples"}
        parts = [task.valid[start : start + 21] for start in range(0, len(task.valid) - 1, 20)]
        losses = [F.cross_entropy(model(part[None, :-1])[0], part[1:], reduction="sum") for part in parts]
        loss = float(sum(losses)) / (len(task.valid) - 1)
        assert outcome["valid_loss"] == pytest.approx(loss, rel=1e-5)
        assert outcome["valid_bpc"] == pytest.approx(loss / math.log(2), rel=1e-5)
        assert (outcome["samples"], outcome["data"]) == (["\n", "\n"], "tiny Shakespeare")
        assert outcome["mixer_parameters"] == model.count_in_maps()

    def test_samples_are_what_the_model_writes(self, make, monkeypatch):
        monkeypatch.undo()
        task = make()
        with torch.inference_mode():
            first, second = task.conclude(task.build())["samples"]
        assert len(first) == len(second) == 501
        assert first != second

    def test_the_model_is_as_the_config_says(self, make):
        model = make(depth=2, tied=True, dense_maps="qkv,out").build()
        assert len(model.blocks) == 2
        assert model.head is None
        assert model.places.weight.shape == (16, 64)
        assert [type(model.blocks[1].get_submodule(name)).__name__ for name in MAPS] == [
            *("Linear", "Linear", "SPMLinear", "SPMLinear")
        ]

    def test_options_of_the_layer_reach_it(self, make):
        block = make(stages=3, block="rotation").build().blocks[0]
        assert {(block.get_submodule(name).stages, block.get_submodule(name).block) for name in MAPS} == {
            (3, "rotation")
        }


class TestConfigs:
    @pytest.mark.parametrize(
        ("options", "complaint"),
        [
            ({"layer": "identity"}, "layer .* got 'identity'"),
            ({"text": "poems"}, "text .* 'poems'"),
            ({"width": 100}, "width must be a multiple of 64, .* got 100"),
            ({"width": 0}, "width .* got 0"),
            ({"depth": 0}, "depth must be at least 1, got 0"),
            ({"length": 0}, "length must be at least 1, got 0"),
            ({"dense_maps": "out,qkv"}, "dense_maps must be some of qkv,out,up,down in this order, got 'out,qkv'"),
            ({"dense_maps": "in"}, "dense_maps .* got 'in'"),
            ({"budget": 0.0}, "budget must be above 0 seconds, .* got 0.0"),
        ],
    )
    def test_bad_values_are_refused(self, options, complaint):
        with pytest.raises(ValueError, match=complaint):
            Config(**options)

    def test_every_config_has_a_name_of_its_own(self):
        shapes = [{}, {"depth": 2}, {"length": 128}, {"tied": True}, {"dense_maps": "qkv,out"}, {"dense_maps": "qkv"}]
        spent = [{"steps": 60}, {"steps": 600}, {"budget": 60.0}, {"budget": 600.0}, {"budget": 0.5}]
        runs = [
            {"seed": 1},
            {"layer": "dense"},
            {"width": 64},
            {"text": "agnews"},
            {"block": "rotation"},
            {"stages": 2},
        ]
        found = [Config(**shape, **amount, **run) for shape in shapes for amount in spent for run in runs]
        assert len({config.name for config in found}) == len(found)
        assert Config(budget=60.0).name == "shakespeare-spm-256-60s-seed0"
        assert Config(depth=2, tied=True, dense_maps="qkv").name == (
            "shakespeare-spm-dense-qkv-256-depth2-tied-2000steps-seed0"
        )

    def test_what_follows_from_the_steps(self):
        (config,) = configs(layers="spm", steps=3000)
        assert (config.warmup, config.validate_every, config.clip, config.weight_decay) == (150, 75, 1.0, 0.0)
        (config,) = configs(layers="spm", steps=10)
        assert (config.warmup, config.validate_every) == (0, 20)

    def test_every_layer_and_width_has_its_rate(self):
        found = configs(layers=",".join(LAYERS), widths=",".join(map(str, WIDTHS)))
        assert {(one.layer, one.width): one.lr for one in found} == {
            (layer, width): RATES[layer][width] for layer in LAYERS for width in WIDTHS
        }
        assert {one.lr for one in configs(lr=0.125, widths="128,512")} == {0.125}

    def test_a_width_in_between_takes_the_rate_of_the_nearest(self, monkeypatch):
        monkeypatch.setitem(RATES, "dense", {128: 1.0, 256: 2.0, 1024: 3.0})
        rates = {64: 1.0, 128: 1.0, 192: 2.0, 448: 2.0, 576: 3.0, 4096: 3.0}
        assert {width: rate("dense", width) for width in rates} == rates

    def test_only_spm_has_dense_maps(self):
        found = configs(layers="dense,spm,lowrank", dense_maps="out, qkv")
        assert [(one.layer, one.dense_maps) for one in found] == [("dense", ""), ("spm", "qkv,out"), ("lowrank", "")]


class TestBudgets:
    def test_steps_are_what_fits_by_the_measured_times(self, folder):
        found = configs(layers="dense,spm", seconds="60,600")
        assert [(one.layer, one.budget, one.steps) for one in found] == [
            *(("dense", 60, 1500), ("dense", 600, 15000), ("spm", 60, 5000), ("spm", 600, 50000))
        ]
        assert found[0].warmup == 75
        assert found == configs(layers="dense,spm", seconds="60,600")

    def test_the_case_is_that_of_the_contender_the_width_and_the_batch(self, folder):
        write_times(
            folder,
            *(
                step_time("gpt", "spm", 10.0 * width, batch=batch, width=width)
                for width in (128, 256)
                for batch in (8, 16)
            ),
            step_time("gpt", "spm-dense-attention", 50.0, batch=8),
            step_time("teacher", "spm", 1.0, batch=8),
        )
        assert [one.steps for one in configs(layers="spm", widths="128,256", seconds="64")] == [50, 25]
        assert [one.steps for one in configs(layers="spm", dense_maps="qkv,out", seconds="64")] == [1280]

    def test_of_several_numbers_of_threads_the_most_count(self, folder):
        rows = [step_time("gpt", "spm", ms, batch=8, threads=threads) for ms, threads in ((30, 1), (20, 2), (40, 1))]
        write_times(folder, *rows)
        assert configs(layers="spm", seconds="60")[0].steps == 3000

    @pytest.mark.parametrize(
        ("options", "lacking"),
        [
            ({"layers": "lowrank"}, "low rank, width 256, batch 8"),
            ({"widths": "128"}, "SPM, width 128, batch 8"),
            ({"batch": 16}, "SPM, width 256, batch 16"),
            ({"blocks": "rotation"}, "SPM, rotation, width 256, batch 8"),
            ({"stages": 3}, "SPM, width 256, batch 8, stages 3"),
            ({"depth": 2, "tied": True}, "SPM, width 256, batch 8, depth 2, tied"),
            ({"dense_maps": "up,down"}, "SPM, dense feed-forward, width 256, batch 8"),
            ({"dense_maps": "qkv"}, "SPM, width 256, batch 8, dense qkv"),
        ],
    )
    def test_a_case_that_was_not_measured_is_refused(self, folder, options, lacking):
        with pytest.raises(typer.BadParameter, match=f"steps-gpt.json has no time of a step of gpt with {lacking};"):
            configs(**{"layers": "spm", "seconds": "60", **options})

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            (None, "steps.json cannot be read; `pairmix bench steps` makes such a file"),
            ("{", "cut off or not JSON"),
            (json.dumps({"config": {"experiment": "gpt"}, "rows": []}), "is not of `pairmix bench steps`"),
            (json.dumps(steps({"experiment": "gpt", "width": 256})), "layer is missing"),
        ],
    )
    def test_a_file_that_has_no_times_is_refused(self, folder, content, complaint):
        path = folder / "other" / "steps.json"
        if content is not None:
            path.parent.mkdir()
            path.write_text(content)
        with pytest.raises(typer.BadParameter, match=complaint):
            configs(seconds="60", times=path)

    def test_a_budget_of_less_than_a_step_is_refused(self, folder):
        with pytest.raises(typer.BadParameter, match="steps must be at least 1, got 0"):
            configs(layers="spm", seconds="0.001")

    def test_without_a_budget_no_times_are_needed(self):
        assert configs(layers="spm", times=Path("nowhere"))[0].budget is None


class TestCommand:
    @pytest.fixture
    def run(self, folder, monkeypatch):
        monkeypatch.setattr(gpt_task, "generate", lambda model, prompt, size, samples: [b"To be"])

        def run(arguments):
            start = f"train gpt --layers spm --batch 2 --data data --out runs --widths 64 {arguments}"
            return CliRunner().invoke(cli.app, start.split())

        return run

    def test_runs_of_both_texts_are_reported_apart(self, run, folder):
        for text in ("shakespeare", "agnews"):
            result = run(f"--text {text} --steps 2 --depth 1 --length 8")
            assert result.exit_code == 0, result.output
        found = sorted((folder / "runs").glob("*.json"))
        assert [path.stem for path in found] == [
            f"{text}-spm-64-depth1-length8-2steps-seed0" for text in ("agnews", "shakespeare")
        ]
        assert [list(results.load(path)["data"]) for path in found] == [["agnews/train.csv"], ["shakespeare/input.txt"]]
        (folder / "runs").rename(folder / "gpt")
        _, news, plays = EXPERIMENT.table("gpt", folder)
        assert [news[:2], plays[:2]] == [["SPM", f"{text}, depth 1, length 8"] for text in ("agnews", "shakespeare")]

    @pytest.mark.parametrize(("text", "file"), [("shakespeare", "input.txt"), ("agnews", "train.csv")])
    def test_resume_checks_the_text_that_the_run_reads(self, run, folder, text, file):
        options = f"--text {text} --steps 2 --depth 1 --length 8"
        assert run(options).exit_code == 0
        other = {"shakespeare": "agnews/train.csv", "agnews": "shakespeare/input.txt"}[text]
        (folder / "data" / other).unlink()
        assert run(f"{options} --resume").exit_code == 0
        path = folder / "data" / text / file
        path.write_bytes(path.read_bytes() + b"\n1,more,of it\n")
        result = run(f"{options} --resume")
        assert result.exit_code == 1
        assert f"{text}/{file} is 'sha256:" in " ".join(result.output.split())

    def test_a_budget_is_trained_and_resumed(self, run, folder):
        write_times(folder, step_time("gpt", "spm", 250.0, width=64, batch=2))
        for more in ("", "--resume"):
            result = run(f"--seconds 0.5,1 {more}")
            assert result.exit_code == 0, result.output
        configs = [results.load(path)["config"] for path in sorted((folder / "runs").glob("*.json"))]
        assert [(one["budget"], one["steps"]) for one in configs] == [(0.5, 2), (1.0, 4)]

    def test_the_config_of_a_result_is_that_of_the_run(self, run, folder):
        assert run("--steps 2 --depth 1 --length 8 --tied").exit_code == 0
        (path,) = (folder / "runs").glob("*.json")
        (wanted,) = configs(layers="spm", widths="64", steps=2, depth=1, length=8, tied=True, batch=2)
        assert results.load(path)["config"] == asdict(wanted)
