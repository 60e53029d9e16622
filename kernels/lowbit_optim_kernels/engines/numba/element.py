"""Names that the generated per-element functions of the Numba engine use: vectors of fp32."""

from __future__ import annotations

from numba import njit
from numpy import float32 as f32

from .memory import load_bf16, load_f16, load_f32, store_bf16, store_f16, store_f32
from .vector import absolute as abs
from .vector import finite, fused, maximum, minimum, sign, splat, sqrt, where

__all__ = [
    "abs", "f32", "fused", "load_bf16", "load_f16", "load_f32", "maximum", "minimum", "njit",
    "sign", "sqrt", "store_bf16", "store_f16", "store_f32", "where",
]  # fmt: skip


INFINITY = f32(float("inf"))


@njit(nogil=True, error_model="numpy")
def only_finite(x):
    """x, or 0 in lanes that are NaN or infinite."""
    return where(finite(x), x, splat(f32(0.0)))
