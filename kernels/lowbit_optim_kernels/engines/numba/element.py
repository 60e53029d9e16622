"""Names that the generated per-element functions of the Numba engine use: vectors of fp32."""

from __future__ import annotations

from numba import njit
from numpy import float32 as f32

from ...formats.dynamic8.numba import (
    LEAST,
    MOST,
    ONE_DOWN,
    decode_s,
    decode_u,
    encode_s,
    encode_u,
    inverse_of,
    place_s,
    place_u,
    put_s_64,
    put_u_64,
)
from .memory import (
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
from .vector import absolute as abs
from .vector import (
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
    "LEAST",
    "MOST",
    "ONE_DOWN",
    "abs",
    "decode_s",
    "decode_u",
    "encode_s",
    "encode_u",
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
    "place_s",
    "place_u",
    "put_s_64",
    "put_u_64",
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
