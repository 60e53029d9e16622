"""The codec `dynamic8` on vectors of 16 lanes, 64 codes at a time.

`decode_s` and `decode_u` turn codes into numbers, `encode_s` and `encode_u` numbers into codes, and
`encode_dithered_s` and `encode_dithered_u` do so by dither. The instructions are chosen when this
module is imported, from the CPU features that Numba compiles for:

    AVX-512 VBMI   decode by 256-entry tables of bytes held in registers
    AVX-512, AVX2  decode by the line of a code's decade, within 2 ulp of the codebook
    any other      decode by a table in memory

    AVX-512        encode by tables of lines and octaves held in registers
    AVX2           encode by a guess of the decade, which one comparison corrects, and tables of 8
    any other      likewise with tables in memory, in generic vector instructions

All follow `numba_tables` in encoding. `exact_s` and `exact_u` decode to the codebook's own values
on every CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import types

from ...engines.numba.dither import next_bits
from ...engines.numba.inner import inlined, inner
from ...engines.numba.memory import load_f32, store_f32
from ...engines.numba.vector import HAS_AVX512 as HAS_AVX512
from ...engines.numba.vector import f32, i32, maximum, of_one, splat, where
from . import MOST as FP32_MOST
from . import REACH as SCALE_OF_LOWEST
from . import numba_decode, numba_encode, numba_registers, numba_tables
from .numba_decode import decode_s_64, decode_u_64, exact_s_64, exact_u_64
from .numba_encode import HALF as HALF
from .numba_encode import SIGNED, UNSIGNED

# For the engine: the template of its passes, and the modules that compiled code depends on as well.
PASSES = "lowbit_optim_kernels.formats.dynamic8.numba_passes"
DEPENDS = (numba_decode, numba_encode, numba_registers, numba_tables)

LEAST, MOST = np.float32(2.0**-28), np.float32(2.0**28)  # between which absmax needs no care
LARGEST, REACH = np.float32(FP32_MOST), np.float32(SCALE_OF_LOWEST)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_SMALLEST = np.float32(2.0**-126)  # that is not subnormal


@of_one(types.float32)
def _power_of_two_near(b: ir.IRBuilder, a: ir.Value) -> ir.Value:
    """The power of two s with 1 <= a s < 2 for a > 0; at most 2**127."""
    field = b.lshr(b.bitcast(a, i32), ir.Constant(i32, 23))
    wanted = b.sub(ir.Constant(i32, 254), field)
    positive = b.icmp_signed(">", wanted, ir.Constant(i32, 1))
    wanted = b.select(positive, wanted, ir.Constant(i32, 1))
    return b.bitcast(b.shl(wanted, ir.Constant(i32, 23)), f32)


@inner
def inverse_of(x, absmax, n):
    """1 / absmax, to encode n numbers at x; rescales them in place if far from 1.

    Positive ones stay positive, however small: a square that is not zero has no code of zero.
    """
    if absmax > LEAST and absmax < MOST:
        return _ONE / absmax
    if not absmax > _ZERO:
        return _ZERO
    s = _power_of_two_near(absmax)
    for i in range(0, n, 16):
        number = load_f32(x + 4 * i)
        scaled = where(number > _ZERO, maximum(number * s, splat(_SMALLEST)), number * s)
        store_f32(x + 4 * i, scaled)
    return _ONE / (absmax * s)


def _decoder(decode_64: Callable) -> Callable:
    @inner
    def decode(codes, out, n):
        """n codes, a multiple of 64, to numbers at out."""
        for i in range(0, n, 64):
            a, b, c, d = decode_64(codes + i)
            store_f32(out + 4 * i, a)
            store_f32(out + 4 * i + 64, b)
            store_f32(out + 4 * i + 128, c)
            store_f32(out + 4 * i + 192, d)

    return decode


def _encoders(place: Callable, put: Callable, dither: Callable, put_dithered: Callable) -> tuple:
    @inlined
    def encode(x, inverse, codes, n):
        """n fp32 numbers at x, a multiple of 64, to codes; see `inverse_of`."""
        for i in range(0, n, 64):
            a = place(load_f32(x + 4 * i), inverse)
            b = place(load_f32(x + 4 * i + 64), inverse)
            c = place(load_f32(x + 4 * i + 128), inverse)
            d = place(load_f32(x + 4 * i + 192), inverse)
            put(a, b, c, d, codes + i)

    @inlined
    def encode_dithered(x, inverse, codes, n, bits):
        """The same by dither; `bits` are those of the first lanes."""
        for i in range(0, n, 64):
            a = dither(load_f32(x + 4 * i), inverse, bits)
            bits = next_bits(bits)
            b = dither(load_f32(x + 4 * i + 64), inverse, bits)
            bits = next_bits(bits)
            c = dither(load_f32(x + 4 * i + 128), inverse, bits)
            bits = next_bits(bits)
            d = dither(load_f32(x + 4 * i + 192), inverse, bits)
            bits = next_bits(bits)
            put_dithered(a, b, c, d, codes + i)
        return bits

    return encode, encode_dithered


decode_s, decode_u = _decoder(decode_s_64), _decoder(decode_u_64)
exact_s, exact_u = _decoder(exact_s_64), _decoder(exact_u_64)
encode_s, encode_dithered_s = _encoders(*SIGNED)
encode_u, encode_dithered_u = _encoders(*UNSIGNED)
