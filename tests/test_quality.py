"""What 8 bits may cost and must not do: quality and memory, not speed."""

import gc
import pathlib
import tracemalloc

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cases
import lowbit_optim

BY_ID = pytest.mark.parametrize("case", cases.ALL_CASES, ids=lambda case: case.id)
STATEFUL = pytest.mark.parametrize(
    "case", [case for case in cases.ALL_CASES if case.moments], ids=lambda case: case.id
)
CLASSES = pytest.mark.parametrize("case", cases.one_per_class(), ids=lambda case: case.id)
FUSED_CLASSES = pytest.mark.parametrize(
    "case", cases.one_per_class(cases.FUSED_CASES), ids=lambda case: case.id
)


def side(engine):
    """Edge of the square weight that an engine gets through in time."""
    return 128 if engine != "triton" else 32


def total_update(optimizer, p, scale, steps=20):
    """How far p moved under random gradients of this scale, float64."""
    generator = torch.Generator().manual_seed(3)
    start = p.detach().clone()
    for _ in range(steps):
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p)
        optimizer.step()
    return (p.detach() - start).double()


def nmse(got, want):
    """Normalized mean squared error."""
    return float((got - want).square().sum() / want.square().sum())


@pytest.mark.parametrize("scale", [1e-8, 1e-6, 1e-2, 1.0, 1e4], ids=str)
@pytest.mark.few("scale", "engine")
def test_adamw8bit_follows_torch_at_every_gradient_scale(engine, device, scale):
    a, b = (
        torch.nn.Parameter(torch.zeros(side(engine), side(engine), device=device)) for _ in "ab"
    )
    options = {"lr": 1e-3, "eps": 1e-20, "weight_decay": 0.0}
    ours = lowbit_optim.AdamW8bit([a], min_8bit_size=1, **options)
    got = total_update(ours, a, scale)
    assert ours.state[a]["exp_avg"].dtype == torch.uint8
    want = total_update(torch.optim.AdamW([b], **options), b, scale)
    assert nmse(got, want) <= 3e-4


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e4], ids=str)
@CLASSES
def test_8bit_follows_32bit(case, scale):
    """Every class against its own 32-bit twin, with the default engine."""
    a, b = (torch.nn.Parameter(torch.full((128, 128), 0.5 * scale)) for _ in "ab")
    eps = {"eps": 1e-20} if "eps" in case.build([a]).defaults and case.name != "LARS" else {}
    got = total_update(case.build([a], 8, min_8bit_size=1, **eps), a, scale)
    want = total_update(case.build([b], 32, **eps), b, scale)
    assert nmse(got, want) <= case.nmse


def test_lars8bit_caps_the_movement_at_two_percent(engine, device):
    """bitsandbytes' LARS8bit moves this weight by 9999 %."""
    p = torch.nn.Parameter(torch.full((8192,), 0.01, device=device))
    optimizer = lowbit_optim.LARS8bit([p], lr=1.0, momentum=0.9, max_unorm=0.02)
    start = p.detach().clone()
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[p]["momentum_buffer"].dtype == torch.uint8
    assert float((p.detach() - start).norm() / start.norm()) == pytest.approx(0.02, rel=1e-4)


@pytest.mark.parametrize(
    "case",
    [case for case in cases.ALL_CASES if case.moments and not case.moves_all],
    ids=lambda case: case.id,
)
@pytest.mark.few(("case", "engine"))
def test_a_weight_without_gradient_never_moves(engine, device, case):
    """bitsandbytes' CPU quantizer maps 0 to another number, and so moves such weights."""
    generator = torch.Generator().manual_seed(0)
    shape = (4, 300) if engine == "triton" else (20, 300)
    p = torch.nn.Parameter(torch.randn(shape, generator=generator).to(device))
    idle = (torch.rand(shape, generator=generator) < 0.5).to(device)
    optimizer = case.build([p], 8, min_8bit_size=1, weight_decay=0.0)
    start = p.detach().clone()
    for step in range(3 if engine == "triton" else 10):
        g = torch.randn(shape, generator=generator).to(device) * 10.0 ** (step % 4 - 2)
        p.grad = torch.where(idle, 0.0, g)
        optimizer.step()
    assert torch.equal(p[idle], start[idle])
    assert (p[~idle] != start[~idle]).double().mean() > 0.5  # Lion's equal steps may cancel


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
@STATEFUL
@pytest.mark.few("case", "bad")
def test_one_bad_gradient_element_costs_one_weight(case, bad):
    """In 65,536, then three clean steps; the other weights go where they would have gone."""
    p, q = cases.as_params(cases.starts([cases.Track((256, 256))] * 2), torch.float32)
    q.data.copy_(p.data)
    generator = torch.Generator().manual_seed(1)
    poisoned, clean = case.build([p], 8), case.build([q], 8)
    for step in range(4):
        g = torch.randn(p.shape, generator=generator)
        for weight, value in ((p, bad), (q, 0.0)):
            weight.grad = g.clone()
            if step == 0:
                weight.grad[100, 7] = value
        poisoned.step()
        clean.step()
    lost = ~p.isfinite()
    assert lost.sum() <= 1
    assert not lost.any() or lost[100, 7]
    exact = {moment.key for moment in poisoned.moments() if moment.exact}
    for key, value in poisoned.state[p].items():
        good = value.double().isfinite()
        assert (good | lost if key in exact else good).all(), key  # it is lost with its weight
    if "percentile_clipping" not in case.options:  # the bad norm is not in the window
        off = (p[~lost] - q[~lost]).abs() > 1e-3 * q[~lost].abs().max()
        assert off.double().mean() < 0.01  # its block has another scale, and so other roundings


def hold_still(case, bits, dtype):
    """Steps of zero lr with zero gradients, then real ones, then zero again."""
    tracks = [cases.Track((6, 80)), cases.Track((5,)), cases.Track((3, 4), start=0.0)]
    params = cases.as_params(cases.starts(tracks), dtype)
    optimizer = case.build(params, bits, min_8bit_size=1)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    start = [p.detach().clone() for p in params]
    for row in ([None] * 3, *cases.gradients(tracks, 2), [None] * 3):
        for p, g in zip(params, row, strict=True):
            p.grad = torch.zeros_like(p) if g is None else g.to(p)
        optimizer.step()
        for p, before in zip(params, start, strict=True):
            assert torch.equal(p, before)
            for value in optimizer.state[p].values():
                assert torch.as_tensor(value).double().isfinite().all()


@pytest.mark.parametrize("bits", [8, 32])
@BY_ID
@pytest.mark.few(("case", "bits"))
def test_zero_gradient_and_zero_lr_leave_every_bit(case, bits):
    """From the first step on, and after moments have built up."""
    hold_still(case, bits, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@CLASSES
@pytest.mark.few("dtype", "case")
def test_zero_gradient_and_zero_lr_leave_every_bit_of_half_precision(case, dtype):
    hold_still(case, 8, dtype)


@pytest.mark.parametrize(
    ("name", "options", "limit"),
    [("AdamW", {}, 2.04), ("Adam", {"amsgrad": True}, 3.06), ("LARS", {"momentum": 0.9}, 1.02),
     ("SGD", {"momentum": 0.9}, 1.02), ("SGD", {}, 1e-3), ("LARS", {}, 1e-3)],
)  # fmt: skip
def test_state_bytes_per_parameter(name, options, limit):
    p = torch.nn.Parameter(torch.zeros(4096, 4096, dtype=torch.bfloat16))
    optimizer = getattr(lowbit_optim, f"{name}8bit")([p], lr=0.1, **options)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for value in tree_leaves(optimizer.state[p])
        if torch.is_tensor(value)
    }
    assert 0 < sum(storages.values()) / p.numel() <= limit


class Allocations(TorchDispatchMode):
    """The largest new storage that any torch operator returned while this was active."""

    largest, operator = 0, None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if torch.is_tensor(leaf)
        }
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if torch.is_tensor(leaf) and leaf.untyped_storage().data_ptr() not in known:
                size = leaf.untyped_storage().nbytes()
                if size > self.largest:
                    self.largest, self.operator = size, str(func)
        return out


def one_step_of(case, engine, bits, shape):
    """An optimizer in the middle of its work, and its parameter."""
    p = torch.nn.Parameter(torch.full(shape, 0.1))
    optimizer = case.build([p], bits)
    p.grad = torch.full(shape, 0.01)
    with lowbit_optim.use_engine(engine):
        optimizer.step()  # compiles, and creates the state
    gc.collect()
    return optimizer, p


@pytest.mark.parametrize("bits", [8, 32])
@FUSED_CLASSES
@pytest.mark.few("bits")
def test_a_step_allocates_no_large_temporary(case, bits):
    """Torch's allocations are seen by operator, NumPy's and Python's together by tracemalloc."""
    optimizer, p = one_step_of(case, "numba", bits, (2048, 2048))
    tracemalloc.start()
    try:
        with lowbit_optim.use_engine("numba"), Allocations() as seen:
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            optimizer.step()
            _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seen.largest <= 0.01 * p.nbytes, seen.operator
    assert peak - before <= 0.01 * p.nbytes


def test_the_torch_engine_goes_through_a_weight_in_spans():
    """Large enough that 1 % of it is more than the span a small weight is done in."""
    case = next(case for case in cases.ALL_CASES if case.name == "SGD" and case.moments)
    optimizer, p = one_step_of(case, "torch", 8, (4096, 2304))
    with lowbit_optim.use_engine("torch"), Allocations() as seen:
        optimizer.step()
    assert 0 < seen.largest <= 0.01 * p.nbytes, seen.operator


def resident(field):
    """VmRSS or VmHWM (its peak) of this process in bytes."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


@FUSED_CLASSES
@pytest.mark.few
def test_a_step_does_not_raise_the_resident_set(case):
    """Whatever allocates, Numba's compiled code included: the kernel counts pages."""
    clear = pathlib.Path("/proc/self/clear_refs")
    if not clear.exists():
        pytest.skip("the peak resident set can be reset on Linux only")
    optimizer, p = one_step_of(case, "numba", 8, (4096, 4096))
    try:
        clear.write_text("5")  # the peak becomes what is resident now
    except OSError:
        pytest.skip("this container does not let a process reset its peak")
    before = resident("VmRSS")
    with lowbit_optim.use_engine("numba"):
        optimizer.step()
    # A parameter-sized temporary would be 64 MiB; 2 MiB more than 1 % is the counter's own slack.
    assert resident("VmHWM") - before <= 0.01 * p.nbytes + 2**21


def test_the_state_is_created_at_the_first_step_only():
    p, q = torch.nn.Parameter(torch.ones(5000)), torch.nn.Parameter(torch.ones(5000))
    optimizer = lowbit_optim.AdamW8bit([p, q], lr=0.1)
    assert not optimizer.state
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert set(optimizer.state) == {p}
    assert np.all(q.detach().numpy() == 1)
