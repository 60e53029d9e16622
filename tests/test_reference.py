"""The naive references themselves: against torch.optim and against what papers promise."""

import numpy as np
import pytest
import torch

import cases
import reference
import reference_codec

STEPS = 24

AGAINST_TORCH = [
    (reference.sgd, torch.optim.SGD, {}),
    (reference.sgd, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    (reference.sgd, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.4, "maximize": True}),
    (reference.sgd, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (reference.adam, torch.optim.Adam, {"weight_decay": 0.1}),
    (reference.adam, torch.optim.Adam, {"amsgrad": True, "maximize": True, "betas": (0.5, 0.6)}),
    (reference.adam, torch.optim.Adam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (reference.adamw, torch.optim.AdamW, {}),
    (reference.adamw, torch.optim.AdamW, {"amsgrad": True, "weight_decay": 0.3}),
    (reference.rmsprop, torch.optim.RMSprop, {"weight_decay": 0.1, "alpha": 0.9}),
    (reference.rmsprop, torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (reference.adagrad, torch.optim.Adagrad, {"weight_decay": 0.1}),
    (reference.adagrad, torch.optim.Adagrad, {"lr_decay": 0.2, "initial_accumulator_value": 0.5}),
]


@pytest.mark.parametrize(("rule", "cls", "options"), AGAINST_TORCH)
def test_reference_equals_torch_optim_in_float64(rule, cls, options):
    tracks = list(cases.TRACKS.values())
    values, grads = cases.starts(tracks), cases.gradients(tracks, STEPS)
    lrs = cases.rates(0.02, STEPS)
    want = cases.as_params(values, torch.float64)
    cases.walk(cls(want, lr=0.02, foreach=False, **options), want, grads, lrs)
    got, _ = cases.walk_reference(
        lambda p, g, state, lr: rule(p, g, state, lr=lr, **options), values, grads, lrs
    )
    for track, a, b in zip(cases.TRACKS, got, want, strict=True):
        assert cases.distance(a, b.detach()) < 1e-12, track


def _one(rule, seed=0, shape=(6, 8), steps=1, lr=0.1, **options):
    """The movement of one parameter, and where it started."""
    tracks = [cases.Track(shape)]
    start, grads = cases.starts(tracks, seed), cases.gradients(tracks, steps, seed + 1)
    end, _ = cases.walk_reference(
        lambda p, g, state, lr: rule(p, g, state, lr=lr, **options), start, grads, [lr] * steps
    )
    return end[0] - start[0], start[0]


def test_lars_without_trust_and_cap_is_sgd():
    options = {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
    lars, _ = _one(reference.lars, steps=5, max_unorm=0, **options)
    sgd, _ = _one(reference.sgd, steps=5, **options)
    assert torch.equal(lars, sgd)


@pytest.mark.parametrize("scale_at", ["grad", "update", "lr"])
def test_lars_first_step_moves_by_eta_times_lr_of_the_norm(scale_at):
    """Without decay a layer moves by lr eta ||p||, whatever the gradient: arXiv:1708.03888."""
    moved, start = _one(reference.lars, lr=0.5, trust_coefficient=0.02, scale_at=scale_at)
    assert float(moved.norm() / start.norm()) == pytest.approx(0.5 * 0.02, rel=1e-12)


def test_lars_cap_bounds_the_movement():
    moved, start = _one(reference.lars, lr=1.0, momentum=0.9)
    assert float(moved.norm() / start.norm()) == pytest.approx(0.02, rel=1e-12)


def test_lars_clip_with_a_large_coefficient_is_sgd():
    options = {"momentum": 0.9, "weight_decay": 0.1}
    larc, _ = _one(reference.lars, steps=5, trust_coefficient=1e9, trust_clip=True, **options)
    assert torch.equal(larc, _one(reference.sgd, steps=5, **options)[0])


@pytest.mark.parametrize("zero_norm", ["one", "denom", "zero", "skip_wd"])
def test_lars_zero_norms_are_finite_and_follow_their_name(zero_norm):
    options = {"lr": 0.1, "trust_coefficient": 0.02, "weight_decay": 0.5, "zero_norm": zero_norm}
    zero, one = torch.zeros(4).double(), torch.ones(4).double()
    from_zero = reference.lars(zero, one, {}, **options)
    expected = -0.1 * one if zero_norm != "zero" else zero
    assert torch.equal(from_zero, expected)
    still = reference.lars(one, zero, {}, **options)
    decayed = {"one": 0.95, "skip_wd": 1.0}.get(zero_norm, 1 - 0.1 * 0.02)
    assert torch.allclose(still, decayed * one, rtol=1e-12)


def test_lamb_trust_moves_by_lr_of_the_norm_and_cap_is_adamw_when_loose():
    moved, start = _one(reference.lamb, lr=0.03, trust_coefficient=1.0, weight_decay=0.1)
    assert float(moved.norm() / start.norm()) == pytest.approx(0.03, rel=1e-12)
    loose, _ = _one(reference.lamb, steps=5, max_unorm=1e9, weight_decay=0.1)
    assert torch.equal(loose, _one(reference.adamw, steps=5, weight_decay=0.1)[0])


def test_lans_ignores_the_gradient_scale_and_is_bounded():
    moved, start = _one(reference.lans, lr=0.03, eps=0.0)
    assert float(moved.norm() / start.norm()) == pytest.approx(0.03, rel=1e-9)
    tracks = [cases.Track((6, 8))]
    (p,), ((g,),) = cases.starts(tracks), cases.gradients(tracks, 1)
    a, b = (reference.lans(p, k * g, {}, lr=0.1) for k in (1.0, 1e6))
    assert torch.allclose(a, b, rtol=1e-12)


def test_lion_moves_every_element_by_lr():
    moved, _ = _one(reference.lion, lr=0.01)
    assert torch.allclose(moved.abs(), torch.full_like(moved, 0.01), rtol=1e-12)


def test_eve_and_ademamix_reduce_to_adam():
    betas = (0.9, 0.98)
    adam, _ = _one(reference.adam, steps=6, betas=betas)
    eve, _ = _one(reference.eve, steps=6, betas=betas, target_rms=10.0)
    assert torch.allclose(eve, adam, rtol=1e-12)
    mixed, _ = _one(reference.ademamix, steps=6, betas=(*betas, 0.99), alpha=0.0, weight_decay=0.1)
    adamw, _ = _one(reference.adamw, steps=6, betas=betas, weight_decay=0.1)
    assert torch.allclose(mixed, adamw, rtol=1e-12)


def test_ademamix_schedules_end_at_their_targets():
    warm, plain = {}, {}
    p = g = torch.ones(3).double()
    for _ in range(12):
        reference.ademamix(p, g, warm, betas=(0.9, 0.99, 0.9), t_alpha=5, t_beta3=5)
        reference.ademamix(p, g, plain, betas=(0.9, 0.99, 0.9))
    assert torch.allclose(warm["exp_avg_slow"], plain["exp_avg_slow"], rtol=1e-12)


def test_cain_does_not_move_at_first_and_its_factor_follows_the_rms():
    moved, _ = _one(reference.cain, scale_speed=0.0)
    assert not moved.any()  # the seed's bias correction is 0 at t = 0
    state = {}
    p = torch.outer(torch.arange(1.0, 4.0), torch.arange(1.0, 6.0)).double()
    reference.cain(p, torch.ones_like(p), state)
    assert torch.allclose(state["R"] ** 2 / p**2, torch.ones_like(p), rtol=1e-9)  # rank 1: exact


def test_learned_gradient_keeps_its_matrices_symmetric_with_unit_mean_diagonal():
    tracks = [cases.Track((4, 3, 2))]
    (p,), state = cases.starts(tracks), {}
    for (g,) in cases.gradients(tracks, 12):
        p = reference.learned_gradient(p, g, state, lr_est_period=3)
    assert sorted(state["L"]) == [0, 1, 2]
    for matrix in state["L"].values():
        assert torch.allclose(matrix, matrix.T)
        assert float(matrix.diag().mean()) == pytest.approx(1.0)
        assert not torch.allclose(matrix, torch.eye(len(matrix), dtype=torch.float64))


def test_percentile_clipping_bounds_the_norm_by_the_recorded_percentile():
    state, small, large = {}, torch.full((4,), 0.5).double(), torch.full((4,), 50.0).double()
    zero = torch.zeros(4).double()
    reference.sgd(zero, small, state, lr=1.0, percentile_clipping=10)
    clipped = reference.sgd(zero, large, state, lr=1.0, percentile_clipping=10)
    assert torch.allclose(clipped, -small)
    assert sorted(state["gnorm_vec"])[-2:] == [1.0, 1e4]


@pytest.mark.parametrize("case", cases.ALL_CASES, ids=lambda case: case.id)
def test_every_case_stays_finite_on_every_track(case):
    tracks = list(cases.TRACKS.values())
    values, states = cases.walk_reference(
        case.reference,
        cases.starts(tracks),
        cases.gradients(tracks, STEPS),
        cases.rates(case.lr, STEPS),
    )
    for track, p, state in zip(cases.TRACKS, values, states, strict=True):
        assert p.isfinite().all(), track
        assert set(case.moments) <= set(state) or not case.moments or p.numel() <= 5, track


def test_fresh_memory_is_poisoned():
    x = torch.ones(3)
    for fresh in (torch.empty(2, 3), torch.empty_like(x), x.new_empty(4)):
        assert fresh.isnan().all()
    assert (torch.empty(3, dtype=torch.uint8) == 0xFF).all()


@pytest.mark.parametrize("signed", [True, False])
def test_codebook_has_the_published_digest(signed):
    table = reference_codec.codebook(signed)
    assert reference_codec.digest(table) == reference_codec.DIGESTS[signed]
    assert table[reference_codec.ZERO[signed]] == 0
    assert table[255] == 1


@pytest.mark.parametrize("signed", [True, False])
def test_counting_midpoints_is_the_brute_force_search(signed):
    rng = np.random.default_rng(0)
    x = np.concatenate([
        reference_codec.midpoints(signed),  # ties
        reference_codec.codebook(signed),
        rng.uniform(-1, 1, 20_000),
        10 ** rng.uniform(-9, 0, 20_000) * rng.choice([-1, 1], 20_000),
    ])  # fmt: skip
    expected = reference_codec.nearest_by_argmin(x, signed)
    np.testing.assert_array_equal(reference_codec.nearest(x, signed), expected)


@pytest.mark.parametrize(
    ("shape", "absmax"),
    [
        ((), (1,)),
        ((0,), (0,)),
        ((257,), (2,)),
        ((4096,), (16,)),
        ((64, 147), (64, 1)),
        ((1000, 1000), (1000, 4)),
        ((8, 63), (2,)),
        ((8, 64), (8, 1)),
        ((3, 8, 8), (3, 1)),
        ((3, 0), (0,)),
        ((0, 64), (0,)),
    ],
)
def test_layout_of_the_scales(shape, absmax):
    codes, scales = reference_codec.encode(np.ones(shape, np.float32), True)
    assert codes.shape == shape
    assert scales.shape == absmax
    np.testing.assert_array_equal(reference_codec.decode(codes, scales, True), np.ones(shape))


def test_encoding_rules_of_the_specification():
    x = np.array([0.0, -0.0, 1e-30, np.nan, np.inf, -np.inf, 2.0], np.float32)
    codes, absmax = reference_codec.encode(x, False)
    assert codes.tolist() == [0, 0, 1, 0, 0, 0, 255]
    assert absmax.tolist() == [2.0]
    codes, _ = reference_codec.encode(x, True)
    assert codes.tolist() == [127, 127, 127, 127, 127, 127, 255]
    codes, absmax = reference_codec.encode(np.full(300, np.nan, np.float32), True)
    assert (codes == 127).all()
    assert absmax.tolist() == [0.0, 0.0]
