"""Layout of a parameter's state: names, shapes and dtypes of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit_optim_kernels.batch import STEP_DTYPE
from lowbit_optim_kernels.devices import scalar_dtype
from lowbit_optim_kernels.formats import FORMATS, OF_BITS, Format, compute_dtype, constant, units
from lowbit_optim_kernels.rules import Lasting, Moment
from lowbit_optim_kernels.weights import PLAIN, RESIDUAL_KEY, WEIGHTS, Weights


class TensorSpec(NamedTuple):
    """A tensor of a parameter's state: how it is stored, and what it is filled with at first."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    start: float = 0.0

    def like(self, x: Any) -> bool:
        """Whether a value is stored so."""
        if not isinstance(x, Tensor) or (x.shape, x.dtype, x.device) != self[:3]:
            return False
        return x.layout == torch.strided and x.is_contiguous() and not x.is_neg()


def lasting_spec(x: Lasting, p: Tensor) -> TensorSpec:
    """The spec of the tensor of a `Lasting`."""
    dtype = torch.float32 if x.history else scalar_dtype(p.device)
    return TensorSpec(x.shape, dtype, p.device, x.start)


def state_layout(
    p: Tensor, moments: tuple[Moment, ...], start: float, format: Format,
    lasting: Iterable[Lasting], weights: Weights,
) -> dict[str, TensorSpec]:  # fmt: skip
    """The tensors of a parameter's state.

    Args:
        p: the parameter.
        moments: what is kept of it.
        start: the value that all of their elements have at first.
        format: how they are stored.
        lasting: what is kept of it beside moments.
        weights: how the parameter itself is stored.
    """
    tensors = {"step": TensorSpec((), STEP_DTYPE, p.device)}
    if weights.residual is not None:
        tensors[RESIDUAL_KEY] = TensorSpec(tuple(p.shape), weights.residual, p.device)
    for x in lasting:
        tensors[x.key] = lasting_spec(x, p)
    for unit in units(moments, format):
        for part, value in zip(unit.parts, constant(unit, start), strict=True):
            shape = part.shape(p.shape, unit.format.block)
            dtype = part.dtype or compute_dtype(p)
            tensors[part.key] = TensorSpec(shape, dtype, p.device, value)
    return tensors


def fits(state: Mapping[str, Any], layout: Mapping[str, TensorSpec]) -> bool:
    """Whether a state has the tensors of a layout, and no residual beside them."""
    superfluous = RESIDUAL_KEY in state and RESIDUAL_KEY not in layout
    return not superfluous and all(spec.like(state.get(key)) for key, spec in layout.items())


def format_of(group: Mapping[str, Any]) -> Format:
    """The format that a group's settings ask for; `optim_bits` alone means a format, too."""
    return FORMATS[group["state_format"] or OF_BITS[group["optim_bits"]]]


def _is_idle(p: Tensor) -> bool:
    """Whether a parameter is frozen and has no gradient, so that no step concerns it."""
    return isinstance(p, torch.nn.Parameter) and not p.requires_grad and p.grad is None


def weights_of(p: Tensor, group: Mapping[str, Any]) -> Weights:
    """The storage of a parameter itself.

    Raises:
        ValueError: for bits of master weights where the parameter's dtype has none, unless it is
            not stepped.
    """
    bits = group["master_weight_bits"]
    if p.dtype == torch.bfloat16:
        return WEIGHTS[16 if bits == "auto" else bits]
    if bits not in (None, "auto") and p.dtype != torch.float32 and not _is_idle(p):
        raise ValueError(
            f"master_weight_bits must be None or 'auto' for parameters of {p.dtype}, got {bits!r}; "
            "bf16 parameters have 16, 24 and 32, and fp32 parameters need none"
        )
    return PLAIN
