"""Decoding `dynamic8` on vectors of 16 lanes, 64 codes at a time.

By bytes and by memory a number is the codebook's; by lines it may be 2 ulp off.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...engines.numba.vector import (
    HAS_AVX2,
    HAS_AVX512,
    HAS_VBMI,
    F,
    call,
    constant,
    f32,
    fill,
    i1,
    i8,
    i16,
    i32,
    i64,
    multiply_add,
    pointer,
    shuffle,
    vector,
)
from .numba_registers import TRANSPOSE, look_up
from .numba_tables import book, decoding_lines


def _interleave(b: ir.IRBuilder, x: ir.Value, y: ir.Value, size: int, count: int) -> list:
    """The two halves of x and y interleaved within 128-bit lanes, elements of `size` bytes."""
    lane = 16 // size
    halves = []
    for half in (0, lane // 2):
        index = []
        for start in range(0, count, lane):
            for j in range(lane // 2):
                index += [start + half + j, count + start + half + j]
        halves.append(shuffle(b, x, y, index))
    return halves


def _planes(b: ir.IRBuilder, codes: ir.Value, signed: bool) -> list:
    """The four bytes of the codebook's fp32 values, looked up in registers; lowest byte first."""
    values = book(signed)[127:255] if signed else book(signed)
    raw = values.view(np.uint8).reshape(-1, 4)

    def look_up_byte(index: ir.Value, first: int, k: int) -> ir.Value:
        low, high = (constant(i8, raw[j : j + 64, k]) for j in (first, first + 64))
        name = "llvm.x86.avx512.vpermi2var.qi.512"  # looks at the low seven bits of the index
        return call(b, name, vector(i8, 64), low, index, high)

    if not signed:
        upper_half = b.icmp_signed("<", codes, fill(i8, 0, 64))
        return [
            b.select(upper_half, look_up_byte(codes, 128, k), look_up_byte(codes, 0, k))
            for k in range(4)
        ]
    # The map is symmetric but for its last code, which is 1.0 = 0x3F800000.
    position = b.sub(codes, fill(i8, 127, 64))
    function_type = ir.FunctionType(vector(i8, 64), [vector(i8, 64), i1])
    absolute = cgutils.get_or_insert_function(b.module, function_type, "llvm.abs.v64i8")
    magnitude = b.call(absolute, [position, ir.Constant(i1, 0)])
    planes = [look_up_byte(magnitude, 0, k) for k in range(4)]
    planes[3] = b.or_(planes[3], b.and_(position, fill(i8, 0x80, 64)))
    is_one = b.icmp_unsigned("==", codes, fill(i8, 255, 64))
    planes[2] = b.select(is_one, fill(i8, 0x80, 64), planes[2])
    planes[3] = b.select(is_one, fill(i8, 0x3F, 64), planes[3])
    return planes


def _decode_by_bytes(b: ir.IRBuilder, address: ir.Value, signed: bool) -> list:
    """Look each of the four bytes of the fp32 values up in registers, then put them together."""
    codes = b.load(pointer(b, address, vector(i8, 64)), align=1)
    words = b.bitcast(codes, vector(i32))
    codes = b.bitcast(shuffle(b, words, words, TRANSPOSE), vector(i8, 64))
    planes = _planes(b, codes, signed)
    pairs = [_interleave(b, planes[k], planes[k + 1], 1, 64) for k in (0, 2)]
    low, high = ([b.bitcast(x, vector(i16, 32)) for x in pair] for pair in pairs)
    whole = [x for h in (0, 1) for x in _interleave(b, low[h], high[h], 2, 32)]
    return [b.bitcast(x, vector(f32)) for x in whole]


def _decode_by_memory(b: ir.IRBuilder, address: ir.Value, signed: bool) -> list:
    array_type = ir.ArrayType(f32, 256)
    name = f"dynamic8_{'signed' if signed else 'unsigned'}"
    table = b.module.globals.get(name)
    if table is None:
        values = ir.Constant(array_type, [float(value) for value in book(signed)])
        table = cgutils.global_constant(b, name, values)
    base = pointer(b, address, i8)
    zero = ir.Constant(i64, 0)
    vectors = []
    for k in range(4):
        lanes = ir.Constant(vector(f32), ir.Undefined)
        for j in range(16):
            code = b.zext(b.load(b.gep(base, [ir.Constant(i64, 16 * k + j)])), i64)
            value = b.load(b.gep(table, [zero, code]))
            lanes = b.insert_element(lanes, value, ir.Constant(i32, j))
        vectors.append(lanes)
    return vectors


def _decode_by_lines(b: ir.IRBuilder, address: ir.Value, signed: bool) -> list:
    """Positions, as floats, by the lines of their decades."""
    slopes, offsets = decoding_lines(signed)
    vectors = []
    for k in range(0, 64, 16):
        at = pointer(b, b.add(address, ir.Constant(i64, k)), vector(i8))
        codes = b.zext(b.load(at, align=1), vector(i32))
        f = b.sitofp(b.add(codes, fill(i32, -127 if signed else 1)), vector(f32))
        bits = b.bitcast(f, vector(i32))
        exponent = b.lshr(bits, fill(i32, 23))
        slope, offset = (look_up(b, table, exponent) for table in (slopes, offsets))
        if signed:
            power = b.bitcast(b.and_(bits, fill(i32, 0xFF800000)), vector(f32))
            f, offset = b.fsub(f, power), b.fmul(power, offset)
        vectors.append(multiply_add(b, f, slope, offset))
    return vectors


_exact = _decode_by_bytes if HAS_VBMI else _decode_by_memory
_fast = _decode_by_lines if HAS_AVX2 or HAS_AVX512 else _decode_by_memory


def _decoder(decode: Callable, signed: bool) -> Callable:
    @intrinsic
    def decode_64(typing, address):
        def emit(context, b, signature, args):
            vectors = decode(b, args[0], signed)
            return context.make_tuple(b, signature.return_type, vectors)

        return types.UniTuple(F, 4)(types.int64), emit

    return decode_64


exact_s_64, exact_u_64 = _decoder(_exact, True), _decoder(_exact, False)
# Within a step.
decode_s_64, decode_u_64 = (
    (exact_s_64, exact_u_64) if HAS_VBMI else (_decoder(_fast, True), _decoder(_fast, False))
)
