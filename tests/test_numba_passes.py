"""The Numba engine's templates: any format of a block's two functions, moments that stay exact."""

import ast
import dataclasses
import inspect
import sys
import textwrap
import types
from importlib.util import resolve_name

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
import lowbit_optim
from lowbit_optim_kernels import formats
from lowbit_optim_kernels.batch import Batch, Slot
from lowbit_optim_kernels.codegen import specialize
from lowbit_optim_kernels.codegen.analysis import functions_source, hyper_names
from lowbit_optim_kernels.codegen.specialize import Item, Variable
from lowbit_optim_kernels.engines import numba as engines_of_numba
from lowbit_optim_kernels.engines import torch as engine_torch
from lowbit_optim_kernels.engines.numba import engine as engine_numba
from lowbit_optim_kernels.engines.numba import memory, modules, source
from lowbit_optim_kernels.formats.layout import Layout
from lowbit_optim_kernels.rules import adam, gives, lamb
from toy_format import ZERO, Toy

SHAPES = [(64, 147), (3, 300), (257,), (5,), (4096,), (0,)]
ENGINES = {"numba": engine_numba, "torch": engine_torch}


def steps(engine, format, bad=False):
    """AdamW over the shapes, its state in the format; parameters and state after some steps."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in SHAPES]
    optimizer = lowbit_optim.AdamW8bit(params, lr=0.01, min_8bit_size=0)
    for group in optimizer.param_groups:
        group["state_format"] = format
    with lowbit_optim.use_engine(engine):
        for _ in range(4):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
                if bad and p.numel():
                    p.grad.view(-1)[p.numel() // 2] = float("nan")
            optimizer.step()
    return params, [optimizer.state[p] for p in params]


@pytest.mark.parametrize("block", [48, 64, 256])
def test_a_format_of_two_functions_steps_as_on_torch(monkeypatch, block):
    monkeypatch.setitem(formats.FORMATS, "toy", Toy(block=block))
    (got, state), (want, wanted) = (steps(engine, "toy") for engine in ENGINES)
    for x, y, s, t in zip(got, want, state, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-3)
        assert s["scale"].shape == t["scale"].shape == Layout.of(x.shape, block).scales_shape
        torch.testing.assert_close(s["scale"], t["scale"])
        for key in ("exp_avg_code", "exp_avg_sq_code"):
            assert x.numel() == 0 or (s[key].int() - t[key].int()).abs().max() <= 1


@pytest.mark.parametrize("row", [96, 124])
def test_rows_of_small_blocks_keep_the_random_bits_of_their_weights(monkeypatch, row):
    """Which are counted in blocks of 64 that begin with every row, whatever the format's are."""
    monkeypatch.setitem(formats.FORMATS, "toy", Toy(block=32))
    stepped = []
    for engine in ENGINES:
        p = torch.nn.Parameter(torch.ones(50, row, dtype=torch.bfloat16))
        optimizer = lowbit_optim.AdamW8bit([p], 1e-3, master_weight_bits=16, min_8bit_size=0)
        optimizer.param_groups[0]["state_format"] = "toy"
        p.grad = torch.ones_like(p)
        with lowbit_optim.use_engine(engine):
            optimizer.step()
        stepped.append(p.detach())
    assert len(stepped[0].unique()) == 2
    assert (stepped[0] != stepped[1]).float().mean() < 0.01


@pytest.mark.parametrize("block", [64, 256])
def test_an_element_with_a_bad_number_starts_again_in_all_moments(monkeypatch, block):
    monkeypatch.setitem(formats.FORMATS, "toy", Toy(block=block))
    params, states = steps("numba", "toy", bad=True)
    for p, state in zip(params, states, strict=True):
        assert state["scale"].isfinite().all()
        for key in ("exp_avg_code", "exp_avg_sq_code"):
            if p.numel():
                assert state[key].view(-1)[p.numel() // 2] == ZERO


def test_whole_tensors_of_such_a_format_are_coded_as_on_torch():
    (unit,) = formats.units(adam.ADAM, Toy(block=64))
    layout = Layout.of((3, 100), 64)
    values = [torch.randn(3, 100), torch.rand(3, 100)]
    coded, numbers = [], []
    for engine in ENGINES.values():
        out = [torch.zeros(part.shape((3, 100), 64), dtype=part.dtype) for part in unit.parts]
        back = [torch.zeros(3, 100) for _ in values]
        engine.encode(unit, values, layout, out)
        engine.decode(unit, out, layout, back)
        coded, numbers = [*coded, out], [*numbers, back]
    assert all(map(torch.equal, *coded))
    assert all(map(torch.equal, *numbers))


@pytest.mark.parametrize("name", formats.FORMATS)
def test_compiled_code_is_named_by_all_that_its_modules_import(name):
    """Or code of another version would be found that has other constants in it."""
    format = formats.FORMATS[name]
    named = set(modules.depends(format))
    code = source.code_of(format)
    helpers = [getattr(engines_of_numba, x) for x in modules.HELPERS if x != "cache"]
    for module in [*helpers, *([code, *getattr(code, "DEPENDS", ())] if code else [])]:
        for node in ast.parse(inspect.getsource(module)).body:
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            start = resolve_name("." * node.level + (node.module or ""), module.__package__)
            for found in {sys.modules.get(f"{start}.{x.name}", start) for x in node.names}:
                there = sys.modules[found] if isinstance(found, str) else found
                assert inspect.getsource(there) in named, (module.__name__, there.__name__)


def test_a_rules_numbers_may_be_infinite():
    text = functions_source([limited], "@kept")
    bound = {"kept": lambda fn: fn, "minimum": min}
    exec(text, bound)
    assert bound["limited_of_rule"](3.0) == 3.0


def test_a_rules_numbers_and_functions_have_names_of_their_own():
    """Where functions of two modules meet, one would be computed with the other's number."""
    elsewhere = types.FunctionType(limited.__code__, {"LIMIT": 1.0}, "elsewhere")
    with pytest.raises(ValueError, match="a rule has two numbers 'LIMIT'; rename one of them"):
        functions_source([limited, elsewhere], "@kept")
    again = types.FunctionType(limited.__code__, {"LIMIT": LIMIT}, "limited")
    with pytest.raises(ValueError, match="a rule has two functions 'limited'; rename one of them"):
        functions_source([limited, again], "@kept")


def test_a_rule_may_call_a_function_by_another_name():
    """As `from elsewhere import limited as capped` has it."""
    text = functions_source([twice_capped], "@kept")
    bound = {"kept": lambda fn: fn, "minimum": min}
    exec(text, bound)
    assert bound["twice_capped_of_rule"](3.0) == 6.0


def test_a_product_in_a_sum_is_fused_and_of_two_the_left_one():
    sums = ["a * b + c", "a * b - c", "c + a * b", "c - a * b", "a * b + c * d"]
    fused = ["(a, b, c)", "(a, b, -c)", "(a, b, c)", "(-a, b, c)", "(a, b, c * d)"]
    assert [source._with_fused(one) for one in sums] == [f"fused{operands}" for operands in fused]


LIMIT = float("inf")


@gives("u")
def limited(g):
    return minimum(g, LIMIT)  # noqa: F821 (the test binds it)


capped = limited


def twice_capped(x):
    return 2.0 * capped(x)


def one_step(engine, rule, format, hyper, shape=(3, 300)):
    generator = torch.Generator().manual_seed(1)
    p, g = (torch.randn(shape, generator=generator) for _ in range(2))
    layout, state = Layout.of(shape, format.block), []
    for unit in formats.units(rule.moments, format):
        for part, fill in zip(unit.parts, formats.constant(unit, 0.0), strict=True):
            at = part.shape(shape, unit.format.block)
            state.append(torch.full(at, fill, dtype=part.dtype or torch.float32))
    count = torch.zeros((), dtype=torch.int64)
    slot = Slot(p, g, format, tuple(state), count, layout.rows, layout.row, p.numel())
    batch = Batch(rule, [slot], p.device, engine, hyper=[hyper])
    batch.note_addresses()
    for _ in range(3):
        run = ENGINES[engine].start(batch)
        run.begin()
        for phase in range(run.phases):
            run.combine(phase, run.reduce(phase))
        run.finish()
    return [p, *state]


@pytest.mark.parametrize("exact", [0, 1])
@pytest.mark.parametrize("format", [formats.FORMATS["dynamic8"], Toy(), Toy(block=64)])
@pytest.mark.parametrize(
    "rule",
    [adam.adam_rule(False, False, False), lamb.lamb_rule(False, True, False, True, False)],
    ids=["adam", "lamb"],
)
@pytest.mark.few("format", "rule")
def test_a_moment_that_stays_exact_beside_a_coded_one(rule, format, exact):
    moments = list(rule.moments)
    moments[exact] = dataclasses.replace(moments[exact], exact=True)
    rule_with_exact = dataclasses.replace(rule, moments=tuple(moments))
    hyper = dict.fromkeys(hyper_names(rule), 0.1)
    got, want = (one_step(engine, rule_with_exact, format, hyper) for engine in ENGINES)
    assert [x.dtype for x in got].count(torch.float32) == 3, "p, a moment and a scale"
    torch.testing.assert_close(got[-1], want[-1], rtol=1e-5, atol=1e-6)  # the exact moment
    for x, y in zip(got, want, strict=True):
        if x.dtype == torch.uint8:
            assert (x.int() - y.int()).abs().max() <= 1
        else:
            torch.testing.assert_close(x, y, rtol=1e-4, atol=5e-3)


def test_the_first_norm_clips_nothing():
    """It is the only one so far. Its root, in fp64 like all per-tensor numbers, is one number."""
    results = []
    for percentile in (5, 100):
        p = torch.nn.Parameter(torch.randn(3000, generator=torch.Generator().manual_seed(0)))
        p.grad = torch.randn(3000, generator=torch.Generator().manual_seed(1))
        optimizer = lowbit_optim.AdamW8bit([p], lr=0.1, percentile_clipping=percentile)
        with lowbit_optim.use_engine("numba"):
            optimizer.step()
        results.append(p.detach())
    assert torch.equal(*results)


def test_short_blocks_are_filled_up_with_whole_elements():
    from numba import njit

    home, spare = np.arange(3, dtype=np.int16), np.zeros(8, dtype=np.int16)
    enter = memory.enter
    njit(lambda at, to: enter(at, to, 3, 8, 2, -300))(home.ctypes.data, spare.ctypes.data)
    assert spare.tolist() == [0, 1, 2] + 5 * [-300]


def test_fp32_is_rounded_to_bf16_as_by_torch():
    from numba import njit

    ends = [0, 0x8000, 0x18000, 0x8001, 0x7FFF, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF]
    bits = np.uint32([*ends, *(x | 1 << 31 for x in ends)])  # the last is NaN
    rounded = np.zeros(16, np.int16)
    load, store = memory.load_f32, memory.store_bf16
    njit(lambda at, to: store(to, load(at)))(bits.ctypes.data, rounded.ctypes.data)
    got = torch.from_numpy(rounded).view(torch.bfloat16)
    want = torch.from_numpy(bits.view(np.float32)).bfloat16()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[~got.isnan()].view(torch.int16), want[~got.isnan()].view(torch.int16))


@pytest.mark.parametrize(("numba", "block"), [("", 256), ("toy_format", 40)])
def test_a_format_that_cannot_run_is_refused(numba, block):
    with pytest.raises(NotImplementedError, match="state format 'toy'"):
        source.element_module(
            adam.adam_rule(False, False, False), "f32", "f32", Toy(numba=numba, block=block)
        )


# The specializer.

TEMPLATE = """
    from .memory import load as read, store
    import math

    def load():
        m.value = read(row + ROW * m.row) * scale[m]

    def whole(n, *NAMES):
        "Not written."
        for m in MOMENTS:
            load()
        ok = every(finite(m.value) for m in MOMENTS)
        if not all(top[m] < 1.0 for m in MOMENTS):
            top[MOMENTS], low[MOMENTS] = mend(n, *top[MOMENTS])
        for m, k in zip(MOMENTS, (0, 1)):
            (f if m.signed else g)(n if n > 0 else ROW // 4, place[m, k])
        top[MOMENTS] = tuple(math.sqrt(m.value) for m in MOMENTS)
        pair((*(m.value for m in MOMENTS),))
        if MOMENTS and ROW == 0:
            store(0)
        table[n, ROW] += table[ROW]
        return (*top[MOMENTS], n)

    def mend(n, *top):
        return top[MOMENTS]

    @quickly
    def raise_tops():
        x = read(at + 4 * j)
        for m in MOMENTS:
            top[m] = highest(top[m], x)

    def run(at, n):
        for m in MOMENTS:
            top[m] = 0
        for j in range(n):
            raise_tops()
        for quarter in (0, 1):
            j = n + quarter
            raise_tops()
        return top[MOMENTS]

    @quickly
    def differ():
        x = x + quarter

    def differing(x):
        for quarter in (0, 1):
            differ()
"""


def specialized(tmp_path, monkeypatch, count, name="whole"):
    (tmp_path / "made_up.py").write_text(textwrap.dedent(TEMPLATE))
    package = types.ModuleType("made_up")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "made_up", package)
    specialize._parsed.cache_clear()
    writer = specialize.Writer("made_up.made_up")
    moments = (Item(key="a", row=0, signed=True), Item(key="b", row=1, signed=False))[:count]
    names = (Variable("x"), Variable("y"))
    bound = {"MOMENTS": moments, "ROW": 8, "NAMES": names}
    writer.add(name, **bound, whole=Variable("named"))
    first = writer.text()
    again = specialize.Writer("made_up.made_up")
    again.add(name, **bound, whole=Variable("named"))
    assert again.text() == first, "the template stays as it was"
    return first


def same(got, want):
    assert ast.unparse(ast.parse(got)) == ast.unparse(ast.parse(textwrap.dedent(want)))


def test_specialized_for_two(tmp_path, monkeypatch):
    same(specialized(tmp_path, monkeypatch, 2), """
        from made_up.memory import load as read
        import math

        def mend(n, top_a, top_b):
            return (top_a, top_b)

        def named(n, x, y):
            value_a = read(row + 0) * scale_a
            value_b = read(row + 8) * scale_b
            ok = finite(value_a) & finite(value_b)
            if not (top_a < 1.0 and top_b < 1.0):
                top_a, top_b, low_a, low_b = mend(n, top_a, top_b)
            f(n if n > 0 else 2, place_a_0)
            g(n if n > 0 else 2, place_b_1)
            top_a, top_b = math.sqrt(value_a), math.sqrt(value_b)
            pair((value_a, value_b))
            table[n, 8] += table[8]
            return (top_a, top_b, n)
    """)  # fmt: skip


def test_specialized_for_one(tmp_path, monkeypatch):
    same(specialized(tmp_path, monkeypatch, 1, "mend"), """
        def mend(n, top_a):
            return top_a
    """)  # fmt: skip


def test_a_fragment_with_a_decorator_is_a_function(tmp_path, monkeypatch):
    same(specialized(tmp_path, monkeypatch, 2, "run"), """
        from made_up.memory import load as read

        @quickly
        def raise_tops(at, j, top_a, top_b):
            x = read(at + 4 * j)
            top_a = highest(top_a, x)
            top_b = highest(top_b, x)
            return (top_a, top_b)

        def run(at, n):
            top_a = 0
            top_b = 0
            for j in range(n):
                top_a, top_b = raise_tops(at, j, top_a, top_b)
            j = n + 0
            top_a, top_b = raise_tops(at, j, top_a, top_b)
            j = n + 1
            top_a, top_b = raise_tops(at, j, top_a, top_b)
            return (top_a, top_b)
    """)  # fmt: skip


def test_such_a_fragment_is_the_same_everywhere(tmp_path, monkeypatch):
    with pytest.raises(AssertionError, match="differ is not the same everywhere"):
        specialized(tmp_path, monkeypatch, 1, "differing")


def test_what_no_text_says_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "template_that_fails.py").write_text("def f():\n    return ITEM\n")
    monkeypatch.syspath_prepend(tmp_path)
    writer = specialize.Writer("template_that_fails")
    with pytest.raises(TypeError, match="no text says"):
        writer.add("f", ITEM=Item(key="a"))
