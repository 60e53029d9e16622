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
from ...engines.triton.random import low_byte, rounded
from .. import Unit
from ..layout import Layout
from . import DYNAMIC8, ZERO_CODE, triton_tables

BOOK = tl.constexpr(256)  # fp32 values of a codebook
BLOCK = tl.constexpr(DYNAMIC8.block)
AT_ONCE = 2048  # elements of a program
CELLS_SIGNED = tl.constexpr(triton_tables.CELLS_SIGNED)
CELLS_UNSIGNED = tl.constexpr(triton_tables.CELLS_UNSIGNED)
SCALE_SIGNED = tl.constexpr(triton_tables.SCALE_SIGNED)
SCALE_UNSIGNED = tl.constexpr(triton_tables.SCALE_UNSIGNED)
SHIFT = tl.constexpr(triton_tables.SHIFT)
OCTAVES = tl.constexpr(triton_tables.OCTAVES)
DITHER_SIGNED = tl.constexpr(triton_tables.dither_scale(True))
DITHER_UNSIGNED = tl.constexpr(triton_tables.dither_scale(False))
LAST_FACTOR, LAST_CONSTANT = (tl.constexpr(x) for x in triton_tables.LAST)
# Where octaves begin, counted in lines, and their `last`, in numbers.
FIRST_OCTAVE = tl.constexpr(256 + triton_tables.CELLS_SIGNED + triton_tables.CELLS_UNSIGNED)
FIRST_LAST = tl.constexpr(2 * (FIRST_OCTAVE.value + 2 * triton_tables.OCTAVES))
# Adding 2**23 rounds to an integer, and leaves the code in the low byte of the bit pattern.
INTEGER, ZERO_SIGNED = tl.constexpr(2.0**23), tl.constexpr(float(ZERO_CODE[True]))
MAGIC_SIGNED = tl.constexpr(2.0**23 + triton_tables.OFFSET_SIGNED)
MAGIC_UNSIGNED = tl.constexpr(2.0**23 + triton_tables.OFFSET_UNSIGNED)
# Below these, SCALE / absmax would overflow: such an absmax is stored as the floor.
FLOOR_SIGNED = tl.constexpr(2.0**-112)
FLOOR_UNSIGNED = tl.constexpr(2.0**-126)
# Quantizing whole tensors stores every absmax as it is: blocks of such a size are scaled first.
TINY, UP = tl.constexpr(2.0**-64), tl.constexpr(2.0**62)
HUGE, DOWN = tl.constexpr(2.0**120), tl.constexpr(2.0**-10)

# Interpreted, a module's constant must stand to the right of the tensor that it is combined with.


@triton.jit
def _look_up(table, index):
    """table[index]: a 1-D tensor and a 2-D tile of int32."""
    flat = tl.reshape(index, [index.shape[0] * index.shape[1]])
    return tl.reshape(tl.gather(table, flat, 0), index.shape)


@triton.jit
def decode_codes(codes, tables, SIGNED: tl.constexpr):
    """uint8 codes -> fp32 values of the codebook, in [-1, 1]."""
    book = tl.load(tables + (0 if SIGNED else BOOK) + tl.arange(0, BOOK))
    return _look_up(book, codes.to(tl.int32))


@triton.jit
def absmax(x, SIGNED: tl.constexpr):
    """Per block: the largest magnitude of finite x, which is what is stored as its scale.

    A largest magnitude under the floor (2e-34 signed, 1.2e-38 unsigned) is raised to it.
    """
    top = tl.max(tl.abs(x), 1)
    floor = FLOOR_SIGNED if SIGNED else FLOOR_UNSIGNED
    return tl.where(top > 0.0, tl.maximum(top, floor), 0.0)


@triton.jit
def _inverse(x, PTX: tl.constexpr):
    """1 / x per block, within half an ulp: one Newton step."""
    r = ptx_reciprocal(x) if PTX else 1.0 / x
    return tl.fma(r, tl.fma(-x, r, 1.0), r)


@triton.jit
def _lines(tables, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """The cells' lines, each as one int64: (slope, start), 8 bytes that one load brings."""
    return tl.load(tables.to(tl.pointer_type(tl.int64)) + FIRST + tl.arange(0, COUNT))


@triton.jit
def _slope_and_start(line):
    """The halves of an int64: a pair of registers, so this takes no instruction."""
    slope = (line & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
    start = (line >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    return slope, start


@triton.jit
def _low_byte(z):
    return z.to(tl.uint32, bitcast=True).to(tl.uint8)


@triton.jit
def _encode_signed(x, top, tables, PTX: tl.constexpr):
    scale = _inverse(tl.maximum(top, FLOOR_SIGNED), PTX) * SCALE_SIGNED
    y = x * scale[:, None]
    # Sign, 5 bits of exponent and 2 of mantissa: the upper byte of the fp16 pattern.
    if PTX:  # two elements by one conversion
        cell = tl.inline_asm_elementwise(
            "{ .reg .b32 h; cvt.rn.f16x2.f32 h, $3, $2; bfe.u32 $0, h, 8, 8; shr.u32 $1, h, 24; }",
            "=r,=r,r,r", [y], dtype=tl.int32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        cell = (y.to(tl.float16).to(tl.uint16, bitcast=True) >> 8).to(tl.int32)
    line = _look_up(_lines(tables, BOOK, CELLS_SIGNED), cell)
    slope, start = _slope_and_start(line)
    return _low_byte(tl.fma(y, slope, start) + MAGIC_SIGNED)


@triton.jit
def _encode_unsigned(x, top, tables, PTX: tl.constexpr):
    scale = _inverse(tl.maximum(top, FLOOR_UNSIGNED), PTX) * SCALE_UNSIGNED
    scale = tl.broadcast_to(scale[:, None], x.shape)
    if PTX:  # rounded up, so that y is SHIFT for x == 0 only
        y = tl.inline_asm_elementwise(
            "fma.rp.f32 $0, $1, $2, 0f30000000;",  # SHIFT
            "=f,f,f", [x, scale], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        y = tl.fma(x, scale, SHIFT)
    # 5 bits of exponent and 4 of mantissa.
    cell = ((y.to(tl.uint32, bitcast=True) >> 19) & 511).to(tl.int32)
    line = _look_up(_lines(tables, BOOK + CELLS_SIGNED, CELLS_UNSIGNED), cell)
    slope, start = _slope_and_start(line)
    if PTX:
        z = tl.inline_asm_elementwise(
            "fma.rp.f32 $0, $1, $2, $3;",
            "=f,f,f,f", [y, slope, start], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        z = tl.maximum(tl.fma(y, slope, start), tl.where(x > 0.0, -127.0, -128.0))
    return _low_byte(z + MAGIC_UNSIGNED)


@triton.jit
def _place(x, top, tables, SIGNED: tl.constexpr, PTX: tl.constexpr):
    """Where magnitudes are among the codes, by straight lines from value to value."""
    if SIGNED:
        scale = _inverse(tl.maximum(top, FLOOR_SIGNED), PTX) * DITHER_SIGNED
    else:
        scale = _inverse(tl.maximum(top, FLOOR_UNSIGNED), PTX) * DITHER_UNSIGNED
    y = tl.abs(x) * scale[:, None]
    cell = (y.to(tl.uint32, bitcast=True) >> 23).to(tl.int32)
    FIRST: tl.constexpr = FIRST_OCTAVE + (0 if SIGNED else OCTAVES)
    slope, start = _slope_and_start(_look_up(_lines(tables, FIRST, OCTAVES), cell))
    if SIGNED:
        last = _look_up(tl.load(tables + FIRST_LAST + tl.arange(0, OCTAVES)), cell)
    else:
        last = tl.fma(start, LAST_FACTOR, LAST_CONSTANT)
    g = tl.fma(y, slope, start)
    return last + tl.minimum(tl.minimum(g, g * (1.0 / 3.0)), g * 0.2 + 0.4)


@triton.jit
def dithered_codes(x, top, bits, tables, SIGNED: tl.constexpr, PTX: tl.constexpr):
    """As `encode_codes`, rounded up with the probability of the distance."""
    z = _place(x, top, tables, SIGNED, PTX)
    if SIGNED:
        sign = x.to(tl.uint32, bitcast=True) & 0x80000000
        z = (z.to(tl.uint32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
        code = tl.maximum(rounded(z, bits, ZERO_SIGNED, True, PTX), INTEGER)
    else:
        code = rounded(tl.maximum(z, positive(x, PTX)), bits, 0.0, True, PTX)
    if not PTX:  # which rounds up where a sum is almost an integer
        code = tl.minimum(code, INTEGER + 255.0)
    return low_byte(code)


@triton.jit
def encode_codes(x, top, tables, SIGNED: tl.constexpr, PTX: tl.constexpr):
    """Codes of a tile x of finite moments whose blocks have the scales `top` = absmax(x)."""
    if SIGNED:
        return _encode_signed(x, top, tables, PTX)
    else:  # noqa: RET505 (Triton takes a second return only in the other branch)
        return _encode_unsigned(x, top, tables, PTX)


# What the engine calls. Moments are coded one by one, so it hands over one at a time: the second
# one's codes are loaded when the first is decoded, which takes fewer registers.

SEPARATE = True


@triton.jit
def decode(codes, scales, tables, MOMENTS: tl.constexpr, PTX: tl.constexpr):
    """The tile of the moment, fp32."""
    scale = scales[0][:, None]
    return (decode_codes(codes[0], tables, MOMENTS[0][SIGNED]) * scale,)


@triton.jit
def scales(moments, MOMENTS: tl.constexpr, PTX: tl.constexpr):
    """The scales of a finite moment, one a block."""
    return (absmax(moments[0], MOMENTS[0][SIGNED]),)


@triton.jit
def encode(moments, scales, random, tables, K: tl.constexpr, MOMENTS: tl.constexpr,
           PTX: tl.constexpr):  # fmt: skip
    """The codes of the moment."""
    if MOMENTS[0][STREAM] > 0:
        return dithered_codes(moments[0], scales[0], random[0], tables, MOMENTS[0][SIGNED], PTX)
    else:  # noqa: RET505
        return encode_codes(moments[0], scales[0], tables, MOMENTS[0][SIGNED], PTX)


def table(ptx: bool, device: torch.device) -> Tensor:
    """What `decode` and `encode` get as `tables`."""
    return triton_tables.packed(ptx, device)


# Whole tensors.


@triton.jit
def _tile(row, blocks, NB: tl.constexpr):
    """Offsets, masks and block numbers of a tile of a tensor whose blocks restart every `row`."""
    per_row = (row + BLOCK - 1) // BLOCK
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
    if not SIGNED:
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
    blocks, at_once = layout.rows * layout.blocks_per_row, AT_ONCE // BLOCK.value
    if not blocks:
        return
    tables = table(ptx, numbers[0].device)
    for moment, x, codes, tops in zip(unit.moments, numbers, *unit.split(stored), strict=True):
        kernel[(-(-blocks // at_once),)](
            x, codes, tops, tables, layout.row, blocks, SIGNED=moment.signed, PTX=ptx, NB=at_once,
            **options,
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
