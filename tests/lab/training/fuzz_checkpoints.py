"""Checkpoints that are damaged or forged in random ways, restored into a small run.

Each must be refused with a CheckpointError that leaves the run as it was, or come back to the bit. A file is decided by
its seed alone:

    python tests/lab/training/fuzz_checkpoints.py --count 10000 --seed 0
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from pairmix_lab.experiments import teacher
from pairmix_lab.training import checkpoints
from pairmix_lab.training.loop import Run
from pairmix_lab.training.processes import Processes

CONFIG = teacher.Config(width=9, steps=40, batch=8, log_every=7, validate_every=15)  # odd: all kinds of parameters
STEPS = 17
DTYPES = [torch.float16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.bfloat16]
GOOD = ("refused", "restored to the bit")


@dataclass(frozen=True)
class Original:
    """A checkpoint as the run wrote it, and what is in it."""

    content: bytes

    @property
    def header(self) -> dict[str, Any]:
        return json.loads(self.content[8 : self.start])

    @property
    def start(self) -> int:
        """Where the tensors begin."""
        return 8 + int.from_bytes(self.content[:8], "little")

    @property
    def tensors(self) -> dict[str, Tensor]:
        return load(self.content)

    @property
    def about(self) -> dict[str, Any]:
        return json.loads(self.header["__metadata__"]["about"])

    def with_header(self, header: bytes) -> bytes:
        return len(header).to_bytes(8, "little") + header + self.content[self.start :]

    def forged(self, rng: random.Random, tensors: dict[str, Tensor], about: str) -> bytes:
        """Written as a run would, most often with a checksum that is right."""
        metadata = {**self.header["__metadata__"], "about": about}
        if rng.random() < 0.8:
            metadata["digest"] = checkpoints.digest(about, tensors)
        return save({name: value.clone().contiguous() for name, value in tensors.items()}, metadata)


def flipped_bits(original: Original, rng: random.Random) -> bytes:
    content = bytearray(original.content)
    for _ in range(rng.choice([1, 1, 1, 2, 10])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(content)


def flipped_bit_of_the_header(original: Original, rng: random.Random) -> bytes:
    content = bytearray(original.content)
    content[rng.randrange(original.start)] ^= 1 << rng.randrange(8)
    return bytes(content)


def cut_off(original: Original, rng: random.Random) -> bytes:
    return original.content[: rng.choice([rng.randrange(len(original.content)), rng.randrange(original.start)])]


def longer(original: Original, rng: random.Random) -> bytes:
    return original.content + rng.randbytes(rng.choice([1, 8, 1000]))


def lost_block(original: Original, rng: random.Random) -> bytes:
    """As after a crash of a system that had not written all of it."""
    size = rng.choice([16, 512, 4096])
    place = rng.randrange(len(original.content))
    content = original.content[:place] + bytes(size) + original.content[place + size :]
    return content[: len(original.content)]


def swapped_blocks(original: Original, rng: random.Random) -> bytes:
    content, size = bytearray(original.content), rng.choice([4, 64, 512])
    one, other = (rng.randrange(len(content) - size) // size * size for _ in range(2))
    content[one : one + size], content[other : other + size] = content[other : other + size], content[one : one + size]
    return bytes(content)


def random_bytes(original: Original, rng: random.Random) -> bytes:
    return original.content[: rng.choice([0, 8, 20])] + rng.randbytes(rng.choice([0, 5, 1000]))


def swapped_tensors(original: Original, rng: random.Random) -> bytes:
    """Two entries of the header, which are of the same form, with one another's bytes; the checksum stays."""
    header = original.header
    names = [name for name in header if name != "__metadata__"]
    one = rng.choice(names)
    alike = [name for name in names if header[name]["shape"] == header[one]["shape"]]
    other = rng.choice(alike)
    header[one], header[other] = header[other], header[one]
    return original.with_header(json.dumps(header).encode())


def moved_tensor(original: Original, rng: random.Random) -> bytes:
    """Other offsets, dtypes or shapes, for which the file may even be long enough."""
    header = original.header
    entry = header[rng.choice([name for name in header if name != "__metadata__"])]
    begin, end = entry["data_offsets"]
    change: Any = rng.choice(
        [
            {"data_offsets": [begin + 4, end + 4]},
            {"data_offsets": [0, end - begin]},
            {"data_offsets": [end, begin]},
            {"data_offsets": [begin, 2**63]},
            {"data_offsets": [-1, end]},
            {"data_offsets": [begin]},
            {"data_offsets": None},
            {"shape": [2**62, 4]},
            {"shape": [-1]},
            {"shape": "all"},
            {"shape": [[3]]},
            {"shape": [*entry["shape"], 1]},
            {"shape": [end - begin], "dtype": "U8"},
            {"dtype": rng.choice(["F16", "F64", "I32", "BOOL", "F8_E4M3", "F4", "C64", "float", "", 3, None])},
        ]
    )
    entry.update(change)
    return original.with_header(json.dumps(header).encode())


def other_header(original: Original, rng: random.Random) -> bytes:
    """A header that is not even one of tensors."""
    text, deep = json.dumps(original.header), rng.choice([200, 100_000])
    header: Any = rng.choice(
        [
            "[" * deep + "]" * deep,
            '{"a":' * deep + "3" + "}" * deep,
            text[:-1] + ', "__metadata__": {"about": "{}"}}',
            text[:-1] + f', "__metadata__": {"[" * deep}{"]" * deep}}}',
            text[:-1] + ', "random_state": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}',
            text.replace('"__metadata__": {', '"__metadata__": {"more": 3, ', 1),
            text.replace('"__metadata__": {', '"__metadata__": {"more": "\\ud800", ', 1),
            text.replace('"__metadata__": {', '"__metadata__": {"more": NaN, ', 1),
            text.replace('"__metadata__"', '"__metadata"', 1),
            '{"__metadata__": null}',
            '{"__metadata__": {"about": ["not", "text"]}}',
            "null",
            "3",
            "NaN",
            "",
            " " * 1000,
        ]
    )
    return original.with_header(header.encode())


def other_length(original: Original, rng: random.Random) -> bytes:
    real = original.start - 8
    near = real + rng.choice([-8, -1, 1, 8])
    size = rng.choice([0, 1, 2, near, len(original.content), 2**26 + 1, 10**8, 2**31, 2**32 + real, 2**63, 2**64 - 1])
    return size.to_bytes(8, "little") + original.content[8:]


def forged_tensors(original: Original, rng: random.Random) -> bytes:
    """Removed, renamed, added, of another dtype or shape: never what the run would write."""
    tensors = original.tensors
    for name in rng.sample(sorted(tensors), rng.choice([1, 1, 1, 3])):
        value = tensors.pop(name)
        index, moment = rng.choice(["0", "99", "-1", "x", ""]), rng.choice(["momentum", "max_exp_avg_sq", "", "a.b"])
        new_name = rng.choice([f"optimizer.{index}.{moment}", "model.", "model.x", "", "optimizer", f"{name}.", "ä\n"])
        new_dtype = rng.choice([dtype for dtype in DTYPES if dtype != value.dtype])
        changes: list[dict[str, Tensor]] = [
            {},
            {new_name: value},
            {name: value, new_name: value},
            {name: value.to(new_dtype)},
            {name: value[None]},
            {name: value.new_zeros(2, *value.shape)},
            {name: value.new_zeros(0)},
        ]
        tensors |= rng.choice(changes)
    return original.forged(rng, tensors, json.dumps(original.about))


def forged_steps(original: Original, rng: random.Random) -> bytes:
    tensors = original.tensors
    name = rng.choice([name for name in tensors if name.startswith("optimizer.") and name.endswith(".step")])
    tensors[name] = torch.tensor(rng.choice([0.0, 16.0, 18.0, -1.0, 1e9, math.nan, math.inf, 17.5]))
    return original.forged(rng, tensors, json.dumps(original.about))


def forged_random_state(original: Original, rng: random.Random) -> bytes:
    """Without its seed or with an impossible place, which torch refuses."""
    tensors = original.tensors
    tensors["random_state"] = torch.zeros_like(tensors["random_state"])
    return original.forged(rng, tensors, json.dumps(original.about))


def forged_about(original: Original, rng: random.Random) -> bytes:
    """Another description, with fields of wrong kinds."""
    about = original.about
    record, config = about["record"], about["config"]
    wrong: Any = rng.choice(
        [None, True, "17", -1, 41, 10**9, 10**30, 16, 17.0, math.nan, math.inf, [], [17], {}, {"step": 17}, "\ud800"]
    )
    if rng.random() < 0.2:
        deep = "[" * rng.choice([10, 900, 100_000])
        text = json.dumps(about).replace('"step": 17', f'"step": {deep}{deep.replace("[", "]")}', 1)
        return original.forged(rng, original.tensors, text)
    places: list[Callable[[], Any]] = [
        lambda: about.update({rng.choice(["step", "format", "config", "record"]): wrong}),
        lambda: about.pop(rng.choice(sorted(about))),
        lambda: about.update(more=wrong),
        lambda: config.update({rng.choice(sorted(config)): wrong}),
        lambda: config.pop(rng.choice(sorted(config))),
        lambda: config.update({"agnews/train.csv": wrong or "sha256:0"}),
        lambda: record.update({rng.choice(sorted(record)): wrong}),
        lambda: record.pop(rng.choice(sorted(record))),
        lambda: record.update(more=wrong),
        lambda: record["losses"].append(wrong),
        lambda: record["losses"].clear(),
        lambda: record["milliseconds"].append(0.5),
        lambda: record["milliseconds"].__setitem__(0, wrong if type(wrong) is not float else math.nan),
        lambda: rng.choice(record["rows"]).update(step=wrong if wrong != 16 else 0),
        lambda: rng.choice(record["rows"]).update(train_loss=wrong if type(wrong) is not float else "x"),
        lambda: record["rows"].append(copy.deepcopy(record["rows"][0])),
        lambda: record["rows"].append(wrong),
    ]
    rng.choice(places)()
    return original.forged(rng, original.tensors, json.dumps(about))


def repeated_keys(original: Original, rng: random.Random) -> bytes:
    """The last one counts."""
    about = json.dumps(original.about)
    first = rng.choice(['"step": 3, ', '"record": NaN, ', '"config": [], ', '"format": 3, '])
    last = rng.choice([', "step": 41}', ', "step": NaN}', ', "record": {}}', ', "step": 17}', "}"])
    return original.forged(rng, original.tensors, "{" + first + about[1:-1] + last)


KINDS: list[Callable[[Original, random.Random], bytes]] = [
    flipped_bits,
    flipped_bit_of_the_header,
    cut_off,
    longer,
    lost_block,
    swapped_blocks,
    random_bytes,
    swapped_tensors,
    moved_tensor,
    other_header,
    other_length,
    forged_tensors,
    forged_steps,
    forged_random_state,
    forged_about,
    repeated_keys,
]


class Fuzz:
    """A run, and what happens to it when a checkpoint is restored."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.path = folder / "checkpoint.safetensors"
        run = self._new_run()
        for _ in range(STEPS):
            run.advance()
        checkpoints.store(self.path, run.state, asdict(CONFIG))
        self.expected = snapshot(run.state)
        self.original = Original(self.path.read_bytes())
        self.run = self._new_run()
        self.fresh = snapshot(self.run.state)

    def _new_run(self) -> Run:
        return Run(teacher.Task(CONFIG), Processes(), None, resume=False)

    def check(self, seed: int) -> tuple[str, str]:
        """The kind of a file, and what became of it."""
        rng = random.Random(seed)
        kind = rng.choice(KINDS)
        self.path.write_bytes(kind(self.original, rng))
        return kind.__name__.replace("_", " "), self._restored()

    def _restored(self) -> str:
        state = self.run.state
        try:
            checkpoints.restore(self.path, state, asdict(CONFIG))
        except checkpoints.CheckpointError as error:
            str(error).encode(errors="backslashreplace")
            verdict = "refused" if snapshot(state) == self.fresh else "refused, but changed"
        except Exception as error:
            verdict = f"wrong error: {type(error).__name__}: {error}"[:200]
        else:
            verdict = "restored to the bit" if snapshot(state) == self.expected else "silently different"
        if verdict != "refused":
            self.run = self._new_run()
        return verdict


def snapshot(state: checkpoints.State) -> tuple[Any, ...]:
    """All of a state, to the bit."""
    moments = state.optimizer.state_dict()["state"].items()
    tensors = {
        **state.model.state_dict(),
        **{(index, name): value for index, kinds in moments for name, value in kinds.items()},
        "random state": torch.get_rng_state(),
    }
    bits = {
        name: (value.dtype, value.shape, value.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, value in tensors.items()
    }
    return state.step, json.dumps(state.record), bits


def restore_all(first: int, end: int, connection: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fuzz = Fuzz(Path(folder))
        for seed in range(first, end):
            connection.send((seed, *fuzz.check(seed)))


def check_all(
    first: int, count: int, work: Callable[[int, int, Any], None] = restore_all
) -> Iterator[tuple[int, str, str]]:
    """Seed, kind and verdict of every file; in a process of its own, so that one that crashes counts too."""
    context = multiprocessing.get_context("spawn")
    seed, end = first, first + count
    while seed < end:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(seed, end, sender))
        process.start()
        sender.close()
        try:
            while True:
                verdict = receiver.recv()
                seed += 1
                yield verdict
        except EOFError:
            process.join()
        if seed < end:
            yield seed, "unknown kind", f"crash: exit code {process.exitcode}"
            seed += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first file")
    parser.add_argument("--count", type=int, default=10_000, help="how many files")
    arguments = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    for seed, kind, verdict in check_all(arguments.seed, arguments.count):
        counts[kind, verdict.partition(":")[0]] += 1
        if verdict not in GOOD:
            print(f"python {sys.argv[0]} --seed {seed} --count 1    # {kind}: {verdict}", flush=True)
    for (kind, verdict), number in sorted(counts.items()):
        print(f"{number:7,}  {kind}: {verdict}")
    totals = Counter(verdict for (_, verdict), number in counts.items() for _ in range(number))
    print(", ".join(f"{number:,} {verdict}" for verdict, number in totals.most_common()))
    return 1 if set(totals) - set(GOOD) else 0


if __name__ == "__main__":
    sys.exit(main())
