"""The Numba engine on `ratio8` and `ratio4`, dither and master weights, against torch."""

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
import lowbit_optim
from lowbit_optim_kernels import dither, formats, weights
from lowbit_optim_kernels.batch import WEIGHT_BLOCK, Batch, Slot
from lowbit_optim_kernels.engines import torch as engine_torch
from lowbit_optim_kernels.engines.numba import dither as numba_dither
from lowbit_optim_kernels.engines.numba import engine as engine_numba
from lowbit_optim_kernels.formats import dynamic8
from lowbit_optim_kernels.formats.dynamic8 import numba_tables
from lowbit_optim_kernels.formats.layout import Layout
from lowbit_optim_kernels.rules import adam
from lowbit_optim_kernels.rules.shared import with_dither
from lowbit_optim_kernels.weights import numba as numba_weights
from toy_format import Toy

SHAPES = [(1,), (7,), (255,), (257,), (4097,), (64, 147), (3, 300), (5, 64), (2, 3, 64)]
LARGE = [(1000, 1000)]
ENGINES = {"numba": engine_numba, "torch": engine_torch}
CODES = (torch.uint8, torch.int8, torch.int16)


def run(engine, name, shapes=SHAPES, steps=3, dtype=torch.float32, gradient=None, **options):
    """Parameters and states after some steps."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]
    with lowbit_optim.use_engine(engine):
        optimizer = getattr(lowbit_optim, name)(
            params, **{"lr": 0.01, "min_8bit_size": 1, "seed": 3, **options}
        )
        for _ in range(steps):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
                if gradient is not None:
                    gradient(p.grad)
            optimizer.step()
    states = [{k: x for k, x in optimizer.state[p].items() if torch.is_tensor(x)} for p in params]
    return [p.detach() for p in params], states


def assert_agree(got, want, steps):
    """A few codes may differ, in 2e-4 of the elements a step, and what follows of them.

    Three may in any case: of a small tensor 2e-4 is none.
    """
    for p, q, state, other in zip(*got[:1], *want[:1], got[1], want[1], strict=True):
        odd = 3 + int(steps * 2e-4 * p.numel())
        assert state.keys() == other.keys()
        moved = (p.float() - q.float()).abs()
        assert int((moved > 1e-5 + 1e-5 * q.float().abs()).sum()) <= odd
        for key, x in state.items():
            y = other[key]
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            if x.dtype in CODES:
                assert int((x != y).sum()) <= odd, key
            elif x.ndim:
                far = (x.double() - y.double()).abs() > 1e-5 * y.double().abs() + 1e-7
                assert int(far.sum()) <= odd, key


CASES = [
    ("AdamW8bit", {"state_format": "ratio8"}),
    ("AdamW8bit", {"state_format": "ratio8", "amsgrad": True, "dither": False}),
    ("AdamW8bit", {}),
    ("AdamW4bit", {}),
    ("SGD8bit", {"state_format": "ratio8", "momentum": 0.9}),
    ("SGD8bit", {"state_format": "ratio8", "momentum": 0.999}),
    ("SGD8bit", {"momentum": 0.999}),
    ("LAMB8bit", {"state_format": "ratio8"}),
    ("AdamW8bit", {"state_format": "ratio8", "betas": (0.9, 0.8)}),
    ("AdamW4bit", {"betas": (0.9, 0.8)}),
]
MORE = [
    ("AdEMAMix8bit", {"state_format": "ratio8"}),
    ("AdEMAMix8bit", {}),
    ("RMSprop8bit", {"state_format": "ratio8", "momentum": 0.9}),
    ("RMSprop8bit", {"state_format": "ratio8", "centered": True}),
    ("LARS8bit", {"state_format": "ratio8", "momentum": 0.9}),
    ("LANS8bit", {"state_format": "ratio8"}),
    ("LAMB4bit", {}),
    ("Adagrad8bit", {"state_format": "ratio8"}),
    ("Lion8bit", {"state_format": "ratio8"}),
    ("ScheduleFreeAdamW8bit", {"state_format": "ratio8"}),
]


def ids(case):
    return "-".join([case[0], *(f"{k}={v}" for k, v in case[1].items())])


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)],
    ids=ids,
)
def test_steps_are_as_on_torch(case):
    name, options = case
    got, want = (run(engine, name, **options) for engine in ENGINES)
    assert_agree(got, want, 3)


@pytest.mark.parametrize("case", [*CASES[-2:], MORE[0]], ids=ids)
def test_steps_with_roots_below_those_of_code_1_are_as_on_torch(case):
    def spread(g):
        g *= 10.0 ** -(torch.arange(g.numel()) % 7).view(g.shape)

    name, options = case
    got, want = (run(engine, name, gradient=spread, **options) for engine in ENGINES)
    assert_agree(got, want, 3)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *MORE], ids=ids)
def test_steps_of_a_large_tensor_are_as_on_torch(case):
    name, options = case
    got, want = (run(engine, name, LARGE, 2, **options) for engine in ENGINES)
    assert_agree(got, want, 2)


@pytest.mark.parametrize("bits", [16, 24, 32])
@pytest.mark.parametrize(
    ("name", "options"),
    [("AdamW8bit", {"state_format": "ratio8"}), ("AdamW", {}), ("SGD", {})],
    ids=["ratio8", "float32", "sgd"],
)
def test_master_weights_are_as_on_torch(bits, name, options):
    options = {"dtype": torch.bfloat16, "master_weight_bits": bits, **options}
    got, want = (run(engine, name, **options) for engine in ENGINES)
    for p, q, state, other in zip(*got[:1], *want[:1], got[1], want[1], strict=True):
        kept = weights.WEIGHTS[bits]
        masters = [
            kept.read(x, s.get(weights.RESIDUAL_KEY), torch.float32)
            for x, s in ((p, state), (q, other))
        ]
        # Of 16 bits a dither that falls on the other side of a number that is off by an ulp.
        off = (masters[0] - masters[1]).abs() > 1e-5 + 1e-5 * masters[1].abs()
        assert int(off.sum()) <= 3 + int(6e-4 * p.numel())


@pytest.mark.parametrize("state_format", ["ratio8", "ratio4", "dynamic8"])
@pytest.mark.parametrize("bits", [16, 24, 32])
@pytest.mark.slow
def test_without_a_learning_rate_no_weight_moves(state_format, bits):
    name = "AdamW4bit" if state_format == "ratio4" else "AdamW8bit"
    steps = {"name": name, "dtype": torch.bfloat16, "lr": 0.0, "weight_decay": 0.0}
    if state_format != "ratio4":
        steps["state_format"] = state_format
    before, after = (run("numba", steps=n, master_weight_bits=bits, **steps)[0] for n in (0, 2))
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_bad_and_missing_gradients_cost_one_weight(case):
    name, options = case
    bad = {7: (3, float("nan")), 255: (64, float("inf")), 4097: (4096, float("-inf"))}

    def spoil(g):
        g.view(-1)[:2] = 0.0
        if g.numel() in bad:
            at, value = bad[g.numel()]
            g.view(-1)[at] = value

    options = {"weight_decay": 0.0, **options}
    shapes = [(7,), (255,), (4097,), (3, 300)]
    (params, states), (want, _) = (
        run(engine, name, shapes, 1, gradient=spoil, **options) for engine in ENGINES
    )
    (start, _) = run("numba", name, shapes, 0, **options)
    whole = "LAMB" in name  # one norm is of the whole tensor
    for p, q, first, state in zip(params, want, start, states, strict=True):
        assert torch.equal(p.view(-1)[:2], first.view(-1)[:2]), "zero stays zero"
        spoiled = 1 if p.numel() in bad else 0
        assert whole or int((~p.isfinite()).sum() + (p == first).sum()) <= spoiled + 2
        assert all(x.isfinite().all() for x in state.values() if x.is_floating_point())
        torch.testing.assert_close(p, q, rtol=1e-4, atol=2e-4, equal_nan=True)


@pytest.mark.parametrize("case", CASES[:1] + CASES[2:4], ids=ids)
def test_threads_change_nothing(case):
    name, options = case
    options = {"dtype": torch.bfloat16, "master_weight_bits": 24, **options}
    results, threads = [], torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(run("numba", name, [(300, 400), (200_000,)], 2, **options))
    torch.set_num_threads(threads)
    (params, states), (others, other_states) = results
    for p, q, state, other in zip(params, others, states, other_states, strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(state[key], other[key]) for key in state)


@pytest.mark.parametrize("block", [48, 512])
def test_norms_have_every_element_once(monkeypatch, block):
    """Whatever the blocks are that terms are added up in."""
    monkeypatch.setitem(formats.FORMATS, "toy", Toy(block=block))
    options = {"state_format": "toy", "trust_coefficient": 1.0}
    (got, _), (want, _) = (run(engine, "LAMB8bit", [(3, 1000)], 1, **options) for engine in ENGINES)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


RULE = with_dither(adam.adam_rule(False, False, False), frozenset({"exp_avg", "exp_avg_sq"}))
HYPER = {
    "lr": 0.01,
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "decoupled": 1.0,
}


def slot_of(shape, format, bits, p, g, before=0, weights_before=0):
    layout = Layout.of(shape, format.block)
    state = []
    for unit in formats.units(RULE.moments, format):
        for part, zero in zip(unit.parts, formats.constant(unit, 0.0), strict=True):
            at = part.shape(shape, unit.format.block)
            state.append(torch.full(at, zero, dtype=part.dtype or torch.float32))
    kept = weights.WEIGHTS[bits]
    residual = None if kept.residual is None else torch.zeros(shape, dtype=kept.residual)
    return Slot(
        p.clone(), g, format, tuple(state), torch.tensor(2**32 - 2), layout.rows, layout.row,
        p.numel(), weights=kept, residual=residual, tensor_key=0x12345678, blocks_before=before,
        weights_before=weights_before,
    )  # fmt: skip


def stepped(engine, slot):
    batch = Batch(RULE, [slot], slot.p.device, engine, hyper=[HYPER])
    batch.note_addresses()
    for _ in range(2):  # the second step's number does not fit into 32 bits
        begun = ENGINES[engine].start(batch)
        begun.begin()
        begun.finish()
    return [slot.p, *slot.state, *([] if slot.residual is None else [slot.residual])]


@pytest.mark.parametrize("row", [300, 512])
@pytest.mark.parametrize("format", ["ratio8", "ratio4", "dynamic8", "float32"])
def test_a_shard_is_a_piece_of_the_whole(format, row):
    """By the numbers of its blocks, which may not fit into 32 bits."""
    format = formats.FORMATS[format]
    generator = torch.Generator().manual_seed(0)
    p, g = (torch.randn(8, row, generator=generator).bfloat16() for _ in range(2))
    first = 2**32 - 4 * -(-row // format.block)
    in_row = -(-row // WEIGHT_BLOCK) * WEIGHT_BLOCK
    whole = slot_of((8, row), format, 24, p, g, first, 2**32 * WEIGHT_BLOCK - 4 * in_row)
    layouts = [Layout.of((8, row), block) for block in (format.block, WEIGHT_BLOCK)]
    before = [x.positions_before(5) for x in layouts]
    part = slot_of(
        (3, row),
        format,
        24,
        p[5:],
        g[5:],
        first + before[0] // format.block,
        whole.weights_before + before[1],
    )
    want = stepped("torch", slot_of((8, row), format, 24, p, g, first, whole.weights_before))
    got, piece = stepped("numba", whole), stepped("numba", part)
    for x, y, z in zip(got, piece, want, strict=True):
        assert torch.equal(x[5:], y)
        if x.dtype == torch.uint8:
            assert int((x != z).sum()) <= 4
        elif x.dtype == torch.int8:  # an ulp of a weight is 1/256 of its last bit
            assert int((x != z).sum()) <= x.numel() // 100


def test_lines_around_gaps_are_the_torch_engines_pieces():
    """Those of the unsigned map by dither without AVX-512: z of every y, as numbers of codes."""
    rng = np.random.default_rng(0)
    y = 10.0 ** rng.uniform(np.log10(numba_tables.LEAST_DITHERED), 0.0, 100_000)
    y = np.append(np.maximum(y, numba_tables.LEAST_DITHERED), 1.0).astype(np.float32)
    factor, offset = numba_tables.gap_guess()
    gap = np.rint(y.view(np.int32) * factor + offset).astype(int)
    slope, start = numba_tables.gap_tables().astype(np.float64)[:, gap & 7]
    d = y * slope + start
    got = 2.0 ** (gap + 1) - 0.5 + np.minimum(3 * d + 3, np.minimum(d, (3 * d - 1) / 5))
    pieces = dynamic8.pieces(False)
    piece = np.searchsorted(pieces.threshold, y)
    inverse, at_zero, last = (
        np.array(x)[piece] for x in (pieces.inverse_slope, pieces.offset, pieces.last)
    )
    f = y * inverse + at_zero
    want = np.minimum(np.minimum(f, (f + 2 * last) / 3), (5 * f - last) / 3)
    assert np.abs(got - want).max() < 1e-4


def test_random_bits_are_those_of_torch():
    out = np.zeros(16, dtype=np.uint32)
    from numba import njit

    from lowbit_optim_kernels.engines.numba.memory import store_f32

    @njit
    def bits(at, key, stream, step, block, lane):
        base = numba_dither.block_bits(numba_dither.stream_key(key, stream), step, block)
        store_f32(at, numba_dither.random_bits(base, lane))

    for block in (0, 1, 2**32 - 1, 2**32, 2**38 + 5):
        for step, stream, lane in ((1, 1, 0), (2**32 + 7, 3, 48), (5, 4, 240)):
            key = dither.tensor_key(11, 4)
            bits(out.ctypes.data, key, stream, step, block, lane)
            want = dither.bits(
                dither.stream_key(key, stream), torch.tensor(step), torch.tensor(block),
                torch.arange(lane, lane + 16),
            )  # fmt: skip
            assert out.tolist() == want.tolist()


def test_blocks_are_hashed_as_one_by_one():
    from numba import njit

    from lowbit_optim_kernels.engines.numba.memory import stack

    @njit
    def both(key, step, block, k):
        hashes = stack(64)
        numba_dither.hash_blocks(hashes, key, step, block)
        return numba_dither.hashed(hashes, k), numba_dither.block_bits(key, step, block + k % 16)

    for block in (0, 2**32 - 5, 2**38 + 5):  # of the second some have other upper halves
        for k in (*range(16), 35):
            hashed, want = both(dither.tensor_key(11, 4), 2**32 + 7, block, k)
            assert hashed == want


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_weights_are_split_and_joined_as_on_torch(bits):
    from numba import njit

    from lowbit_optim_kernels.engines.numba.memory import load_f32, store_f32

    kept = weights.WEIGHTS[bits]
    split = getattr(numba_weights, f"split_{kept.extra}")
    join = getattr(numba_weights, f"join_{kept.extra}")

    @njit
    def there_and_back(w, random, p, residual, back, n, width):
        for i in range(0, n, 16):
            at, low = p + 2 * i, residual + width * i
            split(at, low, load_f32(w + 4 * i), load_f32(random + 4 * i))
            store_f32(back + 4 * i, join(at, low))

    rng = np.random.default_rng(0)
    edges = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFF7F, 0xFF80, 0xFFFF, 0x7F, 0x80, 0x81]
    patterns = np.add.outer(np.arange(0, 2**16, 61, dtype=np.uint32) << 16, np.uint32(edges))
    tops = np.uint32([0, 0x7F7EFFFF, 0x7F7F0000, 0x7F7FFFFF, 0x7F800000, 0x7FC00001])
    patterns = np.concatenate([patterns.ravel(), tops, tops | np.uint32(1 << 31)])
    patterns = np.resize(patterns, len(patterns) // 16 * 16)
    patterns = np.concatenate([patterns, rng.integers(0, 2**32, 1600, dtype=np.uint32)])
    patterns[16:32] = np.resize(tops, 16) | np.uint32(1 << 31)  # behind those next to zero
    random = rng.integers(0, 2**32, len(patterns), dtype=np.uint32)
    n, width = len(patterns), kept.extra // 8
    p, back = np.zeros(n, np.int16), np.zeros(n, np.float32)
    residual = np.zeros(n, np.int8 if width == 1 else np.int16)
    arrays = (patterns, random, p, residual, back)
    there_and_back(*(x.ctypes.data for x in arrays), n, width)
    w = torch.from_numpy(patterns.view(np.float32))
    high, low = weights.split(w, kept.extra, torch.from_numpy(random.astype(np.int64)))
    assert torch.equal(torch.from_numpy(p), high.view(torch.int16))
    if kept.extra:
        assert torch.equal(torch.from_numpy(residual), low.to(kept.residual))
    low = None if kept.residual is None else low.to(kept.residual)
    want = kept.read(high, low, torch.float32)
    assert torch.equal(torch.from_numpy(back).view(torch.int32), want.view(torch.int32))
