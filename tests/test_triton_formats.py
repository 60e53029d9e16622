"""Formats, dither and master weights on the Triton engine, beside the torch engine's.

Interpreted all is computed exactly, so codes may differ only where sums were added in another
order; on a GPU also where an approximate root or reciprocal decides a rounding.
"""

import numpy as np
import pytest
import torch

import lowbit_optim
from protocol import NEEDS_TRITON

pytest.importorskip("triton", minversion="3.4", reason=NEEDS_TRITON)

import triton
import triton.language as tl

from lowbit_optim_kernels import dither, weights
from lowbit_optim_kernels.batch import WEIGHT_BLOCK
from lowbit_optim_kernels.engines.triton import engine as engine_triton
from lowbit_optim_kernels.engines.triton import grid, random
from lowbit_optim_kernels.engines.triton.primitives import ROLES
from lowbit_optim_kernels.formats import dynamic8
from lowbit_optim_kernels.formats.dynamic8 import triton_tables
from lowbit_optim_kernels.formats.ratio import triton as triton8
from lowbit_optim_kernels.formats.ratio import triton4
from lowbit_optim_kernels.rules import RATIO, SQUARE
from lowbit_optim_kernels.weights import triton as triton_weights

pytestmark = pytest.mark.gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(7,), (257,), (4097,), (64, 147), (3, 300), (5, 64), (2, 3, 64), (130, 1024)]
FEW = [(257,), (5, 147), (2, 3, 64), (2048 + 64,)]
BY_FORMAT = pytest.mark.parametrize(
    ("name", "options"),
    [("AdamW8bit", {}), ("AdamW8bit", {"state_format": "ratio8"}), ("AdamW4bit", {})],
    ids=["dynamic8", "ratio8", "ratio4"],
)
INTEGERS = (torch.uint8, torch.int8)


def walk(engine, name, shapes=FEW, dtype=torch.float32, steps=2, spread=False, **options):
    """Parameters and states on the CPU after some steps of an engine.

    With `spread` gradients of neighbours differ in size, and roots are below those of code 1.
    """
    generator = torch.Generator().manual_seed(0)
    device = DEVICE if engine == "triton" else "cpu"
    starts = [torch.randn(shape, generator=generator) for shape in shapes]
    params = [torch.nn.Parameter(x.to(device, dtype)) for x in starts]
    with lowbit_optim.use_engine(engine):
        given = {"lr": 1e-2, "min_8bit_size": 1, **options}
        optimizer = getattr(lowbit_optim, name)(params, **given)
        for step in range(steps):
            for p in params:
                g = torch.randn(p.shape, generator=generator) * 10.0**-step
                if spread:
                    g *= 10.0 ** -(torch.arange(g.numel()) % 7).view(g.shape)
                p.grad = g.to(p)
            optimizer.step()
    states = [{k: v.cpu() for k, v in optimizer.state[p].items()} for p in params]
    return [p.detach().cpu() for p in params], states


def assert_same(got, want, share=1e-4):
    """Codes equal but for a share of them, which are off by one; floats to rounding."""
    counted = {}
    for p, q, state, other in zip(got[0], want[0], got[1], want[1], strict=True):
        assert state.keys() == other.keys()
        for key, x in state.items():
            y = other[key]
            assert (x.shape, x.dtype) == (y.shape, y.dtype), key
            if x.dtype == torch.int16:  # the last bits of fp32 weights, which are rounded otherwise
                a, b = (weights.WEIGHTS[32].read(*pair, torch.float32) for pair in ((p, x), (q, y)))
                assert ((a - b).abs() <= 2.0**-21 * b.abs() + 1e-8).all(), key
            elif x.dtype in INTEGERS:
                counted.setdefault(key, []).append((x != y).flatten())
            elif x.numel():
                assert (x.double() - y.double()).abs().max() <= 1e-5 * y.double().abs().max(), key
        if q.numel():
            limit = 1e-3 if q.dtype == torch.float32 else 1e-2
            assert (p.double() - q.double()).abs().max() <= limit * q.double().abs().max()
    for key, off in counted.items():
        together = torch.cat(off)
        assert int(together.sum()) <= 2 + share * len(together), key


def compare(name, share=1e-4, **options):
    got, want = (walk(engine, name, **options) for engine in ("triton", "torch"))
    assert_same(got, want, share)
    return got


@BY_FORMAT
@pytest.mark.few
def test_every_shape_is_as_on_torch(name, options):
    compare(name, shapes=SHAPES[:-1], **options)


@pytest.mark.slow
@BY_FORMAT
def test_many_codes_are_as_on_torch(name, options):
    compare(name, shapes=SHAPES[-1:], **options)


RULES = {
    "AdEMAMix8bit": {},
    "SGD8bit": {"momentum": 0.9},
    "SGD8bit-slow": {"momentum": 0.999},
    "LAMB8bit": {},
    "LANS8bit": {},
    "RMSprop8bit": {"centered": True, "momentum": 0.9},
    "Adagrad8bit": {},
    "Lion8bit": {},
    "ScheduleFreeAdamW8bit": {},
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.few
def test_rules_are_as_on_torch_in_ratio8(name):
    compare(name.partition("-")[0], state_format="ratio8", **RULES[name])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW8bit", {"state_format": "ratio8", "betas": (0.9, 0.8)}),
        ("AdamW4bit", {"betas": (0.9, 0.8)}),
        ("AdEMAMix8bit", {"state_format": "ratio8"}),
    ],
    ids=["ratio8", "ratio4", "AdEMAMix"],
)
def test_moments_that_outlast_their_squares_are_as_on_torch(name, options):
    compare(name, shapes=FEW[1:2], spread=True, **options)


@pytest.mark.slow_if_interpreted
@pytest.mark.parametrize("name", ["AdEMAMix8bit", "SGD8bit-slow", "RMSprop8bit", "LAMB8bit"])
def test_rules_are_as_on_torch_dithered_in_dynamic8(name):
    compare(name.partition("-")[0], state_format="dynamic8", **RULES[name])


def test_without_dither_squares_are_rounded_to_nearest():
    compare("AdamW8bit", shapes=FEW[:2], state_format="ratio8", dither=False)
    compare("AdamW4bit", shapes=FEW[:2], dither=False)


@pytest.mark.parametrize("bits", [16, 24, 32])
@pytest.mark.parametrize(("name", "shapes"), [("AdamW8bit", FEW), ("LANS8bit", [(5, 147)])])
@pytest.mark.few
def test_weights_are_as_on_torch(name, shapes, bits):
    more = {"dtype": torch.bfloat16, "master_weight_bits": bits, "state_format": "ratio8"}
    # Where a sum of products is rounded once, a third of fp32 weights differ in the last bit, which
    # decides a rounding to 24 bits once in 256 times.
    params, states = compare(name, shapes=shapes, share=5e-3, **more)
    kept = {state["master_residual"].dtype for state in states if "master_residual" in state}
    assert kept == {weights.WEIGHTS[bits].residual} - {None}
    assert {p.dtype for p in params} == {torch.bfloat16}


@pytest.mark.parametrize("bits", [16, 24])
def test_rows_that_are_no_multiple_of_a_weights_block_keep_their_numbers(bits):
    """Of exact state, and of blocks of 256, which a row of 96 is less than."""
    more = {"dtype": torch.bfloat16, "master_weight_bits": bits}
    shapes = [(5, 96), (4, 256), (3, 320)]
    compare("AdamW32bit", shapes=shapes, share=5e-3, **more)
    compare("SGD8bit", shapes=shapes, momentum=0.9, share=1e-2, **more)


@pytest.mark.parametrize("bits", [None, 16, 24, 32])
def test_a_step_of_rate_zero_moves_no_weight(bits):
    p = torch.nn.Parameter(torch.randn(300).to(DEVICE, torch.bfloat16))
    before = p.detach().clone()
    with lowbit_optim.use_engine("triton"):
        optimizer = lowbit_optim.AdamW8bit(
            [p], lr=0.0, min_8bit_size=1, master_weight_bits=bits, state_format="ratio8"
        )
        for _ in range(2):
            p.grad = torch.randn(300).to(p)
            optimizer.step()
    assert torch.equal(p.detach(), before)
    if bits in (24, 32):
        assert not optimizer.state[p]["master_residual"].any()


@BY_FORMAT
def test_a_bad_gradient_costs_one_weight(name, options):
    results = []
    for bad in (False, True):
        p = torch.nn.Parameter(torch.ones(300, device=DEVICE))
        with lowbit_optim.use_engine("triton"):
            cls = getattr(lowbit_optim, name)
            optimizer = cls([p], min_8bit_size=1, **options)
            for step in range(2):
                p.grad = torch.linspace(-1, 1, 300, device=DEVICE)
                p.grad[[7, 200]] = 0.0
                if bad and not step:
                    p.grad[7], p.grad[200] = float("nan"), float("inf")
                optimizer.step()
        results.append(p.detach().cpu())
    good, bad = results
    assert not bad[[7, 200]].isfinite().all()
    rest = torch.ones(300, dtype=torch.bool)
    rest[[7, 200]] = False
    assert torch.equal(good[rest], bad[rest])


def test_kinds_of_several_formats_and_weights_share_a_launch():
    """And each tensor comes out as it does alone."""

    def run(chosen):
        generator = torch.Generator().manual_seed(0)
        params = [
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype))
            for shape in ((2048,), (5, 147), (64,))
            for dtype in (torch.bfloat16, torch.float32)
        ]
        grads = [torch.randn(p.shape, generator=generator).to(p) for p in params]
        for i in chosen:
            params[i].grad = grads[i]
        with lowbit_optim.use_engine("triton"):
            optimizer = lowbit_optim.LAMB8bit(
                params, min_8bit_size=65, state_format="ratio8", master_weight_bits=24
            )
            optimizer.step()
        (plan,) = optimizer.plans.values()
        return params, optimizer.state, plan.batches[0].tables.kinds

    params, states, kinds = run(range(6))
    assert len(kinds) == 8, "of (5, 147) full and short blocks"
    assert {kind.weights.bits for kind in kinds} == {None, 24}
    assert {kind.format.name for kind in kinds} == {"ratio8", "float32"}
    for i, p in enumerate(params):
        others, state, _ = run([i])
        assert torch.equal(p, others[i])
        for key, x in states[p].items():
            assert torch.equal(x, state[others[i]][key]), key


@pytest.mark.parametrize(("state_format", "blocks"), [("ratio8", 3), ("dynamic8", 1)])
def test_a_whole_row_of_blocks_counts_on(state_format, blocks):
    """The bits of a shard are those of the whole: blocks before it only shift their numbers."""
    rows = torch.randn(6, 147, generator=torch.Generator().manual_seed(1))
    with lowbit_optim.use_engine("triton"):
        whole = torch.nn.Parameter(rows.to(DEVICE, torch.bfloat16))
        more = {"min_8bit_size": 1, "state_format": state_format, "lr": 0.1}
        optimizer = lowbit_optim.AdamW8bit([whole], **more)
        whole.grad = rows.to(whole)
        optimizer.step()
        part = torch.nn.Parameter(rows[2:].to(DEVICE, torch.bfloat16))
        shard = lowbit_optim.AdamW8bit([part], **more)
        part.grad = rows[2:].to(part)
        original = engine_triton.start

        def start(batch):
            for slot in batch.slots:
                slot.blocks_before, slot.weights_before = 2 * blocks, 2 * 3 * WEIGHT_BLOCK
            return original(batch)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_triton, "start", start)
            shard.step()
    assert torch.equal(whole.detach()[2:], part.detach())
    assert torch.equal(optimizer.state[whole]["exp_avg_sq"][2:], shard.state[part]["exp_avg_sq"])


@triton.jit
def bits_kernel(
    out, of_streams, number, KEY: tl.constexpr, STREAM: tl.constexpr, STEP: tl.constexpr,
    FAR: tl.constexpr,
):  # fmt: skip
    tensor_key = tl.full((), KEY, tl.int64).to(tl.uint32)
    key, rest = random.of_step(tensor_key, tl.full((), STEP, tl.int64).to(tl.uint32), STREAM)
    tl.store(of_streams, key)
    tl.store(of_streams + 1, rest)
    tl.debug_barrier()
    block = tl.arange(0, 4)
    numbers = random.numbered(tl.load(number), block, FAR)
    first = random.of_blocks(numbers, of_streams, FAR)
    lane = tl.arange(0, 64)
    bits = random.of_lanes(first[:, None], lane[None, :])
    tl.store(out + block[:, None] * 64 + lane[None, :], bits.to(tl.int64))


@pytest.mark.parametrize("before", [0, 5, 2**32 - 2, 2**32 + 77])
def test_random_bits_are_those_of_every_engine(before):
    far = before + 4 > grid.FAR
    out = torch.zeros(4, 64, dtype=torch.int64, device=DEVICE)
    scratch = torch.zeros(2, dtype=torch.uint32, device=DEVICE)
    number = torch.tensor([before], device=DEVICE)
    key, step = dither.tensor_key(3, 7), 123456
    bits_kernel[(1,)](out, scratch, number, KEY=key, STREAM=3, STEP=step, FAR=far)
    blocks, lanes = before + torch.arange(4)[:, None], torch.arange(64)
    want = dither.bits(dither.stream_key(key, 3), torch.tensor(step), blocks, lanes)
    assert torch.equal(out.cpu(), want)


@triton.jit
def split_kernel(
    w, bits, high, low, back, EXTRA: tl.constexpr, DITHERED: tl.constexpr, N: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, N)
    given = tl.load(bits + at).to(tl.uint32)
    p, residual = triton_weights.write(
        tl.load(w + at), given, tl.bfloat16, True, EXTRA, DITHERED, PTX
    )
    tl.store(high + at, p)
    if EXTRA > 0:
        tl.store(low + at, residual)
    tl.store(back + at, triton_weights.read(p, residual, EXTRA, PTX))


@triton.jit
def largest_kernel(m, v, codes, FOUR: tl.constexpr, MOMENTS: tl.constexpr):
    at = tl.arange(0, 16)[:, None] * 64 + tl.arange(0, 64)[None, :]
    bits = (at * 0 - 1).to(tl.uint32)
    values = tl.load(m + at), tl.load(v + at)
    if FOUR:
        tops = triton4.scales(values, MOMENTS, 16, False)
        coded = triton4.encode(values, tops, (bits, bits), m, 0, MOMENTS, False)
    else:
        tops = triton8.scales(values, MOMENTS, 16, False)
        coded = triton8.encode(values, tops, (bits, bits), m, 1, MOMENTS, False)
    tl.store(codes + at, coded)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_square_has_the_top_code_by_any_random_bits(bits):
    """A root that is rounded up by the most would else have one beyond, which is that of zero."""
    v = torch.rand(16, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    codes = torch.zeros(16, 64, dtype=torch.uint8, device=DEVICE)
    ratio, square = (
        (True, ROLES.index(RATIO), 1, False, 1),
        (False, ROLES.index(SQUARE), 0, False, 2),
    )
    largest_kernel[(1,)](
        v.sqrt(), v, codes, FOUR=bits == 4, MOMENTS=(ratio, square), **engine_triton.OPTIONS
    )
    assert (codes.gather(1, v.argmax(1, keepdim=True)) == 255).all()


def weights_of_all_kinds():
    """Every exponent, patterns beside the ends of a mantissa, infinity and NaN."""
    ends = np.array([0, 1, 0x7F, 0x80, 0x7FFF, 0x8000, 0x8001, 0xFF80, 0xFFFF, 0x10000, 0x7FFFFF])
    exponents = np.arange(256) << 23
    patterns = (exponents[:, None] + ends).ravel()
    patterns = np.concatenate([patterns, patterns | 1 << 31]).astype(np.uint32)
    return torch.from_numpy(np.resize(patterns, 8192).view(np.float32).copy())


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_weights_are_split_and_joined_as_on_torch(bits):
    kind, w = weights.WEIGHTS[bits], weights_of_all_kinds()
    random_bits = torch.randint(0, 2**32, (8192,), generator=torch.Generator().manual_seed(0))
    high = torch.zeros(8192, dtype=torch.bfloat16, device=DEVICE)
    low = torch.zeros(8192, dtype=kind.residual or torch.int8, device=DEVICE)
    back = torch.zeros(8192, device=DEVICE)
    split_kernel[(1,)](
        w.to(DEVICE), random_bits.to(DEVICE), high, low, back, EXTRA=kind.extra,
        DITHERED=kind.dithered, N=8192, PTX=False, **engine_triton.OPTIONS,
    )  # fmt: skip
    want, residual = weights.split(w, kind.extra, random_bits if kind.dithered else None)
    assert torch.equal(high.cpu().view(torch.int16), want.view(torch.int16))
    if kind.extra:
        assert torch.equal(low.cpu().long(), residual)
    joined = kind.read(want, residual.to(low.dtype) if kind.extra else None, torch.float32)
    assert torch.equal(back.cpu().view(torch.int32), joined.view(torch.int32))


@pytest.mark.parametrize("signed", [True, False])
def test_lines_from_value_to_value(signed):
    """z by the tables is that of the torch form, but for signed numbers beside zero."""
    generator = np.random.default_rng(0)
    a = np.concatenate([10 ** generator.uniform(-6.25, 0, 50000), generator.uniform(0, 1, 50000)])
    y = a * triton_tables.dither_scale(signed)
    octave = y.astype(np.float32).view(np.uint32) >> 23
    cells, last = triton_tables.octaves(signed)
    slope, start = cells[octave].astype(np.float64).T
    g = slope * y + start
    ends = last[octave] if signed else triton_tables.LAST[0] * start + triton_tables.LAST[1]
    z = ends + np.minimum(np.minimum(g, g / 3), 0.2 * g + 0.4)
    tables = dynamic8.pieces(signed)
    piece = np.searchsorted(tables.threshold, a)
    f = a * np.take(tables.inverse_slope, piece) + np.take(tables.offset, piece)
    ends, shift = np.take(tables.last, piece), 0 if signed else 1
    begins = (ends + shift + 1) / 2 - shift
    want = np.minimum(np.minimum(f, (f + 2 * ends) / 3), (5 * f - 2 * begins) / 3)
    least = -1.0 if signed else 1.0  # of a positive unsigned number
    np.testing.assert_allclose(np.maximum(z, least), np.maximum(want, least), atol=1e-4)
