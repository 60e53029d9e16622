"""Encoding `dynamic8` on vectors of 16 lanes, in two steps: places of numbers, then codes.

`inverse` is 1 / absmax. A place is the position of `numba_tables` with the number's sign; of the
unsigned map, unless to nearest with AVX-512, it is the code. Random bits are rounded by as they
come: without AVX-512 they are added to integers, of the unsigned map and with it to numbers.
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
    i8,
    i16,
    i32,
    i64,
    larger,
    multiply_add,
    pointer,
    smaller,
    spread,
    vector,
)
from .numba_registers import WIDTH, look_up, look_up_rows, packed, with_sign
from .numba_tables import (
    BIAS,
    LEAST,
    LEAST_DITHERED,
    OFFSET,
    SMALLEST,
    dithered_slopes,
    gap_guess,
    gap_tables,
    guess,
    line_tables,
    octave_table,
    segments,
    slope_table,
)

MANTISSA, SIGN, BELOW_TWO = 0x007FFFFF, 0x80000000, 0x3FFFFFFF  # bit patterns of fp32
NUDGE = 2.0**-45  # one ulp of the smallest midpoint, about 2**-22
UNIT = 22  # places by dither count 2**-UNIT: an int32 holds 512, and segment 8 leads to 320
HALF = 0 if HAS_AVX512 else 2**31  # what random bits of the unsigned map are moved by
INTEGER = 1.5 * 2.0**23  # the last bits of a small number's sum with it are the nearest integer


def _linear(b: ir.IRBuilder, x: ir.Value, factor: float | ir.Value, offset: float) -> ir.Value:
    factor = fill(f32, factor) if isinstance(factor, float) else factor
    return multiply_add(b, x, factor, fill(f32, offset))


def _quotient(b: ir.IRBuilder, x: ir.Value, inverse: ir.Value) -> ir.Value:
    """X times inverse; rounded up where an instruction can."""
    if not HAS_AVX512:
        return b.fmul(x, inverse)
    return call(b, "llvm.x86.avx512.mul.ps.512", vector(f32), x, inverse, UPWARD)


def _magnitude(b: ir.IRBuilder, q: ir.Value) -> ir.Value:
    """|q|, and with AVX-512 at least SMALLEST, in one instruction too."""
    if not HAS_AVX512:
        return fabs(b, q)
    name, least = "llvm.x86.avx512.mask.range.ps.512", fill(f32, SMALLEST)
    larger_magnitude, as_ever = ir.Constant(i32, 0b1011), ir.Constant(i32, 4)
    everywhere = ir.Constant(i16, 0xFFFF)
    return call(b, name, vector(f32), q, least, larger_magnitude, least, everywhere, as_ever)


def _moved(b: ir.IRBuilder, q: ir.Value, table: np.ndarray) -> ir.Value:
    """The bits of numbers with other exponents, by an `octave_table`; AVX-512."""
    bits = b.bitcast(q, vector(i32))
    low, high = constant(i32, table[:16]), constant(i32, table[16:])
    name, index = "llvm.x86.avx512.vpermi2var.d.512", b.lshr(bits, fill(i32, 23))
    return b.add(bits, call(b, name, vector(i32), low, index, high))


def _position_by_octaves(b: ir.IRBuilder, q: ir.Value, y: ir.Value, signed: bool) -> ir.Value:
    """Positions with AVX-512, with the sign of q."""
    moved = _moved(b, q, octave_table(segments(signed)[0], 127 + BIAS[signed]))
    slope = look_up(b, slope_table(signed), b.lshr(moved, fill(i32, 23)))
    v = b.bitcast(_linear(b, y, slope, OFFSET), vector(i32))
    v = b.select(b.icmp_unsigned("<", v, fill(i32, BELOW_TWO)), v, fill(i32, BELOW_TWO))
    exponent = b.and_(moved, fill(i32, ~MANTISSA & 0xFFFFFFFF))
    position = b.or_(exponent, b.and_(v, fill(i32, MANTISSA)))
    return b.fptosi(b.bitcast(position, vector(f32)), vector(i32))


def _segment(
    b: ir.IRBuilder, y: ir.Value, signed: bool, tops: np.ndarray, slopes: np.ndarray, unit: int = 0
) -> tuple[ir.Value, ir.Value]:
    """2**(E + unit) and the slope of the segments of magnitudes, without AVX-512.

    One comparison corrects a guess. No unsigned magnitude is below LEAST.
    """
    bias = 127 + BIAS[signed] + unit

    def by_exponent(first: int, values: np.ndarray) -> np.ndarray:
        """A table by the low three bits of the exponent field of segments from `first` on.

        The lowest segment shares the entry of the highest, whose slope serves it too: its numbers
        are so small that the slope does not matter.
        """
        return np.roll(values, first + bias).astype(np.float32)

    factor, offset = guess(signed)
    bits = b.sitofp(b.bitcast(y, vector(i32)), vector(f32))
    exponent = _linear(b, bits, factor, offset + bias + INTEGER)
    exponent = b.bitcast(exponent, vector(i32))
    tops, slopes = by_exponent(0, tops), by_exponent(1, slopes[1:])
    if HAS_AVX2:
        above = b.fcmp_ordered(">", y, look_up(b, tops, exponent))
    else:
        top, slope, next_slope = look_up_rows(b, [tops, slopes, np.roll(slopes, -1)], exponent)
        above = b.fcmp_ordered(">", y, top)
        slope = b.select(above, next_slope, slope)
    exponent = b.sub(exponent, b.sext(above, vector(i32)))
    if HAS_AVX2:
        slope = look_up(b, slopes, exponent)
    return b.bitcast(b.shl(exponent, fill(i32, 23)), vector(f32)), slope


def _position_in_segment(b: ir.IRBuilder, y: ir.Value, signed: bool) -> ir.Value:
    """Positions of magnitudes, or unsigned codes, without AVX-512, not cut off."""
    n, slope = _segment(b, y, signed, *segments(signed))
    below_two = fill(f32, float(np.nextafter(np.float32(2), np.float32(0))))
    v = smaller(b, _linear(b, y, slope, OFFSET), below_two)
    return b.fmul(v, n) if signed else _linear(b, v, n, -1.0)


def _signed_line(b: ir.IRBuilder, y: ir.Value) -> ir.Value:
    """2**UNIT times the z of `numba_tables`, without AVX-512.

    With (F + 2 (2 n - 1)) / 3 = n (v + 4) / 3 - 5 / 6 and so on.
    """
    n, slope = _segment(b, y, True, segments(True)[0], dithered_slopes(True), UNIT)
    v = _linear(b, y, slope, OFFSET)
    near_end = _linear(b, v, 1.0 / 3.0, 4.0 / 3.0)
    near_end = smaller(b, near_end, _linear(b, v, 5.0 / 3.0, -2.0 / 3.0))
    ends = ((v, 1 / 2), (near_end, 5 / 6))
    z = smaller(b, *(_linear(b, x, n, -c * 2.0**UNIT) for x, c in ends))
    return b.fptosi(z, vector(i32))


def _unsigned_codes(b: ir.IRBuilder, y: ir.Value, random: ir.Value) -> ir.Value:
    """Codes by dither of magnitudes, without AVX-512 and without a comparison; see `gap_tables`.

    The random bits, moved by HALF, are numbers of [-1/2, 1/2) as they come.
    """
    (factor, offset), tables = gap_guess(), gap_tables()
    bits = b.sitofp(b.bitcast(y, vector(i32)), vector(f32))
    # Eight bits of e + 128 are the exponent of 2**(e + 1), the three lowest are looked up by.
    gap = b.bitcast(_linear(b, bits, factor, offset + 128 + INTEGER), vector(i32))
    if HAS_AVX2:
        slope, start = (look_up(b, table, gap) for table in tables)
    else:
        slope, start = look_up_rows(b, list(tables), gap)
    first = b.bitcast(b.shl(gap, fill(i32, 23)), vector(f32))
    d = multiply_add(b, y, slope, start)
    above = smaller(b, d, _linear(b, d, 3.0 / 5.0, -1.0 / 5.0))
    z = smaller(b, _linear(b, d, 3.0, 3.0), above)
    random = b.sitofp(b.bitcast(random, vector(i32)), vector(f32))
    z = multiply_add(b, random, fill(f32, 2.0**-32), z)
    return b.fptosi(b.fadd(z, first), vector(i32))


def _line_by_octaves(b: ir.IRBuilder, y: ir.Value, signed: bool) -> ir.Value:
    """The z of `numba_tables` with AVX-512, less two where it is unsigned."""
    ends, tables = line_tables(signed)
    line = b.lshr(_moved(b, y, octave_table(ends, 128)), fill(i32, 23))
    slope, offset, near_end = (look_up(b, table, line) for table in tables)
    f = multiply_add(b, y, slope, offset)
    return smaller(b, multiply_add(b, f, fill(f32, 1.0 / 3.0), near_end), f)


def _cut(b: ir.IRBuilder, z: ir.Value, random: ir.Value) -> ir.Value:
    """One more than the integers below z plus the random bits as numbers in [0, 1); AVX-512.

    The bits are the mantissas of numbers from 1 on, by one instruction of VBMI2.
    """
    one, bits = fill(i32, 127), b.bitcast(random, vector(i32))
    above_one = call(b, "llvm.fshl.v16i32", vector(i32), one, bits, fill(i32, 23))
    z = b.fadd(z, b.bitcast(above_one, vector(f32)))
    name = "llvm.x86.avx512.mask.cvtps2dq.512"
    kept, mask = fill(i32, 0), ir.Constant(i16, 0xFFFF)
    return call(b, name, vector(i32), z, kept, mask, DOWNWARD)


def _cut_integers(b: ir.IRBuilder, z: ir.Value, random: ir.Value) -> ir.Value:
    """Integers of units of 2**-UNIT plus the random bits, in whole numbers; without AVX-512."""
    random = b.lshr(b.bitcast(random, vector(i32)), fill(i32, 32 - UNIT))
    return b.ashr(b.add(z, random), fill(i32, UNIT))


def _signed_like(b: ir.IRBuilder, x: ir.Value, like: ir.Value) -> ir.Value:
    """Numbers that are not negative, with signs."""
    bits, like = (b.bitcast(value, vector(i32)) for value in (x, like))
    return b.bitcast(b.or_(bits, b.and_(like, fill(i32, SIGN))), vector(f32))


def _zero_where_zero(b: ir.IRBuilder, place: ir.Value, x: ir.Value) -> ir.Value:
    """Unsigned places, but zero for zero."""
    if HAS_AVX2 and not HAS_AVX512:
        return with_sign(b, place, b.bitcast(x, vector(i32)))
    return b.select(b.fcmp_ordered(">", x, fill(f32, 0.0)), place, fill(i32, 0))


def _nearest_signed(b: ir.IRBuilder, x: ir.Value, inverse: ir.Value) -> ir.Value:
    # Less so little that only the tie between a negative code and zero turns.
    q = multiply_add(b, x, inverse, fill(f32, -NUDGE))
    y = fabs(b, q)
    if HAS_AVX512:
        return _position_by_octaves(b, q, y, True)
    position = _position_in_segment(b, y, True)
    if HAS_AVX2:
        return with_sign(b, b.fptosi(position, vector(i32)), b.bitcast(x, vector(i32)))
    return b.fptosi(_signed_like(b, position, q), vector(i32))


def _nearest_unsigned(b: ir.IRBuilder, x: ir.Value, inverse: ir.Value) -> ir.Value:
    y = larger(b, _quotient(b, x, inverse), fill(f32, LEAST))
    if HAS_AVX512:
        place = _position_by_octaves(b, y, y, False)
    else:
        place = b.fptosi(_position_in_segment(b, y, False), vector(i32))
    return _zero_where_zero(b, place, x)


def _dithered_signed(b: ir.IRBuilder, x: ir.Value, inverse: ir.Value, random: ir.Value) -> ir.Value:
    q = b.fmul(x, inverse)
    y = _magnitude(b, q)
    if HAS_AVX512:
        return _cut(b, _signed_like(b, _line_by_octaves(b, y, True), q), random)
    z = _signed_line(b, y)  # below zero in the lowest segment, where it is to be zero
    z = b.select(b.icmp_signed(">", z, fill(i32, 0)), z, fill(i32, 0))
    return _cut_integers(b, with_sign(b, z, b.bitcast(x, vector(i32))), random)


def _dithered_unsigned(
    b: ir.IRBuilder, x: ir.Value, inverse: ir.Value, random: ir.Value
) -> ir.Value:
    y = larger(b, _quotient(b, x, inverse), fill(f32, LEAST_DITHERED))
    if HAS_AVX512:
        return _zero_where_zero(b, _cut(b, _line_by_octaves(b, y, False), random), x)
    return _zero_where_zero(b, _unsigned_codes(b, y, random), x)


def _put(zero: int) -> Callable:
    @intrinsic
    def put_64(typing, x, y, z, w, target):
        """Store the codes of four vectors of places at an address."""

        def emit(context, b, signature, args):
            places, target = [b.bitcast(x, vector(i32)) for x in args[:4]], args[4]
            each = WIDTH // 4 if HAS_AVX2 or HAS_AVX512 else 1
            for k in range(0, 4, each):
                if each > 1:
                    codes = packed(b, places[k : k + each], zero)
                else:
                    codes = _saturated(b, b.add(places[k], fill(i32, zero)))
                to = b.add(target, ir.Constant(i64, 16 * k))
                b.store(codes, pointer(b, to, codes.type), align=1)
            return context.get_dummy_value()

        return types.void(F, F, F, F, types.int64), emit

    return put_64


def _saturated(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    for op, bound in ((">", 0), ("<", 255)):
        x = b.select(b.icmp_signed(op, x, fill(i32, bound)), x, fill(i32, bound))
    return b.trunc(x, vector(i8))


def _placer(nearest: Callable) -> Callable:
    @intrinsic
    def place(typing, x, inverse):
        """The places of 16 numbers: i32 lanes, as the bits of a vector of fp32."""

        def emit(context, b, signature, args):
            return b.bitcast(nearest(b, args[0], spread(b, args[1])), vector(f32))

        return F(F, types.float32), emit

    return place


def _ditherer(dithered: Callable) -> Callable:
    @intrinsic
    def place(typing, x, inverse, random):
        """The same by dither, of random bits."""

        def emit(context, b, signature, args):
            return b.bitcast(dithered(b, args[0], spread(b, args[1]), args[2]), vector(f32))

        return F(F, types.float32, F), emit

    return place


place_s, place_u = _placer(_nearest_signed), _placer(_nearest_unsigned)
dither_s, dither_u = _ditherer(_dithered_signed), _ditherer(_dithered_unsigned)
put_s_64, put_dithered_s_64 = _put(127), _put(126 if HAS_AVX512 else 127)  # see `_cut`
put_u_64, put_dithered_u_64 = _put(-1 if HAS_AVX512 else 0), _put(0)
SIGNED = place_s, put_s_64, dither_s, put_dithered_s_64
UNSIGNED = place_u, put_u_64, dither_u, put_dithered_u_64
