"""The GPU kernels equal the definition, on a GPU or in Triton's interpreter: TRITON_INTERPRET=1."""

from __future__ import annotations

from itertools import cycle, product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import oracle
from pairmix import Schedule, SPMFeedForward, SPMLinear, functional, ops
from pairmix.functional import spm
from pairmix.ops import Parameters, reference, triton

triton_kernels = pytest.importorskip("triton_kernels", exc_type=ImportError)
from triton_kernels import DEVICE, Tiles, on_device, using  # noqa: E402 - after the check that Triton is there

pytestmark = pytest.mark.skipif(triton.why_not(DEVICE) is not None, reason=f"{triton.why_not(DEVICE)}")

BLOCKS = ["general", "rotation"]
KINDS = {"butterfly": Schedule.butterfly, "brick": Schedule.brick, "random": Schedule.random}
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
SMALL = Tiles(widest=16, forward_rows=4, backward_rows=2, held=2)


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def check(arguments, tiles=None):
    """Compare the output and every gradient with the oracle."""
    grad = torch.randn(*arguments.x.shape[:-1], arguments.out_features).to(arguments.x.dtype)
    answers = oracle.answers(arguments, grad)
    a = on_device(arguments)
    options = {"d_in": a.d_in, "d_out": a.d_out, "bias": a.bias, "residual_scale": a.residual_scale}
    with using(Tiles() if tiles is None else tiles):
        y = spm(a.x, a.blocks, a.schedule, **options, out_features=a.out_features, impl="triton")
        results = {"output": y.detach(), **oracle.gradients(y, a, grad.to(DEVICE))}
    for name, actual in results.items():
        assert actual.dtype == arguments.x.dtype, name
        oracle.assert_matches(actual.cpu(), answers[name], name)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 12, 31, 64])
def test_square(n, block):
    dtypes = cycle(DTYPES)
    for kind, residual in product(KINDS, ["scale", "pass"] if n % 2 else ["pass"]):
        schedule = KINDS[kind](n, 3)
        check(oracle.random_arguments(schedule, block, dtype=next(dtypes), residual=residual, leading=(3,)))


@pytest.mark.parametrize("sizes", [(1, 7), (7, 3), (12, 4), (4, 16), (16, 4)], ids=str)
def test_rectangular(sizes):
    for kind, block in (("butterfly", "general"), ("random", "rotation")):
        in_features, out_features = sizes
        schedule = KINDS[kind](max(sizes), 3)
        check(oracle.random_arguments(schedule, block, in_features=in_features, out_features=out_features))


@pytest.mark.parametrize("rows", [0, 1, 17, 40])
def test_workers_share_the_rows(rows):
    check(oracle.random_arguments(Schedule.butterfly(8), leading=(rows,)), SMALL)


@pytest.mark.parametrize("held", [1, 2, 3, 8])
@pytest.mark.parametrize("block", BLOCKS)
def test_any_number_of_stages_in_registers(held, block):
    for kind in ("butterfly", "random"):
        check(oracle.random_arguments(KINDS[kind](8, 7), block, dtype=torch.float32), Tiles(held=held))


def test_more_stages_than_a_pass_has():
    check(oracle.random_arguments(Schedule.butterfly(4, 35), leading=(2,)))


@pytest.mark.parametrize("sizes", [(32, 32), (35, 35), (35, 12), (12, 35)], ids=str)
@pytest.mark.parametrize(("kind", "block"), [("butterfly", "general"), ("random", "rotation")])
def test_several_tiles(kind, block, sizes):
    in_features, out_features = sizes
    schedule = KINDS[kind](max(sizes), 6 if kind == "butterfly" else 2)
    arguments = oracle.random_arguments(schedule, block, in_features=in_features, out_features=out_features)
    check(arguments, SMALL._replace(backward_rows=8))


def one_and_all(schedule, block, tiles, maps=3, in_features=None, out_features=None):
    """The results for several maps of one input, by the kernels and by the reference, in float64."""
    n, rows = schedule.n, 5
    make = [
        oracle.random_arguments(schedule, block, in_features=in_features, out_features=out_features, seed=seed)
        for seed in range(maps)
    ]
    x = make[0].x.detach().to(DEVICE)
    stacked = {
        name: torch.stack([one.tensors[name].detach() for one in make]).to(DEVICE) if name in make[0].tensors else None
        for name in Parameters._fields
    }
    parameters = Parameters(**stacked)
    out_features = out_features or n
    grad = torch.randn(rows, maps * out_features, dtype=torch.float64).to(DEVICE)
    own = Schedule(schedule.order, "from_pairs").on(DEVICE)
    needs = Parameters(True, True, True, True, bool(n % 2))
    found = []
    with using(tiles):
        for impl in (triton, reference):
            y = impl.forward(x, parameters, own, block, out_features)
            gx, gradients = impl.backward(grad, x, parameters, own, block, True, needs)
            found.append([y, gx, *gradients])
    return found


@pytest.mark.parametrize(("n", "tiles"), [(8, Tiles()), (7, Tiles()), (24, SMALL)], ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_several_maps(block, n, tiles):
    actual, expected = one_and_all(Schedule.butterfly(n, 5), block, tiles, in_features=n - 2, out_features=n - 3)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("needed", ["x", *Parameters._fields])
@pytest.mark.parametrize("tiles", [Tiles(backward_rows=2), SMALL], ids=["one tile", "several"])
def test_only_the_gradients_that_are_needed(needed, tiles):
    a = on_device(oracle.random_arguments(Schedule.butterfly(19, 5)))
    tensors = (a.blocks, a.d_in, a.d_out, a.bias, a.residual_scale)
    parameters = ops.with_front(Parameters(*(tensor.detach() for tensor in tensors)))
    grad, needs = torch.randn_like(a.x), Parameters(*(name == needed for name in Parameters._fields))
    arguments = (grad, a.x.detach(), parameters, a.schedule.on(DEVICE), "general", needed == "x", needs)
    with using(tiles):
        gx, gradients = triton.backward(*arguments)
    found, expected = ({"x": of_x, **of._asdict()} for of_x, of in ((gx, gradients), reference.backward(*arguments)))
    assert [name for name, gradient in found.items() if gradient is not None] == [needed]
    torch.testing.assert_close(found[needed], expected[needed])


def test_results_repeat_bit_for_bit():
    def results():
        a = on_device(oracle.random_arguments(Schedule.butterfly(9), leading=(50,), dtype=torch.float32))
        with using(SMALL):
            y = spm(a.x, a.blocks, a.schedule, d_in=a.d_in, impl="triton")
        return [y, *torch.autograd.grad(y, [a.x, a.blocks, a.d_in], torch.ones_like(y))]

    for first, second in zip(results(), results(), strict=True):
        assert first.equal(second)


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")  # of lanes that nobody reads
def test_an_infinite_number_does_not_reach_what_does_not_depend_on_it():
    blocks = torch.ones(2, 4, 2, device=DEVICE)
    x = torch.zeros(5, 5, device=DEVICE).fill_diagonal_(torch.inf)
    for schedule in (Schedule.butterfly(5, 2), Schedule.random(5, 2)):
        y = spm(x, blocks, Schedule(schedule.order, "from_pairs"), impl="triton")
        assert y.equal(spm(x, blocks, schedule, impl="reference"))


def test_autocast():
    layer = SPMLinear(12, 12, device=DEVICE)
    x = torch.randn(3, 12, device=DEVICE)
    results = []
    for layer.impl in ("triton", "reference"):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            y = layer(x)
        results.append([y, *torch.autograd.grad(y.sum(), list(layer.parameters()))])
    assert results[0][0].dtype == torch.bfloat16
    torch.testing.assert_close(*results, atol=2**-7, rtol=2**-7)


def launched(monkeypatch, *function_and_arguments):
    """The names of the kernels that a call launches."""
    from pairmix.ops.triton.launch import Operator

    names, launch = [], Operator.launch
    monkeypatch.setattr(
        Operator, "launch", lambda self, kernel, *rest, **options: names.append(kernel.__name__) or launch(
            self, kernel, *rest, **options
        ),
    )  # fmt: skip
    function, *arguments = function_and_arguments
    result = function(*arguments)
    monkeypatch.setattr(Operator, "launch", launch)
    return names, result


@pytest.mark.parametrize(("n", "block"), [(8, "general"), (8, "rotation"), (256, "general"), (4096, "general")])
def test_a_butterfly_is_one_launch_forward_and_two_backward(n, block, monkeypatch):
    stages = 2 if n == 4096 and DEVICE.type == "cpu" else None  # the interpreter takes its time
    layer = SPMLinear(n, n, block=block, stages=stages, impl="triton", device=DEVICE)
    x = torch.randn(1, n, device=DEVICE, requires_grad=True)
    names, y = launched(monkeypatch, layer, x)
    assert names == ["forward_pass"]
    names, _ = launched(monkeypatch, y.sum().backward)
    assert names == ["backward_pass", "reduce_slots"]


class Recorded(TorchDispatchMode):
    """The operations of torch that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket._qualified_op_name)
        return function(*args, **(kwargs or {}))


def test_tables_are_made_once_and_nothing_waits_for_the_device(monkeypatch):
    from pairmix.ops.triton import launch

    made, make_plan = [], launch.make_plan
    monkeypatch.setattr(launch, "make_plan", lambda order: made.append(1) or make_plan(order))
    schedule = Schedule.butterfly(14, 3)  # of no other test
    x, blocks = torch.randn(2, 14, device=DEVICE), torch.randn(3, 4, 7, device=DEVICE, requires_grad=True)
    for _ in range(2):
        with Recorded() as recorded:
            spm(x, blocks, schedule, impl="triton").sum().backward()
    assert len(made) == 1
    assert not {"aten::_local_scalar_dense", "aten::_to_copy", "aten::copy_"} & set(recorded.names)


def test_compiled_it_is_one_node():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    layer = SPMLinear(8, 8, impl="triton", device=DEVICE)
    x = torch.randn(3, 8, device=DEVICE)
    y = torch.compile(layer, backend=backend, fullgraph=True)(x)
    assert y.equal(layer(x))
    [graph] = graphs
    assert [node.target for node in graph.graph.nodes if "pairmix" in str(node.target)] == [ops.spm]


@pytest.mark.parametrize("cell", ["tanh", "lstm"])
def test_recurrences_run_step_by_step(cell):
    generator, n, maps = torch.Generator().manual_seed(0), 6, functional.GATES[cell]

    def random(*shape):
        return (0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(DEVICE).requires_grad_()

    h, c = random(2, n), random(2, n) if cell == "lstm" else None
    tensors = {"gates": random(4, maps * n), "h": h, "blocks": random(maps, 3, 4, n // 2)}
    options = {"d_in": random(maps, n), "d_out": random(maps, n), "bias": random(maps, n)}
    results = []
    for impl in ("triton", "reference"):
        states, _ = functional.recurrence(
            cell, tensors["gates"], h, c, tensors["blocks"], Schedule.butterfly(n), **options, impl=impl
        )
        wanted = [*tensors.values(), *options.values()]
        results.append([states, *torch.autograd.grad(states.sum(), wanted)])
    torch.testing.assert_close(*results)


def test_feed_forward_blocks_run_in_parts():
    block = SPMFeedForward(6, 12, "silu", gated=True, device=DEVICE, dtype=torch.float64)
    x = torch.randn(3, 6, device=DEVICE, dtype=torch.float64)
    results = []
    for impl in ("triton", "reference"):
        block.up.impl = block.down.impl = impl
        y = block(x)
        results.append([y, *torch.autograd.grad(y.sum(), list(block.parameters()))])
    torch.testing.assert_close(*results)


def test_autotuning_gives_the_same_results(monkeypatch):
    from triton.runtime.autotuner import Autotuner

    from pairmix.ops.triton import configs

    def times(self):
        counted = iter(range(100, 0, -1))  # the last one is the fastest
        return lambda call, quantiles: call() or [next(counted)] * 3

    if DEVICE.type == "cpu":
        monkeypatch.setattr(Autotuner, "do_bench", property(times))
    monkeypatch.setenv("PAIRMIX_AUTOTUNE", "1")
    for tried in (
        configs.forward_configs(8, torch.float32, rotation=False, exchanges=False),
        configs.backward_configs(8, torch.float32, reads_tables=False, exchanges=False),
    ):
        assert 1 < len(tried) <= 8
        assert tried[0].rows > tried[-1].rows
    check_with_defaults(oracle.random_arguments(Schedule.butterfly(8), leading=(70,), dtype=torch.float32))


@pytest.mark.parametrize("narrow", [False, True], ids=["one pass", "narrow tiles"])
def test_autotuning_measures_whether_narrow_tiles_are_faster(monkeypatch, narrow):
    from pairmix.ops.triton import configs, launch

    measured, seen = [], []
    make_plan = launch.make_plan

    def milliseconds(run):
        run()
        measured.append(1)
        return 1 if (len(measured) % 2 == 1) == narrow else 2  # narrow tiles are measured first

    monkeypatch.setattr(configs, "milliseconds", milliseconds)
    monkeypatch.setattr(configs, "_PREFERS_NARROW", seen_calls := {})
    monkeypatch.setattr(configs, "NARROWEST", 8)
    monkeypatch.setattr(launch, "NARROWEST", 8)
    monkeypatch.setattr(launch, "make_plan", lambda order, **of: seen.append(of) or make_plan(order, **of))
    monkeypatch.setattr(configs, "_autotunes", lambda: True)
    monkeypatch.setattr(configs, "_tried", lambda tried: tried[:1])
    for _ in range(2):
        check_with_defaults(oracle.random_arguments(Schedule.butterfly(16), leading=(5,), dtype=torch.float32))
    assert len(measured) == 4, "two ways of each direction, once"
    assert list(seen_calls.values()) == [narrow, narrow]
    assert {"widest": 8} in seen


def cosines_and_sines(angles):
    """Every pair turns (1, 0) by an angle of its own."""
    x = torch.tensor([1.0, 0.0], device=DEVICE).repeat(1, len(angles))
    y = spm(x, angles.to(DEVICE)[None], Schedule.butterfly(2 * len(angles), 1), impl="triton")
    return y.view(-1, 2).cpu()


def test_angles_of_many_turns():
    angles = torch.cat([torch.linspace(-8192, 8192, 1001), torch.arange(-9, 10) * (torch.pi / 4), torch.zeros(4)])
    exact = torch.stack([angles.double().cos(), angles.double().sin()], dim=1)
    assert (cosines_and_sines(angles) - exact).abs().max() < 2 * torch.finfo(torch.float32).eps
    assert cosines_and_sines(torch.zeros(4)).equal(torch.tensor([1.0, 0.0]).expand(4, 2))


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # the interpreter's
def test_angles_beyond_all_measure_still_turn():
    lengths = cosines_and_sines(torch.tensor([1e5, -1e6, 3e8, 1e38])).norm(dim=1)
    assert (lengths - 1).abs().max() < 1e-6
    assert cosines_and_sines(torch.tensor([torch.nan, 0.0]))[0].isnan().all()


def check_with_defaults(arguments):
    answers = oracle.answers(arguments, torch.ones(*arguments.x.shape))
    a = on_device(arguments)
    y = spm(a.x, a.blocks, a.schedule, d_in=a.d_in, d_out=a.d_out, bias=a.bias, impl="triton")
    for name, actual in {"output": y.detach(), **oracle.gradients(y, a, torch.ones_like(y))}.items():
        oracle.assert_matches(actual.cpu(), answers[name], name)
