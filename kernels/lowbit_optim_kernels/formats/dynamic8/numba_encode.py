"""Encoding `dynamic8` on vectors of 16 lanes, in two steps.

`inverse` is 2**DOWN / absmax. A place is a position, or without AVX-512 the code.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...engines.numba.vector import (
    DOWNWARD,
    HAS_AVX2,
    HAS_AVX512,
    UPWARD,
    F,
    call,
    constant,
    f32,
    fabs,
    fill,
    floor,
    i8,
    i16,
    i32,
    i64,
    pointer,
    shuffle,
    spread,
    vector,
)
from .numba_decode import TRANSPOSE
from .numba_tables import (
    BIAS,
    DOWN,
    OFFSET,
    dithered_slopes,
    line_tables,
    octave_table,
    segments,
    slope_table,
)

MANTISSA, ONE, BELOW_TWO = 0x007FFFFF, 0x3F800000, 0x3FFFFFFF  # bit patterns of fp32
# One ulp of the smallest midpoint, about 2**-22, times 2**DOWN.
NUDGE = 2.0 ** (DOWN - 45)


def _by_halves(b: ir.IRBuilder, look_up: Callable, index: ir.Value) -> ir.Value:
    """A look-up of eight lanes for each half of sixteen."""
    low, high = (look_up(shuffle(b, index, index, range(k, k + 8))) for k in (0, 8))
    return shuffle(b, low, high, range(16))


def _slope(b: ir.IRBuilder, signed: bool, index: ir.Value, slopes: np.ndarray) -> ir.Value:
    """The slope of a segment by the exponent field."""
    table = slope_table(signed, slopes).astype(np.float32)
    if HAS_AVX512:
        name = "llvm.x86.avx512.permvar.sf.512"  # looks at the low four bits
        return call(b, name, vector(f32), constant(f32, table), index)
    # Of the low three bits the first segment shares those of the last, whose slope serves it too:
    # its numbers are so small that the slope does not matter.
    first = (127 + BIAS[signed]) & 15
    table[first] = table[(first + 8) & 15]
    eight = constant(f32, [table[k] or table[k + 8] for k in range(8)])

    def look_up(half: ir.Value) -> ir.Value:
        return call(b, "llvm.x86.avx2.permps", vector(f32, 8), eight, half)

    return _by_halves(b, look_up, index)


def _octave(b: ir.IRBuilder, signed: bool, index: ir.Value) -> ir.Value:
    """What to add to the bits of a number by the low five bits of its exponent field."""
    table = octave_table(signed)
    if HAS_AVX512:
        low, high = constant(i32, table[:16]), constant(i32, table[16:])
        name = "llvm.x86.avx512.vpermi2var.d.512"
        return call(b, name, vector(i32), low, index, high)

    def look_up(half: ir.Value) -> ir.Value:
        parts = [constant(i32, table[k : k + 8]) for k in range(0, 32, 8)]
        parts = [call(b, "llvm.x86.avx2.permd", vector(i32, 8), part, half) for part in parts]
        for bit in (28, 27):  # to the sign, by which AVX2 selects
            chosen = b.icmp_signed("<", b.shl(half, fill(i32, bit, 8)), fill(i32, 0, 8))
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [b.select(chosen, upper, lower) for lower, upper in pairs]
        return parts[0]

    return _by_halves(b, look_up, index)


def _scaled(b: ir.IRBuilder, x: ir.Value, inverse: ir.Value) -> ir.Value:
    """X times inverse, less so little that only the tie between a negative code and zero turns."""
    return call(b, "llvm.fma.v16f32", vector(f32), x, inverse, fill(f32, -NUDGE))


def _never_zero(b: ir.IRBuilder, x: ir.Value, inverse: ir.Value) -> ir.Value:
    """X times inverse; rounded up where it can be, so that a positive number stays one."""
    if not HAS_AVX512:
        return b.fmul(x, inverse)
    return call(b, "llvm.x86.avx512.mul.ps.512", vector(f32), x, inverse, UPWARD)


def _position_by_tables(b: ir.IRBuilder, x: ir.Value, inverse: ir.Value, signed: bool) -> ir.Value:
    """Signed: code - 127; unsigned: code + 1, or less for zero; i32 lanes."""
    q = _scaled(b, x, inverse) if signed else _never_zero(b, x, inverse)
    bits = b.bitcast(q, vector(i32))
    octave = b.lshr(bits, fill(i32, 23))  # a permutation looks at the low five bits only
    moved = b.add(bits, _octave(b, signed, octave))  # keeps the sign of q
    slope = _slope(b, signed, b.lshr(moved, fill(i32, 23)), segments(signed)[1])
    y = fabs(b, q) if signed else q
    v = call(b, "llvm.fma.v16f32", vector(f32), y, slope, fill(f32, OFFSET))
    v = b.bitcast(v, vector(i32))
    v = b.select(b.icmp_unsigned("<", v, fill(i32, BELOW_TWO)), v, fill(i32, BELOW_TWO))
    if not signed:
        v = b.select(b.icmp_unsigned(">", v, fill(i32, ONE)), v, fill(i32, ONE))
    exponent = b.and_(moved, fill(i32, ~MANTISSA & 0xFFFFFFFF))
    position = b.or_(exponent, b.and_(v, fill(i32, MANTISSA)))
    return b.fptosi(b.bitcast(position, vector(f32)), vector(i32))


def _codes_of(b: ir.IRBuilder, x: ir.Value, position: ir.Value, signed: bool) -> ir.Value:
    """Codes of 16 numbers with their positions, without the instructions of `_pack_codes`."""
    code = b.add(position, fill(i32, 127 if signed else -1))
    least = fill(i32, 0 if signed else 1)
    code = b.select(b.icmp_signed(">", code, least), code, least)
    if not signed:
        code = b.select(b.fcmp_ordered(">", x, fill(f32, 0.0)), code, fill(i32, 0))
    return code


def _pack_codes(b: ir.IRBuilder, positions: list, zero: int) -> ir.Value:
    """Four vectors of positions as 64 codes, to which `zero` is added.

    Saturating makes -1.0 code 0, unsigned zero too.
    """
    halves = []
    for i in (0, 2):
        name = "llvm.x86.avx512.packssdw.512"
        packed = call(b, name, vector(i16, 32), positions[i], positions[i + 1])
        halves.append(b.add(packed, fill(i16, zero, 32)) if zero else packed)
    packed = call(b, "llvm.x86.avx512.packuswb.512", vector(i8, 64), *halves)
    words = b.bitcast(packed, vector(i32))
    return b.bitcast(shuffle(b, words, words, TRANSPOSE), vector(i8, 64))


def _codes_by_comparing(b: ir.IRBuilder, x: ir.Value, inverse: ir.Value, signed: bool) -> ir.Value:
    """Codes of 16 numbers in generic vector instructions; i32 lanes."""
    q = _scaled(b, x, inverse) if signed else b.fmul(x, inverse)
    y = fabs(b, q) if signed else q
    scale, slope = _segment_by_comparing(b, y, signed, segments(signed)[1])
    v = call(b, "llvm.fma.v16f32", vector(f32), y, slope, fill(f32, OFFSET))
    below_two = fill(f32, float(np.nextafter(np.float32(2), np.float32(0))))
    v = b.select(b.fcmp_ordered("<", v, below_two), v, below_two)
    zero = fill(i32, 0)
    if signed:
        v = call(b, "llvm.copysign.v16f32", vector(f32), b.fmul(v, scale), q)
        code = b.add(b.fptosi(v, vector(i32)), fill(i32, 127))
        return b.select(b.icmp_signed(">", code, zero), code, zero)
    v = b.select(b.fcmp_ordered(">", v, fill(f32, 1.0)), v, fill(f32, 1.0))
    code = b.sub(b.fptosi(b.fmul(v, scale), vector(i32)), fill(i32, 1))
    return b.select(b.fcmp_ordered(">", x, fill(f32, 0.0)), code, zero)


def _segment_by_tables(b: ir.IRBuilder, q: ir.Value, signed: bool) -> tuple[ir.Value, ir.Value]:
    """2**E and the dithered slope of the segments of numbers."""
    bits = b.bitcast(q, vector(i32))
    moved = b.add(bits, _octave(b, signed, b.lshr(bits, fill(i32, 23))))
    slope = _slope(b, signed, b.lshr(moved, fill(i32, 23)), dithered_slopes(signed))
    first = b.and_(moved, fill(i32, 0x7F800000))
    return b.bitcast(first, vector(f32)), slope


def _segment_by_comparing(
    b: ir.IRBuilder, y: ir.Value, signed: bool, slopes: np.ndarray
) -> tuple[ir.Value, ir.Value]:
    """2**E and the slope of the segments of magnitudes."""
    tops, down = segments(signed)[0], 2.0**DOWN
    first = 0 if signed else 1
    slope, scale = fill(f32, slopes[first] / down), fill(f32, 2.0 ** (first + BIAS[signed]))
    for e in range(first, 8):
        above = b.fcmp_ordered(">", y, fill(f32, tops[e] * down))
        slope = b.select(above, fill(f32, slopes[e + 1] / down), slope)
        scale = b.select(above, fill(f32, 2.0 ** (e + 1 + BIAS[signed])), scale)
    return scale, slope


def _line(b: ir.IRBuilder, n: ir.Value, slope: ir.Value, y: ir.Value) -> ir.Value:
    """The z of `numba_tables`, with (F + 2 (2 n - 1)) / 3 = n (v + 4) / 3 - 5 / 6 and so on."""

    def linear(x: ir.Value, factor: float | ir.Value, offset: float) -> ir.Value:
        factor = fill(f32, factor) if isinstance(factor, float) else factor
        return call(b, "llvm.fmuladd.v16f32", vector(f32), x, factor, fill(f32, offset))

    def least(x: ir.Value, y: ir.Value) -> ir.Value:
        return b.select(b.fcmp_ordered("<", x, y), x, y)

    v = linear(y, slope, OFFSET)
    near_ends = least(linear(v, 1.0 / 3.0, 4.0 / 3.0), linear(v, 5.0 / 3.0, -2.0 / 3.0))
    return least(linear(v, n, -0.5), linear(near_ends, n, -5.0 / 6.0))


def _line_by_tables(b: ir.IRBuilder, q: ir.Value, y: ir.Value, signed: bool) -> ir.Value:
    """The same with AVX-512 by tables of lines, in codes where it is unsigned."""
    bits = b.bitcast(q, vector(i32))
    moved = b.add(bits, _octave(b, signed, b.lshr(bits, fill(i32, 23))))
    segment = b.lshr(moved, fill(i32, 23))
    name = "llvm.x86.avx512.permvar.sf.512"
    tables = [constant(f32, table) for table in line_tables(signed).astype(np.float32)]
    slope, *offsets = (call(b, name, vector(f32), table, segment) for table in tables)

    def line(x: ir.Value, factor: ir.Value, offset: ir.Value) -> ir.Value:
        return call(b, "llvm.fma.v16f32", vector(f32), x, factor, offset)

    z = f = line(y, slope, offsets[0])
    for factor, offset in zip((1.0 / 3.0, 5.0 / 3.0), offsets[1:], strict=True):
        other = line(f, fill(f32, factor), offset)
        z = b.select(b.fcmp_ordered("<", other, z), other, z)
    return z


def _to_integers(b: ir.IRBuilder, x: ir.Value, how: ir.Constant) -> ir.Value:
    """With AVX-512; NaN gives the lowest."""
    name = "llvm.x86.avx512.mask.cvtps2dq.512"
    kept, mask = fill(i32, 0), ir.Constant(i16, 0xFFFF)
    return call(b, name, vector(i32), x, kept, mask, how)


def _dithered(
    b: ir.IRBuilder, x: ir.Value, inverse: ir.Value, random: ir.Value, signed: bool
) -> ir.Value:
    """Places of 16 numbers by dither, as i32 lanes.

    With AVX-512 those of `_position_by_tables` where it is signed, else codes that may be too
    large, or negative for zero; without AVX-512 codes.
    """
    q = b.fmul(x, inverse) if signed else _never_zero(b, x, inverse)
    y = fabs(b, q) if signed else q
    if HAS_AVX512:
        z = _line_by_tables(b, q, y, signed)
    elif HAS_AVX2:
        z = _line(b, *_segment_by_tables(b, q, signed), y)
    else:
        z = _line(b, *_segment_by_comparing(b, y, signed, dithered_slopes(signed)), y)
    if signed:
        if not HAS_AVX512:
            z = b.select(b.fcmp_ordered(">", z, fill(f32, 0.0)), z, fill(f32, 0.0))
        z = call(b, "llvm.copysign.v16f32", vector(f32), z, q)
    z = b.fadd(z, random, flags=("contract",))
    if HAS_AVX512 and signed:
        return _to_integers(b, z, DOWNWARD)
    if HAS_AVX512:  # a positive number never becomes zero
        least = fill(f32, 1.0)
        return _to_integers(b, b.select(b.fcmp_ordered(">", least, z), least, z), DOWNWARD)
    top = fill(f32, 128.0 if signed else 256.0)
    z = b.select(b.fcmp_ordered("<", z, top), z, top)
    return _codes_of(b, x, b.fptosi(floor(b, z), vector(i32)), signed)


def _encoder(signed: bool) -> tuple[Callable, ...]:
    @intrinsic
    def place(typing, x, inverse):
        """The places of 16 numbers: i32 lanes, as the bits of a vector of fp32."""

        def emit(context, b, signature, args):
            x, inverse = args[0], spread(b, args[1])
            if HAS_AVX2 or HAS_AVX512:
                places = _position_by_tables(b, x, inverse, signed)
                if not HAS_AVX512:
                    places = _codes_of(b, x, places, signed)
            else:
                places = _codes_by_comparing(b, x, inverse, signed)
            return b.bitcast(places, vector(f32))

        return F(F, types.float32), emit

    @intrinsic
    def place_dithered(typing, x, inverse, random):
        """The same by dither, of numbers in [0, 1)."""

        def emit(context, b, signature, args):
            places = _dithered(b, args[0], spread(b, args[1]), args[2], signed)
            return b.bitcast(places, vector(f32))

        return F(F, types.float32, F), emit

    def put(zero: int) -> Callable:
        @intrinsic
        def put_64(typing, x, y, z, w, target):
            """Store the codes of four vectors of places at an address."""

            def emit(context, b, signature, args):
                places, target = [b.bitcast(x, vector(i32)) for x in args[:4]], args[4]
                if HAS_AVX512:
                    packed = _pack_codes(b, places, zero)
                    b.store(packed, pointer(b, target, vector(i8, 64)), align=1)
                    return context.get_dummy_value()
                for k, codes in enumerate(places):
                    to = pointer(b, b.add(target, ir.Constant(i64, 16 * k)), vector(i8))
                    b.store(b.trunc(codes, vector(i8)), to, align=1)
                return context.get_dummy_value()

            return types.void(F, F, F, F, types.int64), emit

        return put_64

    return place, put(127 if signed else -1), place_dithered, put(127 if signed else 0)


SIGNED, UNSIGNED = _encoder(True), _encoder(False)
place_s, put_s_64, dither_s, put_dithered_s_64 = SIGNED
place_u, put_u_64, dither_u, put_dithered_u_64 = UNSIGNED
