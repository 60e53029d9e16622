"""The formats `ratio8` and `ratio4`, and dither: codes, scales, conversion, errors."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import lowbit_optim
import reference_formats as reference
from lowbit_optim_kernels import dither
from lowbit_optim_kernels.formats import FORMATS, finite_in_all
from lowbit_optim_kernels.rules import Moment
from lowbit_optim_kernels.rules.adam import ADAM
from protocol import BY_ENGINE, identical, train

RATIO8, RATIO4 = FORMATS["ratio8"], FORMATS["ratio4"]
OUTLASTING = (replace(ADAM[0], outlasts=True), ADAM[1])
FOUR_BITS = ("Adam4bit", "AdamW4bit", "LAMB4bit", "LANS4bit", "Eve4bit")
SHAPES = ((64, 147), (3, 300), (257,), (5,))


def example():
    """The specification's example: m, v and random bits, of which some are bad or zero."""
    bits = reference.dithers(7, 0, 9, 1, range(64))
    sign = np.where(bits & 1, np.float32(-1), np.float32(1))
    m = sign * reference.fraction(bits) * np.exp2(-(bits & 15).astype(np.float32))
    root = reference.fraction(np.vectorize(lambda x: reference.mix(int(x)))(bits).astype(np.uint32))
    v = root * root
    m[3] = v[3] = 0
    m[4, 5], v[4, 6], v[4, 7] = np.nan, np.inf, np.nan
    return m.astype(np.float32), v, bits


def encoded(format, moments, values, *random):
    values = finite_in_all([torch.from_numpy(np.ascontiguousarray(x)) for x in values])
    random = [None if u is None else torch.from_numpy(u) for u in random]
    return [x.float().numpy() if x.is_floating_point() else x.numpy() for x in
            format.encode(moments, values, random)]  # fmt: skip


def test_dither_is_the_one_that_is_specified():
    _, _, bits = example()
    assert reference.digest(bits) == "c632bdc546f40375"
    key = dither.stream_key(dither.tensor_key(0, 0), dither.WEIGHT)
    blocks, lanes = torch.tensor([[0], [1]]), torch.arange(2)
    got = dither.bits(key, torch.tensor(1), blocks, lanes)
    assert got.tolist() == [[0xBB38677D, 0x7C781126], [0xA0E00116, 0x621FAABF]]
    far = torch.tensor([[2**34 + 5]])
    key = dither.stream_key(dither.tensor_key(2**32 - 1, 12), 4)
    got = dither.bits(key, torch.tensor(2**33 + 7), far, torch.tensor([63]))
    assert got.item() == reference.dither(2**32 - 1, 12, 4, 2**33 + 7, 2**34 + 5, 63)


def test_no_fraction_is_rounded_to_1():
    assert dither.fraction(torch.tensor(dither.MASK), torch.float32) == 1 - 2.0**-24


def test_codes_are_the_ones_that_are_specified():
    m, v, _ = example()
    of_square = reference.fraction(reference.dithers(1, 2, 3, 10, range(64)))
    of_ratio = reference.fraction(reference.dithers(1, 2, 2, 10, range(64)))
    codes, squares, scales, of_squares = encoded(RATIO8, ADAM, (m, v), None, of_square)
    assert reference.digest(codes, scales, squares, of_squares) == "84051e3ecf3677a8"
    both = encoded(RATIO4, ADAM, (m, v), of_ratio, of_square)
    assert reference.digest(*both) == "e4f4f91bbc8a4ef9"
    signed = encoded(RATIO8, (Moment("b"),), (np.where(np.isfinite(m), m, 0),), None)
    assert reference.digest(*signed) == "4c97b4bdf694af32"


def near(got, want):
    """Whether codes are equal but for a few beside a rounding boundary: square roots may err."""
    off = np.abs(got.astype(int) - want)
    return off.max() <= 1 and (off > 0).sum() <= 1


def test_codes_are_those_of_the_definition():
    m, v, _ = example()
    good = np.isfinite(m) & np.isfinite(v)
    m, v = np.where(good, m, 0).astype(np.float32), np.where(good, v, 0).astype(np.float32)
    codes, squares, scales, of_squares = encoded(RATIO8, ADAM, (m, v), None, None)
    both, low_scales, high_scales = encoded(RATIO4, ADAM, (m, v), None, None)
    softs, soft_scales = encoded(RATIO8, (Moment("b"),), (m,), None)
    for b in range(64):
        c, s = reference.ratio(m[b], v[b], 127)
        assert near(codes[b], c + 128)
        assert scales[b] == s
        c, s = reference.square(v[b], 255)
        assert near(squares[b], c)
        assert of_squares[b] == s
        low, s = reference.ratio(m[b], v[b], 7)
        assert low_scales[b] == s
        high, s = reference.square(v[b], 15)
        assert high_scales[b] == s
        assert near(both[b] & 15, low + 8)
        assert near(both[b] >> 4, high)
        c, s = reference.soft(m[b])
        assert near(softs[b], c + 128)
        assert soft_scales[b] == s


def test_scales_of_slow_averages_are_dithered_and_codes_are_relative_to_the_exact_ones():
    m, v, _ = example()
    good = np.isfinite(m) & np.isfinite(v)
    m, v = np.where(good, m, 0).astype(np.float32), np.where(good, v, 0).astype(np.float32)
    bits = reference.dithers(1, 2, 2, 10, range(64))
    u = reference.fraction(bits)
    codes, _, scales, _ = encoded(RATIO8, ADAM, (m, v), u, None)
    softs, soft_scales = encoded(RATIO8, (Moment("b"),), (m,), u)
    for b in range(64):
        random = reference.mix(int(bits[b, 0]) >> 8) >> 16
        c, exact = reference.ratio(m[b], v[b], 127, u[b], rounded=False)
        assert near(codes[b], c + 128)
        assert scales[b] == reference.cut(exact, random)
        c, exact = reference.soft(m[b], u[b], rounded=False)
        assert near(softs[b], c + 128)
        assert soft_scales[b] == reference.cut(exact, random)


def of_every_size():
    """m, v and random bits, with roots on both sides of those that code 1 has."""
    m, v, bits = example()
    m, v = (np.where(np.isfinite(x), x, 0).astype(np.float32) for x in (m, v))
    small = np.exp2(-(np.arange(64) % 22)).astype(np.float32)
    return m * small, v * small * small, bits


@pytest.mark.parametrize("dithered", [False, True])
def test_ratios_of_what_outlasts_its_square_are_to_the_root_of_code_1_at_least(dithered):
    m, v, _ = of_every_size()
    bits = reference.dithers(1, 2, 2, 10, range(64))
    u = reference.fraction(bits) if dithered else None
    codes, squares, scales, of_squares = encoded(RATIO8, OUTLASTING, (m, v), u, None)
    both, low_scales, high_scales = encoded(RATIO4, OUTLASTING, (m, v), u, None)
    for b in range(64):
        random = u[b] if dithered else None
        high, least = reference.square(v[b], 255)
        c, s = reference.ratio(m[b], v[b], 127, random, rounded=not dithered, least=least)
        assert near(codes[b], c + 128)
        if dithered:
            s = reference.cut(s, reference.mix(int(bits[b, 0]) >> 8) >> 16)
        assert (scales[b], of_squares[b]) == (s, least)
        assert near(squares[b], high)
        high, least = reference.square(v[b], 15)
        low, s = reference.ratio(m[b], v[b], 7, random, least=least)
        assert near(both[b] & 15, low + 8)
        assert near(both[b] >> 4, high)
        assert (low_scales[b], high_scales[b]) == (s, least)


@pytest.mark.parametrize(
    ("name", "options", "keys"),
    [
        ("AdamW8bit", {}, []),
        ("AdamW8bit", {"betas": (0.95, 0.999)}, []),
        ("AdamW8bit", {"betas": (0.98, 0.95)}, ["exp_avg"]),
        ("AdamW8bit", {"betas": (0.98, 0.95), "state_format": "dynamic8"}, []),
        ("AdamW8bit", {"betas": (0.5, 0.25), "amsgrad": True}, ["exp_avg"]),
        ("AdamW4bit", {}, []),
        ("AdamW4bit", {"betas": (0.9, 0.8)}, ["exp_avg"]),
        ("LAMB8bit", {}, []),
        ("LANS4bit", {"betas": (0.99, 0.95)}, ["exp_avg"]),
        ("Eve8bit", {}, []),
        ("AdEMAMix8bit", {}, ["exp_avg_slow"]),
        ("AdEMAMix8bit", {"betas": (0.9, 0.8, 0.99)}, ["exp_avg", "exp_avg_slow"]),
        ("AdEMAMix8bit", {"betas": (0.9, 0.999, 0.99)}, []),
        ("ADOPT8bit", {"betas": (0.99, 0.9)}, []),
    ],
    ids=str,
)
def test_which_moments_outlast_their_squares(name, options, keys):
    formats = {} if "4bit" in name else {"state_format": "ratio8"}
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = getattr(lowbit_optim, name)([p], **{**formats, **options})
    assert [moment.key for moment in optimizer.rule().moments if moment.outlasts] == keys


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("format", [RATIO8, RATIO4], ids=lambda f: f.name)
def test_what_must_hold_of_any_block(format, dtype):
    generator = torch.Generator().manual_seed(0)
    for k in range(-28, 36, 6):
        m = torch.randn(16, 64, generator=generator, dtype=dtype) * 10.0 ** (k / 2)
        v = torch.randn(16, 64, generator=generator, dtype=dtype).square() * 10.0**k
        v = torch.where(v > 0, v, 10.0**k)
        m[0], v[0], v[1, :9], m[1, :9], m[2, 5] = 0, 0, 0, 0, 0
        u = torch.rand(2, 16, 64, generator=generator, dtype=dtype)
        for random in ((), (u[0], u[1])):
            decoded = format.decode(ADAM, format.encode(ADAM, [m, v], random), dtype)
            assert all(x.isfinite().all() for x in decoded)
            assert ((decoded[1] > 0) == (v > 0)).all()
            assert (decoded[0][m == 0] == 0).all()
            ratio = (m / v.sqrt()).nan_to_num(0)
            got = (decoded[0] / decoded[1].sqrt()).nan_to_num(0)
            levels = 127 if format is RATIO8 else 7
            step = ratio.abs().amax(1, keepdim=True) / levels
            off = step * (1.02 if random else 0.75)
            if random and format is RATIO8:  # its scale is one of the two bf16 numbers beside it
                off = off + ratio.abs() * 2**-7
            assert ((got - ratio).abs() <= off + 1e-6).all()


def test_a_dithered_code_is_right_on_average():
    """Of every format: what is decoded of many dithers averages to the number."""
    generator = torch.Generator().manual_seed(1)
    v = torch.rand(1, 64, generator=generator).square() + 1e-4
    m = torch.randn(1, 64, generator=generator) * v.sqrt()
    for name, block in (("ratio8", 64), ("ratio4", 64), ("dynamic8", 64)):
        format, steps = FORMATS[name], 2048
        key = [dither.stream_key(dither.tensor_key(0, 0), stream) for stream in (2, 3)]
        at = torch.arange(steps)[:, None, None] + 1
        us = [
            dither.fraction(
                dither.bits(k, at, torch.zeros(1, 1, dtype=torch.int64), torch.arange(block)),
                torch.float32,
            )
            for k in key
        ]
        spread = [x.expand(steps, 64)[:, None] for x in (m, v)]
        got = format.decode(ADAM, format.encode(ADAM, spread, us), torch.float32)
        root = got[1].sqrt() if name != "dynamic8" else got[1]
        want = v.sqrt() if name != "dynamic8" else v
        # A square below the first code is kept from zero, which is no average. fp32 sums err, too.
        kept = want > want.max() * (1 / 225 if name == "ratio4" else 1e-5)
        if name != "dynamic8":  # c is right on average where the root goes by its square
            levels = 255 if name == "ratio8" else 15
            root, want = (x / want.max() * levels**2 for x in (root, want))
            root, want = root.sqrt(), want.sqrt()
        error = (root.mean(0) - want).abs()[kept]
        assert error.max() <= 3e-3 * want.max(), name


@pytest.mark.slow
def test_moments_are_coded_by_their_roles():
    p = torch.nn.Parameter(torch.zeros(2, 300))

    def state(name, **options):
        options = {"lr": 0.01, "min_8bit_size": 1, **options}
        optimizer = getattr(lowbit_optim, name)([p], **options)
        train(optimizer, 1)
        return {k: (x.dtype, tuple(x.shape)) for k, x in optimizer.state[p].items() if k != "step"}

    codes = torch.uint8, (2, 300)
    slim, full = (torch.bfloat16, (2, 5)), (torch.float32, (2, 5))
    ratio = {"exp_avg": codes, "exp_avg_scale": slim, "exp_avg_sq": codes, "exp_avg_sq_scale": full}
    assert state("AdamW8bit", state_format="ratio8") == ratio
    largest = {"max_exp_avg_sq": codes, "max_exp_avg_sq_scale": full}
    assert state("AdamW8bit", state_format="ratio8", amsgrad=True) == {**ratio, **largest}
    slow = {"exp_avg_slow": codes, "exp_avg_slow_scale": slim}
    assert state("AdEMAMix8bit", state_format="ratio8") == {**ratio, **slow}
    signed = {"momentum_buffer": codes, "momentum_buffer_scale": slim}
    assert state("SGD8bit", state_format="ratio8", momentum=0.9) == signed
    sign = {"exp_avg": codes, "exp_avg_absmax": (torch.float32, (2, 2))}
    assert state("Lion8bit", state_format="ratio8") == sign == state("Lion8bit")
    both = {"exp_avg_and_sq": codes, "exp_avg_scale": slim, "exp_avg_sq_scale": full}
    for name in FOUR_BITS:
        assert state(name) == both
    assert state("AdamW", optim_bits=4) == both == state("AdamW", state_format="ratio4")


@pytest.mark.parametrize("name", ["SGD", "LARS", "Lion", "RMSprop", "Adagrad", "AdEMAMix", "ADOPT",
                                  "ScheduleFreeAdamW", "Cain", "LearnedGradient"])  # fmt: skip
def test_four_bits_are_refused_where_there_is_no_ratio_and_square(name):
    p = torch.nn.Parameter(torch.zeros(3))
    for asked in ({"optim_bits": 4}, {"state_format": "ratio4"}):
        with pytest.raises(ValueError, match=f"^{name} cannot have .*'ratio4'"):
            getattr(lowbit_optim, name)([p], lr=0.1, **asked)
    with pytest.raises(ValueError, match=r"AdamW cannot have .*exp_avg_sq, max_exp_avg_sq"):
        lowbit_optim.AdamW([p], optim_bits=4, amsgrad=True)
    optimizer = lowbit_optim.AdamW4bit([p])
    with pytest.raises(ValueError, match="AdamW4bit cannot have"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(p.data)], "amsgrad": True})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("rows", [(16, 64), (3, 192), (1, 4096)])
def test_bytes_of_state(rows):
    p = torch.nn.Parameter(torch.zeros(rows))
    for options, wanted in (
        ({"state_format": "ratio8", "optim_bits": 8}, 2.09375),
        ({"optim_bits": 4}, 1.09375),
    ):
        optimizer = train(lowbit_optim.AdamW([p], min_8bit_size=1, **options), 1)
        tensors = [x for key, x in optimizer.state[p].items() if key != "step"]
        assert sum(x.numel() * x.element_size() for x in tensors) == wanted * p.numel()


def params_on(device, seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(device)) for s in shapes]


FORMAT_OPTIONS = {
    "dynamic8": {"optim_bits": 8},
    "ratio8": {"optim_bits": 8, "state_format": "ratio8"},
    "ratio4": {"optim_bits": 4},
    "float32": {"optim_bits": 32},
}


@pytest.mark.parametrize("name", ["Adam", "LAMB", "LANS", "Eve"])
@pytest.mark.parametrize("after", FORMAT_OPTIONS)
@pytest.mark.parametrize("before", FORMAT_OPTIONS)
@BY_ENGINE
@pytest.mark.few(("before", "after"), "engine", "name")
def test_a_checkpoint_is_converted(engine, name, before, after):
    """By way of fp32, rounded to nearest, the same every time; the own format bit for bit."""
    cls, kept = getattr(lowbit_optim, name), {"min_8bit_size": 1, "lr": 1e-3}
    first = train(cls(params_on("cpu"), **kept, **FORMAT_OPTIONS[before]), 3)
    saved = first.state_dict()
    loaded = []
    for _ in range(2):
        optimizer = cls(params_on("cpu"), **kept, **FORMAT_OPTIONS[after])
        optimizer.load_state_dict(saved)
        loaded.append(optimizer.state_dict()["state"])
    assert identical(*loaded)
    if before == after:
        assert identical(loaded[0], saved["state"])
    wide = cls(params_on("cpu"), **kept, optim_bits=32)
    wide.load_state_dict(saved)
    again = cls(params_on("cpu"), **kept, optim_bits=32)
    again.load_state_dict(optimizer.state_dict())
    for p, q in zip(wide.param_groups[0]["params"], again.param_groups[0]["params"], strict=True):
        m, v = (wide.state[p][key] for key in ("exp_avg", "exp_avg_sq"))
        got_m, got_v = (again.state[q][key] for key in ("exp_avg", "exp_avg_sq"))
        update, got = m / (v.sqrt() + 1e-9), got_m / (got_v.sqrt() + 1e-9)
        worst = {"float32": 1e-6, "ratio8": 0.03, "dynamic8": 0.1, "ratio4": 0.35}
        error = (got - update).norm() / update.norm()
        assert error <= worst[after]


def test_a_bad_number_costs_one_weight(engine, device):
    for options in (FORMAT_OPTIONS["ratio8"], FORMAT_OPTIONS["ratio4"]):
        runs = []
        for bad in (None, math.nan, math.inf, 1e30):
            (p,) = params_on(device, shapes=((2, 130),))
            optimizer = lowbit_optim.AdamW([p], lr=0.01, min_8bit_size=1, **options)
            generator = torch.Generator().manual_seed(5)
            for t in range(4):
                p.grad = torch.randn(p.shape, generator=generator).to(p)
                if bad is not None and t == 1:
                    p.grad[1, 70] = bad
                optimizer.step()
            runs.append(p.detach().cpu())
        for other in runs[1:3]:
            off = (other != runs[0]).nonzero().tolist()
            assert off == [[1, 70]]
        assert runs[3].isfinite().all()


@pytest.mark.parametrize("name", ["AdamW8bit", "RMSprop8bit", "Adagrad8bit", "LAMB8bit"])
@pytest.mark.parametrize("format", ["dynamic8", "ratio8"])
@pytest.mark.few(("engine", "format"), "name")
def test_a_weight_without_a_gradient_never_moves(engine, device, name, format):
    (p,) = params_on(device, shapes=((2, 130),))
    start = p.detach().clone()
    options = {"lr": 0.01, "state_format": format, "min_8bit_size": 1}
    optimizer = getattr(lowbit_optim, name)([p], **options, weight_decay=0)
    for t in range(5):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(t)).to(p)
        p.grad[:, ::3] = 0
        optimizer.step()
    assert torch.equal(p[:, ::3], start[:, ::3])
    assert (p[:, 1::3] != start[:, 1::3]).all()


@pytest.mark.parametrize("format", ["dynamic8", "ratio8", "ratio4"])
@pytest.mark.few(("engine", "format"))
def test_a_tensor_without_rows_is_stepped_with_the_others(engine, device, format):
    """As a rank has it of a matrix with fewer rows than there are ranks."""
    params = params_on(device, shapes=((0, 70), (2, 130)))
    start = params[1].detach().clone()
    optimizer = lowbit_optim.AdamW(params, state_format=format, min_8bit_size=0)
    train(optimizer, 2)
    assert (params[1] != start).all()
    assert all(int(optimizer.state[p]["step"]) == 2 for p in params)


@pytest.mark.parametrize("momentum", [0.9, 0.99])
def test_the_largest_numbers_have_a_finite_scale(engine, device, momentum):
    """In bf16, which ends below fp32; that of the larger momentum is dithered."""
    p = torch.nn.Parameter(torch.zeros(640, device=device))
    optimizer = lowbit_optim.SGD8bit([p], 0.0, momentum, state_format="ratio8", min_8bit_size=1)
    p.grad = torch.full((640,), torch.finfo(torch.float32).max, device=device)
    optimizer.step()
    assert (optimizer.state[p]["momentum_buffer_scale"] == torch.finfo(torch.bfloat16).max).all()
    assert (optimizer.state[p]["momentum_buffer"] == 255).all()


def test_without_dither_nothing_is_random():
    """`dither=False` rounds to nearest: seeds change nothing, and codes repeat."""
    runs = []
    for seed in (0, 1):
        params = params_on("cpu")
        options = {"min_8bit_size": 1, "seed": seed, "dither": False}
        runs.append(train(lowbit_optim.AdamW8bit(params, **options), 3).state_dict()["state"])
    assert identical(*runs)
