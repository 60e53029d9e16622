"""The formats `ratio8` and `ratio4` on vectors of 16 lanes, for the template of their passes.

A code that has been worked out is a vector of i32 lanes, as the bits of one of fp32, whose low byte
(or half of one) is stored. Where a number is rounded to nearest, adding 1.5 * 2**23 does that: what
the sum's last bits are is the nearest integer, ties to even.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy import float32 as f32

from ...engines.numba.dither import mix
from ...engines.numba.inner import inner
from ...engines.numba.memory import rounded_bits
from ...engines.numba.vector import (
    DOWNWARD,
    HAS_AVX512,
    HAS_VBMI,
    F,
    call,
    constant,
    fill,
    finite,
    floor,
    i8,
    i16,
    i32,
    maximum,
    minimum,
    of_one,
    of_two,
    pointer,
    rounded,
    shuffle,
    splat,
    vector,
    where,
)
from ...engines.numba.vector import absolute as magnitude
from ...engines.numba.vector import f32 as single
from . import LARGEST, LEAST_SCALE, RATIO_LEVELS, SOFT, SQUARE_LEVELS, ZERO

PASSES = "lowbit_optim_kernels.formats.ratio.numba_passes"

SQUARE_8, SQUARE_4 = f32(SQUARE_LEVELS[8]), f32(SQUARE_LEVELS[4])
RATIO_8, RATIO_4 = f32(RATIO_LEVELS[8]), f32(RATIO_LEVELS[4])
ZERO_8, ZERO_4 = f32(ZERO), f32(8)
SOFT_LEVELS, SOFT_SUM = f32(127.0), f32(SOFT)
INTEGER = f32(1.5 * 2.0**23)  # and below 2**22 what is added to it comes out as an integer
_LEAST, _LARGEST, _NONE, _ONE = (f32(x) for x in (LEAST_SCALE, LARGEST, 0.0, 1.0))


# Codes in memory.


def _loader(widen: Callable) -> Callable:
    @of_one(types.int64, F)
    def load(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
        codes = b.load(pointer(b, address, vector(i8)), align=1)
        return b.sitofp(widen(b, b.zext(codes, vector(i32))), vector(single))

    return load


# 16 codes, their lower and their upper halves, as numbers.
load_codes = _loader(lambda b, x: x)
load_lower = _loader(lambda b, x: b.and_(x, fill(i32, 15)))
load_upper = _loader(lambda b, x: b.lshr(x, fill(i32, 4)))


def _store_low_bytes(b: ir.IRBuilder, lanes: list, address: ir.Value) -> None:
    """Store the low bytes of four vectors of i32 lanes."""
    raw = [b.bitcast(x, vector(i8, 64)) for x in lanes]
    if HAS_VBMI:
        name, index = "llvm.x86.avx512.vpermi2var.qi.512", constant(i8, [*range(0, 128, 4)] * 2)
        pairs = [call(b, name, vector(i8, 64), raw[k], index, raw[k + 1]) for k in (0, 2)]
        codes = shuffle(b, pairs[0], pairs[1], [*range(32), *range(96, 128)])
    else:
        pairs = [shuffle(b, raw[k], raw[k + 1], range(0, 128, 4)) for k in (0, 2)]
        codes = shuffle(b, pairs[0], pairs[1], range(64))
    b.store(codes, pointer(b, address, vector(i8, 64)), align=1)


@intrinsic
def put_codes(typing, address, x, y, z, w):
    """Store 64 codes."""

    def emit(context, b, signature, args):
        _store_low_bytes(b, args[1:], args[0])
        return context.get_dummy_value()

    return types.void(types.int64, F, F, F, F), emit


@of_two(F)
def joined(b: ir.IRBuilder, lower: ir.Value, upper: ir.Value) -> ir.Value:
    """16 pairs of codes of half a byte."""
    lower, upper = (b.bitcast(x, vector(i32)) for x in (lower, upper))
    both = b.or_(b.and_(lower, fill(i32, 15)), b.shl(upper, fill(i32, 4)))
    return b.bitcast(both, vector(single))


@of_one(types.int64, types.float32)
def read_bf16(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """One bf16 number."""
    bits = b.zext(b.load(pointer(b, address, i16)), i32)
    return b.bitcast(b.shl(bits, ir.Constant(i32, 16)), single)


@intrinsic
def write_bf16(typing, address, x):
    """Store one number that is a bf16 one."""

    def emit(context, b, signature, args):
        bits = b.lshr(b.bitcast(args[1], i32), ir.Constant(i32, 16))
        b.store(b.trunc(bits, i16), pointer(b, args[0], i16))
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), emit


@intrinsic
def dithered_scale(typing, x, base):
    """A number of bf16's range, not negative, rounded to one of bf16; `base` as of `block_bits`."""

    def emit(context, b, signature, args):
        random = mix(b, b.lshr(b.trunc(args[1], i32), ir.Constant(i32, 8)))
        bits = b.add(b.bitcast(args[0], i32), b.lshr(random, ir.Constant(i32, 16)))
        return b.bitcast(b.and_(bits, ir.Constant(i32, 0xFFFF0000)), single)

    return types.float32(types.float32, types.int64), emit


# Rounding.


@of_one(types.float32)
def _nearest_bf16(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    bits = rounded_bits(b, b.bitcast(x, i32))
    return b.bitcast(b.and_(bits, ir.Constant(i32, 0xFFFF0000)), single)


@of_two(F)
def _below(b: ir.IRBuilder, x: ir.Value, zero: ir.Value) -> ir.Value:
    """The code of the next integers below numbers of less than 2**22, as i32 lanes."""
    zero = b.fadd(zero, fill(single, float(INTEGER)))
    if HAS_AVX512:  # in one instruction
        return call(b, "llvm.x86.avx512.add.ps.512", vector(single), x, zero, DOWNWARD)
    return b.fadd(floor(b, x), zero)


@of_one(F)
def _root(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """sqrt(x), with AVX-512 to about one unit in the last place; zero may give NaN.

    A step has two square roots and two divisions for an element, all of them by one unit of the
    processor: so this is a step of Newton's method from an estimate of 14 bits.
    """
    if not HAS_AVX512:
        return call(b, "llvm.sqrt.v16f32", vector(single), x)
    everywhere, half = ir.Constant(i16, 0xFFFF), fill(single, 0.5)
    name = "llvm.x86.avx512.rsqrt14.ps.512"
    inverse = call(b, name, vector(single), x, fill(single, 0.0), everywhere)
    root = b.fmul(x, inverse)
    half_root = b.fmul(root, half)
    name = "llvm.fma.v16f32"
    error = call(b, name, vector(single), b.fneg(half_root), inverse, half)
    return call(b, name, vector(single), root, error, root)


# Numbers of less than 2**31 without their fractions: as i32 lanes, and as numbers.
_cut = of_one(F)(lambda b, x: b.bitcast(b.fptosi(x, vector(i32)), vector(single)))
_whole = of_one(F)(lambda b, x: b.sitofp(b.fptosi(x, vector(i32)), vector(single)))
# Magnitudes with the signs of the second operand.
_with_sign = of_two(F)(lambda b, x, y: call(b, "llvm.copysign.v16f32", vector(single), x, y))


# Scales of blocks, and what numbers are multiplied by to be coded.


@inner
def square_scale(largest, levels):
    return largest / (levels * levels)


@inner
def ratio_scale(largest, levels, dithered):
    scale = largest / levels
    if not dithered:
        scale = _nearest_bf16(scale)
    return scale if scale >= _LEAST else _NONE


@inner
def soft_scale(largest, dithered):
    return min(largest if dithered else _nearest_bf16(largest), _LARGEST)


@inner
def inverse_of_scale(scale):
    return _ONE / scale if scale > _NONE else _NONE


# Numbers of codes. (`rounded`: a product that does not enter a sum before it is rounded.)


@inner
def root_of(code, scale):
    return rounded(rounded(code, code), splat(scale))


@inner
def of_ratio(code, scale, root):
    return rounded(rounded(code, splat(scale)), root)


@inner
def of_soft(code, scale):
    return rounded(code, splat(scale)) / (SOFT_SUM - magnitude(code))


@inner
def ratio_to(x, root):
    return where(root > _NONE, x / root, splat(_NONE))


@inner
def ratio_to_least(x, root, least):
    """As `ratio_to` of roots that are `least` at least, and 0 where that is not finite."""
    ratio = x / maximum(root, splat(least))
    return where((root > _NONE) & finite(ratio), ratio, splat(_NONE))


# Codes of numbers: `random` is what is added before the fraction is cut off.


@inner
def square_code(root, inverse, random, levels):
    y = _root(rounded(root, splat(inverse))) + random
    y = maximum(minimum(y, levels + f32(0.5)), splat(_ONE))
    return _cut(where(root > _NONE, y, splat(_NONE)))


@inner
def ratio_code(ratio, inverse, zero):
    """To the nearest; no ratio is as large as a bf16 scale that is too small could be."""
    return rounded(ratio, splat(inverse)) + (zero + INTEGER)


@inner
def dithered_ratio_code(ratio, inverse, zero, random, levels):
    y = rounded(ratio, splat(inverse)) + random
    return _below(maximum(minimum(y, levels), -splat(levels)), splat(zero))


@inner
def _soft(x, scale):
    """254 |x| / (scale + |x|), and 0 throughout a block without a scale."""
    a, zero = magnitude(x), not scale > _NONE
    share = rounded(splat(_NONE if zero else SOFT_SUM), a)
    return share / (splat(_ONE if zero else scale) + a)


@inner
def soft_code(x, scale):
    y = minimum(_soft(x, scale), splat(SOFT_LEVELS))
    return _with_sign(y, x) + (ZERO_8 + INTEGER)


@inner
def dithered_soft_code(x, scale, random):
    y = minimum(_soft(x, scale) + random, splat(SOFT_LEVELS))
    return _below(_with_sign(_whole(y), x), splat(ZERO_8))
