"""Names that the generated per-tensor functions of the Numba engine use: fp64 numbers."""

from __future__ import annotations

import math

from numba import njit

from .memory import read_i64, take

__all__ = [
    "abs", "count_step", "exp", "log", "maximum", "minimum", "njit", "power", "read_step", "sign",
    "sqrt", "where",
]  # fmt: skip

_inner = njit(nogil=True, error_model="numpy")


@_inner
def where(condition, a, b):
    return a if condition else b


@_inner
def abs(x):
    return math.fabs(x)


@_inner
def sign(x):
    return 1.0 if x > 0.0 else -1.0 if x < 0.0 else 0.0


@_inner
def maximum(a, b):
    return a if a > b else b


@_inner
def minimum(a, b):
    return a if a < b else b


@_inner
def sqrt(x):
    return math.sqrt(x)


@_inner
def log(x):
    return math.log(x)


@_inner
def exp(x):
    return math.exp(x)


@_inner
def power(x, y):
    return x**y


@_inner
def read_step(address):
    return float(read_i64(address))


@_inner
def count_step(address, live):
    if live:
        take(address)
