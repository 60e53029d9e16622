"""The format `ratio4` in Triton: two codes of `ratio8`'s kind, of 4 bits, in one byte."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...engines.triton.primitives import OUTLASTS, ROLE, STREAM, plus
from ...engines.triton.random import rounded
from .. import ratio as of_ratio
from .triton import (
    INTEGER,
    IS_RATIO,
    ratio_code,
    ratio_of,
    ratio_of_block,
    ratio_scale,
    root_of,
    scaled,
    square_place,
    square_scale,
)

SQUARE_LEVELS = tl.constexpr(float(of_ratio.SQUARE_LEVELS[4]))
RATIO_LEVELS = tl.constexpr(float(of_ratio.RATIO_LEVELS[4]))
ZERO = tl.constexpr(8.0)
RUN, AHEAD = 16, True  # as of `ratio8`


@triton.jit
def lower(code, PTX: tl.constexpr):
    """The lower halves of bytes."""
    if PTX:  # of four at once
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0x0f0f0f0f;", "=r,r", [code], dtype=tl.uint8, is_pure=True, pack=4
        )
    else:
        return code & 15


@triton.jit
def upper(code, PTX: tl.constexpr):
    """The upper halves of bytes."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 h; shr.u32 h, $1, 4; and.b32 $0, h, 0x0f0f0f0f; }",
            "=r,r", [code], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return code >> 4


@triton.jit
def decode(codes, scales, tables, MOMENTS: tl.constexpr, PTX: tl.constexpr):
    root = root_of(upper(codes[0], PTX), scales[1], PTX)
    m = scaled(lower(codes[0], PTX), scales[0], ZERO, PTX) * root
    if MOMENTS[0][ROLE] == IS_RATIO:
        return m, root * root
    else:
        return root * root, m


@triton.jit
def scales(moments, MOMENTS: tl.constexpr, ALIGN: tl.constexpr, PTX: tl.constexpr):
    M: tl.constexpr = 0 if MOMENTS[0][ROLE] == IS_RATIO else 1
    ratio = ratio_of_block(moments[M], moments[1 - M], SQUARE_LEVELS, MOMENTS[M][OUTLASTS], PTX)
    scale = ratio_scale(ratio, RATIO_LEVELS, False, PTX)
    return scale, square_scale(moments[1 - M], SQUARE_LEVELS, PTX)


@triton.jit
def encode(moments, scales, random, tables, K: tl.constexpr, MOMENTS: tl.constexpr,
           PTX: tl.constexpr):  # fmt: skip
    M: tl.constexpr = 0 if MOMENTS[0][ROLE] == IS_RATIO else 1
    V: tl.constexpr = 1 - M
    ratio = ratio_of(moments[M], moments[V], scales[1], MOMENTS[M][OUTLASTS], PTX)
    low = ratio_code(ratio, scales[0], random[M], RATIO_LEVELS, ZERO, MOMENTS[M][STREAM] > 0, PTX)
    place = square_place(moments[V], scales[1], PTX)
    high = rounded(place, random[V], 0.0, MOMENTS[V][STREAM] > 0, PTX)
    high = tl.minimum(high, INTEGER + SQUARE_LEVELS)
    both = plus(low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True) << 4)
    return both.to(tl.uint8)


def table(ptx: bool, device: torch.device) -> None:
    """There is nothing to look up."""
