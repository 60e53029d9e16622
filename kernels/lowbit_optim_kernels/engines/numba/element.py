"""Names that the generated per-element functions of the Numba engine use: vectors of fp32."""

from __future__ import annotations

from numpy import float32 as f32

from .inner import inner
from .memory import load_bf16, load_f16, load_f32, store_bf16, store_f16, store_f32
from .vector import absolute as abs
from .vector import fused, maximum, minimum, only_finite, sign, sqrt, where

__all__ = [
    "abs", "f32", "fused", "inner", "load_bf16", "load_f16", "load_f32", "maximum", "minimum",
    "only_finite", "sign", "sqrt", "store_bf16", "store_f16", "store_f32", "where",
]  # fmt: skip


INFINITY = f32(float("inf"))
