"""What is special about the compiled kernels: memory, threads, processes, number formats."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from itertools import product

import pytest
import torch

import oracle
from kernels import running
from pairmix import Schedule, SPMLinear, _kernels
from pairmix.functional import spm
from pairmix.ops import Parameters, cpu
from pairmix.schedule import DeviceSchedule

CPU = torch.device("cpu")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def random_step(layer, rows, seed=0):
    """An input, and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    x, grad = (
        torch.randn(rows, size, generator=generator, dtype=layer.d_in.dtype)
        for size in (layer.in_features, layer.out_features)
    )
    return x.requires_grad_(), grad


def step(layer, x, grad):
    """Output and all gradients."""
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, oracle.of_layer(layer, x).tensors.values(), grad)]


def assert_step_is_right(layer, x, grad):
    answers = oracle.answers(oracle.of_layer(layer, x), grad)
    for actual, (name, answer) in zip(step(layer, x, grad), answers.items(), strict=True):
        oracle.assert_matches(actual, answer, name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_is_read_and_written_exactly(dtype, target):
    values = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
    finite = values[values.isfinite()].reshape(-1, 2)
    scale = torch.tensor([0.337, 1.9], dtype=dtype)
    no_blocks, no_stages = torch.empty(0, 1, dtype=dtype), Schedule.butterfly(2, 0)
    assert spm(finite, no_blocks, no_stages, impl="cpu").equal(finite)
    scaled = spm(finite, no_blocks, no_stages, d_in=scale, impl="cpu")
    assert scaled.equal((finite.float() * scale.float()).to(dtype))


def test_the_result_is_the_same_on_every_run(threads, target):
    threads(2)
    layer = SPMLinear(96, 96)
    arguments = random_step(layer, 200)
    first = step(layer, *arguments)
    for _ in range(5):
        assert all(a.equal(b) for a, b in zip(first, step(layer, *arguments), strict=True))


def test_subnormal_numbers_are_flushed_if_torch_is_told_to(target):
    layer = SPMLinear(64, 64, block="rotation", init="identity", bias=False)
    x = torch.full((500, 64), 1e-40)
    with running(target, 2), torch.inference_mode():
        assert layer(x).equal(x)
        if not torch.set_flush_denormal(True):
            pytest.skip("torch cannot flush on this processor")
        try:
            y = layer(x)
        finally:
            torch.set_flush_denormal(False)
        assert y.count_nonzero() == 0
        assert layer(x).equal(x)


WIDTHS = {64: "butterfly", 100: "butterfly", 129: "random", 512: "butterfly", 513: "random_blocks"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("block", ["general", "rotation"])
@pytest.mark.parametrize(("n", "schedule"), WIDTHS.items())
def test_a_row_does_not_depend_on_the_rows_beside_it(n, schedule, block, dtype, target):
    layer = SPMLinear(n, n, block=block, schedule=schedule, init="random_rotation", dtype=dtype)
    x, grad = random_step(layer, 200)
    with running(target):
        y, grad_x = step(layer, x, grad)[:2]
    for rows, threads in product((4, 5, 16, 17, 33, 100), (1, 2)):
        with running(target, threads):
            some, grad_some = step(layer, x[:rows].detach().requires_grad_(), grad[:rows])[:2]
        assert some.equal(y[:rows]), f"{rows} rows, {threads} threads"
        assert grad_some.equal(grad_x[:rows]), f"{rows} rows, {threads} threads"


@pytest.mark.parametrize("caches", [(4 << 10, 4 << 10), (16 << 10, 256 << 10), (64 << 10, 4 << 20)], ids=str)
@pytest.mark.parametrize(("n", "stages"), [(96, 7), (1023, 10), (2048, 22)])
def test_tiles_for_caches_of_any_size(caches, n, stages, target):
    layer = SPMLinear(n, n, stages=stages, dtype=torch.float64)
    before = cpu.caches()
    try:
        cpu.use_caches(*caches)
        assert_step_is_right(layer, *random_step(layer, 37))
    finally:
        cpu.use_caches(*before)


def test_caches_that_hold_nothing_are_refused():
    before = cpu.caches()
    with pytest.raises(ValueError, match="at least 4096 bytes, got 100 and 524288"):
        cpu.use_caches(100, 512 << 10)
    assert cpu.caches() == before


def test_the_number_of_threads_may_change_between_calls(threads, target):
    layer = SPMLinear(96, 96, dtype=torch.float64)
    arguments = random_step(layer, 200)
    for count in (1, 2, 1, 4, 3, 1):
        threads(count)
        assert_step_is_right(layer, *arguments)


def test_fewer_threads_than_asked_for():
    """The same to the last bit as on all of them: what is added up in a share does not depend on who does it."""
    code = """
import hashlib, torch
from pairmix import SPMLinear
torch.manual_seed(0)
def gradients(layer, x):
    return torch.autograd.grad(layer(x).sin().sum(), list(layer.parameters()))
gradients(SPMLinear(512, 512), torch.randn(400, 512))  # leaves memory that is not zero
layer, x = SPMLinear(64, 64), torch.randn(200, 64)
torch.set_num_threads(2)
print([hashlib.sha256(gradient.numpy().tobytes()).hexdigest() for gradient in gradients(layer, x)])
"""

    def output(**limits):
        environment = {**os.environ, **limits}
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert output(OMP_THREAD_LIMIT="1") == output(OMP_THREAD_LIMIT="2")


@pytest.mark.parametrize(
    "shape", [(65536, 65536), (32768, 32768), (32767, 32767), (20000, 32768), (32768, 20000), (10000, 9000)]
)
def test_threads_share_large_coefficients(threads, shape, targets):
    for block, rows in (("general", 40), ("rotation", 2)):
        layer = SPMLinear(*shape, block=block)
        x, grad = random_step(layer, rows)
        answers = oracle.answers(oracle.of_layer(layer, x), grad)
        for target, count in product(targets, (2, 3)):
            with running(target, count):
                results = step(layer, x, grad)
            for actual, (name, answer) in zip(results, answers.items(), strict=True):
                oracle.assert_matches(actual, answer, f"{target}, {count} threads: {name}")


def test_calls_from_many_threads_at_once(threads, target):
    threads(2)
    layers = [SPMLinear(n, n, block=block) for n in (31, 64, 200) for block in ("general", "rotation")]
    inputs = [random_step(layer, 50) for layer in layers]
    expected = [step(layer, *arguments) for layer, arguments in zip(layers, inputs, strict=True)]
    failures = []

    def work(number):
        for _ in range(30):
            got = step(layers[number], *inputs[number])
            if not all(a.equal(b) for a, b in zip(got, expected[number], strict=True)):
                failures.append(number)

    workers = [threading.Thread(target=work, args=(number % len(layers),)) for number in range(12)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


class Mixed(torch.utils.data.Dataset):
    """Examples that an SPM layer computes in the worker, with the kernels that are in use here."""

    def __init__(self, layer):
        self.layer, self.target = layer, _kernels.target()

    def __len__(self):
        return 6

    def __getitem__(self, index):
        _kernels.use_target(self.target)
        with torch.no_grad():
            return self.layer(torch.full((40, 64), float(index)))


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_in_a_worker_of_a_data_loader(context, threads):
    if context not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {context} here")
    threads(2)
    data = Mixed(SPMLinear(64, 64))
    expected = torch.stack([data[index] for index in range(6)])  # on two threads, before the fork
    loader = torch.utils.data.DataLoader(data, batch_size=6, num_workers=2, multiprocessing_context=context)
    assert next(iter(loader)).equal(expected)


def test_memory_does_not_grow():
    """In a process of its own: in that of all tests, the most memory ever used is that of another test."""
    code = """
import resource
import torch
from pairmix import SPMLinear
torch.set_num_threads(1)
layer = SPMLinear(32, 32)
x = torch.randn(1024, 32, requires_grad=True)  # 128 KiB: the output and the gradient come from the pool
def steps(count):
    for _ in range(count):
        layer.zero_grad()
        x.grad = None
        layer(x).sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = steps(100)
print(steps(5000) - before)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert int(result.stdout) < 4096, result.stderr  # KiB; 1 KiB leaked a step would be more


def test_a_result_outlives_others_from_the_pool():
    x = torch.randn(256, 512)
    layer = SPMLinear(512, 512)
    with torch.no_grad():
        kept = [layer(x * k) for k in range(4)]
        copies = [y.clone() for y in kept]
        del kept[1]
        layer(x)
        assert kept[0].equal(copies[0])
        assert kept[1].equal(copies[2])
        kept[0].zero_()
        assert kept[1].equal(copies[2])


def test_an_order_that_is_no_permutation_is_refused():
    for order in ([[0, 0]], [[0, 2]], [[-1, 0]]):
        schedule = DeviceSchedule(torch.tensor(order, dtype=torch.int32))
        parameters = Parameters(torch.ones(1, 1, 4, 1), None, None, None, None)
        with pytest.raises(ValueError, match="stage 0 of the order is no permutation"):
            cpu.forward(torch.ones(1, 2), parameters, schedule, "general", 2)


def test_shapes_that_do_not_fit_are_refused():
    layer, x = SPMLinear(6, 6, maps=1), torch.ones(2, 6)
    schedule, parameters = layer.schedule.on(CPU), layer._tensors()
    wrong = {"blocks": torch.ones(1, 3, 4, 2), "d_in": torch.ones(1, 5), "d_out": torch.ones(6), "bias": x}
    for arguments in (
        (torch.ones(2, 7), parameters, schedule, "general", 6),
        (x, parameters, schedule, "rotation", 6),
        (x, parameters, schedule, "general", 0),
        *((x, parameters._replace(**{name: tensor}), schedule, "general", 6) for name, tensor in wrong.items()),
    ):
        with pytest.raises(ValueError, match="the shapes do not fit"):
            cpu.forward(*arguments)
    with pytest.raises(ValueError, match="the shapes do not fit"):
        cpu.backward(torch.ones(3, 6), x, parameters, schedule, "general", True, Parameters(*[True] * 5))


def test_without_the_exchange_api_of_newer_torch():
    layer = SPMLinear(20, 12)
    arguments = random_step(layer, 300)
    expected = step(layer, *arguments)
    assert _kernels.use_exchange_api(True)
    assert not _kernels.use_exchange_api(False)
    try:
        assert all(a.equal(b) for a, b in zip(expected, step(layer, *arguments), strict=True))
        with pytest.raises(ValueError, match="blocks are on meta and x is on cpu"):
            spm(torch.ones(2, 6), torch.ones(3, 4, 3, device="meta"), Schedule.butterfly(6))
    finally:
        _kernels.use_exchange_api(True)


NEAR = torch.cat([torch.linspace(-9000, 9000, 20001), torch.randn(9999, generator=torch.Generator().manual_seed(0))])
FAR = torch.tensor([1e5, -3e7, 1e30, 0.0, -0.0, 8192.0, -8192.0, torch.pi / 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_cosines_and_sines_of_all_angles(dtype, target):
    """To the two roundings that the oracle counts for them."""
    angles = torch.cat([NEAR, FAR]).to(dtype)
    schedule = Schedule.butterfly(2 * len(angles), 1)
    firsts, seconds = schedule.on(CPU).order[0].long().chunk(2)
    x = torch.zeros(2 * len(angles), dtype=dtype)
    x[firsts] = 1
    y = spm(x, angles[None], schedule, impl="cpu").double()
    assert (y[firsts] - angles.double().cos()).abs().max() <= 2 * torch.finfo(dtype).eps
    assert (y[seconds] - angles.double().sin()).abs().max() <= 2 * torch.finfo(dtype).eps
    assert spm(torch.ones(2), torch.full((1, 1), torch.nan), Schedule.butterfly(2), impl="cpu").isnan().all()


def test_only_for_cpu_tensors():
    assert cpu.why_not(CPU) is None
    assert "not for meta tensors" in cpu.why_not(torch.device("meta"))
    x = torch.ones(1, 2, device="meta")
    with pytest.raises(RuntimeError, match=r"impl='cpu' cannot run here: .* not for meta tensors"):
        spm(x, torch.ones(1, 1, device="meta"), Schedule.butterfly(2), impl="cpu")


def test_without_the_compiled_kernels_the_reference_runs():
    code = """
import sys
sys.modules["pairmix._kernels"] = None
import torch
from pairmix import SPMLinear, functional
assert functional.choose_impl("auto", torch.device("cpu")) == "reference"
SPMLinear(6, 6)(torch.randn(2, 6)).sum().backward()
try:
    SPMLinear(6, 6, impl="cpu")
except RuntimeError as error:
    assert "installed without its compiled kernels" in str(error)
    print("refused")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "refused\n", result.stderr


def test_one_openmp_runtime():
    """Two of them would fight for the cores, and torch.set_num_threads would not rule."""
    code = """
import torch
from pairmix import SPMLinear
SPMLinear(64, 64)(torch.randn(99, 64))
paths = {line.split()[-1] for line in open("/proc/self/maps") if "gomp" in line or "libomp" in line}
print(len(paths))
"""
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "1\n", result.stderr
