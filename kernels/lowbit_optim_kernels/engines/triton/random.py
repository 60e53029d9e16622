"""Random bits in Triton; `dither` says what they are.

`scalars.begin` works out once a tensor what its step and stream decide; a program makes a number of
each block, and an addition of each element. All is uint32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ... import dither
from ...batch import WEIGHT_BLOCK
from .primitives import minus, plus, times

TIME, SPACE = tl.constexpr(dither.TIME), tl.constexpr(dither.SPACE)
WEIGHT_BLOCK = tl.constexpr(WEIGHT_BLOCK)
FIRST, SECOND = (tl.constexpr(factor) for _, factor in dither.ROUNDS)


def _bytes(dithered: bool) -> str:
    """PTX of the bytes of four numbers.

    A number times 2**-149 is subnormal, and its pattern the integer that it was rounded to, which
    two instructions pack in fours with what is beyond a byte cut off at its ends.
    """
    text = "{ .reg .f32 u; .reg .b32 b, h, y<4>; "
    for i in range(4):
        x, zero, mode = f"${i + 1}", f"${i + (9 if dithered else 5)}", "rn"
        if dithered:  # 1 + u of 23 bits by one shift of a pair of registers
            text += f"shf.r.clamp.b32 b, ${i + 5}, 127, 9; mov.b32 u, b; add.rm.f32 u, u, {x}; "
            x, mode = "u", "rm"
        text += f"fma.{mode}.f32 y{i}, {x}, 0f00000001, {zero}; "
    text += "cvt.pack.sat.u8.s32.b32 h, y3, y2, 0; cvt.pack.sat.u8.s32.b32 $0, y1, y0, h; }"
    return text


MINUS_ONE = tl.constexpr(1 - 2**31)  # the pattern of -(2**-149)
DITHERED_BYTES, NEAREST_BYTES = (tl.constexpr(_bytes(x)) for x in (True, False))


@triton.jit
def mix(x):
    x = times(x ^ (x >> 16), FIRST)
    x = times(x ^ (x >> 15), SECOND)
    return x ^ (x >> 16)


@triton.jit
def of_step(tensor_key, step, STREAM: tl.constexpr):
    """The key of a stream, and what is added for the step, and for blocks below 2**32."""
    key = mix(plus(tensor_key, STREAM))
    return key, plus(mix(key), times(step, TIME))


@triton.jit
def of_blocks(number, of_stream, FAR: tl.constexpr):
    """The first element's bits of blocks, by their numbers: int64 if FAR, else of 32 bits.

    of_stream: where the two numbers are that `of_step` gave.
    """
    both = tl.load(of_stream.to(tl.pointer_type(tl.uint64)))
    key = both.to(tl.uint32)
    bits = plus(mix(number.to(tl.uint32) ^ key), (both >> 32).to(tl.uint32))
    if FAR:
        bits = plus(bits, minus(mix(plus((number >> 32).to(tl.uint32), key)), mix(key)))
    return bits


@triton.jit
def of_lanes(of_block, lane):
    """The bits of elements by their places in the blocks."""
    return plus(of_block, times(lane.to(tl.uint32), SPACE))


@triton.jit
def numbered(before, number, FAR: tl.constexpr):
    """Numbers of blocks in the whole parameter, by those in the tensor that is stepped."""
    if FAR:
        return before + number
    else:
        return plus(before.to(tl.uint32), number.to(tl.uint32))


@triton.jit
def dithered_scale(x, bits):
    """Numbers of bf16's range, not negative, rounded to ones that bf16 has, in fp32.

    bits: those of the first elements of their blocks.
    """
    pattern = plus(x.to(tl.uint32, bitcast=True), mix(bits >> 8) >> 16)
    return (pattern & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def fraction(bits):
    """Bits as numbers in [0, 1)."""
    return (bits >> 8).to(tl.float32) * 2.0**-24


@triton.jit
def rounded(x, bits, ZERO: tl.constexpr, DITHERED: tl.constexpr, PTX: tl.constexpr):
    """2**23 + ZERO + floor(x + u): if it is not below 2**23, the low byte is that of the integer.

    u is the fraction of these bits, or if not DITHERED 1/2. |x| < 2**22.
    """
    if PTX and DITHERED:  # 1 + u of 23 bits by one shift of a pair of registers
        return tl.inline_asm_elementwise(
            "{ .reg .b32 b; .reg .f32 u; shf.r.clamp.b32 b, $2, 127, 9; mov.b32 u, b;"
            " add.rm.f32 u, u, $1; add.rm.f32 $0, u, $3; }",
            "=f,f,r,f", [x, bits, 8388607.0 + ZERO], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    elif PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 u; add.rm.f32 u, $1, 0f3F000000; add.rm.f32 $0, u, $2; }",
            "=f,f,f", [x, 8388608.0 + ZERO], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    elif DITHERED:
        return tl.floor(x + fraction(bits)) + (8388608.0 + ZERO)
    else:
        return tl.floor(x + 0.5) + (8388608.0 + ZERO)


@triton.jit
def low_byte(x):
    """The integer that `rounded` gave, of 8 bits."""
    return x.to(tl.uint32, bitcast=True).to(tl.uint8)


@triton.jit
def byte(x, bits, ZERO: tl.constexpr, DITHERED: tl.constexpr, PTX: tl.constexpr):
    """ZERO + floor(x + u) in a byte, which is 0 or 255 where that is beyond; u as in `rounded`.

    If not DITHERED, x is rounded to nearest even. ZERO is an int, and |x| < 2**22.
    """
    if PTX and DITHERED:
        return tl.inline_asm_elementwise(
            DITHERED_BYTES.value, "=r,f,f,f,f,r,r,r,r,r,r,r,r",
            [x, bits, ZERO - 1 if ZERO > 0 else MINUS_ONE], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    elif PTX:
        return tl.inline_asm_elementwise(
            NEAREST_BYTES.value, "=r,f,f,f,f,r,r,r,r", [x, ZERO], dtype=tl.uint8,
            is_pure=True, pack=4,
        )  # fmt: skip
    else:
        code = rounded(x, bits, ZERO, True, PTX) if DITHERED else x + (8388608.0 + ZERO)
        return low_byte(tl.minimum(tl.maximum(code, 8388608.0), 8388608.0 + 255.0))
