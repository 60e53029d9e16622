"""Names that the generated per-element functions of the Numba engine use: vectors of fp32."""

from __future__ import annotations

from numba import njit
from numpy import float32 as f32

from .numba_codec import decode_s, decode_u, encode_s, encode_u
from .numba_memory import (
    enter,
    leave,
    load_bf16,
    load_f16,
    load_f32,
    read_f32,
    stack,
    store_bf16,
    store_f16,
    store_f32,
    write_f32,
)
from .numba_vector import absolute as abs
from .numba_vector import (
    finite,
    highest,
    maximum,
    minimum,
    reach,
    rounded,
    sign,
    splat,
    sqrt,
    total,
    where,
)

__all__ = [
    "INFINITY",
    "abs",
    "decode_s",
    "decode_u",
    "encode_s",
    "encode_u",
    "enter",
    "f32",
    "finite",
    "highest",
    "leave",
    "load_bf16",
    "load_f16",
    "load_f32",
    "maximum",
    "minimum",
    "njit",
    "only_finite",
    "reach",
    "read_f32",
    "rounded",
    "sign",
    "splat",
    "sqrt",
    "stack",
    "store_bf16",
    "store_f16",
    "store_f32",
    "total",
    "where",
    "write_f32",
]  # fmt: skip


INFINITY = f32(float("inf"))


@njit(nogil=True, error_model="numpy")
def only_finite(x):
    """x, or 0 in lanes that are NaN or infinite."""
    return where(finite(x), x, splat(f32(0.0)))
