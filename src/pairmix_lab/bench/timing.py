"""Time several calls in one run, in turns, so that what disturbs the machine disturbs them all."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pairmix import functional

Samples = dict[str, dict[int, float]]
"""Seconds per call, by the name of the call and the number of the round."""

TASKS = {"train": "forward + backward", "inference": "forward"}
"""What is timed, and what tables and pictures call it."""
MIN_ROUNDS = 10


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    seconds: float,
    *,
    block: float = 0.005,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Take turns until the time is over, for `MIN_ROUNDS` rounds at least.

    In a round every function is called once, or as often as fits into `block` seconds. A function that is so slow that
    the rounds would take too long is called only in every second, fourth or eighth round. So the rounds of slow
    functions are among those of fast ones, and times that are compared are of the same rounds.

    Args:
        calls: what to call, by name.
        seconds: how long to measure.
        block: how long a sample takes, in seconds, unless a single call takes longer.
        clock: tells the time in seconds.
    """
    repeats, every = {}, {}
    for name, call in calls.items():
        call()  # the first one pays for what is made only once
        duration = _quickest(call, block, clock)
        repeats[name] = max(1, round(block / duration))
        every[name] = _every(duration * repeats[name], seconds / (MIN_ROUNDS * len(calls)))
    samples: Samples = {name: {} for name in calls}
    shuffle = random.Random(0)  # none should always follow the same one, whose data fill the caches
    number, end = 0, clock() + seconds
    while number < MIN_ROUNDS or clock() < end:
        for name in shuffle.sample(list(calls), len(calls)):
            if number % every[name] == 0:
                samples[name][number] = _seconds_a_call(calls[name], repeats[name], clock)
        number += 1
    return samples


def _quickest(call: Callable[[], object], seconds: float, clock: Callable[[], float]) -> float:
    durations: list[float] = []
    end = clock() + seconds
    while not durations or clock() < end:
        durations.append(_seconds_a_call(call, 1, clock))
    return max(min(durations), 1e-9)


def _every(duration: float, share: float) -> int:
    every = 1
    while duration > every * share and 2 * every < MIN_ROUNDS:
        every *= 2
    return every


def _seconds_a_call(call: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


def time_layers(
    cases: Mapping[str, tuple[nn.Module, Tensor]], task: str, seconds: float, **others: Callable[[], object]
) -> Samples:
    """Time layers on their inputs, forward and backward or forward in inference mode, and other calls beside them."""
    make_step = training_step if task == "train" else partial
    steps = {name: make_step(layer, x) for name, (layer, x) in cases.items()}
    with torch.inference_mode(task == "inference"):
        return interleaved({**steps, **others}, seconds)


def training_step(layer: nn.Module, x: Tensor) -> Callable[[], None]:
    """Forward and backward, with fresh gradients of the input and of all parameters."""
    x = x.detach().requires_grad_()
    grad = torch.randn_like(layer(x))
    leaves = [x, *layer.parameters()]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        layer(x).backward(grad)

    return step


def ratios(samples: Samples, of: str, to: str) -> list[float]:
    """The time of one over the time of another, in the rounds in which both took part."""
    return [seconds / samples[to][number] for number, seconds in samples[of].items() if number in samples[to]]


def spread(name: str, values: Sequence[float]) -> dict[str, Any]:
    """The median, and the interquartile range as `[low, high]`, as a row has them."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {name: median, f"{name}_iqr": [low, high]}


def measured(samples: Samples, name: str, dense: str | None = None) -> dict[str, Any]:
    """What a row says of one layer: its time, and how many times as fast as `dense` it is."""
    milliseconds = [1e3 * seconds for seconds in samples[name].values()]
    row = {"samples": len(milliseconds), **spread("ms", milliseconds)}
    return row if dense is None else {**row, **spread("speedup", ratios(samples, dense, name))}


def settings(threads: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Set torch's number of threads to each of these in turn; gives what a row says of them."""
    before = torch.get_num_threads()
    try:
        for number in threads:
            torch.set_num_threads(number)
            yield {"threads": number, "impl": functional.choose_impl("auto", torch.device("cpu"))}
    finally:
        torch.set_num_threads(before)


def current_threads() -> tuple[int, ...]:
    """What torch has now: what a run measures at unless it is told otherwise."""
    return (torch.get_num_threads(),)
