"""Names that the generated per-element functions of the Numba engine use: vectors of fp32."""

from __future__ import annotations

from numba import njit
from numpy import float32 as f32

from .numba_codec import (
    decode_s,
    decode_u,
    encode_s,
    encode_s_64,
    encode_u,
    encode_u_64,
    inverse_of,
)
from .numba_memory import (
    enter,
    float_list,
    float_table,
    int_table,
    leave,
    load_bf16,
    load_f16,
    load_f32,
    number_of,
    read_f32,
    read_i64,
    stack,
    store_bf16,
    store_f16,
    store_f32,
    take,
    write_f32,
)
from .numba_vector import absolute as abs
from .numba_vector import (
    finite,
    highest,
    maximum,
    minimum,
    reach,
    reach_unsigned,
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
    "encode_s_64",
    "encode_u",
    "encode_u_64",
    "enter",
    "f32",
    "finite",
    "float_list",
    "float_table",
    "highest",
    "int_table",
    "inverse_of",
    "leave",
    "load_bf16",
    "load_f16",
    "load_f32",
    "maximum",
    "minimum",
    "njit",
    "number_of",
    "only_finite",
    "reach",
    "reach_unsigned",
    "read_f32",
    "read_i64",
    "rounded",
    "sign",
    "splat",
    "sqrt",
    "stack",
    "store_bf16",
    "store_f16",
    "store_f32",
    "take",
    "total",
    "where",
    "write_f32",
]  # fmt: skip


INFINITY = f32(float("inf"))


@njit(nogil=True, error_model="numpy")
def only_finite(x):
    """x, or 0 in lanes that are NaN or infinite."""
    return where(finite(x), x, splat(f32(0.0)))
