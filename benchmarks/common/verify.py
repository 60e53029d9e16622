"""No figure of an optimizer that computes something else: each is run against its naive rule."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.common.registry import Entry

TESTS = Path(__file__).resolve().parents[2] / "tests"
STEPS = 20
SHAPES = ((64, 512), (5000,), (33, 300), (40,))
# Largest normalised mean squared error of the total update. 32 bits leave fp32 rounding of the
# parameter; 8 bits leave the codes' rounding of the moments, which is more than the places of eps
# and of bias corrections that other libraries choose.
LIMIT_32, LIMIT_8, LIMIT_4 = 1e-9, 1e-3, 5e-2
# Where a step is a sign: a rounded momentum near zero moves a weight by two whole steps.
LIMIT_8_SIGN = 1e-2
# What `adamw(**options)` of the references hands on.
_HANDED_ON = ("betas", "eps", "amsgrad", "max_unorm", "maximize", "percentile_clipping")


def _rule(optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    """The naive float64 rule of the tests that the optimizer's class name stands for."""
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    reference = importlib.import_module("reference")
    name = re.sub(r"^Flash|(4bit|8bit|32bit|Fp8)$", "", type(optimizer).__name__).lower()
    return {key.replace("_", ""): value for key, value in vars(reference).items()}[name]


def _limit(entry: Entry) -> float:
    if "4bit" in entry.name or "Fp8" in entry.name:  # fp8 has three bits of mantissa
        return LIMIT_4
    if "8bit" not in entry.name and entry.peer in (None, "torch"):
        return LIMIT_32
    return LIMIT_8_SIGN if entry.sign else LIMIT_8


def _options(rule: Callable[..., torch.Tensor], group: dict) -> dict[str, object]:
    """The entries of a param group that the rule takes."""
    names: set[str] = set()
    for name, parameter in inspect.signature(rule).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            names.add(name)
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            names.update(_HANDED_ON)
    return {name: group[name] for name in names if name in group}


def update_error(entry: Entry, lr: float, device: torch.device) -> float:
    """Largest normalised mean squared error, over tensors, of the update of 20 steps."""
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator) * 0.1 for shape in SHAPES]
    params = [torch.nn.Parameter(start.clone().to(device)) for start in starts]
    optimizer = entry.make(params, lr)
    rule = _rule(optimizer)
    options = _options(rule, optimizer.param_groups[0])
    expected: list[torch.Tensor] = [start.double() for start in starts]
    states: list[dict] = [{} for _ in starts]
    for _ in range(STEPS):
        grads = [torch.randn(shape, generator=generator) for shape in SHAPES]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.to(device)
        optimizer.step()
        for index, (grad, state) in enumerate(zip(grads, states, strict=True)):
            expected[index] = rule(expected[index], grad.double(), state, **options)
    errors = []
    for param, start, wanted in zip(params, starts, expected, strict=True):
        wrong = (param.detach().cpu().double() - wanted).square().sum()
        errors.append(float(wrong / (wanted - start).square().sum()))
    return max(errors)


def verify(entry: Entry, lr: float, device: torch.device) -> float:
    """The update error of an optimizer.

    Raises:
        AssertionError: it is above the limit of its bits.
    """
    error, limit = update_error(entry, lr, device), _limit(entry)
    if not error <= limit:
        raise AssertionError(
            f"{entry.name} on {device.type} differs from its reference after {STEPS} steps: "
            f"normalised mean squared error {error:.2e}, at most {limit:.0e} is allowed"
        )
    return error
