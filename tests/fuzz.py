"""What the generated tests share: how many examples, their optimizers, and what must stay finite.

`LOWBIT_OPTIM_FUZZ=2000` asks for 2,000 examples of every kind instead of the default. An example is
all that follows from its seed, so `replay(seed)` of a test file runs one again.
"""

import math
import os
import random

import pytest
import torch

import cases
from protocol import all_parameters

CHUNKS = 8
NON_NEGATIVE = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "scale_exp_avg_sq")
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)


def examples(default):
    """How many examples a test generates."""
    return int(os.environ.get("LOWBIT_OPTIM_FUZZ", default))


def in_chunks(default):
    """The seeds of all examples as several tests, which workers can share; one is not slow."""
    total = examples(default)
    chunks = [range(first, total, CHUNKS) for first in range(min(CHUNKS, total))]
    each = pytest.mark.parametrize("seeds", chunks, ids=lambda seeds: f"from-{seeds[0]}")
    return lambda test: pytest.mark.few(each(test))


def random_parameters(rng, shapes, dtypes=DTYPES):
    """Parameters of these shapes, each of a random dtype."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    values = [torch.randn(shape, generator=generator, dtype=torch.float32) for shape in shapes]
    return [torch.nn.Parameter(value.to(rng.choice(dtypes))) for value in values]


def random_case(rng):
    """A class with some options; each class as often as another, those with state more often."""
    name = rng.choice(sorted({case.name for case in cases.ALL_CASES}))
    return rng.choice([case for case in cases.ALL_CASES if case.name == name])


def unfit(optimizer):
    """What is wrong with an optimizer that was given finite numbers only; None if nothing is."""
    for index, p in enumerate(all_parameters(optimizer)):
        if not bool(p.detach().isfinite().all()):
            return f"parameter {index} of shape {tuple(p.shape)}, {p.dtype}, is not finite"
        wrong = unfit_state(optimizer.state.get(p, {}))
        if wrong:
            return f"state of parameter {index} of shape {tuple(p.shape)}, {p.dtype}: {wrong}"
    return None


def unfit_state(state):
    """What of a parameter's state is not finite, or negative where it cannot be."""
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        frozen = value == math.inf if key in NON_NEGATIVE else False  # a weight that stands still
        if not bool((value.isfinite() | frozen).all()):
            return f"{key} is not finite"
        if (key in NON_NEGATIVE or str(key).endswith("_absmax")) and bool((value < 0).any()):
            return f"{key} is negative"
    return None


def steps_of(state):
    """The number of steps that a parameter's state has counted."""
    step = state["step"]
    assert step.shape == (), step
    assert math.isfinite(float(step)), step
    assert float(step) == int(step), step
    return int(step)


def engine_of(rng):
    """Mostly the torch engine, which compiles nothing; "auto" takes Numba but for fp64."""
    return rng.choice(("torch",) * 5 + ("auto",))


def generator(seed):
    """All randomness of an example."""
    return random.Random(seed)
