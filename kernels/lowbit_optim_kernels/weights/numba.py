"""Weights of `weights.Weights` on vectors of 16 lanes: how the Numba engine reads and writes them.

`join_<extra>(p, residual)` reads the fp32 weights at two addresses, `split_<extra>(p, residual, w,
bits)` writes them by random bits; the residual's address counts where there is one.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..engines.numba.vector import F, f32, fill, i8, i16, i32, pointer, vector
from . import INFINITE, NAN, ROOM

_RESIDUAL = {0: i16, 8: i8, 16: i16}  # nothing is read or written of the first


def _loaded(b: ir.IRBuilder, address: ir.Value, element: ir.Type) -> ir.Value:
    return b.load(pointer(b, address, vector(element)), align=element.width // 8)


def _stored(b: ir.IRBuilder, x: ir.Value, address: ir.Value, element: ir.Type) -> None:
    at = pointer(b, address, vector(element))
    b.store(b.trunc(x, vector(element)), at, align=element.width // 8)


def _number(x: int) -> ir.Constant:
    return fill(i32, x)


def _zero_where(b: ir.IRBuilder, condition: ir.Value, x: ir.Value) -> ir.Value:
    return b.select(condition, _number(0), x)


def _is_zero(b: ir.IRBuilder, high: ir.Value) -> ir.Value:
    return b.icmp_unsigned("==", b.and_(high, _number(0x7FFF)), _number(0))


def _joiner(extra: int) -> Callable:
    @intrinsic
    def join(typing, p, residual):
        def emit(context, b, signature_, args):
            high = b.zext(_loaded(b, args[0], i16), vector(i32))
            pattern = b.shl(high, _number(16))
            if extra:
                low = b.sext(_loaded(b, args[1], _RESIDUAL[extra]), vector(i32))
                low = b.shl(low, _number(16 - extra))
                pattern = b.add(pattern, _zero_where(b, _is_zero(b, high), low))
            return b.bitcast(pattern, vector(f32))

        return F(types.int64, types.int64), emit

    return join


def split(b: ir.IRBuilder, w: ir.Value, bits: ir.Value, extra: int) -> tuple[ir.Value, ir.Value]:
    """The upper 16 bits and the residual of weights, in i32 lanes; see `weights.split`."""
    pattern = b.bitcast(w, vector(i32))
    magnitude, dropped = b.and_(pattern, _number(0x7FFFFFFF)), 16 - extra
    full = b.icmp_signed(">=", magnitude, _number(ROOM))
    nan = b.icmp_signed(">", magnitude, _number(INFINITE))
    if dropped:
        added = b.lshr(b.bitcast(bits, vector(i32)), _number(32 - dropped))
        pattern = b.lshr(b.add(pattern, _zero_where(b, full, added)), _number(dropped))
    high = low = pattern
    if extra:
        half = 1 << (extra - 1)
        high = b.lshr(b.add(pattern, _zero_where(b, full, _number(half))), _number(extra))
        low = b.sub(pattern, b.shl(high, _number(extra)))
        low = b.select(b.icmp_signed("<", low, _number(half)), low, _number(half - 1))
        low = _zero_where(b, b.or_(nan, _is_zero(b, high)), low)
    return b.select(nan, _number(NAN), high), low


def _splitter(extra: int) -> Callable:
    @intrinsic
    def write(typing, p, residual, w, bits):
        def emit(context, b, signature_, args):
            high, low = split(b, args[2], args[3], extra)
            _stored(b, high, args[0], i16)
            if extra:
                _stored(b, low, args[1], _RESIDUAL[extra])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, F, F), emit

    return write


join_0, join_8, join_16 = map(_joiner, (0, 8, 16))
split_0, split_8, split_16 = map(_splitter, (0, 8, 16))
