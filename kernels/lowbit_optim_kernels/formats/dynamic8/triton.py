"""The codec `dynamic8` in Triton: decode and encode of tiles, and whole-tensor kernels of both.

A tile is [NB, 256]: one row is one block of the format. A look-up is `tl.gather` from a small 1-D
tensor, which Triton keeps in shared memory: 32-bit addresses, one load. `triton_tables` explains
the encoding; with PTX (NVIDIA only) single operations become one instruction each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...engines.triton.primitives import (
    SIGNED,
    STREAM,
    narrow,
    positive,
    ptx_reciprocal,
    widen,
)
from ...engines.triton.random import byte
from .. import Unit
from ..layout import Layout
from . import DYNAMIC8, MOST, REACH, ZERO_CODE, triton_tables

BOOK = tl.constexpr(256)  # fp32 values of a codebook
BLOCK = tl.constexpr(DYNAMIC8.block)
PER_PROGRAM = 2048  # elements of a program
# Pairs are of the unsigned map and of the signed one.
CELLS, BITS = tl.constexpr(triton_tables.CELLS), tl.constexpr(triton_tables.BITS)
SCALE, SHIFT = tl.constexpr(triton_tables.SCALE), tl.constexpr(triton_tables.SHIFT)
NUDGE = tl.constexpr(triton_tables.NUDGE)
LINES, OCTAVES = tl.constexpr(triton_tables.LINES), tl.constexpr(triton_tables.OCTAVES)
DITHER_SCALE = tl.constexpr(tuple(triton_tables.dither_scale(s) for s in (False, True)))
FIRST_MIDPOINT = tl.constexpr(triton_tables.first_midpoint())
LAST_FACTOR, LAST_CONSTANT = (tl.constexpr(x) for x in triton_tables.LAST)
# Where there are, counted in what is read at once: the lines of the signed map's cells; those of
# the unsigned map, and which of them each cell has; octaves, and their `last`.
FIRST_SIGNED = tl.constexpr(512)
FIRST_UNSIGNED = tl.constexpr(256 + triton_tables.CELLS[True])
FIRST_NUMBER = tl.constexpr(8 * (FIRST_UNSIGNED.value + triton_tables.LINES))
FIRST_OCTAVE = tl.constexpr((FIRST_NUMBER.value + triton_tables.CELLS[False]) // 8)
FIRST_LAST = tl.constexpr(2 * (FIRST_OCTAVE.value + 2 * triton_tables.OCTAVES))
ZERO_SIGNED = tl.constexpr(ZERO_CODE[True])
OF_LOWEST, LARGEST = tl.constexpr(-REACH), tl.constexpr(MOST)  # see `dynamic8`
OFFSET = tl.constexpr(triton_tables.OFFSET)
# Below it, SCALE / absmax would overflow: such an absmax is stored as the floor.
FLOOR = tl.constexpr(2.0**-126)
# Quantizing whole tensors stores every absmax as it is: blocks of such a size are scaled first.
TINY, UP = tl.constexpr(2.0**-64), tl.constexpr(2.0**62)
HUGE, DOWN = tl.constexpr(2.0**120), tl.constexpr(2.0**-10)

# Interpreted, a module's constant must stand to the right of the tensor that it is combined with.


@triton.jit
def _look_up(table, index):
    """table[index]: a 1-D tensor and a tile of int32."""
    return tl.reshape(tl.gather(table, tl.ravel(index), 0), index.shape)


@triton.jit
def decode_codes(codes, tables, SIGNED: tl.constexpr):
    """uint8 codes -> fp32 values of the codebook, in [-1, 1]."""
    book = tl.load(tables + (0 if SIGNED else BOOK) + tl.arange(0, BOOK))
    return _look_up(book, codes.to(tl.int32))


@triton.jit
def absmax(x, SIGNED: tl.constexpr, DITHERED: tl.constexpr, ALIGN: tl.constexpr):
    """Per block: the largest magnitude of finite x, which is what is stored as its scale.

    Of signed x that are DITHERED a negative one counts for more. A largest magnitude under 1.2e-38
    is raised to it.
    """
    REACHES: tl.constexpr = SIGNED and DITHERED
    if REACHES:
        x = _reach(x, ALIGN)
    elif SIGNED:
        x = tl.abs(x)
        if ALIGN > 1:  # by fours, which a thread has: of floats its instructions take |x|
            x = tl.max(tl.reshape(x, [x.shape[0], x.shape[1] // 4, 4]), 2)
    # As integers, of which a warp finds the largest by one instruction.
    top = tl.max(x.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
    if REACHES:
        top = tl.minimum(top, LARGEST)
    return tl.where(top > 0.0, tl.maximum(top, FLOOR), 0.0)


@triton.jit
def _reach(x, ALIGN: tl.constexpr):
    """Numbers, or the extremes of fours, by the scales that they need; the largest is not negative.

    What overflows is infinite.
    """
    low = x
    if ALIGN > 1:
        fours = tl.reshape(x, [x.shape[0], x.shape[1] // 4, 4])
        x, low = tl.max(fours, 2), tl.min(fours, 2)
    return tl.maximum(x, low * OF_LOWEST)


@triton.jit
def _scaled_inverse(top, SCALE: tl.constexpr, PTX: tl.constexpr):
    """SCALE / top per block; 1 / top within half an ulp by one Newton step."""
    x = tl.maximum(top, FLOOR)
    r = ptx_reciprocal(x) if PTX else 1.0 / x
    return tl.fma(r, tl.fma(x * -1.0, r, 1.0), r) * SCALE


@triton.jit
def _line(tables, number, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """The slope and the start of lines, 8 bytes that one load brings."""
    lines = tl.load(tables.to(tl.pointer_type(tl.int64)) + FIRST + tl.arange(0, COUNT))
    line = _look_up(lines, number)
    slope = (line & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
    start = (line >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    return slope, start


@triton.jit
def _numbers(tables, PTX: tl.constexpr):
    """The line of each unsigned cell, a byte.

    On AMD, whose programs have twice as many threads, as many bytes again: a thread reads four.
    """
    at = tables.to(tl.pointer_type(tl.int8)) + FIRST_NUMBER
    return tl.load(at + tl.arange(0, CELLS[False] if PTX else 2 * CELLS[False]))


@triton.jit
def _cell(y, SIGNED: tl.constexpr):
    """The number of y's cell: 5 bits of exponent and some of mantissa."""
    high = y.to(tl.uint32, bitcast=True) >> (23 - BITS[SIGNED])
    return high.to(tl.int32) - 3 * CELLS[SIGNED]  # the bits above are the same for all y


@triton.jit
def _with_sign(z, x):
    """z, which is not negative, with the sign of x."""
    sign = x.to(tl.uint32, bitcast=True) & 0x80000000
    return (z.to(tl.uint32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@triton.jit
def _fma_up(a, b, c, PTX: tl.constexpr):
    """A * b + c, with PTX rounded up."""
    if PTX:
        return tl.inline_asm_elementwise(
            "fma.rp.f32 $0, $1, $2, $3;",
            "=f,f,f,f", [a, b, c], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.fma(a, b, c)


@triton.jit
def _encode_signed(x, top, tables, PTX: tl.constexpr):
    scale = tl.broadcast_to(_scaled_inverse(top, SCALE[True], PTX)[:, None], x.shape)
    y = tl.fma(tl.abs(x), scale, SHIFT)
    cell = _cell(y, True)
    lines = tl.load(tables + FIRST_SIGNED + tl.arange(0, 2 * CELLS[True]))
    slope, start = tl.split(_look_up(lines, tl.join(cell, cell + CELLS[True])))
    z = _with_sign(tl.fma(y, slope, start), x)
    return byte(z, z, OFFSET[True], False, PTX)


@triton.jit
def _encode_unsigned(x, top, tables, PTX: tl.constexpr):
    scale = tl.broadcast_to(_scaled_inverse(top, SCALE[False], PTX)[:, None], x.shape)
    # Rounded up, y is SHIFT for x == 0 only.
    y = _fma_up(x, scale, tl.full(x.shape, SHIFT, tl.float32), PTX)
    number = _look_up(_numbers(tables, PTX), _cell(y, False)).to(tl.int32)
    slope, start = _line(tables, number, FIRST_UNSIGNED, LINES)
    z = _fma_up(y, slope, start, PTX)
    if not PTX:
        z = tl.maximum(z, tl.where(x > 0.0, -127.0, -128.0))
    return byte(z, z, OFFSET[False], False, PTX)


@triton.jit
def _place(x, top, tables, SIGNED: tl.constexpr, PTX: tl.constexpr):
    """Positions of magnitudes among the codes, by straight lines from value to value."""
    y = tl.abs(x) * _scaled_inverse(top, DITHER_SCALE[SIGNED], PTX)[:, None]
    cell = (y.to(tl.uint32, bitcast=True) >> 23).to(tl.int32)
    slope, start = _line(tables, cell, FIRST_OCTAVE + (0 if SIGNED else OCTAVES), OCTAVES)
    if SIGNED:
        last = _look_up(tl.load(tables + FIRST_LAST + tl.arange(0, OCTAVES)), cell)
    else:
        last = tl.fma(start, LAST_FACTOR, LAST_CONSTANT)
    g = tl.fma(y, slope, start)
    z = last + tl.minimum(tl.minimum(g, g * (1.0 / 3.0)), tl.fma(g, 0.2, 0.4))
    return tl.where(y > FIRST_MIDPOINT, z, 0.0) if SIGNED else z


@triton.jit
def dithered_codes(x, top, bits, tables, SIGNED: tl.constexpr, PTX: tl.constexpr):
    """As `encode_codes`, rounded up with the probability of the distance."""
    z = _place(x, top, tables, SIGNED, PTX)
    z = _with_sign(z, x) if SIGNED else tl.maximum(z, positive(x, PTX))
    return byte(z, bits, ZERO_SIGNED if SIGNED else 0, True, PTX)


@triton.jit
def encode_codes(x, top, tables, SIGNED: tl.constexpr, PTX: tl.constexpr):
    """Codes of a tile x of finite moments whose blocks have the scales `top` = absmax(x)."""
    if SIGNED:
        return _encode_signed(x, top, tables, PTX)
    else:
        return _encode_unsigned(x, top, tables, PTX)


# What the engine calls. Moments are coded one by one, so it hands over one at a time, which takes
# fewer registers.

SEPARATE = True
# Programs find the tables in the cache more often if elements leave it first: 2 to 5 % of the time
# of a step of two moments in bf16 on an H200.
ONCE = True


@triton.jit
def decode(codes, scales, tables, MOMENTS: tl.constexpr, PTX: tl.constexpr):
    """The tile of the moment, fp32."""
    scale = scales[0][:, None]
    return (decode_codes(codes[0], tables, MOMENTS[0][SIGNED]) * scale,)


@triton.jit
def scales(moments, MOMENTS: tl.constexpr, ALIGN: tl.constexpr, PTX: tl.constexpr):
    """The scales of a finite moment, one a block."""
    return (absmax(moments[0], MOMENTS[0][SIGNED], MOMENTS[0][STREAM] > 0, ALIGN),)


@triton.jit
def encode(moments, scales, random, tables, K: tl.constexpr, MOMENTS: tl.constexpr,
           PTX: tl.constexpr):  # fmt: skip
    """The codes of the moment."""
    if MOMENTS[0][STREAM] > 0:
        return dithered_codes(moments[0], scales[0], random[0], tables, MOMENTS[0][SIGNED], PTX)
    else:
        return encode_codes(moments[0], scales[0], tables, MOMENTS[0][SIGNED], PTX)


def table(ptx: bool, device: torch.device) -> Tensor:
    """The argument `tables` of `decode` and `encode`."""
    return triton_tables.packed(ptx, device)


# Whole tensors.


@triton.jit
def _tile(row, blocks, NB: tl.constexpr):
    """Offsets, masks and block numbers of a tile of a tensor whose blocks restart every `row`."""
    per_row = (row - 1) // BLOCK + 1  # of a row that is an int32 just below 2**31, too
    block = tl.program_id(0).to(tl.int64) * NB + tl.arange(0, NB)
    inside = block < blocks
    line = block // per_row
    column = (block - line * per_row) * BLOCK
    lane = tl.arange(0, BLOCK)
    mask = (lane[None, :] < (row - column)[:, None]) & inside[:, None]
    return (line * row + column)[:, None] + lane[None, :], mask, block, inside


@triton.jit
def quantize_kernel(
    x, codes, scales, tables, row, blocks,
    SIGNED: tl.constexpr, PTX: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """x (any float, rows of `row`) -> codes (uint8), scales (fp32, `blocks`)."""
    at, mask, block, inside = _tile(row, blocks, NB)
    value = widen(tl.load(x + at, mask=mask, other=0.0), PTX)
    value = tl.where(tl.abs(value) < float("inf"), value, 0.0)
    top = tl.max(tl.abs(value), 1)
    tl.store(scales + block, top, mask=inside)
    if SIGNED:
        value = tl.fma(tl.broadcast_to(top[:, None], value.shape), -NUDGE, value)
    else:
        value = tl.maximum(value, 0.0)
    factor = tl.where(top < TINY, UP, tl.where(top > HUGE, DOWN, 1.0))
    coded = encode_codes(value * factor[:, None], top * factor, tables, SIGNED, PTX)
    tl.store(codes + at, coded, mask=mask)


@triton.jit
def dequantize_kernel(
    x, codes, scales, tables, row, blocks,
    SIGNED: tl.constexpr, PTX: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """codes (uint8), scales (fp32, `blocks`) -> x (any float)."""
    at, mask, block, inside = _tile(row, blocks, NB)
    scale = tl.load(scales + block, mask=inside, other=0.0)
    value = decode_codes(tl.load(codes + at, mask=mask, other=0), tables, SIGNED) * scale[:, None]
    tl.store(x + at, narrow(value, x.dtype.element_ty), mask=mask)


def _launch(
    kernel: Any, unit: Unit, numbers: Sequence[Tensor], stored: Sequence[Tensor], layout: Layout,
    ptx: bool, options: dict[str, Any],
) -> None:  # fmt: skip
    """Run a kernel between the numbers of each moment and what is stored of it."""
    blocks, in_program = layout.rows * layout.blocks_per_row, PER_PROGRAM // BLOCK.value
    if not blocks:
        return
    tables = table(ptx, numbers[0].device)
    for moment, x, codes, tops in zip(unit.moments, numbers, *unit.split(stored), strict=True):
        kernel[(-(-blocks // in_program),)](
            x, codes, tops, tables, layout.row, blocks, SIGNED=moment.signed, PTX=ptx,
            NB=in_program, **options,
        )  # fmt: skip


def encode_tensors(
    unit: Unit, values: Sequence[Tensor], layout: Layout, out: Sequence[Tensor], ptx: bool,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Code contiguous tensors; bad numbers give zero. `options` are those of the launches."""
    _launch(quantize_kernel, unit, values, out, layout, ptx, options)


def decode_tensors(
    unit: Unit, stored: Sequence[Tensor], layout: Layout, out: Sequence[Tensor], ptx: bool,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Write the moments into contiguous tensors."""
    _launch(dequantize_kernel, unit, out, stored, layout, ptx, options)
