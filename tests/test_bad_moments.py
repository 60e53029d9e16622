"""Moments after a gradient that is not finite, in checkpoints, such as users set; and counts."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lowbit_optim
from lowbit_optim import _master_weights
from lowbit_optim._tensor_checks import extent
from lowbit_optim_kernels.formats import dynamic8
from protocol import (
    BY_ENGINE,
    all_parameters,
    give_gradients,
    identical,
    parameters,
    saved_and_loaded,
    snapshot,
    train,
    with_values_of,
)

OUTLASTING = [
    ("Lion", {}, math.nan),
    ("Lion", {}, math.inf),
    ("AdamW", {"cautious": True}, math.inf),
    ("SGD", {"momentum": 0.9, "cautious": True}, math.nan),
    ("RMSprop", {"momentum": 0.9, "centered": True, "cautious": True}, math.nan),
]


@pytest.mark.parametrize(("name", "options", "bad"), OUTLASTING)
@BY_ENGINE
@pytest.mark.few_if_compiled("bad", "options")
def test_a_run_resumes_after_a_gradient_that_weights_outlast(engine, name, options, bad):
    """A 32-bit moment keeps what is not finite, beside a weight that is."""
    wide, narrow = (getattr(lowbit_optim, f"{name}{bits}bit") for bits in (32, 8))
    optimizer = train(wide(parameters(), lr=0.01, **options), 1)
    give_gradients(all_parameters(optimizer), 1)
    all_parameters(optimizer)[0].grad[3, 5] = bad
    optimizer.step()
    loaded, in_8_bits = (
        with_values_of(optimizer, cls(parameters(), lr=0.01, min_8bit_size=1, **options))
        for cls in (wide, narrow)
    )
    for other in loaded, in_8_bits:
        other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    assert identical(loaded.state_dict()["state"], optimizer.state_dict()["state"])
    for other in optimizer, loaded, in_8_bits:
        train(other, 2, first=2)
    before, after = snapshot(optimizer), snapshot(loaded)
    assert identical(before["params"], after["params"])
    assert identical(before["state"], after["state"])
    assert bool(all_parameters(in_8_bits)[0].isfinite().all())


@pytest.mark.parametrize(("name", "key"), [("AdamW", "exp_avg"), ("SGD", "momentum_buffer")])
def test_what_weights_do_not_outlast_is_refused(name, key):
    options = {"momentum": 0.9} if name == "SGD" else {}
    cls = getattr(lowbit_optim, f"{name}32bit")
    saved = train(cls(parameters(), lr=0.01, **options), 1).state_dict()
    saved["state"][0][key][3, 5] = math.nan
    with pytest.raises(ValueError, match=f"'{key}' has elements that are not finite"):
        cls(parameters(), lr=0.01, **options).load_state_dict(saved)


def test_a_moment_of_a_weight_that_is_lost_is_loaded():
    saved = train(lowbit_optim.AdamW32bit(parameters(), lr=0.01), 1).state_dict()
    saved["state"][0]["exp_avg"][3, 5] = math.nan
    lost = parameters()
    lost[0].data[3, 5] = math.nan
    optimizer = lowbit_optim.AdamW32bit(lost, lr=0.01)
    optimizer.load_state_dict(saved)
    assert optimizer.state[lost[0]]["exp_avg"].isnan().sum() == 1


def test_a_square_of_minus_infinity_is_refused_of_cautious_ones_too():
    optimizer = train(lowbit_optim.AdamW32bit(parameters(), lr=0.01, cautious=True), 1)
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg_sq"][3, 5] = -math.inf
    with pytest.raises(ValueError, match="'exp_avg_sq' has elements that are not >= 0"):
        lowbit_optim.AdamW32bit(parameters(), lr=0.01, cautious=True).load_state_dict(saved)


@pytest.mark.parametrize(("name", "key"), [("AdamW", "exp_avg"), ("SGD", "momentum_buffer")])
def test_an_infinite_moment_over_a_finite_square_is_refused_of_cautious_ones_too(name, key):
    """It has the sign of some gradient, and an infinite weight follows."""
    options = {"cautious": True, **({"momentum": 0.9} if name == "SGD" else {})}
    cls = getattr(lowbit_optim, f"{name}32bit")
    saved = train(cls(parameters(), lr=0.01, **options), 1).state_dict()
    saved["state"][0][key][3, 5] = math.inf
    with pytest.raises(ValueError, match=f"'{key}' has elements that are not finite"):
        cls(parameters(), lr=0.01, **options).load_state_dict(saved)


@pytest.mark.parametrize("shape", [(12, 70), (7,)])
def test_codes_of_squares_say_nothing_of_an_infinite_moment(shape):
    options = {"lr": 0.01, "cautious": True, "min_8bit_size": 1}
    saved = train(lowbit_optim.AdamW8bit(parameters(), **options), 1).state_dict()
    state = saved["state"][0]
    state["exp_avg"] = torch.full_like(state["exp_avg"], math.inf, dtype=torch.float32)
    del state["exp_avg_absmax"]
    state["exp_avg_sq"] = state["exp_avg_sq"].new_zeros(shape)
    with pytest.raises(ValueError, match="'exp_avg' has elements that are not finite"):
        lowbit_optim.AdamW8bit(parameters(), **options).load_state_dict(saved)


@pytest.mark.parametrize(
    ("name", "key", "beyond", "got"),
    [
        ("AdamW32bit", "exp_avg", -1e300, "float32"),
        ("AdamW8bit", "exp_avg_absmax", 1e300, "float32"),
        ("AdamW8bit-ratio8", "exp_avg_scale", 3.4e38, "bfloat16"),
        ("AdamW8bit-ratio8", "exp_avg_sq_scale", 1e300, "float32"),
        ("AdamW32bit", "gnorm_vec", 1e300, "float32"),
    ],
)
def test_numbers_that_become_infinite_on_loading_are_refused(name, key, beyond, got):
    """Finite ones, in a wider dtype than the state has."""
    cls, _, state_format = name.partition("-")
    settings = {"min_8bit_size": 0, "percentile_clipping": 50}
    settings |= {"state_format": state_format} if state_format else {}

    def made():
        return getattr(lowbit_optim, cls)(parameters(), **settings)

    saved = train(made(), 1).state_dict()
    wide = saved["state"][0][key].double()
    wide.flatten()[3] = beyond
    saved["state"][0][key] = wide
    with pytest.raises(ValueError, match=f"'{key}' .* finite as torch.{got}"):
        made().load_state_dict(saved)
    wide.flatten()[3] = 1.0
    made().load_state_dict(saved)


@pytest.mark.parametrize("dither", [True, False])
def test_a_positive_square_has_no_code_of_zero(dither, engine, device):
    """However far below the largest one of its block it is."""
    p = torch.nn.Parameter(torch.ones(256, device=device))
    optimizer = lowbit_optim.AdamW8bit([p], eps=1e-30, min_8bit_size=1, dither=dither)
    p.grad = torch.full_like(p, 1e-15)
    p.grad[5] = 1e8
    optimizer.step()
    assert (optimizer.state[p]["exp_avg_sq"] > 0).all()


def slow_average(p, name="SGD", key="momentum_buffer", **options):
    """The codes and scales of an average of p's gradients after one step, by dither."""
    options = options or {"momentum": 0.999}
    optimizer = getattr(lowbit_optim, f"{name}8bit")([p], lr=1e-30, min_8bit_size=1, **options)
    optimizer.step()
    state = optimizer.state[p]
    return state[key].cpu(), state[f"{key}_absmax"].cpu()


def test_numbers_far_below_the_largest_are_zero_by_dither(engine, device):
    """Squares have the lowest code that is not zero."""
    p = torch.nn.Parameter(torch.ones(20, 256, device=device))
    p.grad = torch.logspace(0, -16, 256, device=device).expand(20, -1).clone()
    p.grad[1::2] *= -1
    p.grad[:, 0] = 1.0
    codes, _ = slow_average(p)
    assert (codes[:, 0] == 255).all()
    assert (codes[:, 160:] == 127).all()
    codes, _ = slow_average(p, "AdamW", "exp_avg_sq", betas=(0.9, 0.999))
    assert (codes[:, 0] == 255).all()
    assert (codes[:, 60:] == 1).all()


@pytest.mark.parametrize("lowest", [-2.0, -torch.finfo(torch.float32).max])
def test_the_lowest_number_has_the_lowest_code_beside_a_bad_one(lowest, engine, device):
    p = torch.nn.Parameter(torch.ones(256, device=device))
    p.grad = torch.ones_like(p)
    p.grad[3], p.grad[7] = lowest, math.nan
    codes, absmax = slow_average(p)
    assert absmax.item() == pytest.approx(min(-lowest * dynamic8.REACH, dynamic8.MOST), rel=1e-6)
    assert (codes[3], codes[7]) == (0, 127)


@pytest.mark.parametrize(("state_format", "zero"), [("dynamic8", 127), ("ratio8", 128)])
@pytest.mark.parametrize("momentum", [0.9, 0.999])
def test_a_block_of_zeros_has_the_code_of_zero(momentum, state_format, zero, engine, device):
    p = torch.nn.Parameter(torch.ones(300, device=device))
    p.grad = torch.zeros_like(p)
    optimizer = lowbit_optim.SGD8bit(
        [p], lr=0.1, momentum=momentum, state_format=state_format, min_8bit_size=1
    )
    optimizer.step()
    assert (optimizer.state[p]["momentum_buffer"] == zero).all()


# Moments that a user sets between steps: numbers under their keys, without scales.


def with_numbers(name, state_format, keys, value=0.125):
    """An optimizer after a step, and its parameter, whose moments of these keys are set."""
    p = torch.nn.Parameter(torch.ones(20, 100))
    options = {"momentum": 0.9} if name == "SGD" else {"weight_decay": 0.0}
    optimizer = getattr(lowbit_optim, name)(
        [p], lr=0.01, state_format=state_format, min_8bit_size=1, **options
    )
    train(optimizer, 1)
    state = optimizer.state[p]
    for key in keys:
        for old in (f"{key}_absmax", f"{key}_scale", f"{key}_and_sq"):
            state.pop(old, None)
        state[key] = torch.full_like(p, value)
    return optimizer, p


@pytest.mark.parametrize("state_format", ["float32", "dynamic8", "ratio8"])
@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("SGD", "momentum_buffer", 0.125),
        ("AdamW", "exp_avg", 0.0),
        ("AdEMAMix", "exp_avg_slow", 0.0),
    ],
)
def test_a_moment_that_is_set_by_numbers_is_coded(name, key, value, state_format):
    optimizer, p = with_numbers(name, state_format, (key,), value)
    twin, q = with_numbers(name, "float32", (key,), value)
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(p)
    optimizer.step()
    twin.step()
    assert (p - q).abs().max() <= 1e-3
    assert optimizer.state[p][key].dtype == (
        torch.float32 if state_format == "float32" else torch.uint8
    )
    train(optimizer, 1)


def test_both_moments_of_one_byte_are_set_by_numbers():
    optimizer, p = with_numbers("AdamW", "ratio4", ("exp_avg", "exp_avg_sq"))
    train(optimizer, 1)
    assert "exp_avg_and_sq" in optimizer.state[p]
    assert "exp_avg" not in optimizer.state[p]


@pytest.mark.parametrize(
    ("name", "state_format", "keys", "reason"),
    [
        ("AdamW", "ratio8", ("exp_avg_sq",), "'exp_avg' has codes of 'ratio8', which are relative"),
        ("AdEMAMix", "ratio8", ("exp_avg", "exp_avg_sq"), "'exp_avg_slow' has codes of 'ratio8'"),
        ("AdamW", "ratio4", ("exp_avg",), "it has no 'exp_avg_sq'"),
        ("AdamW", "ratio4", ("exp_avg_sq",), "it has no 'exp_avg'"),
    ],
)
def test_a_moment_that_others_are_relative_to_is_not_set_alone(name, state_format, keys, reason):
    optimizer, p = with_numbers(name, state_format, keys)
    before = p.detach().clone()
    with pytest.raises(ValueError, match=f"does not fit {name}: {reason}"):
        train(optimizer, 1)
    assert torch.equal(p, before)
    assert optimizer.state[p]["step"] == 1


def test_numbers_beside_the_scales_of_codes_are_refused_with_the_cure():
    """As torch.optim.Optimizer.load_state_dict leaves codes, which it casts."""
    optimizer, p = with_numbers("SGD", "dynamic8", ())
    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    with pytest.raises(ValueError, match="numbers are given without scales, and codes as torch"):
        train(optimizer, 1)


class MadeInPasses(TorchDispatchMode):
    """Collects the dtypes of what operators make of a size."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.dtypes = numel, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.numel() == self.numel:
            self.dtypes.append(made.dtype)
        return made


@pytest.mark.parametrize("name", ["AdamW32bit", "LAMB8bit", "Cain32bit", "LearnedGradient8bit"])
def test_sound_numbers_are_loaded_without_masks_of_their_size(name):
    """Which took as long as several steps, and more memory than the moments."""
    p = torch.nn.Parameter(torch.ones(70, 90))
    p.grad = torch.ones_like(p)
    optimizer = getattr(lowbit_optim, name)([p], lr=0.01)
    optimizer.step()
    saved = optimizer.state_dict()
    with MadeInPasses(p.numel()) as made:
        optimizer.load_state_dict(saved)
    assert made.dtypes
    assert torch.bool not in made.dtypes


@pytest.mark.parametrize("bits", [24, 32])
@pytest.mark.parametrize("shape", [(70, 90), (90, 70, 1), (6300,), (1, 1), ()])
def test_weights_are_split_in_pieces(monkeypatch, bits, shape):
    """Of which a temporary takes 64 bits an element."""
    made: list[MadeInPasses] = []

    def loaded(piece):
        monkeypatch.setattr(_master_weights, "PIECE", piece)
        p = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
        optimizer = lowbit_optim.AdamW8bit([p], lr=0.01, master_weight_bits=bits)
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        with MadeInPasses(p.numel()) as seen:
            lowbit_optim.load_master_weights(optimizer, [weight])
        made.append(seen)
        return p.detach(), dict(lowbit_optim.master_weights(optimizer))[0], weight

    in_pieces, at_once = loaded(300), loaded(1 << 18)
    assert identical(in_pieces, at_once)
    torch.testing.assert_close(in_pieces[1], in_pieces[2], rtol=2.0 ** (8 - bits), atol=0)
    assert at_once[0].numel() == 1 or torch.int64 not in made[0].dtypes
    assert torch.int64 in made[1].dtypes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 3, 17, 1000])
def test_the_extent_of_numbers_is_nan_if_one_is(dtype, count):
    numbers = torch.arange(count).to(dtype)
    assert extent(numbers) == (0, numbers[-1])
    for place in range(0, count, 7):
        for bad, both in ((math.nan, (True, True)), (math.inf, (False, False))):
            damaged = numbers.index_fill(0, torch.tensor(place), bad)
            assert tuple(map(math.isnan, extent(damaged))) == both
            assert both[1] or extent(damaged)[1] == math.inf
            assert both[0] or extent(-damaged)[0] == -math.inf
    assert extent(numbers[:0]) == extent(numbers.to("meta")) == (math.inf, -math.inf)


def test_an_element_whose_square_alone_overflows_starts_again(engine, device):
    """Though the moment that comes last is finite, the mean of a centered RMSprop."""
    p = torch.nn.Parameter(torch.zeros(300, device=device))
    optimizer = lowbit_optim.RMSprop8bit([p], centered=True, min_8bit_size=1)
    p.grad = torch.ones_like(p)
    p.grad[7] = 1e25
    optimizer.step()
    state = optimizer.state[p]
    for key in ("variance", "grad_avg"):
        assert state[f"{key}_absmax"].max() < 1.0
        codes = state[key].cpu()
        assert codes[7] != codes[8]
        assert (codes[8:] == codes[8]).all()


@pytest.mark.parametrize("make", [int, float, lambda x: torch.tensor(float(x)).double()])
def test_steps_are_counted_up_to_where_fp64_has_every_number(make):
    optimizer = train(lowbit_optim.AdamW8bit(parameters(shapes=[(300,)])), 1)
    saved = optimizer.state_dict()
    for count in (0, 1, 2**24, 2**53):
        saved["state"][0]["step"] = make(count)
        optimizer.load_state_dict(saved)
        (p,) = all_parameters(optimizer)
        assert int(optimizer.state[p]["step"]) == count
    for count in (-1, 2**54):
        saved["state"][0]["step"] = make(count)
        with pytest.raises(ValueError, match=r"a whole number >= 0 and at most 2\*\*53"):
            optimizer.load_state_dict(saved)
    assert int(optimizer.state[p]["step"]) == 2**53


@pytest.mark.parametrize("step", [2**53 + 1, 0.5, True, float("nan"), float("inf"), "3"])
def test_what_is_no_count_of_steps_is_refused(step):
    optimizer = train(lowbit_optim.AdamW8bit(parameters(shapes=[(300,)])), 1)
    saved = optimizer.state_dict()
    saved["state"][0]["step"] = step
    with pytest.raises(ValueError, match="'step' must be a whole number"):
        optimizer.load_state_dict(saved)
