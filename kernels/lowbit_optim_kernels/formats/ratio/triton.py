"""The format `ratio8` in Triton; the package's text says what is computed.

Nothing is looked up. A tile is [NB, 64], a row of it one block. With PTX (NVIDIA only) square roots
and reciprocals are approximate, within 2 ulp, and a code may differ where that decides a rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...engines.triton.primitives import (
    OUTLASTS,
    PARTNER,
    ROLE,
    ROLES,
    STREAM,
    narrow,
    positive,
    ptx_reciprocal,
    ptx_sqrt,
)
from ...engines.triton.random import byte, low_byte, rounded
from ...rules import RATIO, SQUARE
from .. import ratio as of_ratio

IS_SQUARE, IS_RATIO = tl.constexpr(ROLES.index(SQUARE)), tl.constexpr(ROLES.index(RATIO))
SQUARE_LEVELS = tl.constexpr(float(of_ratio.SQUARE_LEVELS[8]))
RATIO_LEVELS = tl.constexpr(float(of_ratio.RATIO_LEVELS[8]))
ZERO, SOFT = tl.constexpr(float(of_ratio.ZERO)), tl.constexpr(of_ratio.SOFT)
LARGEST, LEAST_SCALE = tl.constexpr(of_ratio.LARGEST), tl.constexpr(of_ratio.LEAST_SCALE)
LARGEST_PTX = tl.constexpr(2.0**112)  # scale of ratios: ABOVE of it is finite
UNITS = tl.constexpr(2.0**48)  # of codes in a square of codes in 2**-24
RUN = 16  # instructions are the limit, and what is done once a block is done by fewer threads
AHEAD = True  # the assembler reads weights late, to save registers; 4 to 11 % less time on an H200
INTEGER = tl.constexpr(2.0**23)  # what is added to an integer has it in its low bits
ABOVE = tl.constexpr(2.0**15)  # whose pattern and a byte's, in its second byte, is their sum's


@triton.jit
def above(code):
    """ABOVE and a code of 8 bits in fp32, with PTX: a byte in a pattern, and no conversion."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 m; mov.b32 m, 0x47000000; prmt.b32 $0, $4, m, 0x7504;"
        " prmt.b32 $1, $4, m, 0x7514; prmt.b32 $2, $4, m, 0x7524;"
        " prmt.b32 $3, $4, m, 0x7534; }",
        "=f,=f,=f,=f,r", [code], dtype=tl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def number_of(code, LESS: tl.constexpr, PTX: tl.constexpr):
    """A code of 8 bits, less an integer, in fp32."""
    return above(code) - (ABOVE + LESS) if PTX else code.to(tl.float32) - LESS


@triton.jit
def scaled(code, scale, LESS: tl.constexpr, PTX: tl.constexpr):
    """A code less an integer, times its block's scale, which bf16 has. Exact, so fused as well."""
    scale = scale.to(tl.float32)[:, None]
    if PTX:  # with up to 9 bits of ABOVE + LESS and 8 of the scale
        return tl.fma(above(code), scale, scale * (-(ABOVE + LESS)))
    else:
        return number_of(code, LESS, PTX) * scale


@triton.jit
def root_and_inverse(v, PTX: tl.constexpr):
    """s = sqrt(v), and 1 / s, finite where s is 0."""
    if PTX:
        inverse = tl.inline_asm_elementwise(
            "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1
        )
        inverse = tl.minimum(inverse, 1e19)  # also of subnormal numbers
        return v * inverse, inverse
    else:
        root = tl.sqrt_rn(v)
        return root, 1.0 / tl.maximum(root, 1e-30)


@triton.jit
def divided(x, BY: tl.constexpr, PTX: tl.constexpr):
    """x / BY, rounded to nearest."""
    if PTX:
        q = x * (1.0 / BY)
        return tl.fma(tl.fma(q, -BY, x), 1.0 / BY, q)
    else:
        return tl.div_rn(x, tl.full(x.shape, BY, tl.float32))


@triton.jit
def inverse_of(scale, PTX: tl.constexpr):
    """1 / scale of blocks, where it is 0 anything: with PTX 2**126, else 0."""
    if PTX:
        return ptx_reciprocal(tl.maximum(scale, LEAST_SCALE))[:, None]
    else:
        inverse = 1.0 / tl.where(scale > 0.0, scale, 1.0)
        return tl.where(scale > 0.0, inverse, 0.0)[:, None]


@triton.jit
def largest(x):
    """The largest number of each block, of numbers that are not negative."""
    return tl.max(x, 1)


@triton.jit
def square_scale(v, LEVELS: tl.constexpr, PTX: tl.constexpr):
    root, _inverse = root_and_inverse(v, PTX)
    return divided(largest(root), LEVELS * LEVELS, PTX)


@triton.jit
def ratio_of(m, v, scale, OUTLASTING: tl.constexpr, PTX: tl.constexpr):
    """m / sqrt(v), 0 where v is; if OUTLASTING, sqrt(v) is at least `scale`, the square's."""
    root, inverse = root_and_inverse(v, PTX)
    if OUTLASTING:
        if PTX:  # infinite where all are zero
            inverse = tl.minimum(inverse, ptx_reciprocal(scale)[:, None])
        else:
            root = tl.maximum(root, scale[:, None])
    if PTX:
        return (m * inverse) * positive(v, True)
    else:
        return tl.where(v > 0.0, m / tl.where(v > 0.0, root, 1.0), 0.0)


@triton.jit
def ratio_of_block(m, v, LEVELS: tl.constexpr, OUTLASTING: tl.constexpr, PTX: tl.constexpr):
    """As `ratio_of`, before there are scales; LEVELS are the square's."""
    if OUTLASTING:
        return ratio_of(m, v, square_scale(v, LEVELS, PTX), True, PTX)
    else:
        return ratio_of(m, v, v, False, PTX)


@triton.jit
def square_place(v, scale, PTX: tl.constexpr):
    """Positions of squares among the codes: 1 or above for positive ones, else 0."""
    root, _inverse = root_and_inverse(v, PTX)
    if PTX:  # NaN where all are zero, of which the maximum is 0
        y = ptx_sqrt(root * ptx_reciprocal(scale)[:, None])
    else:
        y = tl.sqrt_rn(root * inverse_of(scale, PTX))
    return tl.maximum(y, positive(v, PTX))


@triton.jit
def ratio_scale(ratio, LEVELS: tl.constexpr, DITHERED: tl.constexpr, PTX: tl.constexpr):
    """In fp32, and a number that bf16 has unless DITHERED, as it is when it is stored."""
    scale = divided(largest(tl.abs(ratio)), LEVELS, PTX)
    if not DITHERED:
        scale = narrow(scale, tl.bfloat16).to(tl.float32)
    most: tl.constexpr = LARGEST_PTX if PTX else LARGEST
    return tl.where((scale >= LEAST_SCALE) & (scale <= most), scale, 0.0)


@triton.jit
def ratio_code(ratio, scale, bits, LEVELS: tl.constexpr, ZERO: tl.constexpr,
               DITHERED: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """2**23 + ZERO + the code."""
    inverse = inverse_of(scale, PTX)
    if DITHERED:
        code = rounded(ratio * inverse, bits, ZERO, True, PTX)
        return tl.minimum(tl.maximum(code, INTEGER + (ZERO - LEVELS)), INTEGER + (ZERO + LEVELS))
    else:
        # To nearest even, as it is added. At most LEVELS and a quarter: bf16 has 8 bits.
        return tl.fma(ratio, inverse, INTEGER + ZERO)


@triton.jit
def soft_scale(m, DITHERED: tl.constexpr):
    """As `ratio_scale`."""
    top = tl.minimum(largest(tl.abs(m)), LARGEST)
    return top if DITHERED else narrow(top, tl.bfloat16).to(tl.float32)


@triton.jit
def soft_code(m, scale, bits, DITHERED: tl.constexpr, PTX: tl.constexpr):
    """2**23 + ZERO + the code."""
    wide = scale[:, None]
    if PTX:
        y = (m * SOFT) * ptx_reciprocal(tl.maximum(wide, LEAST_SCALE) + tl.abs(m))
    else:
        y = tl.where(wide > 0.0, (m * SOFT) / tl.where(wide > 0.0, wide + tl.abs(m), 1.0), 0.0)
    if DITHERED:
        code = tl.minimum(rounded(tl.abs(y), bits, 0.0, True, PTX) - INTEGER, RATIO_LEVELS)
        code = tl.where(m < 0.0, -code, tl.where(m > 0.0, code, 0.0)) + (INTEGER + ZERO)
    else:
        code = y + (INTEGER + ZERO)
    # |y| is at most 127 and a quarter, or NaN or infinite by overflow.
    top = tl.where(m < 0.0, INTEGER + (ZERO - RATIO_LEVELS), INTEGER + (ZERO + RATIO_LEVELS))
    return tl.where(tl.abs(y) < SOFT, code, top)


@triton.jit
def root_of(code, scale, PTX: tl.constexpr):
    """The root of a square."""
    if PTX:  # 2**-24 of a code is a subnormal number of 16 bits, two of which one instruction makes
        c = tl.inline_asm_elementwise(
            "{ .reg .b32 x, y; .reg .b16 h<4>; prmt.b32 x, $4, 0, 0x4140;"
            " prmt.b32 y, $4, 0, 0x4342; mov.b32 {h0, h1}, x; mov.b32 {h2, h3}, y;"
            " cvt.f32.f16 $0, h0; cvt.f32.f16 $1, h1; cvt.f32.f16 $2, h2; cvt.f32.f16 $3, h3; }",
            "=f,=f,=f,=f,r", [code], dtype=tl.float32, is_pure=True, pack=4,
        )  # fmt: skip
        return (c * c) * (scale * UNITS)[:, None]
    else:
        c = number_of(code, 0.0, PTX)
        return (c * c) * scale[:, None]


@triton.jit
def soft_number(code, scale, PTX: tl.constexpr):
    c = number_of(code, ZERO, PTX)
    m = c * scale.to(tl.float32)[:, None]
    if PTX:
        return m * ptx_reciprocal(SOFT - tl.abs(c))
    else:
        return m / (0.0 * c + SOFT - tl.abs(c))


@triton.jit
def decode(codes, scales, tables, MOMENTS: tl.constexpr, PTX: tl.constexpr):
    moments = ()
    for k in tl.static_range(len(MOMENTS)):
        if MOMENTS[k][ROLE] == IS_SQUARE:
            root = root_of(codes[k], scales[k], PTX)
            moments = moments + (root * root,)
        else:
            if MOMENTS[k][ROLE] == IS_RATIO:
                root = root_of(codes[MOMENTS[k][PARTNER]], scales[MOMENTS[k][PARTNER]], PTX)
                moments = moments + (scaled(codes[k], scales[k], ZERO, PTX) * root,)
            else:
                moments = moments + (soft_number(codes[k], scales[k], PTX),)
    return moments


@triton.jit
def scales(moments, MOMENTS: tl.constexpr, ALIGN: tl.constexpr, PTX: tl.constexpr):
    out = ()
    for k in tl.static_range(len(MOMENTS)):
        if MOMENTS[k][ROLE] == IS_SQUARE:
            scale = square_scale(moments[k], SQUARE_LEVELS, PTX)
        elif MOMENTS[k][ROLE] == IS_RATIO:
            square = moments[MOMENTS[k][PARTNER]]
            ratio = ratio_of_block(moments[k], square, SQUARE_LEVELS, MOMENTS[k][OUTLASTS], PTX)
            scale = ratio_scale(ratio, RATIO_LEVELS, MOMENTS[k][STREAM] > 0, PTX)
        else:
            scale = soft_scale(moments[k], MOMENTS[k][STREAM] > 0)
        out = out + (scale,)
    return out


@triton.jit
def encode(moments, scales, random, tables, K: tl.constexpr, MOMENTS: tl.constexpr,
           PTX: tl.constexpr):  # fmt: skip
    DITHERED: tl.constexpr = MOMENTS[K][STREAM] > 0
    if MOMENTS[K][ROLE] == IS_SQUARE:
        place = square_place(moments[K], scales[K], PTX)
        if not DITHERED and not PTX:
            place = tl.floor(place + 0.5)
        return byte(place, random[K], 0, DITHERED, PTX)
    elif MOMENTS[K][ROLE] == IS_RATIO:
        square, scale = moments[MOMENTS[K][PARTNER]], scales[MOMENTS[K][PARTNER]]
        ratio = ratio_of(moments[K], square, scale, MOMENTS[K][OUTLASTS], PTX)
        return low_byte(ratio_code(ratio, scales[K], random[K], RATIO_LEVELS, ZERO, DITHERED, PTX))
    else:
        return low_byte(soft_code(moments[K], scales[K], random[K], DITHERED, PTX))


def table(ptx: bool, device: torch.device) -> None:
    """There is nothing to look up."""
