"""Names that the generated per-tensor functions of the Numba engine use: fp64 numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...rules import HISTORY
from .inner import inner
from .memory import read_f32, stack, take, write_f32
from .vector import call, f32, f64, i64, larger, of_one, of_two, pointer, sign_of, smaller

__all__ = [
    "abs", "count_step", "exp", "inner", "log", "maximum", "minimum", "power", "read_step",
    "recorded", "sign", "single", "sqrt", "where",
]  # fmt: skip


_SEEN = 4 * HISTORY  # bytes


_number = types.float64


def _library(name: str) -> Callable:
    return lambda b, *numbers: call(b, f"llvm.{name}.f64", f64, *numbers)


abs, sqrt, log, exp = map(of_one(_number), map(_library, ("fabs", "sqrt", "log", "exp")))
sign = of_one(_number)(sign_of)
single = of_one(_number)(lambda b, x: b.fpext(b.fptrunc(x, f32), f64))
maximum, minimum, power = map(of_two(_number), (larger, smaller, _library("pow")))


@intrinsic
def where(typing, condition, x, y):
    """The number x where the condition is true, else y."""
    return _number(types.boolean, _number, _number), lambda c, b, s, a: b.select(*a)


@of_one(types.int64, _number)
def read_step(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """The number of the step at an address, an int64, as a number."""
    return b.sitofp(b.load(pointer(b, address, i64)), f64)


@inner
def count_step(address, live):
    if live:
        take(address)


@inner
def recorded(history, step, x, rank, live):
    """See `rules.Lasting`; the history is an address."""
    fresh = read_f32(history) < 0.0
    if not (live and math.isfinite(x)) or (fresh and x == 0.0):
        return math.inf
    place = int(step) % HISTORY
    seen = stack(_SEEN)  # in order of size
    for k in range(HISTORY):
        if fresh or k == place:
            write_f32(history + 4 * k, single(x))
        number = read_f32(history + 4 * k)
        i = k
        while i > 0 and read_f32(seen + 4 * (i - 1)) > number:
            write_f32(seen + 4 * i, read_f32(seen + 4 * (i - 1)))
            i -= 1
        write_f32(seen + 4 * i, number)
    return float(read_f32(seen + 4 * int(rank)))
