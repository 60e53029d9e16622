"""One rule, three engines: numba and Triton against torch, on every shape, case and dtype."""

import math

import numpy as np
import pytest
import torch

import cases
import lowbit_optim
import reference_codec
from lowbit_optim_kernels.engines import torch as torch_engine
from protocol import NEEDS_TRITON, identical, parameters, snapshot, train

COMPILED = ("numba", "triton")
LARGE = 100_000  # elements; Triton's interpreter takes seconds for more
SMALL_SHAPES = [shape for shape in cases.SHAPES if np.prod(shape) <= LARGE]
BITS = pytest.mark.parametrize("bits", [8, 32])
CLASSES = pytest.mark.parametrize(
    "case", cases.one_per_class(cases.FUSED_CASES), ids=lambda case: case.id
)
BY_ID = pytest.mark.parametrize("case", cases.FUSED_CASES, ids=lambda case: case.id)


@pytest.fixture(params=COMPILED)
def compiled(request):
    """An engine that is held against the torch engine, and where its tensors live."""
    if request.param == "triton":
        pytest.importorskip("triton", minversion="3.4", reason=NEEDS_TRITON)
    on_gpu = request.param == "triton" and torch.cuda.is_available()
    return request.param, "cuda" if on_gpu else "cpu"


def run(case, shapes, bits, steps, engine, device, dtype=torch.float32, split=False, **options):
    """Parameters and states after some steps; `split` gives every tensor its own optimizer."""
    tracks = [cases.Track(shape) for shape in shapes]
    grads, lrs = cases.gradients(tracks, steps), cases.rates(case.lr, steps)
    params = cases.as_params(cases.starts(tracks), dtype, device)
    columns = [[i] for i in range(len(params))] if split else [range(len(params))]
    states = {}
    with lowbit_optim.use_engine(engine):
        for column in columns:
            chosen = [params[i] for i in column]
            optimizer = case.build(chosen, bits, min_8bit_size=1, **options)
            cases.walk(optimizer, chosen, [[row[i] for i in column] for row in grads], lrs)
            states.update(optimizer.state)
    tensors = [
        {key: value.cpu() for key, value in states[p].items() if torch.is_tensor(value)}
        for p in params
    ]
    return [p.detach().cpu() for p in params], tensors


def assert_close(case, got, want, shapes, rtol, encodings, engine):
    """Parameters within rtol but for weights whose code fell on the other side of a midpoint.

    `encodings` is how often each moment has been coded: once a step.
    """
    for shape, p, q, state, other in zip(shapes, got[0], want[0], got[1], want[1], strict=True):
        assert p.shape == q.shape == shape
        off = (p.double() - q.double()).abs() > rtol * q.double().abs()
        off &= (p.double() - q.double()).abs() > rtol
        others = reference_codec.other_codes(p.numel(), encodings * len(case.moments), engine)
        assert int(off.sum()) <= others, shape
        assert state.keys() == other.keys()
        for key in state:
            a, b = state[key], other[key]
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            if a.dtype == torch.uint8:
                assert int((a != b).sum()) <= others, (shape, key)
            elif a.numel():
                close = (a - b).abs() <= 1e-3 * b.abs() + 1e-5 * b.abs().max()
                assert int((~close).sum()) <= others, (shape, key)


@BITS
@CLASSES
@pytest.mark.slow_if_interpreted
def test_every_shape(compiled, case, bits):
    engine, device = compiled
    shapes = cases.SHAPES if engine == "numba" else SMALL_SHAPES
    got = run(case, shapes, bits, 2, engine, device)
    want = run(case, shapes, bits, 2, "torch", "cpu")
    assert_close(case, got, want, shapes, 1e-5, 2, engine)


@BITS
@BY_ID
@pytest.mark.few(("case", "bits"))
def test_every_case_on_numba(case, bits):
    """Triton's are in test_trajectories: its interpreter is slow."""
    shapes = [(3, 90), (300,), (5,), ()]
    got = run(case, shapes, bits, 6, "numba", "cpu")
    want = run(case, shapes, bits, 6, "torch", "cpu")
    assert_close(case, got, want, shapes, 3e-5, 6, "numba")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@BITS
@CLASSES
@pytest.mark.slow_if_interpreted
@pytest.mark.few_if_compiled("case", "dtype", "bits")
def test_half_precision(compiled, case, bits, dtype):
    engine, device = compiled
    shapes = [(4, 257), (300,), (7,), ()]
    got = run(case, shapes, bits, 3, engine, device, dtype)
    want = run(case, shapes, bits, 3, "torch", "cpu", dtype)
    for p in got[0]:
        assert p.dtype == dtype
    # One rounding step of the dtype where an fp32 result lay next to a boundary, in a few weights.
    assert_close(case, got, want, shapes, torch.finfo(dtype).eps * 1e-3, 3, engine)


@BITS
@CLASSES
@pytest.mark.slow_if_interpreted
@pytest.mark.few(("case", "engine"), "bits")
def test_all_tensors_at_once_are_as_one_by_one(engine, device, case, bits):
    """The plan over many tensors changes no bit of any of them.

    (Random bits are of a tensor's number, and alone each has the number 0.)
    """
    shapes = [(3, 90), (300,), (5,), (), (0,), (2, 3, 70)]
    steps = 2 if engine == "triton" else 4
    together = run(case, shapes, bits, steps, engine, device, dither=False)
    alone = run(case, shapes, bits, steps, engine, device, split=True, dither=False)
    for p, q, state, other in zip(*together[:1], *alone[:1], together[1], alone[1], strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(state[key], other[key]) for key in state)


def test_sums_of_a_tensors_tiles_are_alike_beside_a_longer_one(monkeypatch):
    """Of tiles that differ so much in size that every other order of additions rounds otherwise."""
    pytest.importorskip("triton", minversion="3.4", reason=NEEDS_TRITON)
    from lowbit_optim_kernels.engines.triton import engine as triton_engine

    monkeypatch.setattr(triton_engine, "ADDED", 1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator, reduce, sums = torch.Generator().manual_seed(0), triton_engine.TritonRun.reduce, []
    of_tiles = torch.randn(3, 22, 1, generator=generator) * 2
    gradients = [*(10.0**of_tiles * torch.ones(1024)), torch.ones(41, 1024)]

    def noted(self, phase):
        sums.append(reduce(self, phase)[:3])
        return sums[-1]

    monkeypatch.setattr(triton_engine.TritonRun, "reduce", noted)
    for some in (gradients[:3], gradients):
        params = [torch.nn.Parameter(torch.ones_like(g, device=device)) for g in some]
        for p, g in zip(params, some, strict=True):
            p.grad = g.to(device)
        with lowbit_optim.use_engine("triton"):
            lowbit_optim.LARS32bit(params, lr=0.1).step()
    assert torch.equal(*sums)


@BITS
@CLASSES
@pytest.mark.slow_if_interpreted
def test_a_second_run_gives_the_same_bits(engine, device, case, bits):
    shapes = [(40, 300), (5000,)] if engine != "triton" else [(4, 300), (500,)]
    first, second = (run(case, shapes, bits, 2, engine, device) for _ in range(2))
    for p, q, state, other in zip(*first[:1], *second[:1], first[1], second[1], strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(state[key], other[key]) for key in state)


@CLASSES
def test_two_groups_with_their_own_options(engine, device, case):
    """Every group is read by itself: another lr, other bits, other options."""
    shapes = [(300,), (4, 80)]
    tracks = [cases.Track(shape) for shape in shapes]
    (row,) = cases.gradients(tracks, 1)
    a, b = cases.as_params(cases.starts(tracks), torch.float32, device)
    optimizer = case.build(
        [{"params": [a]}, {"params": [b], "lr": 2 * case.lr, "optim_bits": 8, "min_8bit_size": 1}]
    )
    for p, g in zip((a, b), row, strict=True):
        p.grad = g.to(p)
    optimizer.step()
    want = [
        case.reference(p, g, {}, lr)
        for p, g, lr in zip(cases.starts(tracks), row, (case.lr, 2 * case.lr), strict=True)
    ]
    assert cases.distance(a, want[0]) < 1e-5
    assert cases.distance(b, want[1]) < 1e-5
    for key in case.moments:
        assert optimizer.state[a][key].dtype == torch.float32
        assert optimizer.state[b][key].dtype == torch.uint8


def test_ratios_that_are_too_small_for_a_scale_are_zero(engine, device):
    """Of gradients that have nearly vanished, while their squares are remembered."""
    p = torch.nn.Parameter(torch.zeros(640, device=device))
    options = {"betas": (0.0, 0.999), "state_format": "ratio8", "min_8bit_size": 1}
    optimizer = lowbit_optim.AdamW8bit([p], **options)
    for size in (1e3, 4e-36):
        p.grad = torch.linspace(size / 2, size, 640, device=device)
        optimizer.step()
    state = optimizer.state[p]
    assert (state["exp_avg_scale"] == 0).all()
    assert (state["exp_avg"] == 128).all()
    assert (state["exp_avg_sq"] > 128).all()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LARS", {"momentum": 0.9, "optim_bits": 8}),
        ("AdamW", {"state_format": "ratio8", "master_weight_bits": 24}),
        ("LAMB", {"optim_bits": 32, "master_weight_bits": 16}),
    ],
)
def test_the_torch_engines_slabs_change_no_code_and_no_random_bit(name, options, monkeypatch):
    """Pieces of a long row are whole blocks, and rows are as many as a piece has room for."""

    def stepped():
        params = parameters(torch.bfloat16, [(3000,), (2, 1300), (40, 70), (9, 64)])
        optimizer = getattr(lowbit_optim, name)(params, lr=0.1, min_8bit_size=1, **options)
        with lowbit_optim.use_engine("torch"):
            return snapshot(train(optimizer, 3))

    whole = stepped()
    monkeypatch.setattr(torch_engine, "SLAB", 700)
    assert identical(stepped(), whole)


@pytest.mark.parametrize("shape", [(1, 2**24), (2**12, 2**12), (2**24, 1), (3, 70_000)], ids=str)
def test_the_torch_engines_slabs_cover_a_tensor_and_stay_small(shape):
    """Of 1/128 of it, or of 65,536 elements if these are more."""
    sizes = [
        math.prod(len(range(*part.indices(n))) for part, n in zip(slab[:2], shape, strict=True))
        for slab in torch_engine.slabs(*shape, 256)
    ]
    assert sum(sizes) == math.prod(shape)
    assert max(sizes) <= max(torch_engine.SLAB, math.prod(shape) // 128)
