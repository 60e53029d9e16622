"""Steps of compiled kernels, generated: tensors of any shapes, formats and settings side by side.

Each step starts from one state on the torch engine and in the emulator; see `test_steps`.
`replay(seed)` runs an example again, `LOWBIT_OPTIM_FUZZ=200` asks for 200 of them.
"""

import pytest
import torch

import cases
from fuzz import (
    generator,
    in_chunks,
    random_case,
    random_masters,
    random_parameters,
    random_storage,
)
from fuzz_operations import give, random_like
from protocol import all_parameters

pytest.importorskip("triton", reason="the Triton engine needs the triton package")

from test_steps import ARCHITECTURES, assert_same_step, placed

STEPS = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [
    (), (0,), (1,), (3,), (63,), (64,), (257,), (300, 1), (1024,), (2048 + 272,), (4096,), (6, 65),
    (130, 70), (1, 700), (5, 96), (17, 128), (4, 100), (5, 260), (9, 272), (9, 300), (8, 301),
    (7, 512), (2, 1024), (2, 1025), (3, 2048), (2, 4100), (16, 48), (3, 4, 20), (70, 3, 3),
]  # fmt: skip
OFFSETS = (0, 0, 0, 1, 2, 4, 8)  # elements before a tensor in its memory


def optimizer_of(rng, case, offsets):
    """An optimizer of some tensors, in one group or two."""
    bits, allowed = random_masters(rng)
    dtypes = [dtype for dtype in DTYPES if dtype in allowed]
    dtypes = dtypes if rng.random() < 0.4 else [rng.choice(dtypes)]
    shapes = rng.choices(SHAPES, k=rng.choice([1, 2, 3, 5]))
    params = [
        torch.nn.Parameter(placed(p.detach(), p.dtype, rng.choice(offsets)))
        for p in random_parameters(rng, shapes, dtypes)
    ]
    options = {"seed": rng.choice([0, 2**32 - 1]), "master_weight_bits": bits}
    if rng.random() < 0.3:
        options["percentile_clipping"] = rng.choice([5, 50])
    cut = rng.randrange(1, len(params) + 1)
    groups = [{"params": params[:cut]}, {"params": params[cut:], "lr": 2 * case.lr}]
    return case.build(groups, **random_storage(rng, case), **options)


def give_gradients(rng, optimizer, offsets, may_be_bad):
    """Gradients of a step, of which some are missing, strided, of another dtype or not finite.

    And what an AMP scaler says of them.
    """
    scale, missing = rng.choice([1e-6, 0.1, 0.1, 10.0]), rng.choice([0.0, 0.0, 0.3])
    spread, turned = rng.random() < 0.2, rng.random() < 0.15
    bad = may_be_bad and rng.random() < 0.15
    for p in all_parameters(optimizer):
        g = random_like(rng, p) * scale * rng.choice([1.0] * 9 + [0.0])
        if spread:
            g *= 10.0 ** random_like(rng, p).clamp(-2.0, 1.0)
        if bad and g.numel() > 5:
            g.view(-1)[2], g.view(-1)[-1] = float("nan"), float("inf")
        dtype = rng.choice([p.dtype] * 9 + [torch.float32])
        g = placed(g, dtype, rng.choice(offsets))
        give(p, g.mT.contiguous().mT if turned and g.ndim > 1 else g)
        if rng.random() < missing:
            p.grad = None
    scaler = rng.choice([(None, None)] * 4 + [(64.0, 0.0), (64.0, 1.0)])
    optimizer.grad_scale, optimizer.found_inf = (
        None if x is None else torch.tensor(x) for x in scaler
    )


def replay(seed):
    """Run an example again; what is printed says what it is."""
    rng = generator(seed)
    case, arch = random_case(rng, cases.FUSED_CASES), rng.choice(ARCHITECTURES)
    offsets, start = rng.choice([(0,), OFFSETS]), rng.getstate()
    optimizer = optimizer_of(rng, case, offsets)
    rng.setstate(start)
    other = optimizer_of(rng, case, offsets)
    (group, *_) = optimizer.param_groups
    kept = {24: 2.0**-15, 32: 2.0**-23}.get(group["master_weight_bits"], 1.0)
    shapes = [f"{tuple(p.shape)} {p.dtype}" for p in all_parameters(optimizer)]
    print(f"replay({seed}): {case.id}, {shapes}, sm_{arch}", {**group, "params": None})
    may_be_bad = not group.get("amsgrad")  # whose maximum in 32 bits is no NaN on GPUs
    for step in range(STEPS):
        start = rng.getstate()
        give_gradients(rng, optimizer, offsets, may_be_bad)
        rng.setstate(start)
        give_gradients(rng, other, offsets, may_be_bad)
        print(f"replay({seed}): step {step}")
        assert_same_step(
            arch, optimizer, other, lambda p: min(kept, torch.finfo(p.dtype).eps), decided=0.03,
            other_codes=0.05,  # numbers of few bits are often in the middle between two codes
        )  # fmt: skip


@in_chunks(default=8)
def test_generated_steps_are_those_of_torch(seeds):
    for seed in seeds:
        replay(seed)
