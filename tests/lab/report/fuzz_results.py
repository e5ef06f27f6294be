"""Results with something wrong in them, through the report: a page, or a sentence that names the file.

What is wrong is decided by a seed alone. Everything but the pictures is made of each result that is accepted; pictures
take seconds, and are drawn for one seed in `DRAWN`.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import synthetic

from pairmix_lab.experiments import EXPERIMENTS
from pairmix_lab.report import page
from pairmix_lab.report.runs import collect

DRAWN = 5
EVIL = "<script>alert(1)</script>"
VALUES = [
    *(None, True, False, 0, 1, -1, 3, 0.5, -0.0, 1e-300, 5e-324, 1e300, 2**31, 2**63, 10**400),
    *(math.nan, math.inf, -math.inf, "", "1", "nan", "x" * 300, "\ud800", "\x00", "é†", "a: b", "_x", "$\\frac{1}{$"),
    *(
        "../../evil",
        "/evil",
        "..\\evil",
        "a/b",
        EVIL,
        "{{ 7 * 7 }}",
        "2025-01-01",
        "teacher",
        "steps",
        "spm",
        "uniform",
    ),
    *([], {}, [None], [[]], [1, 2], {"a": 1}, {EVIL: EVIL}, {"step": 1}),
]
# As far as a number may go somewhere.
LIMITS = [0, 1, 0.0, 1.0, 5e-324, 1e-12, 1e12, 1e38, math.nan, 2**31 - 1, 2**53 - 1]


def valid_result(rng):
    """Of any kind."""
    return rng.choice(
        [
            lambda: synthetic.teacher(rng.choice(["spm", "dense"]), seed=5),
            lambda: synthetic.teacher(angle_std=rng.choice([0.0, 0.3, "uniform"]), block="rotation", pairing="other"),
            lambda: synthetic.agnews(rng.choice(["spm", "softmax"]), width=2048),
            lambda: synthetic.shakespeare(rng.choice(["spm", "dense"]), cell=rng.choice(["rnn", "gru"])),
            lambda: synthetic.gpt(
                rng.choice(["spm", "dense"]),
                budget=rng.choice([None, 60.0]),
                dense_maps=rng.choice(["", "qkv", "qkv,out"]),
            ),
            lambda: synthetic.steps(
                synthetic.step_time("teacher", "spm", 1.0, 2.0),
                synthetic.step_time("shakespeare", "torch.nn.RNN", 1.0, width=4096, batch=32, cell="rnn", threads=2),
                synthetic.step_time("gpt", "spm", 1.0, 2.0, batch=16),
            ),
        ]
    )()


def places(tree):
    """Every object or list of a result with each of its keys."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        yield tree, key
        yield from places(value)


def mutate(rng, run):
    """Change one thing somewhere."""
    kind = rng.choice(["limit"] * 8 + ["delete", "replace", "replace", "retype", "nest", "swap", "add", "rename"])
    numbers = [(tree, key) for tree, key in places(run) if isinstance(tree[key], int | float)]
    tree, key = rng.choice(numbers if kind == "limit" and numbers else list(places(run)))
    if kind == "limit":
        limit, rows = rng.choice(LIMITS), run.get("rows")
        in_all_rows = isinstance(rows, list) and any(row is tree for row in rows) and rng.random() < 0.5
        for row in [row for row in rows if type(row) is type(tree)] if in_all_rows else [tree]:
            row[key] = limit
    elif kind == "delete":
        del tree[key]
    elif kind == "replace":
        tree[key] = copy.deepcopy(rng.choice(VALUES))
    elif kind == "retype":
        value = tree[key]
        tree[key] = (
            str(value) if isinstance(value, int | float) else [value] if rng.random() < 0.5 else json.dumps(value)
        )
    elif kind == "nest":
        for _ in range(rng.choice([1, 2, 50])):
            tree[key] = rng.choice([lambda inner: [inner], lambda inner: {"a": inner}])(tree[key])
    elif kind == "swap":
        other, other_key = rng.choice(list(places(run)))
        tree[key], other[other_key] = copy.deepcopy(other[other_key]), copy.deepcopy(tree[key])
    elif isinstance(tree, dict):  # add or rename a key
        value = copy.deepcopy(rng.choice(VALUES)) if kind == "add" else tree.pop(key)
        tree[rng.choice(["x", "", EVIL, "../x", "\ud800", "data", "schema", "cell", "speedup", "speedup_iqr"])] = value
    else:
        tree.append(copy.deepcopy(rng.choice(VALUES)))


def damaged(rng, text):
    """A file that was cut off, overwritten, or has a key twice; mostly the file as it was."""
    kind = rng.choice([None] * 8 + ["truncated", "overwritten", "duplicated key", "deep"])
    if kind == "truncated":
        return text[: rng.randrange(len(text))]
    if kind == "overwritten":
        place = rng.randrange(len(text))
        return text[:place] + rng.choice(['"', "}", "[", "\x00", "NaN", "-", "1" * 5000]) + text[place + 1 :]
    if kind == "duplicated key":
        key = rng.choice(["config", "rows", "outcome", "finished", "machine"])
        return f'{{"{key}": {json.dumps(rng.choice(VALUES))}, {text[1:-1]}, "{key}": {json.dumps(rng.choice(VALUES))}}}'
    if kind == "deep":
        return text.replace("[", "[" * 5000, 1)
    return text


def make_text(seed):
    """A file with something wrong."""
    rng = random.Random(seed)
    run = valid_result(rng)
    for _ in range(rng.choice([1, 1, 2, 3])):
        if any(places(run)):
            mutate(rng, run)
    return damaged(rng, json.dumps(run))


def check(seed, root, draw=False):
    """Report a result with something wrong.

    Args:
        seed: what is wrong.
        root: an empty folder, all of whose files may only be where they belong.
        draw: also the pictures.

    Returns:
        "page" or "refused".

    Raises:
        Exception: if the report fails with anything but a ValueError that names the file, or leaves files where none
            belong, or HTML as it was.
    """
    files, out = root / "deep" / "runs", root / "deep" / "out"
    others = [synthetic.teacher("dense"), synthetic.agnews("dense", width=2048), synthetic.shakespeare("dense")]
    others += [synthetic.gpt("dense", budget=budget) for budget in (60.0, 600.0)]
    synthetic.write(files, *random.Random(seed).choice([[], others[:1], others]))
    (files / "bad.json").write_text(make_text(seed), "utf-8", errors="surrogatepass")
    before = set(root.rglob("*"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            runs = collect(sorted(files.iterdir()), EXPERIMENTS)
            if draw:
                page.write(runs, out / "report.html", out / "pictures")
            else:
                with ExitStack() as stack:
                    for experiment in EXPERIMENTS:
                        stack.enter_context(patch.object(experiment, "pictures", lambda runs: ()))
                    page.write(runs, out / "report.html")
    except ValueError as error:
        if "bad.json" not in str(error):
            raise
        assert set(root.rglob("*")) == before, "something was written"
        return "refused"
    written = [path.relative_to(out) for path in set(root.rglob("*")) - before - {out, out / "pictures"}]
    assert all(len(path.parts) == 1 + draw or path.name == "report.html" for path in written), written
    assert EVIL not in (out / "report.html").read_text("utf-8"), "HTML is not escaped"
    return "page"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first result")
    parser.add_argument("--count", type=int, default=1000, help="how many results")
    arguments = parser.parse_args()
    start, counts = time.monotonic(), Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        draw = seed % DRAWN == 0
        with tempfile.TemporaryDirectory() as root:
            try:
                answer = check(seed, Path(root), draw)
                counts[answer + ", drawn" * (draw and answer == "page")] += 1
            except Exception as error:
                counts["failed"] += 1
                print(f"--seed {seed} --count 1: {type(error).__name__}: {error}", flush=True)
    print(f"{dict(counts)} in {time.monotonic() - start:.0f} s")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
