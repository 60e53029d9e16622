"""How a parameter's state is stored: names, shapes and dtypes of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit_optim_kernels.formats.dynamic8 import TOP_CODE, ZERO_CODE, Layout
from lowbit_optim_kernels.plan import GNORM_HISTORY, STEP_DTYPE
from lowbit_optim_kernels.rules import Moment


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


def compute_dtype(p: Tensor) -> torch.dtype:
    """The dtype of a parameter's 32-bit state, and that its step is computed in."""
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def stored(p: Tensor, starts: Mapping[Moment, float], bits: int, clips: bool) -> dict[str, Stored]:
    """The tensors of a parameter's state.

    Args:
        p: the parameter.
        starts: its moments, each with the value that all of its elements have at first.
        bits: 8 or 32, the width of the moments.
        clips: whether percentile clipping keeps a history of norms.
    """
    tensors = {"step": Stored((), STEP_DTYPE, p.device)}
    if clips:
        tensors["gnorm_vec"] = Stored((GNORM_HISTORY,), torch.float32, p.device, -1.0)
    for moment, start in starts.items():
        if bits == 32:
            tensors[moment.key] = Stored(p.shape, compute_dtype(p), p.device, start)
            continue
        code, scales = TOP_CODE if start else ZERO_CODE[moment.signed], Layout.of(p.shape)
        tensors[moment.key] = Stored(p.shape, torch.uint8, p.device, code)
        absmax = Stored(scales.absmax_shape, torch.float32, p.device, start)
        tensors[f"{moment.key}_absmax"] = absmax
    return tensors
