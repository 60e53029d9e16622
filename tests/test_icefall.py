"""What only Cain and LearnedGradient have; the tests of all classes are for them as well."""

import pytest
import torch

import cases
from lowbit_optim._cain import Cain, Cain8bit
from lowbit_optim._learned_gradient import LearnedGradient, LearnedGradient8bit
from protocol import identical, snapshot, train

BOTH = pytest.mark.parametrize("cls", [Cain, LearnedGradient], ids=lambda cls: cls.__name__)
BITS = pytest.mark.parametrize("bits", [8, 32])
BY_ID = pytest.mark.parametrize("case", cases.CASES_ICEFALL, ids=lambda case: case.id)

ODD = {
    "5 elements": cases.Track((5,)),
    "2 elements, at times": cases.Track((2, 1), missing=lambda t: t % 2 == 0),
    "size 1 inside": cases.Track((3, 1, 4)),
    "3-D zero start": cases.Track((2, 3, 2), start=0.0),
    "tiny": cases.Track((4, 4), start=1e-6),
    "large": cases.Track((4, 4), start=50.0),
}
TRACKS = {**cases.TRACKS, **ODD}


def walk_both(case, tracks, steps, lr, dtype=torch.float64):
    """Parameters and states of the package, then of the reference."""
    values, grads = cases.starts(tracks), cases.gradients(tracks, steps)
    lrs = cases.rates(lr, steps)
    params = cases.as_params(values, dtype)
    optimizer = case.build(params)
    cases.walk(optimizer, params, grads, lrs)
    want = cases.walk_reference(case.reference, values, grads, lrs)
    return params, [optimizer.state[p] for p in params], *want


@BY_ID
def test_every_state_equals_the_reference(case):
    got = walk_both(case, list(TRACKS.values()), 24, case.lr)
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


@BY_ID
def test_single_precision_on_odd_tensors(case):
    got = walk_both(case, list(ODD.values()), 24, case.lr, torch.float32)
    for name, p, _, want, _ in zip(ODD, *got, strict=True):
        assert cases.distance(p, want) < case.rtol, name


def test_cain_estimates_its_factor_afresh_after_1000_steps():
    tracks = [cases.Track((3, 4)), cases.Track((2, 3, 2))]
    got = walk_both(cases.CASES_ICEFALL[0], tracks, 1003, 1e-3)
    for p, want in zip(got[0], got[2], strict=True):
        assert cases.distance(p, want) < 1e-9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@BITS
@BOTH
def test_half_precision_is_computed_in_single(cls, bits, dtype):
    """A step of a bf16 weight is the fp32 step of the same weight, rounded."""
    start = torch.randn(30, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    half, single = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    options = {"optim_bits": bits, "min_8bit_size": 1, "master_weight_bits": None}
    a, b = (cls([p], **options) for p in (half, single))
    for t in range(6):
        generator = torch.Generator().manual_seed(t)
        g = torch.randn(half.shape, generator=generator).to(dtype)
        half.grad, single.grad = g, g.float()
        a.step()
        b.step()
        assert torch.equal(half, single.to(dtype))
        single.data.copy_(half)


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
