import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch import nn

import oracle
from pairmix import Schedule, SPMLinear
from pairmix.nn import init

BLOCKS = ["general", "rotation"]


def randomised(*args, **kwargs):
    """A layer in which every parameter is random, so that none can be mistaken for another."""
    layer = SPMLinear(*args, **kwargs)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("in_features", "out_features"), [(1, 1), (7, 7), (8, 8), (3, 7), (7, 3), (12, 5), (1, 9)])
@pytest.mark.parametrize("residual", ["scale", "pass"])
@pytest.mark.parametrize("bias", [True, False])
def test_to_dense_is_the_layer(in_features, out_features, block, residual, bias):
    layer = randomised(in_features, out_features, bias, block=block, residual=residual, dtype=torch.float64)
    x = torch.randn(4, in_features, dtype=torch.float64)
    answer = oracle.answers(oracle.of_layer(layer, x), torch.ones(4, out_features))["output"]
    oracle.assert_matches(layer(x), answer)
    oracle.assert_matches(layer.to_dense(), oracle.dense_answer(layer))
    answer.roundings += in_features  # of the product with the matrix
    oracle.assert_matches(nn.functional.linear(x, layer.to_dense(), layer.bias), answer)


def test_to_dense_is_differentiable():
    layer = randomised(5, 5)
    layer.to_dense().square().sum().backward()
    assert layer.coeffs.grad.norm() > 0


@pytest.mark.parametrize(
    ("in_features", "out_features", "stages"), [(8, 8, None), (7, 7, None), (7, 7, 0), (100, 30, 5), (3, 1000, None)]
)
def test_parameter_counts(in_features, out_features, stages):
    n = max(in_features, out_features)
    for block, per_pair in (("general", 4), ("rotation", 1)):
        for residual in ("scale", "pass"):
            layer = SPMLinear(in_features, out_features, block=block, stages=stages, residual=residual)
            L, P = layer.stages, n // 2
            expected = n + n + out_features + per_pair * P * L + (L if n % 2 and residual == "scale" else 0)
            assert sum(parameter.numel() for parameter in layer.parameters()) == expected


def test_shapes_and_names():
    layer = SPMLinear(5, 9, block="rotation")
    shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    assert shapes == {"angles": (5, 4), "d_in": (9,), "d_out": (9,), "bias": (9,), "residual_scale": (5,)}
    layer = SPMLinear(9, 5, bias=False, residual="pass", stages=2)
    shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    assert shapes == {"coeffs": (2, 4, 4), "d_in": (9,), "d_out": (9,)}
    assert layer.bias is None
    assert layer.residual_scale is None


def test_repr_shows_what_it_is_and_what_it_saves():
    assert repr(SPMLinear(1000, 1000)) == (
        "SPMLinear(in_features=1000, out_features=1000, bias=True, width=1000, stages=10, block=general, "
        "schedule=butterfly, parameters=23,000 (dense 1,001,000))"
    )
    assert "bias=False" in repr(SPMLinear(4, 4, bias=False))


def test_one_line_change():
    """The arguments of nn.Linear, by position and by name."""
    for layer in (nn.Linear, SPMLinear):
        made = layer(6, 4, False, "cpu", torch.float64)
        assert made(torch.randn(2, 6, dtype=torch.float64)).shape == (2, 4)
        assert made.bias is None
        made = layer(in_features=6, out_features=4, bias=True, device="cpu", dtype=torch.float32)
        assert made(torch.randn(3, 2, 6)).shape == (3, 2, 4)
        assert (made.in_features, made.out_features) == (6, 4)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((0, 4), {}, "in_features must be at least 1, got 0"),
        ((4, -1), {}, "out_features must be at least 1, got -1"),
        ((4, 4), {"block": "cube"}, r"block must be one of \['general', 'rotation'\], got 'cube'"),
        ((4, 4), {"residual": "drop"}, "residual must be one of .* got 'drop'"),
        ((4, 4), {"init": "zeros"}, "init must be one of .* got 'zeros'"),
        ((4, 4), {"schedule": "spiral"}, "schedule must be one of .* got 'spiral'"),
        ((4, 4), {"stages": -1}, "stages must be an integer of at least 0, got -1"),
        ((4, 4), {"schedule": Schedule.butterfly(8)}, "the layer has the width 4, its schedule has 8"),
        ((8, 8), {"schedule": Schedule.butterfly(8), "stages": 2}, "stages=2, but the given .* has 3"),
        ((4, 6), {"width": 5}, r"width must be at least 6 = max\(in_features, out_features\), got 5"),
        ((4, 4), {"rank": -1}, "rank must be at least 0, got -1"),
        ((4, 4), {"gain": float("nan")}, "gain must be a finite number, got nan"),
        ((4, 4), {"impl": "magic"}, "impl must be one of .* got 'magic'"),
    ],
)
def test_bad_arguments(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        SPMLinear(*args, **kwargs)


def test_an_input_of_the_wrong_size():
    layer = SPMLinear(4, 8)
    for x in (torch.zeros(2, 5), torch.zeros(2, 8), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"expected an input of shape \(\*, 4\), got"):
            layer(x)
    with pytest.raises(TypeError, match=r"x is torch\.float64"):
        layer(torch.zeros(2, 4, dtype=torch.float64))


def test_options_are_keyword_only():
    with pytest.raises(TypeError):
        SPMLinear(4, 4, True, None, None, "rotation")


@pytest.mark.parametrize("schedule", ["butterfly", "brick", "random", "random_blocks"])
def test_default_stages_reach_everything(schedule):
    layer = SPMLinear(13, 20, schedule=schedule)
    assert layer.schedule.kind == schedule
    assert layer.schedule.reach().all()


def test_copies():
    layer = randomised(9, 5)
    x = torch.randn(3, 9)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(buffer, weights_only=False),
    ):
        assert other(x).equal(layer(x))
        assert other.schedule == layer.schedule
        assert not {p.data_ptr() for p in other.parameters()} & {p.data_ptr() for p in layer.parameters()}


def test_dtype_and_device_move():
    layer = randomised(9, 9)
    x = torch.randn(3, 9, dtype=torch.float64)
    x = x.float().double()
    answer = oracle.answers(oracle.of_layer(layer, x), torch.ones(3, 9))["output"]
    oracle.assert_matches(layer(x.float()), answer)
    assert layer.to(torch.float64)(x).dtype == torch.float64
    oracle.assert_matches(layer(x), answer)
    assert layer.half()(x.half()).dtype == torch.float16
    assert layer.to("meta")(x.half().to("meta")).device.type == "meta"


def test_meta_device_and_reset_parameters():
    with torch.device("meta"):
        layer = SPMLinear(33, 20)
    assert layer(torch.empty(2, 33, device="meta")).shape == (2, 20)
    layer = layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        parameter.data.fill_(torch.nan)
    torch.manual_seed(0)
    layer.reset_parameters()
    torch.manual_seed(0)
    fresh = SPMLinear(33, 20)
    for (name, a), (_, b) in zip(layer.named_parameters(), fresh.named_parameters(), strict=True):
        assert a.equal(b), name


class TestStateDict:
    @pytest.mark.parametrize("block", BLOCKS)
    def test_round_trip(self, block, tmp_path):
        layer, other = randomised(9, 5, block=block), randomised(9, 5, block=block)
        torch.save(layer.state_dict(), tmp_path / "layer.pt")
        other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
        x = torch.randn(3, 9)
        assert other(x).equal(layer(x))

    def test_safetensors(self, tmp_path):
        from safetensors.torch import load_file, save_file

        layer, other = randomised(9, 5), randomised(9, 5)
        save_file(layer.state_dict(), tmp_path / "layer.safetensors")
        other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
        x = torch.randn(3, 9)
        assert other(x).equal(layer(x))

    def test_assign_to_a_layer_on_meta(self):
        layer = randomised(9, 5)
        with torch.device("meta"):
            other = SPMLinear(9, 5)
        other.load_state_dict(layer.state_dict(), assign=True)
        x = torch.randn(3, 9)
        assert other(x).equal(layer(x))

    def test_own_pairs(self):
        schedule = Schedule.from_pairs(5, [[(4, 0), (2, 1)], [(3, 4), (0, 1)]])
        layer, other = randomised(5, 5, schedule=schedule), randomised(5, 5, schedule=schedule)
        other.load_state_dict(layer.state_dict())
        with pytest.raises(RuntimeError, match="another layer: schedule is"):
            randomised(5, 5, stages=2).load_state_dict(layer.state_dict())

    def test_the_same_pairing_under_another_name(self):
        layer = randomised(8, 8)
        by_hand = Schedule.from_pairs(8, layer.schedule.pairs.transpose(0, 2, 1))
        randomised(8, 8, schedule=by_hand).load_state_dict(layer.state_dict())

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"schedule": "brick"}, r"schedule is Schedule.butterfly\(n=9, .* there and Schedule.brick\(n=9, .* here"),
            ({"schedule": Schedule.random(9, 5, seed=3)}, r"schedule is .* there and Schedule.random\(.*seed=3\) here"),
            (
                {"schedule": "random_blocks"},
                r"schedule is .* there and Schedule.random_blocks\(.*, block_size=1\) here",
            ),
            ({"stages": 4}, r"schedule is .*stages=5\) there and .*stages=4\) here"),
            ({"block": "rotation"}, "block is general there and rotation here"),
            ({"residual": "pass"}, "residual is scale there and pass here"),
            ({"out_features": 6}, "out_features is 5 there and 6 here"),
            ({"in_features": 11}, "in_features is 9 there and 11 here"),
        ],
    )
    @pytest.mark.parametrize("strict", [True, False])
    def test_another_layer_is_refused_and_left_as_it_was(self, changed, message, strict):
        checkpoint = nn.Sequential(nn.ReLU(), randomised(9, 5, stages=5)).state_dict()
        arguments = {"in_features": 9, "out_features": 5, "stages": 5, **changed}
        if isinstance(changed.get("schedule"), Schedule):
            del arguments["stages"]
        model = nn.Sequential(nn.ReLU(), randomised(**arguments))
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(RuntimeError, match=f"1: the checkpoint is of another layer: .*{message}"):
            model.load_state_dict(checkpoint, strict=strict)
        for name, tensor in model.state_dict().items():
            assert tensor.equal(before[name]), name

    def test_residual_does_not_matter_for_even_widths(self):
        randomised(8, 8, residual="pass").load_state_dict(randomised(8, 8).state_dict())

    def test_a_checkpoint_without_its_description(self):
        layer = randomised(9, 5)
        checkpoint = layer.state_dict()
        del checkpoint["description"]
        with pytest.raises(RuntimeError, match=r'Missing key.*"description"'):
            randomised(9, 5).load_state_dict(checkpoint)
        randomised(9, 5).load_state_dict(checkpoint, strict=False)

    @pytest.mark.parametrize("content", [b"", b"not json", b"[]", b"{}", b'{"schedule": {}}', b'{"schedule": 3}'])
    def test_a_description_that_cannot_be_read(self, content):
        checkpoint = SPMLinear(9, 5).state_dict()
        checkpoint["description"] = torch.tensor(list(content), dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="its description cannot be read"):
            SPMLinear(9, 5).load_state_dict(checkpoint)


def test_it_learns():
    torch.manual_seed(0)
    target = SPMLinear(8, 8, init=partial(init.near_identity_, std=0.3))
    student = SPMLinear(8, 8)
    optimizer = torch.optim.Adam(student.parameters(), 0.03)
    for _ in range(300):
        x = torch.randn(64, 8)
        loss = (student(x) - target(x).detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05 * target(x).var()
