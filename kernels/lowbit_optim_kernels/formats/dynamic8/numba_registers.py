"""Look-ups in small tables, and packing, for `dynamic8`; on x86 with AVX2 in registers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from ...engines.numba.vector import (
    HAS_AVX2,
    HAS_AVX512,
    F,
    call,
    constant,
    f32,
    fill,
    i8,
    i16,
    i32,
    of_one,
    shuffle,
    vector,
)

WIDTH = 16 if HAS_AVX512 else 8  # of a register, in numbers of 32 bits
# Of a 4 x 4 matrix of 32-bit words: undoes the order that instructions on 128-bit lanes leave.
TRANSPOSE = [4 * (i % 4) + i // 4 for i in range(16)]


def by_halves(b: ir.IRBuilder, emit: Callable, *vectors: ir.Value) -> ir.Value:
    """The results of a function of eight lanes, for each half of sixteen."""
    halves = [emit(*(shuffle(b, x, x, range(k, k + 8)) for x in vectors)) for k in (0, 8)]
    return _joined(b, halves)


def look_up(b: ir.IRBuilder, table: np.ndarray, index: ir.Value) -> ir.Value:
    """Entries of a table of fp32 numbers by the low bits of the index: 8 entries; 16 by AVX-512."""
    if HAS_AVX512:
        entries = constant(f32, np.resize(table, 16))
        return call(b, "llvm.x86.avx512.permvar.sf.512", vector(f32), entries, index)
    entries = constant(f32, table)

    def emit(half: ir.Value) -> ir.Value:
        return call(b, "llvm.x86.avx2.permps", vector(f32, 8), entries, half)

    return by_halves(b, emit, index)


def look_up_rows(b: ir.IRBuilder, tables: list, index: ir.Value) -> list:
    """Entries of up to four tables of 8 fp32 numbers by the low bits of the index; on any CPU."""
    rows = np.zeros((8, 4), np.float32)
    rows[:, : len(tables)] = np.transpose(tables)
    values = ir.Constant(ir.ArrayType(vector(f32, 4), 8), [constant(f32, row) for row in rows])
    memory = cgutils.global_constant(b, b.module.get_unique_name("dynamic8_rows"), values)
    memory.align = 16
    index, quarters = b.and_(index, fill(i32, 7)), []
    for k in range(0, 16, 4):
        lanes = [b.extract_element(index, ir.Constant(i32, k + j)) for j in range(4)]
        at = [b.gep(memory, [ir.Constant(i32, 0), lane], inbounds=True) for lane in lanes]
        quarters.append(_joined(b, [b.load(one) for one in at]))
    columns = [range(column, 16, 4) for column in range(len(tables))]
    return [_joined(b, [shuffle(b, x, x, lanes) for x in quarters]) for lanes in columns]


def _joined(b: ir.IRBuilder, parts: list) -> ir.Value:
    """Vectors of equal size one after the other."""
    while len(parts) > 1:
        lanes = range(2 * parts[0].type.count)
        parts = [shuffle(b, x, y, lanes) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def with_sign(b: ir.IRBuilder, x: ir.Value, like: ir.Value) -> ir.Value:
    """Integers x, negative where the integers `like` are; with AVX2 zero where they are."""
    if not HAS_AVX2:
        sign = b.ashr(like, fill(i32, 31))
        return b.sub(b.xor(x, sign), sign)

    def emit(*halves: ir.Value) -> ir.Value:
        return call(b, "llvm.x86.avx2.psign.d", vector(i32, 8), *halves)

    return by_halves(b, emit, x, like)


@of_one(F)
def pinned(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """x; with AVX2 it is computed where this stands, though no instruction is added.

    LLVM puts off what only the end of a loop needs, and has to keep what that is made of.
    """
    if HAS_AVX512 or not HAS_AVX2:
        return x
    half = vector(f32, 8)
    function_type = ir.FunctionType(half, [half])
    return by_halves(b, lambda y: b.asm(function_type, "", "=x,0,~{memory}", [y], True), x)


def packed(b: ir.IRBuilder, places: list, zero: int) -> ir.Value:
    """WIDTH * 4 integers, in vectors of 16, as bytes: with `zero` added and saturated."""
    size = 32 * WIDTH
    suffix = ".512" if HAS_AVX512 else ""
    pack = f"llvm.x86.{'avx512' if HAS_AVX512 else 'avx2'}.pack"
    parts = [shuffle(b, x, x, range(k, k + WIDTH)) for x in places for k in range(0, 16, WIDTH)]
    halves = []
    for k in (0, 2):
        name = f"{pack}ssdw{suffix}"
        half = call(b, name, vector(i16, size // 16), parts[k], parts[k + 1])
        halves.append(b.add(half, fill(i16, zero, size // 16)) if zero else half)
    codes = call(b, f"{pack}uswb{suffix}", vector(i8, size // 8), *halves)
    words = b.bitcast(codes, vector(i32, WIDTH))
    order = TRANSPOSE if HAS_AVX512 else [0, 4, 1, 5, 2, 6, 3, 7]
    return b.bitcast(shuffle(b, words, words, order), vector(i8, size // 8))
