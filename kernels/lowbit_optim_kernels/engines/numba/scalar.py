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
from .vector import call, f32, f64, i64, pointer

__all__ = [
    "abs", "count_step", "exp", "inner", "log", "maximum", "minimum", "power", "read_step",
    "recorded", "sign", "single", "sqrt", "where",
]  # fmt: skip


_SEEN = 4 * HISTORY  # bytes


def _larger(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _smaller(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.select(b.fcmp_ordered("<", x, y), x, y)


def _sign(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    zero, one, minus = (ir.Constant(f64, value) for value in (0.0, 1.0, -1.0))
    negative = b.select(b.fcmp_ordered("<", x, zero), minus, zero)
    return b.select(b.fcmp_ordered(">", x, zero), one, negative)


def _library(name: str) -> Callable:
    return lambda b, *numbers: call(b, f"llvm.{name}.f64", f64, *numbers)


def _of_one(emit: Callable) -> Callable:
    @intrinsic
    def function(typing, x):
        return types.float64(types.float64), lambda c, b, s, a: emit(b, *a)

    return function


def _of_two(emit: Callable) -> Callable:
    @intrinsic
    def function(typing, x, y):
        return types.float64(types.float64, types.float64), lambda c, b, s, a: emit(b, *a)

    return function


abs, sqrt, log, exp = (_of_one(_library(name)) for name in ("fabs", "sqrt", "log", "exp"))
sign, single = _of_one(_sign), _of_one(lambda b, x: b.fpext(b.fptrunc(x, f32), f64))
maximum, minimum, power = _of_two(_larger), _of_two(_smaller), _of_two(_library("pow"))


@intrinsic
def where(typing, condition, x, y):
    """The number x where the condition is true, else y."""
    number = types.float64
    return number(types.boolean, number, number), lambda c, b, s, a: b.select(*a)


@intrinsic
def read_step(typing, address):
    """The number of the step at an address, an int64, as a number."""

    kind = types.float64(types.int64)
    return kind, lambda c, b, s, a: b.sitofp(b.load(pointer(b, a[0], i64)), f64)


@inner
def count_step(address, live):
    if live:
        take(address)


@inner
def recorded(history, step, x, rank, live):
    """See `rules.Lasting`; the history is an address."""
    if not (live and math.isfinite(x)):
        return math.inf
    place = int(step) % HISTORY
    fresh = read_f32(history) < 0.0
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
