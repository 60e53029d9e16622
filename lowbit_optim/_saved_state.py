"""One parameter's saved state: its checks, and its copy as the parameter is to keep it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lowbit_optim_kernels.batch import STEP_DTYPE
from lowbit_optim_kernels.formats import Format
from lowbit_optim_kernels.rules import Lasting, Moment
from lowbit_optim_kernels.rules.shared import NORMS
from lowbit_optim_kernels.weights import RESIDUAL_KEY, Weights, as_integers, converted

from . import _saved_moments
from ._cast_checks import require_coded
from ._saved_moments import HarmlessMask
from ._settings import plain_copy
from ._state_layout import lasting_spec
from ._tensor_checks import (
    all_finite,
    extent,
    missing,
    require_dense,
    require_shape,
    require_values,
    shape_or_value,
)

EXACT_IN_FP32 = 2**24  # every whole number up to here
MOST_STEPS = 2**53  # and up to here in fp64


def saved_step(step: Tensor) -> Tensor:
    """A count of steps in fp32 while that is exact, in a tensor of its own."""
    exact = step.device.type == "meta" or int(step) <= EXACT_IN_FP32  # there is no number there
    return step.to(torch.float32 if exact else torch.float64)


def as_step(value: Any) -> int:
    """The number of steps that a checkpoint says have been taken."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"'step' must be one number, got a tensor of shape {tuple(value.shape)}")
    if isinstance(value, Tensor) and value.is_meta:  # there is no number there
        return 0
    step = value.item() if isinstance(value, Tensor) else value
    whole = isinstance(step, Real) and not isinstance(step, bool) and step == step // 1
    if not whole or not 0 <= step <= MOST_STEPS:
        raise ValueError(f"'step' must be a whole number >= 0 and at most 2**53, got {step!r}")
    return int(step)


def has_begun(saved: Mapping[str, Any], moments: tuple[Moment, ...]) -> bool:
    """Whether saved state has more than what a user keeps of a parameter before its first step."""
    return "step" in saved or bool(_saved_moments.present_moments(saved, moments))


def check_values(
    saved: Mapping[str, Any], p: Tensor, moments: Iterable[Moment], lasting: Iterable[Lasting],
    harmless: HarmlessMask,
) -> None:  # fmt: skip
    """Refuse numbers that no step leaves behind, and that would make parameters non-finite."""
    require_values(saved, p)
    if "step" in saved:
        as_step(saved["step"])
    for x in dict.fromkeys((*lasting, NORMS)):
        if x.key in saved:
            _check_lasting(x, saved[x.key], p)
        elif not x.history:
            raise missing(x.key, saved)
    if RESIDUAL_KEY in saved:
        _check_residual(saved[RESIDUAL_KEY], p)
    there = _saved_moments.present_moments(saved, tuple(moments))
    for unit in _saved_moments.saved_units(saved, there):
        _saved_moments.check_unit(saved, p, unit, harmless)
        if not unit.format.exact:
            require_coded(saved, p, unit)


def _check_residual(value: Any, p: Tensor) -> None:
    require_shape(repr(RESIDUAL_KEY), value, p.shape)
    allowed = torch.int8, torch.int16, torch.bfloat16  # the last are an int16's bits, of DTensors
    require_dense(RESIDUAL_KEY, value, allowed)


def require_integers(state: Mapping[str, Any], p: Tensor) -> None:
    """Refuse a residual that torch.optim.Optimizer's load_state_dict has cast as it does moments.

    Of a DTensor alone it is kept as bf16, whose bits it is; a plain tensor's would be read so, too.
    """
    value = state.get(RESIDUAL_KEY)
    if isinstance(value, Tensor) and value.dtype == torch.bfloat16 == p.dtype:
        raise ValueError(
            f"{RESIDUAL_KEY!r} of a parameter of shape {tuple(p.shape)} is torch.bfloat16 and must "
            "be of integers, which this optimizer's load_state_dict keeps and torch.optim."
            "Optimizer's does not"
        )


def _require_lasting(x: Lasting, value: Any) -> None:
    if not isinstance(value, Tensor) or tuple(value.shape) != x.shape:
        raise ValueError(f"{x.key!r} must have shape {x.shape}; got {shape_or_value(value)!r}")
    require_dense(x.key, value)


def _check_lasting(x: Lasting, value: Any, p: Tensor) -> None:
    _require_lasting(x, value)
    dtype = lasting_spec(x, p).dtype
    if not (all_finite(value, 0, dtype) or extent(value) == (x.start, x.start)):
        raise ValueError(f"{x.key!r} must hold numbers >= 0 that are finite as {dtype}")


def _residual(saved: Mapping[str, Any], p: Tensor, dtype: torch.dtype) -> Tensor:
    """The saved residual of a parameter as this dtype; zeros where none is saved."""
    value = saved.get(RESIDUAL_KEY)
    if value is None:
        return torch.zeros(p.shape, dtype=dtype, device=p.device)
    _check_residual(value, p)
    moved = value.detach().to(p.device, copy=True).contiguous()
    return converted(as_integers(moved), dtype)


def state_in_format(
    saved: Mapping[str, Any], p: Tensor, moments: tuple[Moment, ...], format: Format,
    lasting: Iterable[Lasting], kept_as: Weights,
) -> dict[str, Any]:  # fmt: skip
    """A parameter's state, copied from `saved`, on the parameter's device and in this format."""
    if not saved:
        return {}  # torch.optim.SGD before its first step with momentum
    kept, used = _saved_moments.moments_in_format(saved, p, moments, format)
    # torch.optim.SGD counts no steps: a momentum buffer says that there has been one.
    step = as_step(saved.get("step", 1))
    # In the order of `state_layout`: who compares two state dicts walks through both at once.
    state: dict[str, Any] = {"step": torch.tensor(step, dtype=STEP_DTYPE, device=p.device)}
    used |= {RESIDUAL_KEY}
    if kept_as.residual is not None:
        state[RESIDUAL_KEY] = _residual(saved, p, kept_as.residual)
    for x in dict.fromkeys((*lasting, NORMS)):
        if x.key in saved:
            _require_lasting(x, saved[x.key])
            dtype = lasting_spec(x, p).dtype
            state[x.key] = saved[x.key].detach().to(p.device, dtype, copy=True)
    state |= kept
    for key, value in saved.items():
        if key not in used | state.keys():
            state[key] = plain_copy(value, p.device)
    return state
