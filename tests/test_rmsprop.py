"""RMSprop with `centered=True`: 32 bits keep torch's moments, 8 bits the variance itself."""

import copy
from functools import partial

import pytest
import torch

import cases
import lowbit_optim
import reference
from lowbit_optim_kernels.formats.dynamic8 import DYNAMIC8

SIZE, LR = 4096, 1e-3
STEPS = {"torch": 80, "numba": 1000, "triton": 8}  # a step of the others takes longer
OPTIONS = pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9}, {"weight_decay": 0.1, "alpha": 0.9}], ids=str
)
EIGHT, WIDE = {"variance", "grad_avg"}, {"square_avg", "grad_avg"}


def gradients(steps, noise=0.1, size=SIZE):
    """A gradient of its own size for every weight, which hardly changes."""
    generator = torch.Generator().manual_seed(0)
    base = torch.linspace(0.1, 1.0, size)
    return [base * (1 + noise * torch.randn(size, generator=generator)) for _ in range(steps)]


def build(bits, p, **options):
    cls = getattr(lowbit_optim, f"RMSprop{bits}bit")
    return cls([p], **{"lr": LR, "centered": True, **options})


def walk(optimizer, p, grads):
    """The largest change of a weight in one step, in units of lr."""
    largest = 0.0
    for g in grads:
        before = p.detach().clone()
        p.grad = g.to(p)
        optimizer.step()
        largest = max(largest, float((p.detach() - before).abs().max()) / LR)
    return largest


def zeros(device="cpu", size=SIZE):
    return torch.nn.Parameter(torch.zeros(size, device=device))


def moments(state):
    return {key for key in state if key != "step" and not key.endswith("_absmax")}


@OPTIONS
@pytest.mark.parametrize("noise", [0.1, 0.01])
@pytest.mark.few_if_interpreted("noise", "options")
def test_8_bits_follow_32_where_the_gradient_hardly_changes(engine, device, options, noise):
    """Where the mean square and the mean are rounded, their difference is nothing but rounding."""
    size = SIZE if engine == "numba" else 300
    p, q = zeros(device, size), zeros(device, size)
    grads = gradients(STEPS[engine], noise, size)
    longest = walk(build(8, p, min_8bit_size=1, **options), p, grads)
    assert longest < 1.5 * walk(build(32, q, **options), q, grads)
    p, q = p.detach(), q.detach()
    assert float((p - q).square().sum() / q.square().sum()) < 0.04
    assert float(p.abs().max()) == pytest.approx(float(q.abs().max()), rel=0.06)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_variance_in_32_bits_is_the_same_algebra(engine, device, momentum):
    """A tensor below `min_8bit_size` keeps the variance in fp32."""
    options = {"momentum": momentum, "weight_decay": 0.1}
    tracks = [cases.Track((300,)), cases.Track((5, 7), start=0.0)]
    values, grads = cases.starts(tracks), cases.gradients(tracks, 12 if engine != "triton" else 3)
    lrs = cases.rates(LR, len(grads))
    params = cases.as_params(values, torch.float32, device)
    optimizer = lowbit_optim.RMSprop8bit(params, lr=LR, centered=True, **options)
    cases.walk(optimizer, params, grads, lrs)
    want, states = cases.walk_reference(
        lambda p, g, state, lr: reference.rmsprop(p, g, state, lr=lr, centered=True, **options),
        values, grads, lrs,
    )  # fmt: skip
    for p, q, state in zip(params, want, states, strict=True):
        assert cases.distance(p, q) < 3e-4
        variance = state["square_avg"] - state["grad_avg"] ** 2
        assert optimizer.state[p]["variance"].dtype == torch.float32
        assert cases.distance(optimizer.state[p]["variance"], variance) < 1e-5


# Checkpoints and changes of `optim_bits`.


def as_before(optimizer):
    """The state dict that 8 bits had when mean square and mean were both coded."""
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        for key, signed in (("square_avg", False), ("grad_avg", True)):
            state[key], state[f"{key}_absmax"] = lowbit_optim.quantize_blockwise(state[key], signed)
    return saved


def as_saved(optimizer):
    return optimizer.state_dict()


def of_torch(p, **options):
    return torch.optim.RMSprop([p], lr=LR, centered=True, **options)


SOURCES = {
    "torch": (of_torch, as_saved),
    "32 bits": (partial(build, 32), as_saved),
    "8 bits": (partial(build, 8), as_saved),
    "8 bits, before": (partial(build, 32), as_before),
}


@pytest.mark.parametrize("noise", [0.1, 1e-3, 0.0])
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("source", SOURCES)
@OPTIONS
def test_state_of_either_form_continues_in_either(source, bits, options, noise):
    """No step after the load is longer than the longest of 32 bits, nor are they much shorter."""
    make, saved_by = SOURCES[source]
    grads = gradients(60, noise)
    p, exact = zeros(), zeros()
    optimizer = make(p, **options)
    walk(optimizer, p, grads[:40])
    straight = build(32, exact, **options)
    before = walk(straight, exact, grads[:40])
    q = torch.nn.Parameter(p.detach().clone())
    loaded = build(bits, q, **options)
    loaded.load_state_dict(saved_by(optimizer))
    assert moments(loaded.state[q]) - {"momentum_buffer"} == (EIGHT if bits == 8 else WIDE)
    wanted = torch.uint8 if bits == 8 else torch.float32
    assert all(loaded.state[q][key].dtype == wanted for key in moments(loaded.state[q]))
    longest = walk(loaded, q, grads[40:])
    assert longest < 1.2 * max(before, walk(straight, exact, grads[40:]))
    assert cases.distance(q, exact) < (0.5 if "before" in source else 0.1)


def test_the_lowest_and_the_highest_code_have_a_neighbour_on_one_side():
    """On the other is no number that is far away: what was rounded to them is known as well."""
    codes, scales = torch.tensor([0, 1, 254, 255], dtype=torch.uint8), torch.ones(1)
    (lower, *kept), (higher, *also) = DYNAMIC8.neighbours([codes, scales])
    assert (lower.tolist(), higher.tolist()) == ([0, 0, 253, 254], [1, 2, 255, 255])
    assert kept[0] is also[0] is scales


@OPTIONS
def test_bits_may_change_between_steps(engine, device, options):
    """To 8 and back to 32, with the variance of a run that stays in 32, and no moment too many."""
    p, q = zeros(device), zeros(device)
    kept = {"momentum_buffer"} if "momentum" in options else set()
    optimizer, straight = build(32, p, **options), build(32, q, **options)
    for bits, keys, grads in zip((32, 8, 32), (WIDE, EIGHT, WIDE), gradients(3), strict=True):
        optimizer.param_groups[0]["optim_bits"] = bits
        for run, x in ((optimizer, p), (straight, q)):
            walk(run, x, [grads])
        assert moments(optimizer.state[p]) == keys | kept
        assert (optimizer.state[p]["grad_avg"].dtype == torch.uint8) == (bits == 8)
    of_both = [
        one["square_avg"] - one["grad_avg"] ** 2 for one in (optimizer.state[p], straight.state[q])
    ]
    torch.testing.assert_close(*of_both, rtol=0.1, atol=1e-3)
    assert cases.distance(p, q) < 0.1


def test_an_override_to_32_bits_keeps_torchs_moments(manager):
    p, q = zeros(), zeros()
    optimizer = lowbit_optim.RMSprop8bit([p, q], lr=LR, centered=True)
    manager.override_config(q, "optim_bits", 32)
    for x in (p, q):
        x.grad = gradients(1)[0]
    optimizer.step()
    assert moments(optimizer.state[p]) == EIGHT
    assert moments(optimizer.state[q]) == WIDE
    p, q = zeros(), zeros()
    again = lowbit_optim.RMSprop8bit([p, q], lr=LR, centered=True)
    manager.override_config(q, "optim_bits", 32)
    again.load_state_dict(optimizer.state_dict())
    assert [moments(again.state[x]) for x in (p, q)] == [EIGHT, WIDE]


@pytest.mark.parametrize("bits", [8, 32])
def test_centered_and_momentum_may_be_switched_together(bits):
    """On, off and on again: the mean square stays that of the same gradients."""
    p = zeros()
    optimizer = build(bits, p, centered=False)
    (g,) = gradients(1)
    square = 0.0
    for centered in (False, True, False, True):
        optimizer.param_groups[0].update(centered=centered, momentum=0.9 * centered)
        walk(optimizer, p, [g])
        state = optimizer.state[p]
        square = 0.99 * square + 0.01 * g * g
        if not centered:
            torch.testing.assert_close(
                decoded(state, "square_avg", False), square, rtol=0.1, atol=1e-3
            )
            assert "variance" not in state
    assert ("variance" in state, "square_avg" in state) == (bits == 8, bits == 32)


def decoded(state, key, signed):
    if state[key].dtype != torch.uint8:
        return state[key]
    return lowbit_optim.dequantize_blockwise(state[key], state[f"{key}_absmax"], signed)


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("key", ["square_avg", "grad_avg"])
def test_a_state_that_does_not_fit_is_refused(bits, key):
    p = zeros()
    optimizer = build(32, p)
    walk(optimizer, p, gradients(1))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0][key] = torch.zeros(7)
    loaded = build(bits, zeros())
    with pytest.raises(ValueError, match=rf"{key}.*\(7,\)"):
        loaded.load_state_dict(saved)
    assert not loaded.state


def test_a_momentum_that_contains_the_rate_is_refused():
    """That of timm's RMSpropTF, whose groups say so; without one its state loads."""
    p = torch.nn.Parameter(torch.ones(SIZE))
    p.grad = torch.ones(SIZE)
    source = torch.optim.RMSprop([p], lr=LR, momentum=0.9)
    source.step()
    saved = source.state_dict()
    optimizer = lowbit_optim.RMSprop8bit([p], lr=LR, momentum=0.9)
    optimizer.load_state_dict(saved)
    saved["param_groups"][0]["lr_in_momentum"] = True
    with pytest.raises(ValueError, match="momentum_buffer contains the learning rate"):
        optimizer.load_state_dict(saved)
    del saved["state"][0]["momentum_buffer"]
    saved["param_groups"][0]["momentum"] = 0.0
    optimizer.load_state_dict(saved)
