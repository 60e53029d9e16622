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
import lowbit_optim
from protocol import all_parameters

CHUNKS = 8
NON_NEGATIVE = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "scale_exp_avg_sq")
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
MASTERED = (torch.float32, torch.bfloat16)  # that may ask for master weights
STORAGE = ("optim_bits", "state_format", "min_8bit_size", "master_weight_bits")  # a load keeps them


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


def random_case(rng, among=cases.ALL_CASES):
    """A class with some options; each class as often as another, those with state more often."""
    name = rng.choice(sorted({case.name for case in among}))
    return rng.choice([case for case in among if case.name == name])


def random_masters(rng):
    """Bits of master weights, and dtypes of parameters that may have them."""
    bits = rng.choice([None, None, "auto", 16, 24, 32])
    return bits, DTYPES if bits in (None, "auto") else MASTERED


def random_storage(rng, case):
    """How an optimizer of a case may keep its state: arguments of `case.build`."""
    bits = rng.choice([4, 8, 8, 8, 32])
    halves = hasattr(lowbit_optim, f"{case.name}4bit") and not case.options.get("amsgrad")
    options = {"min_8bit_size": rng.choice([1, 1, 200]), "dither": rng.random() < 0.8}
    if bits == 8 or (bits == 4 and not halves):
        bits, options["state_format"] = 8, rng.choice(["dynamic8", "ratio8"])
    return {"bits": bits, **options}


def is_scale(key):
    """Whether a state's tensor has a scale for each block of codes."""
    return str(key).endswith(("_absmax", "_scale"))


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
        if (key in NON_NEGATIVE or is_scale(key)) and bool((value < 0).any()):
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


def registrar(operations):
    """A decorator that has a function in this list so many times as it is drawn."""

    def often(times):
        def register(function):
            operations.extend([function] * times)
            return function

        return register

    return often


def generator(seed):
    """All randomness of an example."""
    return random.Random(seed)
