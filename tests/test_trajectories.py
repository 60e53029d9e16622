"""Every case walked for some steps, against the float64 references and against torch.optim."""

import numpy as np
import pytest
import torch

import cases
import lowbit_optim
import reference_codec
from protocol import ANY_GRADIENT

BY_ID = pytest.mark.parametrize("case", cases.ALL_CASES, ids=lambda case: case.id)
STATEFUL = pytest.mark.parametrize(
    "case", [case for case in cases.ALL_CASES if case.moments], ids=lambda case: case.id
)
TRACKS = list(cases.TRACKS.values())
EVERY_KIND = (*TRACKS, cases.Track((600,)))
STEPS = {"torch": 24, "numba": 12, "triton": 3}  # the last is interpreted
FEW = ("dense", "zero start", "zero gradient", "no gradient first", "scalar", "4-D")  # for it


def walk_both(case, tracks, steps, dtype, device="cpu", bits=32, rule=None, **options):
    """Parameters and states of the package, then of the reference."""
    values, grads = cases.starts(tracks), cases.gradients(tracks, steps)
    lrs = cases.rates(case.lr, steps)
    params = cases.as_params(values, dtype, device)
    optimizer = case.build(params, bits, **options)
    cases.walk(optimizer, params, grads, lrs)
    want, states = cases.walk_reference(rule or case.reference, values, grads, lrs)
    return params, [optimizer.state[p] for p in params], want, states


@pytest.mark.parametrize("case", cases.ALL_CASES + cases.CASES_IN_DOUBLE, ids=lambda case: case.id)
def test_float64_equals_the_reference(case):
    """Zero starts, zero and missing gradients, 0-d to 4-D; lr changes every step."""
    with lowbit_optim.use_engine("torch"):
        got = walk_both(case, TRACKS, 24, torch.float64)
    for name, p, state, want, expected in zip(cases.TRACKS, *got, strict=True):
        assert cases.distance(p, want) < 1e-10, name
        for key in case.moments.keys() & expected.keys():
            assert state[key].dtype == torch.float64
            assert cases.distance(state[key], expected[key]) < 1e-10, (name, key)


@BY_ID
@pytest.mark.few(("case", "engine"))
def test_single_precision_equals_the_reference(engine, device, case):
    names = FEW if engine == "triton" else list(cases.TRACKS)
    tracks = [cases.TRACKS[name] for name in names]
    got = walk_both(case, tracks, STEPS[engine], torch.float32, device)
    for name, p, state, want, expected in zip(names, *got, strict=True):
        assert cases.distance(p, want) < case.rtol, name
        for key in case.moments.keys() & expected.keys():
            assert state[key].dtype == torch.float32
            assert cases.distance(state[key], expected[key]) < case.rtol, (name, key)


@STATEFUL
@pytest.mark.few(("case", "engine"))
def test_eight_bits_equal_the_reference_through_the_codec(engine, device, case):
    """The naive rule with naively quantized moments: a code differs only by rounding at a midpoint,
    and where one does, that weight's later steps may."""
    small, steps = engine == "triton", 2 if engine == "triton" else 5
    shapes = [(600,), (4, 100), (3, 2, 5)] if small else [(2100,), (20, 100), (7, 2, 30), (3, 2, 5)]
    tracks = [cases.Track(shape) for shape in shapes]
    options = {"min_8bit_size": 1, "dither": False}
    got = walk_both(case, tracks, steps, torch.float32, device, 8, case.quantized, **options)
    for shape, p, state, want, expected in zip(shapes, *got, strict=True):
        off = (p.detach().cpu().double() - want).abs() > case.rtol * want.abs().max()
        others = reference_codec.other_codes(off.numel(), steps * len(case.moments), engine)
        assert off.sum() <= others, shape
        assert cases.distance(p, want) < 0.1, shape
        for key in case.stored(8):
            codes = state[key].cpu().numpy()
            assert codes.dtype == np.uint8
            wrong = (codes != expected[f"{key}_codes"]).sum()
            assert wrong <= others, (shape, key)
            scales = state[f"{key}_absmax"].cpu().numpy()
            assert scales.shape == expected[f"{key}_absmax"].shape
            np.testing.assert_allclose(scales, expected[f"{key}_absmax"], rtol=1e-3)


AGAINST_TORCH = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "dampening": 0.4, "maximize": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {"weight_decay": 0.1}),
    ("Adam", {"amsgrad": True, "maximize": True}),
    ("Adam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("AdamW", {}),
    ("AdamW", {"amsgrad": True, "weight_decay": 0.3, "betas": (0.8, 0.95)}),
    ("RMSprop", {}),
    ("RMSprop", {"alpha": 0.9, "momentum": 0.9, "weight_decay": 0.1, "maximize": True}),
    ("RMSprop", {"centered": True}),
    ("RMSprop", {"centered": True, "momentum": 0.5, "eps": 1e-3}),
    ("Adagrad", {}),
    ("Adagrad", {"lr_decay": 0.1, "weight_decay": 0.1, "maximize": True}),
    ("Adagrad", {"initial_accumulator_value": 0.5, "eps": 1e-3}),
]


def against_torch(name, options, dtype, device="cpu", tracks=EVERY_KIND):
    """Largest difference from torch.optim after 50 steps, of all parameters and of each moment.

    Relative to the largest of its kind: a lone number may have ended next to zero.
    """
    values, grads = cases.starts(tracks), cases.gradients(tracks, 50)
    lrs = cases.rates(0.01, 50)
    ours, theirs = (cases.as_params(values, dtype, device) for _ in range(2))
    optimizer = getattr(lowbit_optim, f"{name}32bit")(ours, lr=0.01, **options)
    peer = getattr(torch.optim, name)(theirs, lr=0.01, **options)
    cases.walk(optimizer, ours, grads, lrs)
    cases.walk(peer, theirs, grads, lrs)
    pairs = [("p", p, q) for p, q in zip(ours, theirs, strict=True)]
    for p, q in zip(ours, theirs, strict=True):
        state = peer.state[q].items()
        assert optimizer.state[p].keys() - {"step"} == peer.state[q].keys() - {"step"}
        pairs += [(key, optimizer.state[p][key], value) for key, value in state if key != "step"]
    joined = {key: ([], []) for key, _, _ in pairs}
    for key, a, b in pairs:
        joined[key][0].append(a.detach().cpu().flatten())
        joined[key][1].append(b.detach().cpu().flatten())
    return max(cases.distance(torch.cat(a), torch.cat(b)) for a, b in joined.values())


@pytest.mark.parametrize(("name", "options"), AGAINST_TORCH)
def test_float64_equals_torch_optim_after_50_steps(name, options):
    with lowbit_optim.use_engine("torch"):
        assert against_torch(name, options, torch.float64) < 1e-12


@pytest.mark.parametrize(("name", "options"), AGAINST_TORCH)
@pytest.mark.slow_if_interpreted
def test_single_precision_equals_torch_optim_after_50_steps(engine, device, name, options):
    if engine != "triton":
        assert against_torch(name, options, torch.float32) < 1e-6
        return
    few = (cases.Track((300,)), cases.Track((3, 4), start=0.0))  # interpreted: one per layout
    assert against_torch(name, options, torch.float32, device, few) < 1e-6


MIXES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    pytest.param(torch.float32, torch.bfloat16, marks=ANY_GRADIENT),
    pytest.param(torch.bfloat16, torch.float32, marks=ANY_GRADIENT),
    pytest.param(torch.float16, torch.bfloat16, marks=ANY_GRADIENT),
]


@pytest.mark.parametrize("case", cases.one_per_class(), ids=lambda case: case.id)
@pytest.mark.parametrize(("p_dtype", "g_dtype"), MIXES, ids=str)
@pytest.mark.few_if_interpreted("p_dtype", "g_dtype", "case")
@pytest.mark.few_if_compiled(("p_dtype", "g_dtype"), "case")
def test_half_precision_rounds_once_a_step(engine, device, case, p_dtype, g_dtype):
    """The reference with p rounded to its dtype after every step; fp32 states on both sides."""
    tracks, steps = [cases.Track((300,)), cases.Track((4, 70))], 4
    values = [p.to(p_dtype).double() for p in cases.starts(tracks)]
    grads = [[g.to(g_dtype) for g in row] for row in cases.gradients(tracks, steps)]
    params = cases.as_params(values, p_dtype, device)
    optimizer = case.build(params, master_weight_bits=None)
    for row in grads:
        for p, g in zip(params, row, strict=True):
            p.grad_dtype = None  # accept a gradient of another dtype
            p.grad = g.to(device)
        optimizer.step()

    def rounded(p, g, state, lr):
        return case.reference(p, g.double(), state, lr).to(p_dtype).double()

    want, _ = cases.walk_reference(rounded, values, grads, [case.lr] * steps)
    for p, expected in zip(params, want, strict=True):
        assert p.dtype == p_dtype
        error = (p.detach().cpu().double() - expected).abs()
        # Two ulps: a value next to a rounding boundary may fall on its other side, once or twice.
        assert (error <= 2 * torch.finfo(p_dtype).eps * expected.abs() + 1e-6).all()
        assert (error > 1e-6).double().mean() < (0.02 if p_dtype != torch.float32 else 1e-9)


def spread(x):
    """The same numbers in memory of another layout: every second element of a larger buffer."""
    buffer = x.new_zeros((*x.shape, 2)) if x.dim() else x.new_zeros(2)
    view = buffer[..., 0]
    view.copy_(x)
    return view


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("case", cases.one_per_class(), ids=lambda case: case.id)
@pytest.mark.few_if_interpreted("bits", "case")
def test_memory_layout_changes_nothing(engine, device, case, bits):
    """Strided, transposed and channels_last parameters and gradients: as contiguous ones."""
    shape, steps = (4, 5, 6, 7), 3
    (start,), grads = (
        cases.starts([cases.Track(shape)]),
        cases.gradients([cases.Track(shape)], steps),
    )
    channels_last = {"memory_format": torch.channels_last}
    layouts = [
        (lambda x: x, lambda x: x),
        (spread, lambda x: x),
        (lambda x: x.contiguous(**channels_last), lambda x: x.contiguous(**channels_last)),
        (lambda x: x.contiguous(**channels_last), lambda x: x),
        (lambda x: x.mT.contiguous().mT, spread),
    ]
    results = []
    for of_p, of_g in layouts:
        p = torch.nn.Parameter(of_p(start.to(device, torch.float32)))
        strides = p.stride()
        optimizer = case.build([p], bits, min_8bit_size=1)
        for (g,) in grads:
            p.grad = of_g(g.to(device, torch.float32))
            before = p.grad.clone(), p.grad.data_ptr()
            optimizer.step()
            assert torch.equal(p.grad, before[0])
            assert p.grad.data_ptr() == before[1]
        assert p.stride() == strides
        results.append((p.detach().cpu(), optimizer.state[p]))
    for p, state in results[1:]:
        assert cases.distance(p, results[0][0].double()) < 1e-6
        for key in case.moments:
            expected = results[0][1][key].cpu()
            assert state[key].shape == expected.shape
            assert (state[key].cpu().double() - expected.double()).abs().mean() < 1e-2


def test_percentile_clipping_records_squared_norms(engine, device):
    case = next(c for c in cases.ALL_CASES if c.options.get("percentile_clipping"))
    tracks = [cases.Track((300,)), cases.Track((3, 4))]
    _, states, _, expected = walk_both(case, tracks, STEPS[engine], torch.float32, device)
    for state, want in zip(states, expected, strict=True):
        recorded = state["gnorm_vec"]
        assert recorded.dtype == torch.float32
        assert recorded.shape == (100,)
        assert cases.distance(recorded, want["gnorm_vec"]) < 1e-5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_percentile_clipping_does_not_record_a_bad_norm(engine, device, bad):
    p = torch.nn.Parameter(torch.zeros(300, device=device))
    optimizer = lowbit_optim.SGD32bit([p], lr=0.1, momentum=0.9, percentile_clipping=50)
    for first in (1.0, bad, 1.0):
        p.grad = torch.ones_like(p)
        p.grad[0] = first
        optimizer.step()
    assert optimizer.state[p]["gnorm_vec"].tolist() == pytest.approx([300.0] * 100)
    assert p[1:].isfinite().all()


def test_percentile_clipping_begins_with_the_first_gradient_that_is_not_zero(engine, device):
    """LoRA's A has gradients of 0 while B is 0, which must not hold back those that follow."""
    p = torch.nn.Parameter(torch.zeros(300, device=device))
    optimizer = lowbit_optim.SGD32bit([p], lr=1.0, percentile_clipping=5)
    moved = []
    for size in (0.0, -0.0, 2.0, 0.0, 3.0):
        p.grad = torch.full_like(p, size)
        before = p.detach().clone()
        optimizer.step()
        moved.append((before - p.detach()).mean().item())
    assert moved == pytest.approx([0.0, 0.0, 2.0, 0.0, 2.0])
    expected = [1200.0] * 100
    expected[4], expected[5] = 0.0, 2700.0
    assert optimizer.state[p]["gnorm_vec"].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["SGD", "LARS"])
@pytest.mark.parametrize("bits", [8, 32])
def test_dampened_momentum_that_is_switched_on_and_off_is_torchs(name, bits, engine):
    """Its first gradient is not dampened, whenever that comes."""
    tracks = TRACKS[:3]
    grads = cases.gradients(tracks, 10)
    walked = []
    for cls, more in (
        (getattr(lowbit_optim, f"{name}{bits}bit"), {"max_unorm": 0.0, "min_8bit_size": 1}),
        (torch.optim.SGD, {}),
    ):
        params = cases.as_params(cases.starts(tracks), torch.float32)
        optimizer = cls(params, lr=0.1, dampening=0.4, **more)
        for start, momentum in ((0, 0.0), (3, 0.9), (6, 0.0), (8, 0.5)):
            optimizer.param_groups[0]["momentum"] = momentum
            cases.walk(optimizer, params, grads[start : start + 2], [0.1, 0.2])
        walked.append(params)
    assert max(map(cases.distance, *walked)) < (1e-6 if bits == 32 else 1e-2)


def test_the_history_of_norms_goes_on_where_steps_are_counted_anew(engine, device):
    p = torch.nn.Parameter(torch.zeros(16, device=device))
    optimizer = lowbit_optim.SGD32bit([p], lr=0.1, dampening=0.5, percentile_clipping=50)

    def walk(first, last):
        for norm in range(first, last):
            p.grad = torch.full_like(p, norm / 4.0)
            optimizer.step()

    walk(1, 131)
    optimizer.param_groups[0]["momentum"] = 0.9
    walk(131, 161)
    assert optimizer.state[p]["step"] == 30
    recorded = optimizer.state[p]["gnorm_vec"].sqrt().sort().values
    assert recorded.tolist() == pytest.approx(range(61, 161))


@pytest.mark.parametrize("name", ["SGD", "LARS"])
def test_steps_go_on_where_a_momentum_begins_without_dampening(name):
    p = torch.nn.Parameter(torch.zeros(16))
    optimizer = getattr(lowbit_optim, name)([p], lr=0.1)
    for momentum in (0.0, 0.0, 0.9, 0.9):
        optimizer.param_groups[0]["momentum"] = momentum
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert optimizer.state[p]["step"] == 4
