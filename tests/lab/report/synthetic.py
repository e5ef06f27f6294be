"""Runs as `pairmix train` and `pairmix bench steps` write them, with made-up numbers."""

import json
import math

MACHINE = {"processor": "Some CPU", "system": "Linux x86_64", "cores": 2, "threads": 2, "instruction_set": "AVX2"}
VERSIONS = {"python": "3.11.7", "pairmix": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
DATA = "AG News, 61,297-row part"


def result(config, rows, outcome=None, *, command="pairmix train", finished="2025-01-01T00:00:00+00:00"):
    return {
        "command": command,
        "config": config,
        **({} if outcome is None else {"outcome": outcome}),
        "rows": rows,
        "machine": dict(MACHINE),
        "versions": dict(VERSIONS),
        "commit": COMMIT,
        "finished": finished,
    }


def classified(experiment, layer="spm", *, accuracy=0.9, ms=2.0, width=256, seed=0, steps=1200, **changes):
    """A run of the teacher or of AG News. `changes` are of its config, `finished` of the whole."""
    finished = {"finished": changes.pop("finished")} if "finished" in changes else {}
    config = {
        **{"experiment": experiment, "layer": layer, "width": width, "seed": seed, "steps": steps, "batch": 256},
        **{"lr": 0.003, "block": "general", "stages": 12, "init": "own", "layer_rate": None},
        **({"angle_std": 0.1, "pairing": "same"} if experiment == "teacher" else {}),
        **changes,
    }
    rows = [
        {
            **{"step": step, "train_loss": 2.3 - 2 * accuracy * step / steps, "ms_per_step": ms},
            **{"valid_loss": 2.4 - 2 * accuracy * step / steps, "valid_accuracy": accuracy * step / steps},
        }
        for step in (1, steps // 2, steps)
    ]
    if config.get("norms"):
        for number, row in enumerate(rows):
            row |= {
                "operator_norm": 1.0 + number,
                "condition": 2.0 + 5 * (number == 1),
                "gradient_norm": 0.5 / (1 + number),
            }
    size = {"softmax": 0, "spm": 24 * width + 2 * width}.get(layer, width * width)
    outcome = {"parameters": size + 10 * width, "mixer_parameters": size, "ms_per_step": ms, "step": steps}
    outcome |= {"finished": True, "test_accuracy": accuracy, "test_loss": 0.3}
    outcome |= {"data": DATA} if experiment == "agnews" else {}
    return result(config, rows, outcome, command=f"pairmix train {experiment} --layer {layer}", **finished)


def teacher(layer="spm", **changes):
    return classified("teacher", layer, **changes)


def agnews(layer="spm", **changes):
    return classified("agnews", layer, **changes)


def shakespeare(layer="spm", *, bpc=3.0, ms=100.0, width=4096, seed=0, steps=400, cell="gru", samples=("To be",)):
    config = {"experiment": "shakespeare", "layer": layer, "width": width, "seed": seed, "steps": steps, "batch": 32}
    config |= {"lr": 0.001, "block": "general", "stages": 12, "init": "own", "layer_rate": None, "cell": cell}
    rows = []
    for step in range(0, steps + 1, 100):
        bits = bpc + 3 * math.exp(-step / 100)
        row = {"step": max(step, 1), "train_loss": bits * math.log(2) - 0.1, "ms_per_step": ms}
        if step % 200 == 0:  # between validations only the training loss is known
            row |= {"valid_loss": bits * math.log(2), "valid_bpc": bits}
        rows.append(row)
    outcome = {"parameters": 2 * width * width, "mixer_parameters": width * width, "ms_per_step": ms, "step": steps}
    outcome |= {"finished": True, "data": "tiny Shakespeare", "valid_loss": bpc * math.log(2), "valid_bpc": bpc}
    return result(
        config, rows, outcome | {"samples": list(samples)}, command=f"pairmix train shakespeare --layer {layer}"
    )


def gpt(layer="spm", *, loss=2.0, ms=20.0, width=256, seed=0, steps=1000, **changes):
    """A run of the GPT. `changes` are of its config; the loss falls in a line to what it is in the end."""
    config = {"experiment": "gpt", "layer": layer, "width": width, "seed": seed, "steps": steps, "batch": 8}
    config |= {"lr": 0.002, "block": "general", "stages": None, "length": 64, "depth": 4, "text": "shakespeare"}
    config |= {"tied": False, "dense_maps": "", "budget": None, **changes}
    rows = [
        {"step": step, "train_loss": value - 0.1, "ms_per_step": ms, "valid_loss": value}
        for step, value in ((max(1, part * steps // 4), loss + 4 - part) for part in range(5))
    ]
    outcome = {"parameters": 12 * width * width, "mixer_parameters": width * width, "ms_per_step": ms, "step": steps}
    outcome |= {"data": "tiny Shakespeare", "valid_loss": loss, "valid_bpc": loss / math.log(2), "samples": ["To be"]}
    return result(config, rows, outcome, command=f"pairmix train gpt --layers {layer}")


def adapters(layer="rotations", *, loss=2.0, ms=20.0, width=256, seed=0, parameters=8192, **changes):
    """A run of fine-tuning. `changes` are of its config."""
    run = gpt(layer, loss=loss, ms=ms, width=width, seed=seed, steps=500)
    config = {key: value for key, value in run["config"].items() if key not in ("tied", "dense_maps", "budget")}
    config |= {"experiment": "adapters", "text": "agnews", "base_text": "shakespeare", "base_steps": 2000, **changes}
    outcome = {key: value for key, value in run["outcome"].items() if key not in ("mixer_parameters", "samples")}
    outcome |= {"untuned_bpc": 4.2, "trained_parameters": parameters, "training_bytes": 2**24}
    return result(config, run["rows"], outcome, command=f"pairmix train adapters --layers {layer}")


def step_time(experiment, layer, ms, speedup=None, *, width=256, batch=256, **more):
    row = {"experiment": experiment, "width": width, "layer": layer, "batch": batch, "ms": ms, "samples": 20, **more}
    row["ms_iqr"] = [0.9 * ms, 1.1 * ms]
    if speedup is not None:
        row |= {"speedup": speedup, "speedup_iqr": [0.95 * speedup, 1.05 * speedup]}
    return row


def steps(*rows, **changes):
    return result({"experiment": "steps"}, list(rows), command="pairmix bench steps", **changes)


def write(folder, *runs):
    """One file for each run."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, run in enumerate(runs):
        (folder / f"{number:03}.json").write_text(json.dumps(run))
    return folder


def everything():
    """Something of every experiment, layer and table."""
    seeds = range(3)
    runs = [
        teacher(layer, accuracy=accuracy - 0.01 * seed - 0.1 * (width == 2048), width=width, seed=seed, ms=ms)
        for width in (256, 2048)
        for layer, accuracy, ms in (
            ("dense", 0.67, 60.0),
            ("spm", 0.95, 3.0),
            ("lowrank", 0.5, 4),
            ("identity", 0.8, 60),
        )
        for seed in seeds
    ]
    runs += [
        teacher(layer, accuracy=accuracy / (1 + number), angle_std=angle, block=block, pairing=pairing)
        for number, angle in enumerate((0.05, 0.2, "uniform"))
        for layer, block, pairing, accuracy in (
            *(("dense", "general", "same", 0.7), ("lowrank", "general", "same", 0.5), ("spm", "general", "same", 0.96)),
            *(("spm", "rotation", "same", 0.97), ("spm", "general", "other", 0.6), ("spm", "rotation", "other", 0.5)),
        )
    ]
    runs += [
        teacher(layer, accuracy=accuracy - 30 / rows, angle_std=angle, rows=rows, seed=seed)
        for layer, accuracy in (("dense", 0.7), ("spm", 0.9))
        for angle in (0.1, "uniform")
        for rows in (300, 1000, 100_000)
        for seed in (0, 1)
    ]
    runs += [teacher(layer, norms=True, seed=seed) for layer in ("dense", "spm") for seed in (0, 1)]
    layers = {"dense": (0.899, 1.0), "spm": (0.897, 0.05), "lowrank": (0.893, 0.04), "softmax": (0.902, 0.01)}
    runs += [
        agnews(layer, accuracy=accuracy + 0.002 * (power - 11), width=2**power, ms=ms * 2 ** (power - 4), seed=seed)
        for power in range(11, 17)
        for layer, (accuracy, ms) in layers.items()
        for seed in seeds[: 1 if layer == "dense" else 3]
        if layer != "dense" or power < 14
    ]
    runs += [
        shakespeare(layer, bpc=bpc, ms=ms, steps=length, cell=cell)
        for cell in ("rnn", "gru")
        for layer, bpc, ms, length in (("dense", 3.1, 20000.0, 400), ("spm", 2.9, 400.0, 2000))
    ]
    runs += [
        gpt(layer, loss=loss - budget / 1000 - 0.1 * (width > 128), ms=ms, budget=budget, width=width, **more)
        for budget in (60.0, 600.0)
        for width in (128, 256)
        for layer, loss, ms, more in (
            *(("dense", 2.3, 40.0, {}), ("spm", 2.2, 20.0, {}), ("spm", 2.1, 30.0, {"dense_maps": "qkv,out"})),
            *(("lowrank", 2.4, 20.0, {}), ("dense", 2.8, 40.0, {"text": "agnews", "tied": True})),
        )
    ]
    runs += [
        adapters(layer, loss=loss, width=width, seed=seed, parameters=parameters)
        for width in (128, 256)
        for layer, loss, parameters in (("rotations", 2.6, 8192), ("lora", 2.62, 8192), ("full", 2.3, 3_000_000))
        for seed in seeds
    ]
    runs.append(
        steps(
            step_time("teacher", "dense", 2.0, 1.0),
            step_time("teacher", "spm", 1.5, 1.33),
            step_time("agnews", "dense", 64, 1.0, width=2048),
            step_time("agnews", "spm", 2.0, 32, width=2048),
            step_time("shakespeare", "dense", 20000, 1.0, width=4096, batch=32, cell="gru"),
            step_time("shakespeare", "spm", 400, 50, width=4096, batch=32, cell="gru"),
            step_time("gpt", "dense", 40, 1.0, batch=16),
            step_time("gpt", "spm", 20, 2.0, batch=16),
            step_time("gpt", "spm-dense-attention", 30, 1.33, batch=16),
        )
    )
    return runs
