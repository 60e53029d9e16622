"""Automatic mixed precision: a GradScaler that unscales gradients, or leaves that to the step."""

import math

import pytest
import torch

import lowbit_optim
from protocol import (
    CLASSES,
    NEEDS_TRITON,
    ONE_PER_CLASS,
    all_parameters,
    build,
    give_gradients,
    identical,
    parameters,
    pass_by_pass,
    snapshot,
    train,
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EVERY = [(case, bits) for case in ONE_PER_CLASS for bits in (8, 32)]
INTERPRETED = pytest.param(
    next(case for case in ONE_PER_CLASS if case.name == "AdamW"),
    8,
    "triton",
    marks=pytest.mark.skipif(torch.cuda.is_available(), reason="only interpreted on the CPU"),
)
ENGINES = [*((*which, name) for which in EVERY for name in ("torch", "numba")), INTERPRETED]


@pytest.fixture
def unscaled_in_step(monkeypatch):
    """A GradScaler that leaves the division to the step, as with fused=True, on every engine."""
    cls = lowbit_optim.LowBitOptimizer
    monkeypatch.setattr(cls, "_step_supports_amp_scaling", True)


def scaled_run(optimizer, scale, bad_steps=(), clip=False):
    """Steps under a GradScaler whose scale stays as it is but for overflows."""
    params = all_parameters(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
    scales = []
    for t in range(4):
        give_gradients(params, t)
        for p in params:
            p.grad = (p.grad * scaler.get_scale()).to(p.grad.dtype)
        scaler.scale(torch.ones(()))  # what makes the scaler set itself up
        if t in bad_steps:
            params[-1].grad[0] = math.inf
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize(("case", "bits", "name"), ENGINES, ids=lambda x: getattr(x, "name", x))
@pytest.mark.few("case", "bits", "name")
def test_grad_scaler_divides_gradients(case, bits, name, unscaled_in_step):
    """By a power of two, so that no bit is lost."""
    if name == "triton":
        pytest.importorskip("triton", minversion="3.4", reason=NEEDS_TRITON)
    with lowbit_optim.use_engine(name):
        scaled, plain = build(case, bits, parameters()), build(case, bits, parameters())
        scaled_run(scaled, 1024.0)
        train(plain, 4)
    assert identical(snapshot(scaled), snapshot(plain))


@pytest.mark.parametrize(("case", "bits", "name"), ENGINES, ids=lambda x: getattr(x, "name", x))
@pytest.mark.few("case", "bits", "name")
def test_grad_scaler_skips_an_overflow(case, bits, name, unscaled_in_step):
    """Nothing moves, counts or is recorded; the scale halves and training goes on."""
    options = {"percentile_clipping": 50}
    if name == "triton":
        pytest.importorskip("triton", minversion="3.4", reason=NEEDS_TRITON)
    with lowbit_optim.use_engine(name):
        scaled = build(case, bits, parameters(), **options)
        scales = scaled_run(scaled, 1024.0, bad_steps=(1,))
        plain = build(case, bits, parameters(), **options)
        for t in (0, 2, 3):
            train(plain, 1, first=t)
    assert scales == [1024.0, 512.0, 512.0, 512.0]
    assert all(int(state["step"]) == 3 for state in scaled.state.values())
    assert identical(snapshot(scaled), snapshot(plain))


@CLASSES
def test_grad_scaler_overflow_in_the_first_step(case, unscaled_in_step):
    scaled = build(case, 8, parameters())
    scaled_run(scaled, 1024.0, bad_steps=(0, 1, 2, 3))
    for before, p in zip(parameters(), all_parameters(scaled), strict=True):
        assert torch.equal(before, p)
        assert int(scaled.state[p]["step"]) == 0


@CLASSES
def test_clipping_after_unscale(case, unscaled_in_step):
    scaled, plain = build(case, 32, parameters()), build(case, 32, parameters())
    scaled_run(scaled, 1024.0, clip=True)
    for t in range(4):
        give_gradients(all_parameters(plain), t)
        torch.nn.utils.clip_grad_norm_(all_parameters(plain), 0.5)
        plain.step()
    for p, q in zip(all_parameters(scaled), all_parameters(plain), strict=True):
        assert torch.equal(p, q)


def test_grad_scaler_with_gradients_of_several_dtypes(unscaled_in_step):
    params = [p for dtype in FLOATS for p in parameters(dtype)]
    optimizer = lowbit_optim.AdamW8bit(params, min_8bit_size=1)
    scaled_run(optimizer, 64.0, bad_steps=(2,))
    assert all(int(optimizer.state[p]["step"]) == 3 for p in params)
    assert all(p.isfinite().all() for p in params)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@CLASSES
def test_a_grad_scaler_unscales_by_itself(case):
    """As it does for torch.optim: a step that overflows is none."""
    scaled, plain = build(case, 8, parameters()), build(case, 8, parameters())
    scales = scaled_run(scaled, 1024.0, bad_steps=(1,))
    for t in (0, 2, 3):
        train(plain, 1, first=t)
    assert scales == [1024.0, 512.0, 512.0, 512.0]
    assert identical(snapshot(scaled), snapshot(plain))


def test_what_a_scaler_sets_may_change_from_step_to_step(engine, device):
    """To the same bits as by plans that are made anew. (Overflows halve a scale, down to 0.)"""
    given = [(None, None), (None, 0.0), (None, 1.0), (4.0, None), (4.0, 0.0), (None, None)]
    given += [(0.0, 1.0)]
    results = []
    for thorough in (False, True):
        params = [torch.nn.Parameter(p.detach().to(device)) for p in parameters()]
        optimizer = lowbit_optim.AdamW8bit(params, min_8bit_size=1)
        for t, numbers in enumerate(given):
            for name, x in zip(("grad_scale", "found_inf"), numbers, strict=True):
                setattr(optimizer, name, None if x is None else torch.tensor(x, device=device))
            if thorough:
                optimizer.plans.clear()
            give_gradients(params, t)
            optimizer.step()
        results.append(snapshot(optimizer))
        assert all(int(optimizer.state[p]["step"]) == 5 for p in params)
    assert identical(*results)


@pytest.mark.parametrize("name", ["AdamW8bit", "Cain8bit"])
def test_a_step_is_skipped_by_whatever_number_of_devices_found_an_overflow(name, engine, device):
    """A scaler adds them up: two say 2."""
    params = [torch.nn.Parameter(p.detach().to(device)) for p in parameters()]
    optimizer = train(getattr(lowbit_optim, name)(params, min_8bit_size=1), 1)
    before = snapshot(optimizer)
    optimizer.grad_scale, optimizer.found_inf = (torch.tensor(x, device=device) for x in (4.0, 2.0))
    train(optimizer, 1, first=1)
    assert identical(snapshot(optimizer), before)


def test_an_overflow_elsewhere_adds_no_norm_of_shards_to_a_history(monkeypatch):
    """Their own gradients may all be finite; the Numba engine hands out sums of shards."""
    pass_by_pass(monkeypatch)
    with lowbit_optim.use_engine("numba"):
        optimizer = train(lowbit_optim.AdamW8bit(parameters(), percentile_clipping=50), 1)
        before = snapshot(optimizer)
        optimizer.found_inf = torch.tensor(1.0)
        train(optimizer, 1, first=1)
    assert identical(snapshot(optimizer), before)
