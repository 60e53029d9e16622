"""The Triton engine by its interpreter: values beside the torch engine's, the codec, the plan.

On a machine with a GPU the same tests run compiled.
"""

import inspect
from collections import Counter

import numpy as np
import pytest
import torch

import cases
import lowbit_optim
import reference_codec
from protocol import NEEDS_TRITON

pytest.importorskip("triton", minversion="3.4", reason=NEEDS_TRITON)

from lowbit_optim_kernels import formats
from lowbit_optim_kernels.engines.registry import HALF_TO_SINGLE
from lowbit_optim_kernels.engines.triton import engine as engine_triton
from lowbit_optim_kernels.engines.triton import grid, kinds, tiles
from lowbit_optim_kernels.engines.triton import tables as engine_tables
from lowbit_optim_kernels.engines.triton.compiled import Compiled
from lowbit_optim_kernels.formats.dynamic8 import triton_tables

pytestmark = pytest.mark.gpu  # `make gpu-check` runs these tests too

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# One element, both sides of a block, ragged rows unaligned and aligned, whole tiles with a tail.
SHAPES = [(1,), (255,), (256,), (257,), (64, 147), (3, 512), (5, 96), (0,), (), (2048 + 272,)]
FEW = [(257,), (5, 96), (0,), (3,), (2048 + 256,)]
MOMENTUM = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
VARIANTS = {
    "SGD": ("SGD", MOMENTUM),
    "SGD-nesterov": ("SGD", {**MOMENTUM, "nesterov": True}),
    "SGD-plain": ("SGD", {"lr": 0.1}),
    "LARS-cap": ("LARS", MOMENTUM),
    "LARS-trust": ("LARS", {**MOMENTUM, "trust_coefficient": 0.02}),
    "Adam": ("Adam", {"weight_decay": 0.1}),
    "AdamW": ("AdamW", {}),
    "AdamW-amsgrad": ("AdamW", {"amsgrad": True}),
    "AdamW-cap": ("AdamW", {"max_unorm": 0.01}),
    "AdamW-clipped": ("AdamW", {"percentile_clipping": 30}),
    "AdamW-maximize": ("AdamW", {"maximize": True}),
}
BY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)
BITS = pytest.mark.parametrize("bits", [8, 32])


def build(variant, params, bits, **more):
    name, options = VARIANTS[variant]
    cls = getattr(lowbit_optim, f"{name}{bits}bit")
    return cls(params, **{"min_8bit_size": 1, **options, **more})


def walk(engine, variant, bits, shapes, dtype=torch.float32, steps=2, **more):
    """Parameters and states on the CPU after some steps of an engine."""
    generator = torch.Generator().manual_seed(0)
    device = DEVICE if engine == "triton" else "cpu"
    starts = [torch.randn(shape, generator=generator) for shape in shapes]
    params = [torch.nn.Parameter(x.to(device, dtype)) for x in starts]
    with lowbit_optim.use_engine(engine):
        optimizer = build(variant, params, bits, **more)
        for step in range(steps):
            for p in params:
                g = torch.randn(p.shape, generator=generator) * 10.0 ** (2 - step)
                p.grad = g.to(p)
            optimizer.step()
    states = [{k: v.cpu() for k, v in optimizer.state[p].items()} for p in params]
    return [p.detach().cpu() for p in params], states


def assert_same(got, want, rtol, other_codes=0.001):
    """All but a share of the codes equal, and floats within rtol of the tensor's largest."""
    for p, q, state, other in zip(got[0], want[0], got[1], want[1], strict=True):
        pairs = [(p, q), *((state[key], other[key]) for key in other)]
        for a, b in pairs:
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            if a.dtype == torch.uint8:
                assert int((a != b).sum()) <= 2 + other_codes * a.numel()
            elif a.numel():
                assert (a.double() - b.double()).abs().max() <= rtol * b.double().abs().max()


@BITS
@pytest.mark.parametrize("variant", ["AdamW", "LARS-trust"])
@pytest.mark.few_if_interpreted
def test_every_shape_is_as_on_torch(variant, bits):
    got = walk("triton", variant, bits, SHAPES)
    # A code on the other side of a midpoint moves a weight by a fraction of lr.
    assert_same(got, walk("torch", variant, bits, SHAPES), 1e-4 if bits == 8 else 1e-6)


@BITS
@BY_VARIANT
@pytest.mark.few_if_interpreted("variant", "bits")
def test_every_variant_is_as_on_torch(variant, bits):
    got = walk("triton", variant, bits, FEW)
    assert_same(got, walk("torch", variant, bits, FEW), 1e-4 if bits == 8 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@BITS
@pytest.mark.parametrize("variant", ["AdamW", "LARS-cap"])
@pytest.mark.few("variant", "bits", "dtype")
def test_half_precision_is_as_on_torch(variant, bits, dtype):
    got = walk("triton", variant, bits, FEW, dtype)
    # Numbers of few digits often lie at a midpoint, where rounding decides.
    want = walk("torch", variant, bits, FEW, dtype)
    assert_same(got, want, 2 * torch.finfo(dtype).eps, other_codes=0.01)


def test_a_maximum_keeps_nan():
    """As in torch.optim; a GPU's plain maximum takes the other number."""
    p = torch.nn.Parameter(torch.ones(300, device=DEVICE))
    optimizer = build("AdamW-amsgrad", [p], 32)
    with lowbit_optim.use_engine("triton"):
        for bad in (1.0, float("nan"), 1.0):
            p.grad = torch.ones_like(p)
            p.grad[7] = bad
            optimizer.step()
    assert optimizer.state[p]["max_exp_avg_sq"].isnan().nonzero().tolist() == [[7]]


def test_a_list_of_mixed_dtypes_and_widths():
    """Norms stay per tensor, whatever else is in the group."""
    results = {}
    for engine in ("triton", "torch"):
        device = DEVICE if engine == "triton" else "cpu"
        generator = torch.Generator().manual_seed(0)
        params = [
            torch.nn.Parameter(torch.randn(n, generator=generator).to(device, dtype))
            for n in (2048, 100, 2500)
            for dtype in cases.DTYPES
        ]
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p)
        with lowbit_optim.use_engine(engine):
            build("LARS-trust", params, 8, min_8bit_size=1000).step()
        results[engine] = [p.detach().cpu().float() for p in params]
    for p, q in zip(results["triton"], results["torch"], strict=True):
        assert cases.distance(p, q) < 1e-3


# Whole, aligned and ragged tiles of 8-bit and, under 2049 elements, of 32-bit state. With how many
# kinds of tiles there are of each: full and short blocks of rows have two.
KINDS = [((4096,), 1), ((3, 688), 3), ((2, 1025), 2), ((2048,), 1), ((96,), 1), ((65,), 1), ((), 1)]
MIXED = [
    *((shape, dtype) for shape, _ in KINDS for dtype in (torch.float32, torch.bfloat16)),
    ((0,), torch.float32),
    ((2048 + 272,), torch.bfloat16),  # two kinds of one tensor
]


@pytest.fixture
def launches(monkeypatch):
    """How often each kernel was launched so far."""
    counts, launch = Counter(), Compiled.launch

    def counted(self, key, kernel, *given):
        counts[kernel.__name__] += 1
        launch(self, key, kernel, *given)

    monkeypatch.setattr(Compiled, "launch", counted)
    return counts


def step_groups(variant, groups):
    """Parameters and states of MIXED after two steps of an optimizer for each group of tensors.

    And how many kinds each had. A third step is skipped, as a gradient scaler does.
    """
    generator = torch.Generator().manual_seed(0)
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype))
        for shape, dtype in MIXED
    ]
    found_inf = torch.zeros((), device=DEVICE)
    with lowbit_optim.use_engine("triton"):
        optimizers = [
            # Random bits are of a tensor's number in its group.
            build(
                variant, [params[i] for i in group], 8, min_8bit_size=2049, dither=False,
                master_weight_bits=None,
            )
            for group in groups
        ]  # fmt: skip
        for step in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).to(p)
            found_inf.fill_(float(step == 2))
            for optimizer in optimizers:
                optimizer.grad_scale = torch.tensor(4.0, device=DEVICE)
                optimizer.found_inf = found_inf
                optimizer.step()
    states = {p: state for optimizer in optimizers for p, state in optimizer.state.items()}
    plans = [plan for optimizer in optimizers for plan in optimizer.plans.values()]
    kinds = [len(batch.tables.kinds) for plan in plans for batch in plan.batches]
    return params, [states[p] for p in params], kinds


@pytest.mark.parametrize("variant", ["LARS-trust", "AdamW-clipped", "AdamW-cap"])
@pytest.mark.few_if_interpreted
def test_a_group_of_many_kinds_steps_each_tensor_as_alone(variant, launches):
    every = range(len(MIXED))
    want, wanted, kinds = step_groups(variant, [[i] for i in every])
    assert kinds == [*(n for _, n in KINDS for _ in range(2)), 0, 2]
    launches.clear()
    got, states, kinds = step_groups(variant, [every])
    assert kinds == [19]
    assert set(launches) >= {"begin", "update"}
    assert set(launches.values()) == {3}, "one launch for each pass of a step"
    for p, q, state, other in zip(got, want, states, wanted, strict=True):
        assert torch.equal(p, q)
        assert state["step"] == 2
        assert all(torch.equal(state[key], other[key]) for key in other)


@pytest.mark.parametrize(("at_once", "whole"), [(2, 5), (2, 4), (engine_triton.CHUNKS_AT_ONCE, 5)])
def test_sums_of_many_tiles_are_added_in_chunks(at_once, whole, monkeypatch):
    """What a tensor of more than 4 million elements does, at 2 tiles a chunk, wherever it is."""
    monkeypatch.setattr(engine_triton, "ADDED", 2)
    monkeypatch.setattr(engine_triton, "CHUNKS_AT_ONCE", at_once)
    shapes = [(300,), (kinds.TILE * whole + 100,), (3,)]
    got = walk("triton", "LARS-trust", 32, shapes)
    assert_same(got, walk("torch", "LARS-trust", 32, shapes), 1e-6)


def test_a_skipped_amp_step_changes_nothing():
    p = torch.nn.Parameter(torch.ones(300, device=DEVICE))
    p.grad = torch.ones_like(p)
    with lowbit_optim.use_engine("triton"):
        optimizer = build("AdamW", [p], 8)
        optimizer.grad_scale = torch.tensor(4.0, device=DEVICE)
        optimizer.found_inf = torch.tensor(0.0, device=DEVICE)
        optimizer.step()
        before = [p.detach().clone(), *(x.clone() for x in optimizer.state[p].values())]
        assert optimizer.state[p]["exp_avg_absmax"][0].item() == pytest.approx(0.1 / 4)
        optimizer.found_inf.fill_(1.0)
        optimizer.step()
        after = [p.detach(), *optimizer.state[p].values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest(signed):
    generator = np.random.default_rng(0)
    x = 10.0 ** generator.uniform(-8, 0, 256 * 40)
    x = (x * generator.choice([-1, 1], x.size) if signed else x).astype(np.float32)
    x[::256] = 1.0
    with lowbit_optim.use_engine("triton"):
        codes, absmax = lowbit_optim.quantize_blockwise(torch.from_numpy(x).to(DEVICE), signed)
    assert (absmax == 1).all()
    expected, _ = reference_codec.encode(x, signed)
    assert not len(reference_codec.misplaced(x, signed, codes.cpu().numpy(), expected, "triton"))


@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize("signed", [True, False])
def test_one_line_per_cell_hits_every_midpoint(signed, up):
    """The table in float64: 5e-5 of a gap beside each midpoint, the code is the nearest."""
    middle = reference_codec.midpoints(signed)
    gap = np.diff(reference_codec.codebook(signed).astype(np.float64))
    first = 0 if signed else 1  # the unsigned map has no midpoint between zero and code 1
    lines, numbers = triton_tables.lines(signed, up)
    for side in (-5e-5, 5e-5):
        x = (middle + side * gap)[first:]
        y = np.abs(x) * triton_tables.SCALE[signed] + triton_tables.SHIFT
        cell = y.astype(np.float32).view(np.uint32) >> (23 - triton_tables.BITS[signed])
        slope, start = lines[numbers[cell % triton_tables.CELLS[signed]]].T.astype(np.float64)
        z = np.rint(slope * y + start).astype(int)
        z = np.maximum(np.sign(x).astype(int) * z, -127) if signed else z
        codes = z + triton_tables.OFFSET[signed]
        np.testing.assert_array_equal(codes, reference_codec.nearest(x, signed))


def tables_of(optimizer):
    (plan,) = optimizer.plans.values()
    (batch,) = plan.batches
    return batch.tables


def plan_of(shapes, bits=8, dtype=torch.float32):
    """The plan that a step of AdamW builds."""
    params = [torch.nn.Parameter(torch.ones(shape, dtype=dtype, device=DEVICE)) for shape in shapes]
    for p in params:
        p.grad = torch.ones_like(p)
    with lowbit_optim.use_engine("triton"):
        optimizer = build("AdamW", params, bits)
        optimizer.step()
        first = tables_of(optimizer)
        optimizer.step()
        assert tables_of(optimizer) is first, "the tables are built once"
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert tables_of(optimizer) is first, "new gradients need new addresses only"
    return first


def kinds_of(plan):
    """Programs by blocks, whole and alignment, from the table that the kernels read."""
    numbers = plan.work[:, 0].cpu() // grid.NUMBER
    assert (numbers.diff() >= 0).all(), "kind after kind"
    return {
        (kind.blocks, kind.whole, kind.align): int((numbers == i).sum())
        for i, kind in enumerate(plan.kinds)
    }


def test_whole_tiles_are_of_one_kind_whatever_the_number_of_tensors():
    tile = kinds.TILE
    plan = plan_of([(tile,), (4, tile), (tile // 256, 256)])
    assert kinds_of(plan) == {(kinds.LINE, True, 16): 6}
    assert plan.tiles == 6
    assert (plan.work[:, 0].cpu() == torch.tensor([0, 1, 1, 1, 1, 2])).all()


def test_a_tail_of_a_single_row_is_masked():
    plan = plan_of([(kinds.TILE + 16,), (kinds.TILE + 1,), (0,)])
    assert kinds_of(plan) == {
        (kinds.LINE, True, 16): 2, (kinds.LINE, False, 16): 1, (kinds.LINE, False, 1): 1,
    }  # fmt: skip
    assert plan.kinds[0].whole, "the largest work first"


@pytest.mark.slow
def test_full_and_short_blocks_of_rows_make_tiles_of_their_own():
    assert kinds_of(plan_of([(8, 96)])) == {(kinds.SHORT, False, 16): 1}
    blocks = kinds.TILE // 256
    plan = plan_of([(2 * blocks + 2, 272), (2 * blocks, 301), (16 * blocks + 1, 260)])
    assert kinds_of(plan) == {
        (kinds.FULL, True, 16): 2, (kinds.FULL, False, 16): 1, (kinds.SHORT, False, 16): 1,
        (kinds.FULL, True, 1): 2, (kinds.SHORT, False, 1): 1,
        (kinds.FULL, True, 4): 16, (kinds.FULL, False, 4): 1, (kinds.SHORT, False, 4): 2,
    }  # fmt: skip
    rooms = {kind.align: kind.short for kind in plan.kinds if kind.blocks == kinds.SHORT}
    assert rooms == {16: 16, 1: 64, 4: 16}, "as few elements as the block fits in"


@pytest.mark.slow
def test_the_order_of_kinds_does_not_depend_on_that_of_the_tensors():
    shapes = [(2048,), (9, 96), (9, 65), (16, 301)]
    assert plan_of(shapes).kinds == plan_of(shapes[::-1]).kinds


def test_every_kind_has_a_number():
    dtypes = len(HALF_TO_SINGLE)
    rooms = (256 // grid.NARROWEST).bit_length()  # of short blocks
    tiles = len(grid.ALIGNMENTS) * (2 + 2 + rooms)  # whole and masked ones of a line, of full rows
    count = dtypes * dtypes * tiles * max(8, len(formats.FORMATS))
    assert count * grid.NUMBER <= 2**31


def test_offsets_are_64_bit():
    """Tile 2**21 + 1 starts at element 2**32 + 2048; a table of that many tiles is cheap."""
    source = inspect.getsource(tiles)
    assert "line * row + first.to(tl.int64) * BLOCK" in source
    assert "line = tl.load(here + 2).to(tl.int64)" in source


def test_capture_without_a_plan_says_what_to_do(monkeypatch):
    monkeypatch.setattr(engine_tables, "capturing", lambda device: True)
    p = torch.nn.Parameter(torch.ones(300, device=DEVICE))
    p.grad = torch.ones_like(p)
    with (
        lowbit_optim.use_engine("triton"),
        pytest.raises(RuntimeError, match=r"at least one step .* before the capture"),
    ):
        build("AdamW", [p], 8).step()


def test_new_gradients_are_read_where_they_lie():
    """Only their addresses are sent; one at another alignment takes another kernel."""
    results, reused = {}, []
    for engine in ("triton", "torch"):
        generator = torch.Generator().manual_seed(0)
        device = DEVICE if engine == "triton" else "cpu"
        shapes = [(2048,), (3, 512)]
        params = [
            torch.nn.Parameter(torch.randn(s, generator=generator).to(device)) for s in shapes
        ]
        with lowbit_optim.use_engine(engine):
            optimizer = build("AdamW", params, 8)
            for shift in (0, 0, 1, 1, 0):
                for p in params:
                    memory = torch.empty(p.numel() + 4, device=device)
                    p.grad = memory[shift : shift + p.numel()].view(p.shape)
                    p.grad.copy_(torch.randn(p.shape, generator=generator))
                optimizer.step()
                reused += [
                    batch.reused for plan in optimizer.plans.values() for batch in plan.batches
                ]
        results[engine] = [p.detach().cpu() for p in params]
    assert reused[:5] == [False, True, False, True, False]
    for p, q in zip(results["triton"], results["torch"], strict=True):
        assert cases.distance(p, q) < 1e-4
