"""Cain and LearnedGradient against their references; what `cases` walks is not repeated here."""

import pytest
import torch

import cases
import reference
import reference_codec
from lowbit_optim._cain import Cain, Cain8bit
from lowbit_optim._learned_gradient import LearnedGradient, LearnedGradient8bit
from protocol import identical, snapshot, train

RULES = {Cain: reference.cain, LearnedGradient: reference.learned_gradient}
MOMENTS = {Cain: {"delta": True, "exp_avg_sq": False}, LearnedGradient: {"exp_avg": True}}
BOTH = pytest.mark.parametrize("cls", RULES, ids=lambda cls: cls.__name__)
BITS = pytest.mark.parametrize("bits", [8, 32])

OPTIONS = [
    (Cain, {}),
    (Cain, {"bias_correction_fix": True, "param_max": 0.5}),
    (Cain, {"betas": (0.0, 0.9), "rms_eps": 0.05, "scale_speed": 0.9, "eps": 1e-3}),
    (Cain, {"maximize": True, "percentile_clipping": 5}),
    (LearnedGradient, {}),
    (LearnedGradient, {"lr_est_period": 3, "param_max_rms": 0.5}),
    (LearnedGradient, {"lr_est_period": 1, "betas": (0.0, 0.5), "max_step_scale": 0.5}),
    (LearnedGradient, {"meta_lr_scale": 5.0, "size_lr_scale": 0.7, "lr_est_period": 2}),
    (LearnedGradient, {"max_size": 4, "param_min_rms": 3.0, "param_max_rms": 9.0}),
    (LearnedGradient, {"maximize": True, "percentile_clipping": 5, "lr_est_period": 4}),
]
BY_OPTIONS = pytest.mark.parametrize(
    ("cls", "options"), OPTIONS, ids=lambda x: x.__name__ if isinstance(x, type) else str(x)
)
TRACKS = {
    **cases.TRACKS,
    "5 elements": cases.Track((5,)),
    "2 elements, at times": cases.Track((2, 1), missing=lambda t: t % 2 == 0),
    "size 1 inside": cases.Track((3, 1, 4)),
    "3-D zero start": cases.Track((2, 3, 2), start=0.0),
    "tiny": cases.Track((4, 4), start=1e-6),
    "large": cases.Track((4, 4), start=50.0),
}


def naive(cls, options):
    """The reference as `step(p, g, state, lr)`, percentile clipping included."""
    options = dict(options)
    percentile = options.pop("percentile_clipping", 100)

    def step(p, g, state, lr):
        clipped = reference._clipped(g, state, state.get("step", 0) + 1, percentile)
        return RULES[cls](p, clipped, state, lr=lr, **options)

    return step


def walk_both(cls, options, tracks, steps, dtype, step=None, lr=0.05, **more):
    """Parameters and states of the package, then of the reference."""
    values, grads = cases.starts(tracks), cases.gradients(tracks, steps)
    params = cases.as_params(values, dtype)
    optimizer = cls(params, lr=lr, **options, **more)
    cases.walk(optimizer, params, grads, cases.rates(lr, steps))
    want = cases.walk_reference(step or naive(cls, options), values, grads, cases.rates(lr, steps))
    return params, [optimizer.state[p] for p in params], *want


@BY_OPTIONS
def test_float64_equals_the_reference(cls, options):
    got = walk_both(cls, options, list(TRACKS.values()), 24, torch.float64)
    for name, p, state, want, expected in zip(TRACKS, *got, strict=True):
        assert cases.distance(p, want) < 1e-10, name
        for key in ("delta", "exp_avg", "exp_avg_sq", "scale_exp_avg", "scale_exp_avg_sq"):
            if key in state and key in expected:
                assert state[key].dtype == torch.float64
                assert cases.distance(state[key], expected[key]) < 1e-10, (name, key)
        for dim, matrix in expected.get("L", {}).items():
            assert cases.distance(state[f"lr_{dim}"], matrix) < 1e-10, name
            assert cases.distance(state[f"grad_cov_{dim}"], expected["C"][dim]) < 1e-10, name
        if "R" in expected:
            r = torch.ones((), dtype=torch.float64)
            for dim in range(p.ndim):
                r = r.unsqueeze(-1) * state[f"param_rms_{dim}"]
            assert cases.distance(r, expected["R"]) < 1e-10, name


@BY_OPTIONS
def test_single_precision_equals_the_reference(cls, options):
    got = walk_both(cls, options, list(TRACKS.values()), 24, torch.float32)
    for name, p, _, want, _ in zip(TRACKS, *got, strict=True):
        assert cases.distance(p, want) < 3e-4, name


def test_cain_estimates_its_factor_afresh_after_1000_steps():
    tracks = [cases.Track((3, 4)), cases.Track((2, 3, 2))]
    got = walk_both(Cain, {}, tracks, 1003, torch.float64, lr=1e-3)
    for p, want in zip(got[0], got[2], strict=True):
        assert cases.distance(p, want) < 1e-9


@BY_OPTIONS
def test_eight_bits_equal_the_reference_through_the_codec(engine, cls, options):
    """The naive rule with naively quantized moments; a code may differ at a midpoint."""
    small, steps = engine == "triton", 3 if engine == "triton" else 8
    shapes = [(600,), (4, 100), (3, 2, 5)] if small else [(4200,), (40, 100), (7, 2, 30), (2, 3)]
    walk = naive(cls, options)

    def step(p, g, state, lr):
        p = walk(p, g, state, lr)
        for key, signed in MOMENTS[cls].items():
            codes, absmax = reference_codec.encode(state[key].numpy(), signed)
            state[key] = torch.from_numpy(reference_codec.decode(codes, absmax, signed))
            state[f"{key}_codes"] = torch.from_numpy(codes)
        return p

    tracks = [cases.Track(shape) for shape in shapes]
    got = walk_both(cls, options, tracks, steps, torch.float32, step, optim_bits=8, min_8bit_size=1)
    for shape, p, state, want, expected in zip(shapes, *got, strict=True):
        off = (p.detach().double() - want).abs() > 3e-4 * want.abs().max()
        assert off.sum() <= 1 + 1e-3 * off.numel(), shape
        for key in MOMENTS[cls]:
            assert state[key].dtype == torch.uint8
            wrong = (state[key] != expected[f"{key}_codes"]).sum()
            assert wrong <= 1 + 1e-3 * state[key].numel(), (shape, key)


@BOTH
def test_bits_of_float64_parameters(cls):
    """8-bit state of fp64 parameters goes through the torch engine."""
    p = torch.nn.Parameter(torch.ones(20, 30, dtype=torch.float64))
    optimizer = train(cls([p], optim_bits=8, min_8bit_size=1), 3)
    for key in MOMENTS[cls]:
        assert optimizer.state[p][key].dtype == torch.uint8
    assert p.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@BITS
@BOTH
def test_half_precision_is_computed_in_single(cls, bits, dtype):
    """A step of a bf16 weight is the fp32 step of the same weight, rounded."""
    start = torch.randn(30, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    half, single = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    a, b = (cls([p], optim_bits=bits, min_8bit_size=1) for p in (half, single))
    for t in range(6):
        generator = torch.Generator().manual_seed(t)
        g = torch.randn(half.shape, generator=generator).to(dtype)
        half.grad, single.grad = g, g.float()
        a.step()
        b.step()
        assert torch.equal(half, single.to(dtype))
        single.data.copy_(half)


@BITS
@BOTH
def test_layout_of_a_parameter_does_not_matter(cls, bits):
    start = torch.randn(8, 6, 5, 4, generator=torch.Generator().manual_seed(0))
    plain = torch.nn.Parameter(start.clone())
    odd = torch.nn.Parameter(start.clone(memory_format=torch.channels_last))
    a, b = (cls([p], optim_bits=bits, min_8bit_size=1, lr_est_period=3) if cls is LearnedGradient
            else cls([p], optim_bits=bits, min_8bit_size=1) for p in (plain, odd))  # fmt: skip
    for t in range(7):
        g = torch.randn(start.shape, generator=torch.Generator().manual_seed(t))
        plain.grad, odd.grad = g, g.clone(memory_format=torch.channels_last)
        a.step()
        b.step()
    assert odd.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(odd, plain, rtol=1e-5, atol=1e-6)


def test_cain_stores_a_vector_per_dimension():
    p, scalar = torch.nn.Parameter(torch.ones(100, 60)), torch.nn.Parameter(torch.ones(1, 1))
    optimizer = train(Cain8bit([p, scalar]), 2)
    state = optimizer.state[p]
    assert {key: tuple(value.shape) for key, value in state.items()} == {
        "step": (), "delta": (100, 60), "delta_absmax": (24,), "exp_avg_sq": (100, 60),
        "exp_avg_sq_absmax": (24,), "scale_exp_avg_sq": (), "param_rms_0": (100,),
        "param_rms_1": (60,),
    }  # fmt: skip
    assert set(optimizer.state[scalar]) == {"step", "delta", "exp_avg_sq"}


def test_cain_clamps_every_tenth_step():
    p = torch.nn.Parameter(torch.tensor([3.0, -5.0]))
    optimizer = Cain([p], lr=1e-12, param_max=2.0)
    for t in range(11):
        p.grad = torch.ones_like(p)
        if t == 5:
            p.data.fill_(4.0)
        optimizer.step()
        assert float(p.detach().abs().max()) == pytest.approx(4.0 if 5 <= t < 10 else 2.0)


def matrix_keys(optimizer, p):
    return {key for key in optimizer.state[p] if key.startswith(("lr_", "grad_cov_"))}


def test_max_size_keeps_long_dimensions_without_matrices():
    for limit, dims in ((None, (0, 1, 3)), (7, (1, 3)), (6, (3,)), (1, ())):
        p, bias = torch.nn.Parameter(torch.ones(8, 7, 1, 5)), torch.nn.Parameter(torch.ones(9))
        optimizer = train(LearnedGradient8bit([p, bias], max_size=limit, lr_est_period=1), 3)
        wanted = {f"{kind}_{dim}" for kind in ("lr", "grad_cov") for dim in dims}
        assert matrix_keys(optimizer, p) == wanted
        assert not matrix_keys(optimizer, bias)
        for dim in dims:
            assert optimizer.state[p][f"lr_{dim}"].dtype == torch.float32


def test_max_size_is_read_in_a_parameters_first_step():
    p = torch.nn.Parameter(torch.ones(8, 7))
    optimizer = train(LearnedGradient([p], max_size=7), 1)
    optimizer.param_groups[0]["max_size"] = None
    train(optimizer, 1)
    assert matrix_keys(optimizer, p) == {"lr_1", "grad_cov_1"}
    resumed = LearnedGradient([torch.nn.Parameter(p.detach().clone())])
    resumed.load_state_dict(optimizer.state_dict())
    assert identical(snapshot(resumed), snapshot(optimizer))


def test_learning_rate_matrices_stay_positive_definite():
    p = torch.nn.Parameter(torch.ones(12, 9))
    optimizer = LearnedGradient([p], lr=0.1, lr_est_period=1)
    mixing = torch.randn(9, 9, generator=torch.Generator().manual_seed(0))
    for t in range(60):
        p.grad = torch.randn(12, 9, generator=torch.Generator().manual_seed(t)) @ mixing
        optimizer.step()
    for dim in (0, 1):
        matrix = optimizer.state[p][f"lr_{dim}"]
        assert torch.equal(matrix, matrix.T)
        assert float(matrix.diagonal().mean()) == pytest.approx(1.0, rel=1e-5)
        assert float(torch.linalg.eigvalsh(matrix).min()) > 0
        assert (matrix - torch.eye(len(matrix))).abs().max() > 0.1


def test_autocast_does_not_reach_the_matrices():
    params = [torch.nn.Parameter(torch.ones(8, 7)) for _ in "ab"]
    inside, outside = (LearnedGradient([p], lr_est_period=1) for p in params)
    with torch.autocast("cpu", torch.bfloat16):
        train(inside, 4)
    train(outside, 4)
    assert torch.equal(*params)
