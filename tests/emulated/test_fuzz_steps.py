"""Steps of compiled kernels, generated: tensors of any shapes, formats and settings side by side.

Each step starts from one state on the torch engine and in the emulator; see `test_steps`.
`replay(seed)` runs an example again, `LOWBIT_OPTIM_FUZZ=200` asks for 200 of them.
"""

import pytest
import torch

import cases
import lowbit_optim
from fuzz import generator, in_chunks, random_masters, random_storage
from fuzz_operations import give

pytest.importorskip("triton", reason="the Triton engine needs the triton package")

from benchmarks.static.ptx.launch import emulated
from test_steps import (
    ARCHITECTURES,
    assert_clean,
    assert_same_state,
    assert_same_weights,
    go_on_from,
    weights_of,
)

STEPS = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [
    (), (0,), (1,), (3,), (63,), (64,), (257,), (300, 1), (1024,), (2048 + 272,), (4096,), (6, 65),
    (130, 70), (1, 700), (5, 96), (17, 128), (4, 100), (5, 260), (9, 272), (9, 300), (8, 301),
    (7, 512), (2, 1024), (2, 1025), (3, 2048), (2, 4100), (16, 48), (3, 4, 20), (70, 3, 3),
]  # fmt: skip
OFFSETS = (0, 0, 0, 1, 2, 4, 8)  # elements before a tensor in its memory


def random_of(rng, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rng.randrange(2**31)))


def placed(rng, x, dtype, offsets):
    """A copy of a tensor, as a part of memory."""
    before = rng.choice(offsets)
    memory = torch.zeros(before + x.numel() + 8, dtype=dtype)
    return memory[before : before + x.numel()].view(x.shape).copy_(x)


def optimizer_of(rng, case, offsets):
    """An optimizer of some tensors, in one group or two."""
    bits, allowed = random_masters(rng)
    dtypes = [dtype for dtype in DTYPES if dtype in allowed]
    dtypes = dtypes if rng.random() < 0.4 else [rng.choice(dtypes)]
    params = [
        torch.nn.Parameter(placed(rng, random_of(rng, shape), rng.choice(dtypes), offsets))
        for shape in rng.choices(SHAPES, k=rng.choice([1, 2, 3, 5]))
    ]
    options = {"seed": rng.choice([0, 2**32 - 1]), "master_weight_bits": bits}
    if rng.random() < 0.3:
        options["percentile_clipping"] = rng.choice([5, 50])
    cut = rng.randrange(1, len(params) + 1)
    groups = [{"params": params[:cut]}, {"params": params[cut:], "lr": 2 * case.lr}]
    return case.build(groups, **random_storage(rng, case), **options)


def give_gradients(rng, params, offsets, bad):
    """Gradients of a step, of which some are missing, strided, of another dtype or not finite."""
    scale, missing = rng.choice([1e-6, 0.1, 0.1, 10.0]), rng.choice([0.0, 0.0, 0.3])
    spread, turned = rng.random() < 0.2, rng.random() < 0.15
    bad = bad and rng.random() < 0.15
    for p in params:
        g = random_of(rng, p.shape) * scale * rng.choice([1.0] * 9 + [0.0])
        if spread:
            g *= 10.0 ** random_of(rng, p.shape).clamp(-2.0, 1.0)
        if bad and g.numel() > 5:
            g.view(-1)[2], g.view(-1)[-1] = float("nan"), float("inf")
        dtype = rng.choice([p.dtype] * 9 + [torch.float32])
        g = placed(rng, g, dtype, offsets)
        give(p, g.mT.contiguous().mT if turned and g.ndim > 1 else g)
        if rng.random() < missing:
            p.grad = None


def replay(seed):
    """Run an example again; what is printed says what it is."""
    rng = generator(seed)
    name = rng.choice(sorted({case.name for case in cases.FUSED_CASES}))
    case = rng.choice([case for case in cases.FUSED_CASES if case.name == name])
    offsets, arch = rng.choice([(0,), OFFSETS]), rng.choice(ARCHITECTURES)
    start = rng.getstate()
    optimizer = optimizer_of(rng, case, offsets)
    rng.setstate(start)
    other = optimizer_of(rng, case, offsets)
    params, others = (
        [p for group in one.param_groups for p in group["params"]] for one in (optimizer, other)
    )
    (group, *_) = optimizer.param_groups
    kept = {"auto": 7, 16: 7, 24: 15, 32: 23}.get(group["master_weight_bits"], 7)
    shapes = [f"{tuple(p.shape)} {p.dtype}" for p in params]
    print(f"replay({seed}): {case.id}, {shapes}, sm_{arch}", {**group, "params": None})
    for step in range(STEPS):
        start = rng.getstate()
        give_gradients(rng, params, offsets, not group.get("amsgrad"))
        rng.setstate(start)
        give_gradients(rng, others, offsets, not group.get("amsgrad"))
        scale, found = rng.choice([(None, None)] * 4 + [(64.0, 0.0), (64.0, 1.0)])
        for one in (optimizer, other):
            one.grad_scale = None if scale is None else torch.tensor(scale)
            one.found_inf = None if found is None else torch.tensor(found)
        before = weights_of(other)
        with lowbit_optim.use_engine("torch"):
            other.step()
        with emulated(arch) as emulation, lowbit_optim.use_engine("triton"):
            optimizer.step()
        print(f"replay({seed}): step {step}")
        assert_clean(emulation)
        both = zip(params, weights_of(optimizer), weights_of(other), before, strict=True)
        for p, got, want, old in both:
            bits = kept if p.dtype == torch.bfloat16 else {torch.float16: 10}.get(p.dtype, 23)
            assert_same_weights(got, want, old, 2.0**-bits, 0.03)
        for p, q in zip(params, others, strict=True):
            # Numbers of few bits are often in the middle between two codes.
            assert_same_state(optimizer.state.get(p, {}), other.state.get(q, {}), 0.05)
        go_on_from(optimizer, params, other, others)


@in_chunks(default=8)
def test_generated_steps_are_those_of_torch(seeds):
    for seed in seeds:
        replay(seed)
