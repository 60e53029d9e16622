"""The Triton engine steps state formats that it knows nothing of, here by its interpreter."""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lowbit_optim
from fuzz import is_scale
from protocol import NEEDS_TRITON

pytest.importorskip("triton", minversion="3.4", reason=NEEDS_TRITON)

import triton
import triton.language as tl

from lowbit_optim_kernels import formats
from lowbit_optim_kernels.engines.triton import bindings, grid, kinds, moments
from lowbit_optim_kernels.engines.triton import tables as engine_tables
from lowbit_optim_kernels.formats import Format, Part
from lowbit_optim_kernels.formats.dynamic8 import DYNAMIC8
from lowbit_optim_kernels.formats.float32 import FLOAT32
from lowbit_optim_kernels.rules import adam
from lowbit_optim_kernels.weights import WEIGHTS

pytestmark = pytest.mark.gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(64, 147), (3, 300), (257,), (5,), (2048 + 64,)]
FEW = SHAPES[1:]
TOP = tl.constexpr(127.0)
META = torch.device("meta")


class Operators(TorchDispatchMode):
    """Notes the operators that are called."""

    def __torch_dispatch__(self, operator, kinds, args=(), options=None):
        result = operator(*args, **(options or {}))
        self.seen.add((operator.overloadpacket, result.device.type))
        return result


@pytest.mark.parametrize("format", [DYNAMIC8, FLOAT32], ids=lambda format: format.name)
def test_tables_that_steps_share_are_there_for_every_stream(format):
    """A device runs nothing for them that a step on another stream would have to wait for."""
    with Operators() as noted:
        noted.seen = set()
        bindings.code_tables.__wrapped__(
            adam.adam_rule(False, False, False), (format,), False, META
        )
    assert {name for name, place in noted.seen if place == "meta"} == {torch.ops.aten._to_copy}


def test_what_begins_to_multiply_gradients_is_seen():
    """Kernels are compiled with or without it, and tables kept from step to step."""
    p = torch.nn.Parameter(torch.ones(300, device=DEVICE))
    p.grad = torch.linspace(-1.0, 1.0, 300, device=DEVICE)
    optimizer = lowbit_optim.SGD([p], lr=0.5)
    with lowbit_optim.use_engine("triton"):
        for maximize, scale in ((False, None), (True, None), (False, None), (False, 4.0)):
            optimizer.param_groups[0]["maximize"] = maximize
            optimizer.grad_scale = None if scale is None else torch.tensor(scale, device=DEVICE)
            optimizer.step()
    torch.testing.assert_close(p.detach(), 1.0 - 0.5 * (1 - 1 + 1 + 0.25) * p.grad)


@pytest.mark.parametrize("format", ["dynamic8", "ratio8"])
@pytest.mark.parametrize("name", ["SGD8bit", "AdamW8bit"])
def test_nothing_outside_of_a_tensor_counts_in_a_scale(name, format):
    """Of moments that a step makes much smaller: short blocks forget what they have had."""
    generator, scales = torch.Generator().manual_seed(0), []
    random = [[torch.randn(n, generator=generator) for n in (300, 301, 2100)] for _ in range(2)]
    gradients = [10 * x for x in random[0]], [y - 9 * x for x, y in zip(*random, strict=True)]
    momentum = {"momentum": 0.9} if name == "SGD8bit" else {}
    for engine, device in (("torch", "cpu"), ("triton", DEVICE)):
        params = [torch.nn.Parameter(torch.zeros_like(x, device=device)) for x in random[0]]
        optimizer = getattr(lowbit_optim, name)(
            params, min_8bit_size=1, state_format=format, dither=False, **momentum
        )
        for row in gradients:
            for p, g in zip(params, row, strict=True):
                p.grad = g.to(device)
            with lowbit_optim.use_engine(engine):
                optimizer.step()
        kept = [x for p in params for key, x in optimizer.state[p].items() if is_scale(key)]
        scales.append(torch.cat([x.flatten().cpu().float() for x in kept]))
    torch.testing.assert_close(*scales, rtol=0.2, atol=0.0)  # codes may differ by one


def test_addresses_are_64_bit():
    """Those of Intel's GPUs have the upper bit set; the kernels read the same bits as a number."""
    target = torch.zeros(2, 2, dtype=torch.int64)
    tables = SimpleNamespace(rows=None, sent=None, address=target)
    batch = SimpleNamespace(addresses=[[0, 2**64 - 4096], [2**48, 1]], param_addresses={})
    batch.reused = False
    engine_tables._send_addresses(tables, batch)
    assert target.tolist() == [[0, -4096], [2**48, 1]]
    batch.reused, batch.gradient_addresses, batch.param_addresses = True, [2**63, 5], {1: 2**64 - 1}
    engine_tables._send_addresses(tables, batch)
    assert target.tolist() == [[0, -(2**63)], [-1, 5]]


def test_a_number_takes_the_place_of_a_tensor():
    """0 too, for which nothing else tells it from the tensor's place."""
    with lowbit_optim.use_engine("triton"):
        (p,) = params = [torch.nn.Parameter(torch.ones(300, device=DEVICE))]
        p.grad = torch.ones_like(p)
        optimizer = lowbit_optim.SGD32bit(params, lr=0.5)
        optimizer.step()
    ((batch,),) = [plan.batches for plan in optimizer.plans.values()]
    place = engine_tables.hyper_names(batch.rule).index("lr")
    for lr in (torch.tensor(0.25, device=DEVICE), 0.0):
        batch.hyper = [{**batch.hyper[0], "lr": lr}]
        engine_tables._send_hyperparameters(batch.tables, batch)
        assert float(batch.tables.hyper[0, place]) == float(lr)


@pytest.mark.parametrize("long", [grid.LONG, 0], ids=["tiles", "spans"])
@pytest.mark.parametrize("name", ["LAMB", "SGD"])
def test_kinds_of_many_tiles_are_launched_by_themselves(name, long, monkeypatch):
    """Which changes no bit, nor does it that long tensors among them have a row for many tiles."""
    shapes = [(kinds.TILE * 2 + 100,), (3 * kinds.TILE,), (40, 300), (7,)]
    options = {"momentum": 0.9} if name == "SGD" else {}

    def stepped():
        generator = torch.Generator().manual_seed(0)
        params = [
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE))
            for shape in shapes
        ]
        with lowbit_optim.use_engine("triton"):
            optimizer = getattr(lowbit_optim, f"{name}8bit")(
                params, lr=0.1, min_8bit_size=1, **options
            )
            for _ in range(2):
                for p in params:
                    p.grad = torch.randn(p.shape, generator=generator).to(p)
                optimizer.step()
        ((batch,),) = [plan.batches for plan in optimizer.plans.values()]
        return params, optimizer.state, batch.tables

    *together, tables = stepped()
    assert [len(launch.kinds) for launch in tables.launches] == [len(tables.kinds)]
    monkeypatch.setattr(grid, "ALONE", 5)
    monkeypatch.setattr(grid, "LONG", long)
    *apart, tables = stepped()
    counts = [len(launch.work) for launch in tables.launches]
    assert [len(launch.kinds) for launch in tables.launches] == [1, 1, len(tables.kinds) - 2]
    spanned = [launch.kinds[0].spanned for launch in tables.launches]
    assert spanned == [not long, False, False]
    if long:
        assert min(counts[:2]) >= 5
        assert sum(counts) == tables.tiles
    else:
        assert counts[0] == 2, "a row for each of two tensors"
        assert tables.launches[0].programs == 2 * grid.SPAN
        assert counts[1] + counts[2] == tables.tiles - 5
    for p, q in zip(together[0], apart[0], strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(together[1][p][key], x) for key, x in apart[1][q].items())


# A format for Triton is a module with these functions, and this one is such a module.


@triton.jit
def decode(codes, scales, tables, MOMENTS: tl.constexpr, PTX: tl.constexpr):
    moments = ()
    for k in tl.static_range(len(MOMENTS)):
        # Triton takes no `(*moments, x)`.
        moments = moments + (codes[k].to(tl.float32) * scales[k][:, None],)  # noqa: RUF005
    return moments


@triton.jit
def scales(moments, MOMENTS: tl.constexpr, ALIGN: tl.constexpr, PTX: tl.constexpr):
    tops = ()
    for k in tl.static_range(len(MOMENTS)):
        tops = tops + (tl.max(tl.abs(moments[k]), 1) / TOP,)  # noqa: RUF005
    return tops


@triton.jit
def encode(
    moments, scales, random, tables, K: tl.constexpr, MOMENTS: tl.constexpr, PTX: tl.constexpr
):
    scale = tl.where(scales[K] > 0.0, scales[K], 1.0)[:, None]
    return tl.floor(moments[K] / scale + 0.5).to(tl.int8)


def table(ptx, device):
    return None


@dataclass(frozen=True)
class Linear8(Format):
    """Multiples of a scale per block, all moments handed over at once."""

    name: str
    block: int
    bits: int = 8
    numba: str = ""
    triton: str = __name__

    def parts(self, moments):
        codes = (Part(f"{moment.key}_int8", torch.int8) for moment in moments)
        return (*codes, *(Part(f"{m.key}_scale", torch.float32, True) for m in moments))

    def encode(self, moments, values, random=()):
        scales = [x.abs().amax(-1, keepdim=True) / 127.0 for x in values]
        pairs = zip(values, scales, strict=True)
        codes = [torch.floor(x / torch.where(s > 0, s, 1.0) + 0.5).to(torch.int8) for x, s in pairs]
        return [*codes, *(scale.float() for scale in scales)]

    def decode(self, moments, stored, dtype):
        codes, scales = stored[: len(moments)], stored[len(moments) :]
        return [c.to(dtype) * s.to(dtype) for c, s in zip(codes, scales, strict=True)]


@pytest.fixture(params=[64, 256])
def linear8(request, monkeypatch):
    format = Linear8(f"linear8_{request.param}", request.param)
    monkeypatch.setitem(formats.FORMATS, format.name, format)
    return format


def steps(engine, format, cls="AdamW8bit", shapes=SHAPES, choose=None, monkeypatch=None):
    """Parameters and states on the CPU after two steps; `choose` gives a parameter's format."""
    device = DEVICE if engine == "triton" else "cpu"
    generators = [torch.Generator().manual_seed(math.prod(shape)) for shape in shapes]
    pairs = list(zip(shapes, generators, strict=True))
    params = [torch.nn.Parameter(torch.randn(s, generator=g).to(device)) for s, g in pairs]
    with lowbit_optim.use_engine(engine):
        # Random bits are of a tensor's number in its group, which a tensor alone does not have.
        optimizer = getattr(lowbit_optim, cls)(params, min_8bit_size=1, dither=False)
        optimizer.param_groups[0]["state_format"] = format.name
        if choose is not None:
            monkeypatch.setattr(optimizer, "_format", lambda p, group: choose(p))
        for _ in range(2):
            for p, generator in zip(params, generators, strict=True):
                p.grad = torch.randn(p.shape, generator=generator).to(device)
            optimizer.step()
    states = [{k: v.cpu() for k, v in optimizer.state[p].items()} for p in params]
    batches = [batch for plan in optimizer.plans.values() for batch in plan.batches]
    kinds = [batch.tables.kinds for batch in batches if batch.engine == "triton"]
    return [p.detach().cpu() for p in params], states, [kind[2] for each in kinds for kind in each]


def assert_as_on_torch(got, want):
    for p, q, state, other in zip(got[0], want[0], got[1], want[1], strict=True):
        assert state.keys() == other.keys()
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
        for key, x in state.items():
            y = other[key]
            assert (x.shape, x.dtype) == (y.shape, y.dtype), key
            if x.dtype in (torch.int8, torch.uint8):
                off = (x.int() - y.int()).abs()
                assert off.max() <= 1, key
                assert (off > 0).float().mean() <= 0.01, key
            else:
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)


@pytest.mark.few
def test_a_format_of_any_block_is_as_on_torch(linear8):
    got = steps("triton", linear8)
    assert set(got[2]) == {linear8}
    assert "exp_avg_int8" in got[1][0]
    assert got[1][2]["exp_avg_scale"].shape == (-(-257 // linear8.block),)
    assert_as_on_torch(got, steps("torch", linear8))


@pytest.mark.parametrize("block", [16, 32])
def test_weights_of_short_blocks_have_random_bits_of_their_own(block, monkeypatch):
    """Which are counted in blocks of 64 that begin with every row, whatever the format's are."""
    format = Linear8(f"linear8_{block}", block)
    monkeypatch.setitem(formats.FORMATS, format.name, format)
    stepped = []
    for engine, device in (("triton", DEVICE), ("torch", "cpu")):
        p = torch.nn.Parameter(torch.ones(20, 96, dtype=torch.bfloat16, device=device))
        optimizer = lowbit_optim.AdamW8bit([p], 1e-3, master_weight_bits=16, min_8bit_size=1)
        optimizer.param_groups[0].update(state_format=format.name, dither=False)
        p.grad = torch.ones_like(p)
        with lowbit_optim.use_engine(engine):
            optimizer.step()
        stepped.append(p.detach().cpu())
    assert len(stepped[1].unique()) == 2
    assert (stepped[0] != stepped[1]).float().mean() < 0.01


def test_sums_are_of_all_pieces_of_a_tile():
    """Of short blocks at the ends of rows, which start anywhere, there are many in a tile."""
    stepped = []
    for engine, device in (("triton", DEVICE), ("torch", "cpu")):
        p = torch.nn.Parameter(torch.zeros(20, 257, device=device))
        p.data[:, 256:] = 1.0
        optimizer = lowbit_optim.LARS8bit([p], 0.1, 0.9, trust_coefficient=0.02, min_8bit_size=1)
        p.grad = torch.ones_like(p)
        with lowbit_optim.use_engine(engine):
            optimizer.step()
        stepped.append(p.detach().cpu())
    torch.testing.assert_close(*stepped, rtol=1e-5, atol=0)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.few
def test_one_moment_may_stay_exact(linear8, last, monkeypatch):
    """Beside a coded one, whichever comes first."""
    original = lowbit_optim.AdamW._rule

    def rule(self, group):
        found = original(self, group)
        first, second = found.moments
        exact = (
            (first, replace(second, exact=True)) if last else (replace(first, exact=True), second)
        )
        return replace(found, moments=exact)

    monkeypatch.setattr(lowbit_optim.AdamW, "_rule", rule)
    for format in (linear8, DYNAMIC8):
        got = steps("triton", format, shapes=FEW)
        kept, coded = ("exp_avg_sq", "exp_avg")[:: 1 if last else -1]
        assert got[1][0][kept].dtype == torch.float32
        assert f"{kept}_scale" not in got[1][0]
        assert coded not in got[1][0] or got[1][0][coded].dtype == torch.uint8
        assert_as_on_torch(got, steps("torch", format, shapes=FEW))


@pytest.mark.few
def test_formats_of_several_blocks_share_a_launch(linear8, monkeypatch):
    """And each tensor comes out as it does alone."""
    of = {257: DYNAMIC8, 900: FLOAT32, 5: DYNAMIC8}

    def choose(p):
        return of.get(p.numel(), linear8)

    got = steps("triton", linear8, "LAMB8bit", FEW, choose, monkeypatch)
    assert set(got[2]) == {linear8, DYNAMIC8, FLOAT32}
    assert_as_on_torch(got, steps("torch", linear8, "LAMB8bit", FEW, choose, monkeypatch))
    for shape, p, state in zip(FEW, *got[:2], strict=True):
        (q,), (other,), _ = steps("triton", linear8, "LAMB8bit", [shape], choose, monkeypatch)
        assert torch.equal(p, q)
        assert all(torch.equal(state[key], other[key]) for key in other)


def test_whole_tensors_are_coded_by_torch_without_functions_of_the_formats_own(linear8):
    from lowbit_optim_kernels.engines.triton import engine
    from lowbit_optim_kernels.formats.layout import Layout
    from lowbit_optim_kernels.rules.adam import ADAM

    (unit,) = formats.units(ADAM, linear8)
    layout = Layout.of((3, 300), linear8.block)
    values = [torch.randn(3, 300, device=DEVICE) for _ in ADAM]
    stored = [
        torch.empty(part.shape((3, 300), linear8.block), dtype=part.dtype, device=DEVICE)
        for part in unit.parts
    ]
    engine.encode(unit, values, layout, stored)
    out = [torch.empty_like(x) for x in values]
    engine.decode(unit, stored, layout, out)
    for x, y in zip(values, out, strict=True):
        assert (x - y).abs().max() <= x.abs().max() / 250


def test_a_block_that_does_not_fit_a_tile_is_refused():
    from lowbit_optim_kernels.engines.triton import grid

    with pytest.raises(ValueError, match="blocks of 4096"):
        grid.blocks_of_tile(Linear8("huge", 4096))


def test_kinds_have_one_order_by_all_that_tells_them_apart():
    """So that the same kinds share what is compiled, in whichever order the tensors come."""
    kind = kinds.Kind(torch.float32, torch.float32, DYNAMIC8, True, 16)
    others = {
        "p": torch.bfloat16, "g": torch.bfloat16, "format": FLOAT32, "whole": False, "align": 4,
        "weights": WEIGHTS[16], "far": True, "blocks": kinds.FULL, "short": 16, "shifted": True,
        "spanned": True,
    }  # fmt: skip
    assert others.keys() == set(kinds.Kind._fields)
    for field, value in others.items():
        assert grid._order(kind._replace(**{field: value})) != grid._order(kind), field


def test_kernels_find_the_constants_of_a_kind_by_their_names():
    for place, name in enumerate(kinds.KindConstants._fields):
        assert getattr(moments, name.upper()).value == place, name
