"""Optimizer steps by the PTX that Triton compiles for them, emulated, beside the torch engine's.

Each step starts from one state in both. Approximations of roots and reciprocals are emulated as
correctly rounded, so weights differ by roundings of fp32, and few codes do. `make emulate` runs
this: Triton must not be its interpreter.
"""

from itertools import groupby
from types import SimpleNamespace

import pytest
import torch

import cases
import design
import lowbit_optim
import test_cut_vectors
from protocol import all_parameters

pytest.importorskip("triton", reason="the Triton engine needs the triton package")

from benchmarks.static.ptx import launch
from benchmarks.static.ptx.launch import emulated
from lowbit_optim_kernels.engines.triton.compiled import Compiled

STEPS = 2
CLASSES = list(dict.fromkeys(case.name for case in cases.FUSED_CASES))
IN_4_BITS = [name for name in CLASSES if hasattr(lowbit_optim, f"{name}4bit")]
OPTIONS_OF = {  # of a state format
    "dynamic8": {"bits": 8},
    "float32": {"bits": 32},
    "ratio8": {"bits": 8, "state_format": "ratio8"},
    "ratio4": {"bits": 4},
}
# The parameters' dtype, bits of master weights, distance of the weights that can be kept.
WEIGHTS = {
    "fp32": (torch.float32, None, 2.0**-23),
    "fp16": (torch.float16, None, 2.0**-10),
    "bf16": (torch.bfloat16, None, 2.0**-7),
    "bf16_of_16": (torch.bfloat16, 16, 2.0**-7),
    "bf16_of_24": (torch.bfloat16, 24, 2.0**-15),
    "bf16_of_32": (torch.bfloat16, 32, 2.0**-23),
}
# Shapes. "offset" starts every tensor one element after an aligned address. "mixed" has tiles of
# many kinds in one launch: small tensors keep 32-bit state, and some, or their gradients, are of
# other dtypes.
TILES = {
    "whole": [(4096,), (3, 2048)],
    "masked": [(9, 272), (2048 + 272,)],
    "unaligned": [(9, 300), (8, 301), (257,), (3,), ()],
    "offset": [(2048,), (3, 272)],
    "mixed": [(4096,), (9, 272), (5, 300), (2048 + 272,), (2048,), (33, 64), (0,)],
}
GRADIENTS = ("plain", "scaled", "skipped", "bad", "wide")
ARCHITECTURES = (61, 75, 80, 90, 120)  # GPUs as GTX 1080, T4, A100, H100, RTX 5090


def steps():
    """Rows of the design, with the options of their class in turn, and more until all had one."""
    factors = {
        "optimizer": CLASSES, "format": list(OPTIONS_OF), "weights": list(WEIGHTS),
        "tiles": list(TILES), "gradients": GRADIENTS, "arch": ARCHITECTURES,
    }  # fmt: skip

    def allowed(row):
        return row["format"] != "ratio4" or row["optimizer"] in IN_4_BITS

    def name_of(row):
        return row["optimizer"]

    for name, group in groupby(sorted(design.pairwise(factors, allowed), key=name_of), name_of):
        rows, options = list(group), [case for case in cases.FUSED_CASES if case.name == name]
        left, i = list(options), 0
        while left or i < len(rows):
            row = SimpleNamespace(**rows[i % len(rows)])
            three = row.format != "ratio4"  # moments, which it does not take
            fit = (x for x in (*left, *options) if three or "amsgrad" not in x.options)
            case, i = next(fit), i + 1
            left = [x for x in left if x is not case]
            rest = (row.format, row.weights, row.tiles, row.gradients, f"sm_{row.arch}")
            yield pytest.param(case, row, id="-".join((case.id, *rest)))


def parameters(row):
    generator, (dtype, bits, _) = torch.Generator().manual_seed(0), WEIGHTS[row.weights]
    dtypes = [dtype]
    if row.tiles == "mixed" and bits is None:
        dtypes += [torch.float32, dtype, torch.bfloat16, dtype, torch.float16]
    starts = [torch.randn(shape, generator=generator) for shape in TILES[row.tiles]]
    before = int(row.tiles == "offset")
    return [
        torch.nn.Parameter(placed(x, dtypes[i % len(dtypes)], before)) for i, x in enumerate(starts)
    ]


def placed(x, dtype, before):
    """A copy of a tensor in memory of its own, so many elements after where that begins."""
    memory = torch.zeros(before + x.numel(), dtype=dtype)
    return memory[before:].view(x.shape).copy_(x)


def optimizer_of(case, row, params):
    options = dict(OPTIONS_OF[row.format])
    bits, master_weight_bits = options.pop("bits"), WEIGHTS[row.weights][1]
    if bits < 32:
        options["min_8bit_size"] = 1000 if row.tiles == "mixed" else 1
    return case.build(params, bits, master_weight_bits=master_weight_bits, **options)


def give_gradients(row, optimizer, params, step):
    """The same ones whenever a step is asked for."""
    generator = torch.Generator().manual_seed(step)
    for i, p in enumerate(params):
        g = torch.randn(p.shape, generator=generator) * 0.1 * step
        if row.gradients == "wide":
            g *= 10.0 ** torch.randint(-3, 2, p.shape, generator=generator)
        if row.gradients == "bad" and step == STEPS and g.numel() > 5:
            g.view(-1)[2], g.view(-1)[-1] = float("nan"), float("inf")
        dtype = p.dtype
        if row.tiles == "mixed" and i == 3 and hasattr(p, "grad_dtype"):  # since torch 2.10
            p.grad_dtype = dtype = torch.float32
        p.grad = placed(g, dtype, int(row.tiles == "offset"))
    if row.gradients in ("scaled", "skipped"):
        optimizer.grad_scale = torch.tensor(64.0)
        optimizer.found_inf = torch.tensor(float(row.gradients == "skipped" and step == STEPS))


def weights_of(optimizer):
    return [w.detach().clone() for _, w in lowbit_optim.master_weights(optimizer)]


def assert_same_weights(got, want, before, spacing, decided=0.0):
    """Weights to the rounding of fp32; few of them to that of what they are stored in.

    Of two elements, and this part of them, a rounding may decide whether a number is zero, and with
    it the whole update.
    """
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite)
    got, want, before = (x.double()[finite] for x in (got, want, before))
    moved = (want - before).abs().max() if want.numel() else 0.0
    off, in_fp32 = (got - want).abs(), 2.0**-22 * want.abs() + 2e-5 * moved
    assert int((off > in_fp32).sum()) <= 2 + 0.03 * off.numel()
    assert int((off > in_fp32 + spacing * want.abs()).sum()) <= 2 + decided * off.numel()


def assert_same_state(got, want, other_codes=0.005):
    """Numbers to the rounding of fp32, but for two of many, and codes but for this part of them."""
    assert got.keys() == want.keys()
    for key, x in got.items():
        y = want[key]
        if not isinstance(y, torch.Tensor) or key == "master_residual":  # part of the weights
            continue
        assert (x.shape, x.dtype) == (y.shape, y.dtype), key
        if y.dtype == torch.uint8:
            assert int((x != y).sum()) <= 2 + other_codes * y.numel(), key
        elif y.is_floating_point() and y.numel():
            finite = y.isfinite()
            assert torch.equal(x.isfinite(), finite), key
            off, wanted = (x - y).double()[finite].abs(), y.double()[finite].abs()
            top = wanted.max() if len(wanted) else 0.0
            assert int((off > 1e-5 * top).sum()) <= (2 if y.numel() > 256 else 0), key
        else:
            assert torch.equal(x, y), key


def assert_clean(emulation):
    """No races, and nothing read that nobody wrote."""
    for name, counters in emulation.counters.items():
        assert not counters.races, name
        assert not counters.unwritten, name


def assert_same_step(arch, optimizer, other, spacing_of, decided=0.0, other_codes=0.005):
    """Step an optimizer in the emulator and its twin by torch, which goes on from that one's state.

    Args:
        arch: the architecture.
        optimizer, other: the two, with the same gradients.
        spacing_of: the distance of the weights of a parameter that can be kept.
        decided, other_codes: parts; see `assert_same_weights` and `assert_same_state`.

    Returns:
        The emulation.
    """
    before = weights_of(other)
    with lowbit_optim.use_engine("torch"):
        other.step()
    with emulated(arch) as emulation, lowbit_optim.use_engine("triton"):
        optimizer.step()
    assert_clean(emulation)
    params, others = all_parameters(optimizer), all_parameters(other)
    both = zip(params, weights_of(optimizer), weights_of(other), before, strict=True)
    for p, got, want, old in both:
        assert_same_weights(got, want, old, spacing_of(p), decided)
    for p, q in zip(params, others, strict=True):
        assert_same_state(optimizer.state.get(p, {}), other.state.get(q, {}), other_codes)
    go_on_from(optimizer, params, other, others)
    return emulation


@pytest.mark.parametrize(("case", "row"), list(steps()))
def test_emulated_steps_are_those_of_torch(case, row):
    params, others = parameters(row), parameters(row)
    optimizer, other = (optimizer_of(case, row, x) for x in (params, others))
    own, _, kept = WEIGHTS[row.weights]

    def spacing_of(p):
        return kept if p.dtype == own else max(kept, torch.finfo(p.dtype).eps)

    for step in range(1, STEPS + 1):
        give_gradients(row, optimizer, params, step)
        give_gradients(row, other, others, step)
        emulation = assert_same_step(row.arch, optimizer, other, spacing_of)
        assert {"begin", "update"} <= emulation.counters.keys()


@pytest.mark.parametrize("name", ["AdamW", "LANS"])
def test_a_group_of_many_kinds_steps_each_tensor_as_alone(name):
    """To the same bits as compiled, though each group has its kernels."""
    options = {"min_8bit_size": 2049, "dither": False, "master_weight_bits": None}
    generator, results = torch.Generator().manual_seed(0), []
    starts = [torch.randn(shape, generator=generator) for shape in ((4096,), (2, 1025), (65,))]
    gradients = [torch.randn(x.shape, generator=generator) for x in starts]
    for alone in (False, True):
        params = [torch.nn.Parameter(x.clone()) for x in starts]
        groups = [[p] for p in params] if alone else [params]
        optimizers = [getattr(lowbit_optim, f"{name}8bit")(group, **options) for group in groups]
        for p, g in zip(params, gradients, strict=True):
            p.grad = g
        with emulated(90), lowbit_optim.use_engine("triton"):
            for optimizer in (*optimizers, *optimizers):
                optimizer.step()
        state = {p: x for optimizer in optimizers for p, x in optimizer.state.items()}
        results.append([x for p in params for x in (p.detach(), *state[p].values())])
    for together, alone in zip(*results, strict=True):
        assert torch.equal(together, alone)


@pytest.mark.parametrize("name", ["AdamW", "LANS"])
def test_groups_are_stepped_together_to_the_same_bits(name):
    """As compiled: each tensor by the numbers of its own group."""
    generator, results = torch.Generator().manual_seed(0), []
    starts = [torch.randn(300, generator=generator) for _ in range(35)]
    gradients = [torch.randn(x.shape, generator=generator) for x in starts]
    settings = [
        {"lr": 0.001 * (1 + i), "weight_decay": 0.01 * (i % 3), "betas": (0.9, 0.95 + 0.001 * i)}
        for i in range(len(starts))
    ]
    for together in (True, False):
        params = [torch.nn.Parameter(x.clone()) for x in starts]
        groups = [{"params": [p], **own} for p, own in zip(params, settings, strict=True)]
        optimizers = [
            getattr(lowbit_optim, f"{name}8bit")(some, min_8bit_size=1, dither=False)
            for some in ([groups] if together else [groups[:1], groups[1:34], groups[34:]])
        ]
        for p, g in zip(params, gradients, strict=True):
            p.grad = g
        with emulated(90) as emulation, lowbit_optim.use_engine("triton"):
            for optimizer in (*optimizers, *optimizers):
                optimizer.step()
        assert_clean(emulation)
        state = {p: x for optimizer in optimizers for p, x in optimizer.state.items()}
        results.append([x for p in params for x in (p.detach(), *state[p].values())])
        assert all(len(optimizer.plans) == 1 for optimizer in optimizers)
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_groups_that_are_not_stepped_together_are_launched_in_turn():
    """As one that is maximized, whose launches come between those of the first."""
    params, others = ([torch.nn.Parameter(torch.ones(n)) for n in (300, 65)] for _ in range(2))
    for engine, some in (("triton", params), ("torch", others)):
        groups = [{"params": some[:1]}, {"params": some[1:], "maximize": True}]
        optimizer = lowbit_optim.LAMB8bit(groups, min_8bit_size=1)
        for p in some:
            p.grad = torch.linspace(-1.0, 1.0, p.numel())
        with emulated(90) as emulation, lowbit_optim.use_engine(engine):
            optimizer.step()
        assert_clean(emulation)
        assert len(optimizer.plans) == 2
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("name", ["AdamW", "LANS"])
def test_tensors_without_a_gradient_are_left_out(name):
    """As compiled: neither read nor written, and their sums are zeros."""
    generator, results = torch.Generator().manual_seed(0), []
    starts = [torch.randn(shape, generator=generator) for shape in ((5000,), (2, 300), (65,))]
    gradients = [[torch.randn(x.shape, generator=generator) for x in starts] for _ in range(3)]
    for thorough in (False, True):
        params = [torch.nn.Parameter(x.clone()) for x in starts]
        optimizer = getattr(lowbit_optim, f"{name}8bit")(params, min_8bit_size=65)
        for t in range(3):
            for i, p in enumerate(params):
                p.grad = None if t > 0 and i == t - 1 else gradients[t][i]
            if thorough:
                optimizer.plans.clear()
            with emulated(90) as emulation, lowbit_optim.use_engine("triton"):
                optimizer.step()
            assert_clean(emulation)
        (plan,) = optimizer.plans.values()
        assert (plan.reused, plan.missing) == ((False, frozenset()) if thorough else (True, {1}))
        results.append([x for p in params for x in (p.detach(), *optimizer.state[p].values())])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("origin", "bits"), [*zip(test_cut_vectors.ORIGINS, (16, 24), strict=True)]
)
def test_pieces_of_a_vector_are_stepped_as_in_the_whole(origin, bits):
    with emulated(90) as emulation:
        test_cut_vectors.assert_whole("triton", "cpu", origin, bits)
    assert_clean(emulation)


def test_a_kernel_without_its_barriers_has_races(monkeypatch):
    """Which a GPU may take a long time to show."""

    def without(text):
        return launch.Executable(text.replace("bar.sync", "//"))

    monkeypatch.setattr(launch, "_executable", without)
    p = torch.nn.Parameter(torch.ones(2048))
    p.grad = torch.linspace(-1.0, 1.0, 2048)
    optimizer = lowbit_optim.LAMB8bit([p], min_8bit_size=1)
    with emulated(90) as emulation, lowbit_optim.use_engine("triton"):
        optimizer.step()
    for name in ("reduce_0", "add_up", "update"):
        assert any("between warps" in text for text in emulation.counters[name].races)


@torch.no_grad()
def go_on_from(optimizer, params, other, others):
    """Copy weights and state that were emulated to those of the torch engine."""
    for p, q in zip(params, others, strict=True):
        q.copy_(p)
        for key, x in optimizer.state.get(p, {}).items():
            if isinstance(x, torch.Tensor):
                other.state[q][key].copy_(x)


def test_later_steps_launch_what_the_first_compiled(monkeypatch):
    """Past Triton's binder, to the same bits, with new gradients and without some."""
    generator, results = torch.Generator().manual_seed(0), []
    starts = [torch.randn(shape, generator=generator) for shape in ((5000,), (2, 300), (65,))]
    gradients = [[torch.randn(x.shape, generator=generator) for x in starts] for _ in range(4)]
    binder, launches = Compiled.launch, []

    def noting(self, key, *launch):
        launches.append(key in self._kept)
        binder(self, key, *launch)

    def by_binder(self, key, *launch):
        binder(self, None, *launch)

    for call in (noting, by_binder):
        monkeypatch.setattr(Compiled, "launch", call)
        params = [torch.nn.Parameter(x.clone()) for x in starts]
        optimizer = lowbit_optim.LANS8bit(params, percentile_clipping=50, min_8bit_size=65)
        for t in range(4):
            for i, p in enumerate(params):
                p.grad = None if t == i + 1 else gradients[t][i]
            with emulated(90) as emulation, lowbit_optim.use_engine("triton"):
                optimizer.step()
            assert_clean(emulation)
        results.append([x for p in params for x in (p.detach(), *optimizer.state[p].values())])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
    assert launches.count(True) > launches.count(False) > 0
