"""What a step takes in and how state is stored: dtypes, layouts, clipping, bits, devices."""

import math
from types import SimpleNamespace

import pytest
import torch

import lowbit_optim
from protocol import (
    ANY_GRADIENT,
    BITS,
    BY_ENGINE,
    CLASSES,
    ONE_PER_CLASS,
    all_parameters,
    build,
    give_gradients,
    identical,
    parameters,
    snapshot,
    train,
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CHANNELS_LAST = {"memory_format": torch.channels_last}


def mixed_gradients(params, seed=0, shift=1):
    """Gradients in another dtype than their parameters."""
    give_gradients(params, seed)
    for p in params:
        g = p.grad.to(FLOATS[(FLOATS.index(p.dtype) + shift) % 3])
        p.grad, p.grad_dtype = None, None  # accept a gradient of any dtype
        p.grad = g


EVERY = [(case, bits) for case in ONE_PER_CLASS for bits in (8, 32)]
# Numba compiles for every pair of dtypes, so for one class only; Triton is interpreted.
ADAMW = next(case for case in ONE_PER_CLASS if case.name == "AdamW")
MIXED = [*((*which, "torch") for which in EVERY), (ADAMW, 8, "numba")]


@ANY_GRADIENT
@pytest.mark.parametrize(("case", "bits", "name"), MIXED, ids=lambda x: getattr(x, "name", x))
@pytest.mark.few("case", "bits")
def test_one_group_holds_every_mix_of_dtypes(case, bits, name):
    """Parameters and gradients of all dtypes in one group, as each in an optimizer of its own."""
    together = [p for dtype in FLOATS for p in parameters(dtype)]
    alone = [p for dtype in FLOATS for p in parameters(dtype)]
    nearest = {"dither": False, "master_weight_bits": None}  # random bits are of a tensor's number
    one = build(case, bits, together, **nearest)
    many = [build(case, bits, [p], **nearest) for p in alone]
    with lowbit_optim.use_engine(name):
        for t in range(2):
            mixed_gradients(together, t, shift=1 + t % 2)
            one.step()
            for p, q, optimizer in zip(alone, together, many, strict=True):
                p.grad, p.grad_dtype = None, None
                p.grad = q.grad
                optimizer.step()
    for p, q, optimizer in zip(alone, together, many, strict=True):
        assert torch.equal(p, q)
        assert identical(dict(optimizer.state[p]), dict(one.state[q]))
        for key in case.moments:
            assert one.state[q][key].dtype == (torch.uint8 if bits == 8 else torch.float32)


@CLASSES
@BITS
def test_float64_next_to_float32(case, bits):
    """fp64 goes through torch in fp64, in the same group."""
    wide, narrow = parameters(torch.float64, [(300,)]) + parameters(torch.float32, [(300,)])
    optimizer = train(build(case, bits, [wide, narrow]), 2)
    assert lowbit_optim.engine_for(wide).name == "torch"
    for p, dtype in ((wide, torch.float64), (narrow, torch.float32)):
        assert p.dtype == dtype
        for key in case.moments:
            assert optimizer.state[p][key].dtype == (torch.uint8 if bits == 8 else dtype)
            scales = optimizer.state[p].get(f"{key}_absmax")
            assert scales is None or scales.dtype == torch.float32


@CLASSES
@BITS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@BY_ENGINE
@pytest.mark.few_if_compiled("dtype", "bits", "case")
def test_torchs_default_dtype_changes_nothing(engine, case, bits, dtype):
    plain = train(build(case, bits, parameters(), percentile_clipping=50), 2)
    values = parameters()
    torch.set_default_dtype(dtype)
    try:
        other = train(build(case, bits, values, percentile_clipping=50), 2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert identical(snapshot(plain), snapshot(other))


@CLASSES
def test_layouts_are_preserved(case):
    """Values are compared in test_trajectories; here every layout is in one group."""
    base = torch.randn(4, 6, 5, 5, generator=torch.Generator().manual_seed(0))
    layouts = [
        base.contiguous(**CHANNELS_LAST),
        base.mT,
        base.new_zeros(8, 6, 5, 5)[::2].copy_(base),
        base[:, :, :1, :1].expand(4, 6, 5, 5).clone(),
    ]
    params = [torch.nn.Parameter(x) for x in layouts]
    strides = [p.stride() for p in params]
    optimizer = build(case, 8, params)
    before = [p.detach().clone() for p in params]
    for _ in range(2):
        for p in params:
            p.grad = torch.ones(1).expand(p.shape)
        optimizer.step()
    assert [p.stride() for p in params] == strides
    assert not any(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert all(x.is_contiguous() for p in params for x in optimizer.state[p].values())


def test_a_gradient_with_the_negative_bit():
    """Imaginary parts of conjugated views are negated lazily; memory holds the other sign."""
    p, q = parameters(shapes=[(300,), (300,)])
    q.data.copy_(p.data)
    p.grad, q.grad = torch._neg_view(torch.ones(300)), -torch.ones(300)
    lowbit_optim.SGD32bit([p, q], lr=0.1).step()
    assert torch.equal(p, q)


@CLASSES
@BITS
def test_maximize_is_the_negative_gradient(case, bits):
    up, down = (build(case, bits, parameters(), maximize=flag) for flag in (True, False))
    for t in range(3):
        for optimizer, sign in ((up, 1), (down, -1)):
            give_gradients(all_parameters(optimizer), t)
            for p in all_parameters(optimizer):
                p.grad *= sign
            optimizer.step()
    for p, q in zip(all_parameters(up), all_parameters(down), strict=True):
        assert torch.equal(p, q)


# Percentile clipping and the cap.


@pytest.mark.parametrize("percentile", [0, 5, 50, 99])
@pytest.mark.parametrize("name", ["torch", "numba"])
def test_percentile_clipping_against_a_naive_one(name, percentile):
    (p,) = parameters(shapes=[(40,)])
    optimizer = lowbit_optim.SGD8bit([p], lr=1.0, percentile_clipping=percentile)
    history = []
    with lowbit_optim.use_engine(name):
        for t in range(120):
            g = torch.randn(40, generator=torch.Generator().manual_seed(t)) * (1 + t % 7)
            if t == 60:
                g[3] = math.nan
            norm = float(g.double().norm())
            if math.isfinite(norm):
                history = history or [norm] * 100
                history[(t + 1) % 100] = norm
            limit = sorted(history)[percentile]
            before = p.detach().clone()
            p.grad = g
            optimizer.step()
            if t == 60:
                assert int((p != p).sum()) == 1
                p.data.nan_to_num_(0.0)
                continue
            moved = float((p.detach() - before).double().norm())
            assert moved == pytest.approx(min(norm, limit), rel=1e-4)
    recorded = optimizer.state[p]["gnorm_vec"].double().sqrt()
    assert torch.allclose(recorded, torch.tensor(history, dtype=torch.float64), rtol=1e-5)


@CLASSES
def test_percentile_clipping_may_be_switched_on_and_off(case):
    optimizer = train(build(case, 8, parameters()), 2)
    assert all("gnorm_vec" not in state for state in optimizer.state.values())
    before = {p: dict(state) for p, state in optimizer.state.items()}
    optimizer.param_groups[0]["percentile_clipping"] = 50
    train(optimizer, 1, first=2)
    for p, state in optimizer.state.items():
        square = p.grad.double().square().sum()
        assert torch.allclose(state["gnorm_vec"].double(), square.expand(100), rtol=1e-5)
        assert all(state[key] is before[p][key] for key in case.moments)
    optimizer.param_groups[0]["percentile_clipping"] = 100
    train(optimizer, 1, first=3)
    assert all(int(state["step"]) == 4 for state in optimizer.state.values())


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_max_unorm_caps_the_movement(name, bits):
    p, q = parameters(shapes=[(5000,), (5000,)])
    free = getattr(lowbit_optim, f"{name}{bits}bit")([q], lr=1.0)
    capped = getattr(lowbit_optim, f"{name}{bits}bit")([p], lr=1.0, max_unorm=0.01)
    before = p.detach().clone()
    p.grad = q.grad = torch.ones(5000)
    capped.step()
    free.step()
    decay = capped.param_groups[0]["weight_decay"] if name == "AdamW" else 0.0
    moved = (p.detach() - before * (1 - decay)).norm()
    assert float(moved / before.norm()) == pytest.approx(0.01, rel=1e-3)
    assert not torch.equal(p, q)


# How state is stored.


@CLASSES
def test_min_8bit_size(case):
    params = parameters(shapes=[(4095,), (4096,), (64, 64), (63, 65)])
    optimizer = train(case.build(params, 8), 1)
    dtypes = [torch.float32, torch.uint8, torch.uint8, torch.float32]
    for key in case.moments:
        assert [optimizer.state[p][key].dtype for p in params] == dtypes
    raised = train(case.build(parameters(shapes=[(4096,)]), 8, min_8bit_size=4097), 1)
    for key in case.moments:
        assert next(iter(raised.state.values()))[key].dtype == torch.float32


def test_args_replace_arguments_where_present():
    args = SimpleNamespace(min_8bit_size=16, percentile_clipping=20, max_unorm=0.5)
    for cls in (lowbit_optim.AdamW8bit, lowbit_optim.SGD8bit, lowbit_optim.LARS8bit):
        group = cls(parameters(), lr=0.1, args=args).param_groups[0]
        assert {key: group[key] for key in vars(args)} == vars(args)
        assert group["optim_bits"] == 8
    args = SimpleNamespace(optim_bits=8)
    group = lowbit_optim.AdamW(parameters(), args=args).param_groups[0]
    assert (group["optim_bits"], group["min_8bit_size"]) == (8, 4096)


@CLASSES
def test_a_change_of_optim_bits_takes_effect(case):
    """Moments are quantized or dequantized at the next step, not forgotten and not ignored."""
    optimizer = train(build(case, 32, parameters()), 2)
    twin = build(case, 8, parameters())
    twin.load_state_dict(optimizer.state_dict())
    for p, q in zip(all_parameters(twin), all_parameters(optimizer), strict=True):
        p.data.copy_(q.data)
    optimizer.param_groups[0]["optim_bits"] = 8
    train(optimizer, 1, first=2)
    train(twin, 1, first=2)
    assert identical(snapshot(optimizer), snapshot(twin))
    optimizer.param_groups[0]["optim_bits"] = 32
    train(optimizer, 1, first=3)
    for state in optimizer.state.values():
        assert int(state["step"]) == 4
        for key in case.moments:
            assert state[key].dtype == torch.float32
            assert f"{key}_absmax" not in state


@CLASSES
@BITS
@pytest.mark.few("bits", "case")
def test_a_model_that_changes_dtype_keeps_its_state(case, bits):
    model = torch.nn.Linear(20, 15)
    optimizer = train(build(case, bits, model.parameters()), 2)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        optimizer.zero_grad()
        model.to(dtype)
        train(optimizer, 1)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for p in model.parameters():
            for key in case.moments:
                assert optimizer.state[p][key].dtype == (torch.uint8 if bits == 8 else wide)
            assert p.isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
@CLASSES
@BITS
def test_a_model_that_moves_takes_its_state_along(case, bits):
    model = torch.nn.Linear(20, 15)
    optimizer = train(build(case, bits, model.parameters(), percentile_clipping=50), 2)
    for device in ("cuda", "cpu"):
        optimizer.zero_grad()
        model.to(device)
        train(optimizer, 2)
        for p in model.parameters():
            state = optimizer.state[p]
            assert all(state[key].device == p.device for key in [*case.moments, "gnorm_vec"])
            assert p.isfinite().all()
    assert all(int(state["step"]) == 6 for state in optimizer.state.values())


def test_max_unorm_zero_and_percentile_100_keep_no_extra_state():
    optimizer = train(lowbit_optim.SGD8bit(parameters(), lr=0.1), 1)
    assert all(set(state) == {"step"} for state in optimizer.state.values())


@CLASSES
@pytest.mark.few
def test_zero_gradients_and_lr_zero_leave_every_bit(case):
    params = [p for dtype in FLOATS for p in parameters(dtype)]
    optimizer = build(case, 8, params, lr=0.0)
    before = [p.detach().clone() for p in params]
    for _ in range(3):
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    tensors = [x for state in optimizer.state.values() for x in state.values()]
    assert all(x.isfinite().all() for x in tensors)


@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
@pytest.mark.parametrize("case", ONE_PER_CLASS, ids=lambda case: case.name)
@pytest.mark.few("case")
def test_infinite_weights_without_decay_and_gradient_stay(case, name):
    """A mask for attention, for example; no decay is none, not 0 times infinity."""
    if case.name in ("LANS", "ScheduleFreeAdamW", "Cain", "LearnedGradient"):
        pytest.skip("its arithmetic takes differences of weights, or products with them")
    if name == "triton":
        pytest.importorskip("triton")
    p = torch.nn.Parameter(torch.ones(4, 70))
    p.data[1] = -torch.inf
    with lowbit_optim.use_engine(name):
        optimizer = build(case, 8, [p], weight_decay=0.0)
        for _ in range(2):
            p.grad = torch.ones(4, 70)
            p.grad[1] = 0.0
            optimizer.step()
    assert (p[1] == -torch.inf).all()
    assert p[0].isfinite().all()


@pytest.mark.parametrize("name", ["torch", "numba"])
def test_centered_moments_that_are_infinite(name):
    """As with torch.optim.RMSprop, weights stay from there on."""
    p, q = (torch.nn.Parameter(torch.ones(300)) for _ in range(2))
    theirs = torch.optim.RMSprop([q], centered=True)
    with lowbit_optim.use_engine(name):
        ours = lowbit_optim.RMSprop32bit([p], centered=True)
        for g in (1e22, 1.0):
            p.grad, q.grad = torch.full((300,), g), torch.full((300,), g)
            ours.step()
            theirs.step()
    assert torch.equal(p, q)


def some_moment(state):
    return next(key for key in ("exp_avg", "sum", "square_avg", "momentum_buffer") if key in state)


REPLACED = {
    "integers": lambda x: x.to(torch.int64),
    "booleans": lambda x: x.to(torch.bool),
    "complex": lambda x: x.to(torch.complex64),
    "sparse": lambda x: x.to_sparse(),
    "smaller": lambda x: x.flatten()[:3],
    "a number": lambda x: 0.5,
    "None": lambda x: None,
}


@pytest.mark.parametrize("damage", REPLACED)
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
def test_a_moment_that_a_user_replaces_by_what_is_none(name, bits, damage):
    """Codes in other integers are no codes, as in a checkpoint."""
    options = {"momentum": 0.9} if name == "SGD" else {}
    cls = getattr(lowbit_optim, f"{name}{bits}bit")
    optimizer = train(cls(parameters(), min_8bit_size=1, **options), 2)
    p, other = all_parameters(optimizer)
    key = some_moment(optimizer.state[p])
    optimizer.state[p][key] = REPLACED[damage](optimizer.state[p][key])
    before = snapshot(optimizer) if damage != "sparse" else None
    with pytest.raises(ValueError, match=f"does not fit {name}{bits}bit: .*'{key}'"):
        train(optimizer, 1)
    assert before is None or identical(snapshot(optimizer), before)
    del optimizer.state[p]
    train(optimizer, 1)
    assert optimizer.state[p]["step"] == 1
    assert optimizer.state[other]["step"] == 3


@pytest.mark.parametrize("key", ["gnorm_vec", "master_residual"])
@pytest.mark.parametrize("change", [lambda x: x[:3], lambda x: x.to(torch.complex64)])
def test_what_a_user_replaces_beside_moments(key, change):
    options = {"percentile_clipping": 50, "master_weight_bits": 24, "min_8bit_size": 1}
    optimizer = train(lowbit_optim.AdamW8bit(parameters(torch.bfloat16), **options), 1)
    state = optimizer.state[all_parameters(optimizer)[1]]
    state[key] = change(state[key])
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=f"does not fit AdamW8bit: '{key}'"):
        train(optimizer, 1)
    assert identical(snapshot(optimizer), before)
