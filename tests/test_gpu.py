"""What only a GPU can show: `make gpu-check`. Skipped where there is none."""

import contextlib
import copy
import warnings

import pytest
import torch

import cases
import lowbit_optim

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]
# Of the tiles of 8 blocks, some are whole: those of (5000,), (1000, 1000), (96, 512).
SHAPES = [
    (1,), (255,), (257,), (64, 147), (5000,), (1000, 1000), (3, 512), (96, 512), (0,), (),
    (4096, 300),
]  # fmt: skip
BY_CASE = pytest.mark.parametrize(
    "case", cases.one_per_class(cases.FUSED_CASES), ids=lambda case: case.id
)
BITS = pytest.mark.parametrize("bits", [8, 32])


def parameters(shapes, dtype=torch.float32, device="cuda"):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in shapes
    ]


def give_gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p)


@contextlib.contextmanager
def synchronizing_is_an_error():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def assert_close(params, others, rtol, share=0.0):
    """All but a share of the elements within rtol of the largest of their tensor."""
    for p, q in zip(params, others, strict=True):
        if p.numel():
            a, b = p.detach().double().cpu(), q.detach().double().cpu()
            wrong = (a - b).abs() > rtol * b.abs().max()
            assert int(wrong.sum()) <= share * a.numel(), (p.shape, float((a - b).abs().max()))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@BITS
@BY_CASE
def test_engines_agree_on_the_device(case, bits, dtype):
    results = []
    for engine in ("triton", "torch"):
        params = parameters(SHAPES, dtype)
        with lowbit_optim.use_engine(engine):
            optimizer = case.build(params, bits, min_8bit_size=1)
            for step in range(4):
                give_gradients(params, step)
                optimizer.step()
        results.append(params)
    rtol = {torch.float32: 1e-6 if bits == 32 else 1e-4}.get(dtype, 2 * torch.finfo(dtype).eps)
    assert_close(*results, rtol, share=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@BY_CASE
def test_a_group_of_many_kinds_steps_each_tensor_as_alone(case, dtype):
    """8-bit and 32-bit state, whole tiles, aligned and ragged ones in one launch: the same bits.

    To nearest: the random bits of dither depend on the parameter's number in its optimizer.
    """
    options = {"min_8bit_size": 2049, "dither": False, "master_weight_bits": None}
    shapes = [(4096,), (3, 688), (2, 1025), (2048 + 272,), (2048,), (96,), (65,), (), (0,)]
    together = parameters(shapes, dtype) + parameters(shapes, torch.float32)
    alone = copy.deepcopy(together)
    optimizer = case.build(together, 8, **options)
    others = [case.build([p], 8, **options) for p in alone]
    for step in range(3):
        give_gradients(together, step)
        give_gradients(alone, step)
        optimizer.step()
        for other in others:
            other.step()
    for p, q, other in zip(together, alone, others, strict=True):
        assert torch.equal(p, q), (p.dtype, p.shape)
        for key, value in other.state[q].items():
            assert torch.equal(optimizer.state[p][key], value), (p.dtype, p.shape, key)


@BITS
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_fifty_steps_are_as_torch_optim(name, bits):
    options = {"momentum": 0.9} if name == "SGD" else {}
    ours, theirs = parameters([(1000, 77)]), parameters([(1000, 77)])
    optimizer = getattr(lowbit_optim, f"{name}{bits}bit")(ours, lr=1e-3, **options)
    expected = getattr(torch.optim, name)(theirs, lr=1e-3, **options)
    for step in range(50):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step()
        expected.step()
    limit = 50 * 2**-24 if bits == 32 else 5e-3 if name == "SGD" else 1e-3
    assert cases.distance(ours[0], theirs[0]) < limit


@BY_CASE
def test_a_captured_step_replays_like_an_eager_one(case):
    def fresh():
        params = parameters([(64, 147), (5000,), (300, 256)])
        give_gradients(params, 0)
        lr = torch.tensor(case.lr, device="cuda")
        optimizer = case.build(params, 8, min_8bit_size=1, lr=lr)
        return params, lr, optimizer

    captured, lr, optimizer = fresh()
    eager, other_lr, other = fresh()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    other.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in range(1, 4):
        for params, rate in ((captured, lr), (eager, other_lr)):
            rate.fill_(case.lr / step)
            generator = torch.Generator().manual_seed(step)
            for p in params:
                p.grad.copy_(torch.randn(p.shape, generator=generator))
        graph.replay()
        other.step()
    for p, q in zip(captured, eager, strict=True):
        assert torch.equal(p, q)
        for key, value in other.state[q].items():
            assert torch.equal(optimizer.state[p][key], value), key


def test_an_eager_step_after_a_capture_leaves_the_graph_alone():
    """Replays fill tables of their own, so new gradients elsewhere do not redirect them."""
    (p,) = parameters([(5000,)])
    give_gradients([p], 0)
    optimizer = lowbit_optim.AdamW8bit([p], lr=1e-3)
    optimizer.step()
    static = p.grad
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    p.grad = torch.full_like(p, float("nan"))
    optimizer.step()
    assert torch.isnan(p).all()
    p.detach().zero_()
    before = p.detach().clone()
    static.fill_(1.0)
    graph.replay()
    assert torch.isfinite(p).all()
    assert not torch.equal(p, before)


def test_capture_before_the_first_step_says_what_to_do():
    (p,) = parameters([(5000,)])
    give_gradients([p], 0)
    optimizer = lowbit_optim.AdamW8bit([p])
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        p.grad.mul_(1.0)  # torch warns of an empty graph
        with pytest.raises(RuntimeError, match="captur"):
            optimizer.step()


def test_two_captures_need_no_step_in_between():
    (p,) = parameters([(5000,)])
    give_gradients([p], 0)
    optimizer = lowbit_optim.AdamW8bit([p])
    optimizer.step()
    graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    for graph in graphs:
        with torch.cuda.graph(graph):
            optimizer.step()
    for graph in graphs:
        before = p.detach().clone()
        graph.replay()
        assert torch.isfinite(p).all()
        assert not torch.equal(p, before)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        p.grad.mul_(1.0)
        with pytest.raises(RuntimeError, match="between"):
            optimizer.step()


def test_another_stream():
    """A step on a side stream sees what that stream wrote before it, and nothing else waits."""
    ours, theirs = parameters([(1 << 22,)]), parameters([(1 << 22,)])
    a, b = (lowbit_optim.AdamW8bit(params) for params in (ours, theirs))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for step in range(3):
        with torch.cuda.stream(side):
            give_gradients(ours, step)
            torch.cuda._sleep(10_000_000)
            ours[0].grad.mul_(2.0)
            a.step()
        give_gradients(theirs, step)
        theirs[0].grad.mul_(2.0)
        b.step()
    torch.cuda.synchronize()
    assert torch.equal(ours[0], theirs[0])


def test_a_step_on_another_stream_waits_for_the_last_one():
    """Which may still be reading and writing what both have tables of."""
    ours, theirs = parameters([(1 << 22,)]), parameters([(1 << 22,)])
    a, b = (lowbit_optim.AdamW8bit(params) for params in (ours, theirs))
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for step in range(4):
        with torch.cuda.stream(streams[step % 2]):
            give_gradients(ours, step)
            if step % 2 == 0:
                torch.cuda._sleep(10_000_000)
            a.step()
        give_gradients(theirs, step)
        b.step()
    torch.cuda.synchronize()
    assert torch.equal(ours[0], theirs[0])


def test_two_thousand_small_tensors():
    shapes = [(n % 700 + 1,) for n in range(2000)]
    results = []
    for engine in ("triton", "torch"):
        params = parameters(shapes)
        give_gradients(params, 1)
        with lowbit_optim.use_engine(engine):
            lowbit_optim.LARS8bit(params, lr=0.1, momentum=0.9, min_8bit_size=1).step()
        results.append(params)
    assert_close(*results, 1e-5)


@BITS
@BY_CASE
def test_a_step_does_not_synchronize(case, bits):
    params = parameters([(64, 147), (5000,), (7,)])
    lr = torch.tensor(case.lr, device="cuda")
    optimizer = case.build(params, bits, min_8bit_size=1, lr=lr)
    give_gradients(params, 0)
    optimizer.step()
    give_gradients(params, 1)
    with synchronizing_is_an_error():
        optimizer.step()


def test_a_step_allocates_next_to_nothing():
    (p,) = parameters([(1 << 24,)])
    give_gradients([p], 0)
    optimizer = lowbit_optim.LARS8bit([p], lr=0.1, momentum=0.9)
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < 0.01 * p.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "format"),
    [("AdamW", "dynamic8"), ("AdamW", "ratio8"), ("AdamW", "ratio4"), ("LAMB", "ratio8")],
)
def test_long_tensors_step_to_the_same_bits_by_spans(name, format, dtype, monkeypatch):
    """And programs beyond the end of one do nothing: the second fills no whole number of spans."""
    grid = pytest.importorskip("lowbit_optim_kernels.engines.triton.grid")
    from lowbit_optim_kernels.engines.triton.kinds import TILE

    shapes = [(grid.ALONE * TILE + 200,), (grid.LONG * grid.SPAN + 1, TILE)]

    def stepped():
        generator = torch.Generator("cuda").manual_seed(0)
        params = [
            torch.nn.Parameter(torch.randn(s, generator=generator, device="cuda").to(dtype) * 0.1)
            for s in shapes
        ]
        optimizer = getattr(lowbit_optim, name)(params, lr=1e-2, state_format=format)
        for _ in range(2):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator, device="cuda").to(dtype)
            optimizer.step()
        kinds = [
            kind
            for plan in optimizer.plans.values()
            for batch in plan.batches
            for kind in batch.tables.kinds
        ]
        return params, optimizer.state, any(kind.spanned for kind in kinds)

    *by_spans, spanned = stepped()
    monkeypatch.setattr(grid, "ALONE", 2**31)
    *by_tiles, other = stepped()
    assert (spanned, other) == (True, False)
    for p, q in zip(by_spans[0], by_tiles[0], strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(by_spans[1][p][key], x) for key, x in by_tiles[1][q].items())


def test_more_than_two_to_the_31_elements():
    """The last elements of a huge tensor are stepped like those of a small one, to nearest."""
    count = 2**31 + 5000
    free, _ = torch.cuda.mem_get_info()
    if free < 7 * count:  # p and g in bf16, one code, one moment
        pytest.skip(f"needs {7 * count / 2**30:.0f} GiB of GPU memory")
    p = torch.nn.Parameter(torch.zeros(count, dtype=torch.bfloat16, device="cuda"))
    p.grad = torch.zeros_like(p)
    small = torch.nn.Parameter(torch.zeros(5000, dtype=torch.bfloat16, device="cuda"))
    small.grad = torch.randn(5000, device="cuda").to(small)
    p.grad[-5000:] = small.grad
    p.grad[:5000] = small.grad
    options = {"lr": 0.1, "momentum": 0.9, "dither": False, "master_weight_bits": None}
    lowbit_optim.SGD8bit([p], **options).step()
    # 2**31 is a multiple of 256: the blocks of the tail are those of the small tensor.
    lowbit_optim.SGD8bit([small], **options).step()
    assert torch.equal(p[-5000:], small)
    assert torch.equal(p[:5000], small)
    assert not p[10_000:20_000].any()


def test_amp_with_a_grad_scaler():
    (p,) = parameters([(5000,)])
    optimizer = lowbit_optim.AdamW8bit([p], fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    scaler.scale((p * 2).sum()).backward()
    expected = copy.deepcopy(p.detach())
    other = torch.nn.Parameter(expected)
    other.grad = torch.full_like(other, 2.0)
    scaler.step(optimizer)
    scaler.update()
    lowbit_optim.AdamW8bit([other]).step()
    assert cases.distance(p.detach().cpu(), other.detach().cpu()) < 1e-6
    p.grad.fill_(float("inf"))
    before = p.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(p, before)
