"""How a parameter's state is stored: names, shapes and dtypes of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit_optim_kernels.devices import scalar_dtype
from lowbit_optim_kernels.formats import FORMATS, OF_BITS, Format, compute_dtype, constant, units
from lowbit_optim_kernels.plan import STEP_DTYPE
from lowbit_optim_kernels.rules import Lasting, Moment
from lowbit_optim_kernels.weights import PLAIN, RESIDUAL_KEY, WEIGHTS, Weights

from . import _checks


class Stored(NamedTuple):
    """A tensor of a parameter's state: how it is stored, and what it is filled with at first."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    start: float = 0.0

    def like(self, x: Any) -> bool:
        """Whether a value is stored so."""
        if not isinstance(x, Tensor) or (x.shape, x.dtype, x.device) != self[:3]:
            return False
        return x.layout == torch.strided and x.is_contiguous()


def stored_of(x: Lasting, p: Tensor) -> Stored:
    """How what lasts is stored."""
    dtype = torch.float32 if x.history else scalar_dtype(p.device)
    return Stored(x.shape, dtype, p.device, x.start)


def stored(
    p: Tensor, starts: Mapping[Moment, float], format: Format, lasting: Iterable[Lasting],
    weights: Weights,
) -> dict[str, Stored]:  # fmt: skip
    """The tensors of a parameter's state.

    Args:
        p: the parameter.
        starts: its moments, each with the value that all of its elements have at first.
        format: how they are stored.
        lasting: what is kept of it beside moments.
        weights: how the parameter itself is stored.
    """
    tensors = {"step": Stored((), STEP_DTYPE, p.device)}
    if weights.residual is not None:
        tensors[RESIDUAL_KEY] = Stored(tuple(p.shape), weights.residual, p.device)
    for x in lasting:
        tensors[x.key] = stored_of(x, p)
    for unit in units(tuple(starts), format):
        values = constant(unit, tuple(starts[moment] for moment in unit.moments))
        for part, value in zip(unit.parts, values, strict=True):
            shape = part.shape(p.shape, unit.format.block)
            dtype = part.dtype or compute_dtype(p)
            tensors[part.key] = Stored(shape, dtype, p.device, value)
    return tensors


def with_storage(own: Mapping[str, Any], inherited: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a group, of an override or of a constructor, with what they mean for storage.

    Args:
        own: the settings; an own `state_format` decides `optim_bits`, and with own `optim_bits` an
            inherited format of other bits does not count.
        inherited: the settings that apply where there are no own.

    Raises:
        ValueError: if own `optim_bits` and an own `state_format` contradict each other.
    """
    if "optim_bits" in own:
        _checks.optim_bits(own["optim_bits"])
    name = own.get("state_format")
    if name is not None:
        _checks.state_format(name)
        agreed = {**own, "optim_bits": own.get("optim_bits", FORMATS[name].bits)}
        _checks.storage(agreed)
        return agreed
    name = inherited.get("state_format")
    others = name is not None and "optim_bits" in own and own["optim_bits"] != FORMATS[name].bits
    return {**own, "state_format": None} if others else dict(own)


def format_of(group: Mapping[str, Any]) -> Format:
    """The format that a group's settings ask for; `optim_bits` alone means a format, too."""
    return FORMATS[group["state_format"] or OF_BITS[group["optim_bits"]]]


def weights_of(p: Tensor, group: Mapping[str, Any]) -> Weights:
    """How a parameter is stored.

    Raises:
        ValueError: for bits of master weights where the parameter's dtype has none.
    """
    bits = group["master_weight_bits"]
    if p.dtype == torch.bfloat16:
        return WEIGHTS[16 if bits == "auto" else bits]
    if bits not in (None, "auto") and p.dtype != torch.float32:
        raise ValueError(
            f"master_weight_bits must be None or 'auto' for parameters of {p.dtype}, got {bits!r}; "
            "bf16 parameters have 16, 24 and 32, and fp32 parameters need none"
        )
    return PLAIN
