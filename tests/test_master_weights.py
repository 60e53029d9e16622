"""bf16 parameters: dithered, with a residual, as fp32 would be, and their master weights."""

import math

import numpy as np
import pytest
import torch

import lowbit_optim
import reference_formats as reference
from lowbit_optim import master_weights
from lowbit_optim_kernels import dither, weights
from protocol import identical, train

EXTRA = {16: 0, 24: 8, 32: 16}
SHAPES = ((64, 147), (3, 300), (257,), (5,))
KEY = "master_residual"


def patterns(x):
    return torch.as_tensor(x, dtype=torch.float32).view(torch.int32)


def split(x, bits, random=0):
    """p as bf16, and the residual, of fp32 numbers."""
    x = torch.as_tensor(x, dtype=torch.float32)
    random = torch.as_tensor(random, dtype=torch.int64).broadcast_to(x.shape)
    return weights.split(x, EXTRA[bits], random)


def joined(p, residual, bits):
    kept_as = weights.WEIGHTS[bits]
    residual = None if kept_as.residual is None else residual.to(kept_as.residual)
    return kept_as.read(p, residual, torch.float32)


@pytest.mark.parametrize(
    ("bits", "digest"),
    [(16, "19292150ac172f8d"), (24, "3489fca314f05506"), (32, "2a0fa66ccdf10009")],
)
def test_a_split_is_the_one_that_is_specified(bits, digest):
    random = reference.dithers(7, 0, 9, 1, range(64))
    m = np.where(random & 1, np.float32(-1), np.float32(1)) * reference.fraction(random)
    m = (m * np.exp2(-(random & 15).astype(np.float32))).astype(np.float32)
    m[3] = 0
    m[4, 5] = np.nan
    odd = np.array([0, -0.0, np.inf, -np.inf, 3.4028235e38, 1e-45, 1.0], np.float32)
    w = np.concatenate([m[5:].ravel(), odd])
    p, residual = split(w, bits, np.resize(random, w.shape).astype(np.int64))
    parts = [p.view(torch.int16).numpy().view(np.uint16)]
    if bits > 16:
        parts.append(residual.to(weights.WEIGHTS[bits].residual).numpy())
    assert reference.digest(*parts) == digest


@pytest.mark.parametrize("bits", EXTRA)
def test_what_can_be_said_stays(bits):
    """Every exponent with mantissas at the ends of p and residual, whatever the dither."""
    exponents = torch.arange(1, 255) << 23
    unit = 1 << (16 - EXTRA[bits])
    mantissas = torch.tensor([0, 1, 2, 127 << (EXTRA[bits]), (128 << EXTRA[bits]) - 1]) * unit
    both = (exponents[:, None] + mantissas % 2**23).flatten().to(torch.int32)
    x = torch.cat([both, both | -(2**31)]).view(torch.float32)
    x = x[x.abs() < 3.38e38]
    for random in (0, 2**32 - 1, 0x9E3779B9):
        back = joined(*split(x, bits, random), bits)
        assert torch.equal(patterns(back), patterns(x))


@pytest.mark.parametrize("bits", EXTRA)
def test_numbers_without_neighbours(bits):
    for random in (0, 2**32 - 1):
        x = [0.0, -0.0, math.inf, -math.inf, 3.4028235e38, -3.4028235e38, 1e-45, math.nan]
        p, residual = split(x, bits, random)
        back = joined(p, residual, bits)
        assert torch.equal(patterns(back[:4]), patterns(x[:4]))
        assert residual[:4].tolist() == [0, 0, 0, 0]
        assert back[4:6].isfinite().all()
        assert back[4] > 3.38e38
        assert 0 <= back[6] <= 1e-40
        assert back[7].isnan()
        assert p[7:].view(torch.int16).item() == 0x7FC0
        assert residual[7] == 0
    masked = weights.WEIGHTS[24].read(
        torch.tensor([0.0, -0.0]).bfloat16(), torch.tensor([-5, 100], dtype=torch.int8), None
    )
    assert torch.equal(patterns(masked), patterns([0.0, -0.0]))


def test_dither_averages_to_the_weight():
    key = dither.stream_key(dither.tensor_key(0, 0), dither.WEIGHT)
    steps = torch.arange(1, 4097)[:, None]
    random = dither.bits(key, steps, torch.zeros(1, dtype=torch.int64), torch.arange(64))
    p, _ = split(torch.full((4096, 64), 1.001), 16, random)
    assert abs(float(p.double().mean()) - float(np.float32(1.001))) < 2e-6


def shapes_on(engine):
    """Short and whole blocks, of rows and of vectors; few where each is interpreted."""
    return ((3, 300), (5,)) if engine == "triton" else SHAPES


def bf16_parameters(device, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator).bfloat16().to(device) for shape in shapes]
    return [torch.nn.Parameter(x) for x in made]


@pytest.mark.few_if_interpreted
@pytest.mark.parametrize("name", ["AdamW8bit", "SGD32bit", "LARS8bit", "LAMB32bit"])
def test_32_bits_are_fp32_training(engine, device, name):
    """Bit for bit on one engine, the network's weights being bf16 casts."""
    options = {"lr": 0.01, "weight_decay": 0.1, "min_8bit_size": 1}
    if name[0] in "SL" and "LAMB" not in name:
        options["momentum"] = 0.9
    narrow, wide = (bf16_parameters(device, shapes_on(engine)) for _ in range(2))
    wide = [torch.nn.Parameter(p.detach().float()) for p in wide]
    cls = getattr(lowbit_optim, name)
    ours, fp32 = cls(narrow, master_weight_bits=32, **options), cls(wide, **options)
    for t in range(4):
        generator = torch.Generator().manual_seed(t)
        for p, q in zip(narrow, wide, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(p)
            q.grad = p.grad.float()
        ours.step()
        fp32.step()
    for (_, w), p, q in zip(master_weights(ours), narrow, wide, strict=True):
        assert torch.equal(w, q)
        assert torch.equal(p, q.bfloat16())


@pytest.mark.parametrize("bits", [16, 24, 32, "auto"])
@pytest.mark.parametrize("name", ["AdamW8bit", "SGD8bit", "Cain8bit"])
@pytest.mark.few(("engine", "bits"), "name")
def test_lr_0_moves_nothing(engine, device, name, bits):
    params = bf16_parameters(device, shapes_on(engine))
    start = [p.detach().clone() for p in params]
    optimizer = getattr(lowbit_optim, name)(
        params, lr=0.0, min_8bit_size=1, master_weight_bits=bits
    )
    train(optimizer, 2)
    for p, q in zip(params, start, strict=True):
        assert torch.equal(p.view(torch.int16), q.view(torch.int16))


@pytest.mark.parametrize("bits", [24, 32])
def test_a_mask_of_the_user_holds(engine, device, bits):
    (p,) = bf16_parameters(device, [(8, 96)])
    optimizer = lowbit_optim.AdamW8bit([p], lr=0.1, min_8bit_size=1, master_weight_bits=bits)
    train(optimizer, 2)
    p.data[:, ::2] = 0
    p.grad[:, ::2] = 0
    for state in ("exp_avg", "exp_avg_sq"):
        optimizer.state[p][state][:, ::2] = {"exp_avg": 127, "exp_avg_sq": 0}[state]
    optimizer.step()
    assert (p[:, ::2] == 0).all()
    assert (p[:, 1::2] != 0).all()


def drift(device, steps, **options):
    """Motion, along that of fp64 and by its error, of small weights with small steps."""
    generator = torch.Generator().manual_seed(0)
    start = (0.02 * torch.randn(2048, generator=generator)).bfloat16()
    p = torch.nn.Parameter(start.clone().to(device))
    q = torch.nn.Parameter(start.double())
    ours = lowbit_optim.AdamW32bit([p], lr=1e-6, weight_decay=0.0, **options)
    exact = torch.optim.AdamW([q], lr=1e-6, weight_decay=0.0)
    mean = torch.randn(2048, generator=generator)
    for _ in range(steps):
        g = 0.3 * mean + torch.randn(2048, generator=generator)
        p.grad, q.grad = g.to(p), g.bfloat16().double()
        ours.step()
        exact.step()
    moved = dict(master_weights(ours))[0].cpu().double() - start.double()
    wanted = q.detach() - start.double()
    error = (moved - wanted).square().sum() / wanted.square().sum()
    return float((moved * wanted).sum() / wanted.square().sum()), float(error)


def test_small_steps_are_not_lost():
    motion, error = drift("cpu", 2000, master_weight_bits=24)
    assert abs(motion - 1) <= 0.01
    assert error <= 1e-3
    motion, _ = drift("cpu", 2000, master_weight_bits="auto")
    assert abs(motion - 1) <= 0.03
    motion, _ = drift("cpu", 2000, master_weight_bits=None)
    assert motion < 0.02


def test_none_is_rounding_to_nearest(engine, device):
    (p,) = bf16_parameters(device, [(8, 96)])
    before = p.detach().float()
    optimizer = lowbit_optim.SGD([p], lr=0.25, master_weight_bits=None)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(p, (before - 0.25).bfloat16())
    assert KEY not in optimizer.state[p]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("bits", [16, 24, 32])
def test_a_dtype_without_master_weights_is_refused(dtype, bits):
    p, q = torch.nn.Parameter(torch.zeros(3, dtype=dtype)), torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=f"master_weight_bits must be .* {dtype}, got {bits}"):
        lowbit_optim.AdamW8bit([p], master_weight_bits=bits)
    optimizer = lowbit_optim.AdamW8bit([q], master_weight_bits=bits)  # fp32 needs none
    with pytest.raises(ValueError, match="master_weight_bits"):
        optimizer.add_param_group({"params": [p]})
    assert len(optimizer.param_groups) == 1
    q.data = q.data.to(dtype)
    q.grad = torch.ones_like(q)
    with pytest.raises(ValueError, match="master_weight_bits"):
        optimizer.step()
    assert not optimizer.state[q]
    assert lowbit_optim.AdamW8bit([p]).defaults["master_weight_bits"] == "auto"


@pytest.mark.parametrize("value", [8, 0, "24", True, 16.5])
def test_other_bits_are_refused(value):
    with pytest.raises(ValueError, match=r"master_weight_bits must be one of None, 16, 24, 32"):
        lowbit_optim.AdamW([torch.nn.Parameter(torch.zeros(3))], master_weight_bits=value)


@pytest.mark.parametrize("after", [None, 16, 24, 32])
@pytest.mark.parametrize("before", [16, 24, 32])
def test_a_checkpoint_of_other_bits(before, after):
    first = bf16_parameters("cpu")
    saved = train(lowbit_optim.AdamW8bit(first, master_weight_bits=before), 3).state_dict()
    params = bf16_parameters("cpu")
    with torch.no_grad():
        for p, q in zip(params, first, strict=True):
            p.copy_(q)
    optimizer = lowbit_optim.AdamW8bit(params, master_weight_bits=after)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["master_weight_bits"] == after
    for i, p in enumerate(params):
        state, kept = optimizer.state[p], weights.WEIGHTS[after].residual
        assert (KEY in state) == (kept is not None)
        old = saved["state"][i].get(KEY)
        if kept is None:
            continue
        assert state[KEY].dtype == kept
        if old is None:
            assert not state[KEY].any()
        elif old.dtype == kept:
            assert torch.equal(state[KEY], old)
        elif kept == torch.int16:
            assert torch.equal(state[KEY], old.to(torch.int16) << 8)
        else:
            assert torch.equal(state[KEY].int(), ((old.int() + 128) >> 8).clamp(max=127))
    train(optimizer, 1, 3)


def test_a_run_goes_on_bit_for_bit(engine, device):
    for bits in ("auto", 24, 32):
        params = bf16_parameters(device, shapes_on(engine))
        options = {"master_weight_bits": bits, "min_8bit_size": 1}
        straight = train(lowbit_optim.AdamW8bit(params, **options), 2)
        copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
        resumed = lowbit_optim.AdamW8bit(copies, **options)
        resumed.load_state_dict(straight.state_dict())
        for optimizer in (straight, resumed):
            train(optimizer, 2, 2)
        assert identical(resumed.state_dict()["state"], straight.state_dict()["state"])
        for p, q in zip(params, copies, strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("after", [None, 16, 24, 32])
@pytest.mark.parametrize("before", [24, 32])
def test_master_weights_before_the_step_that_takes_new_bits(before, after):
    p = bf16_parameters("cpu")[0]
    optimizer = train(lowbit_optim.AdamW8bit([p], master_weight_bits=before), 2)
    want = next(w for _, w in master_weights(optimizer))
    optimizer.param_groups[0]["master_weight_bits"] = after
    got = next(w for _, w in master_weights(optimizer))
    error = 2.0 ** -(15 if after in (24, 32) else 8)
    assert ((got - want).abs() <= error * want.abs()).all()


@pytest.mark.parametrize(("before", "after"), [(24, 32), (32, 24)])
def test_a_residual_of_a_parameter_that_waits_for_new_bits_is_loaded(before, after):
    """One without a gradient since its group's bits were changed keeps the residual it had."""
    p = bf16_parameters("cpu")[0]
    optimizer = train(lowbit_optim.AdamW8bit([p], master_weight_bits=before), 2)
    optimizer.param_groups[0]["master_weight_bits"] = after
    resumed = lowbit_optim.AdamW8bit([torch.nn.Parameter(p.detach())], master_weight_bits=after)
    resumed.load_state_dict(optimizer.state_dict())
    want, got = (next(w for _, w in master_weights(o)) for o in (optimizer, resumed))
    assert ((got - want).abs() <= 2.0**-15 * want.abs()).all()
    cast = optimizer.state_dict()  # as torch.distributed.checkpoint does, to the dtype of `resumed`
    cast["state"][0][KEY] = cast["state"][0][KEY].to(weights.WEIGHTS[after].residual)
    cast["param_groups"][0]["master_weight_bits"] = before
    with pytest.raises(ValueError, match=f"was saved with master_weight_bits={before}"):
        resumed.load_state_dict(cast)


def test_a_bad_residual_is_refused():
    saved = train(lowbit_optim.AdamW8bit(bf16_parameters("cpu"), master_weight_bits=24), 1)
    saved = saved.state_dict()
    optimizer = lowbit_optim.AdamW8bit(bf16_parameters("cpu"), master_weight_bits=24)
    for bad, match in (
        (torch.zeros(64, 146, dtype=torch.int8), r"'master_residual' has shape \(64, 146\)"),
        (torch.zeros(64, 147), "'master_residual' must be a dense tensor of torch.int8"),
        (3, "'master_residual' has shape 3"),
    ):
        saved["state"][0][KEY] = bad
        with pytest.raises(ValueError, match=match):
            optimizer.load_state_dict(saved)
        assert not optimizer.state


def test_a_weight_of_another_shape_is_refused_where_there_are_no_moments():
    p = torch.nn.Parameter(torch.ones(100).bfloat16())
    optimizer = train(lowbit_optim.SGD8bit([p], lr=0.1, master_weight_bits=24), 1)
    p.grad, p.data = None, torch.ones(9000).bfloat16()
    with pytest.raises(ValueError, match=r"'master_residual' has shape \(100,\), its"):
        train(optimizer, 1)
