"""Reading and writing of weights in Triton; the package's text says what is computed.

With PTX (NVIDIA only) what differs is of no account: NaN is the machine's own 0x7FFF, whatever its
residual; and a residual may be there beside p = 0, where it is not read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import weights
from ..engines.triton.primitives import PER_THREAD, narrow, plus, widen

ROOM, NAN = tl.constexpr(weights.ROOM), tl.constexpr(weights.NAN)
INFINITE = tl.constexpr(weights.INFINITE)
MAGNITUDE, HALF = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x8000)


def _read(extra: int, n: int) -> str:
    """PTX that joins n bf16 numbers and residuals, which are cleared where a number is zero.

    A sum of products of pairs takes a residual out of its register, shifts and adds it.
    """
    residual, halves = f"${n + n // 2}", [f"${n + i}" for i in range(n // 2)]
    text = "{ .reg .b32 b, x, y, z; mov.b32 z, 0; "
    for name, half in zip("xy", halves, strict=False):  # zeros are the same halves in fp16
        text += f"set.neu.u32.f16x2 {name}, {half}, z; "
    text += "prmt.b32 x, x, y, 0x6420; " if extra == 8 else ""
    text += f"and.b32 x, x, {residual}; "
    for i in range(n):
        half, place = halves[i // 2], 0x10000 if i % 2 else 1
        text += f"and.b32 b, {half}, 0xffff0000; " if i % 2 else f"shl.b32 b, {half}, 16; "
        if extra == 8:  # halves by bytes
            text += f"dp2a.{'hi' if i > 1 else 'lo'}.s32.s32 ${i}, {place << 8:#x}, x, b; "
        else:
            text += f"dp2a.lo.s32.s32 ${i}, x, {0x100 if i % 2 else 1:#x}, b; "
    return text + "}"


def _bounded(extra: int) -> str:
    """PTX that leaves weights, of PER_THREAD, with room for what `_split` adds.

    Of one that has no larger bf16 number to be rounded to, the bits below k are cleared, and those
    below p limited, so that nothing is carried into p. One test, for bit 30, serves all: weights
    are looked at one by one behind a branch, where some are 2 or more.
    """
    n, kept = PER_THREAD.value, 0xFFFF & ~(0xFFFF >> extra)
    text = "{ .reg .pred q; .reg .f32 a; .reg .b32 t; mov.b32 t, 0; "
    for i in range(n):
        text += f"mov.b32 ${i}, ${n + i}; "
    for i in range(0, n, 2):
        text += f"lop3.b32 t, t, ${i}, ${i + 1}, 0xfe; "
    text += "and.b32 t, t, 0x40000000; setp.eq.b32 q, t, 0; @q bra good; "
    for i in range(n):
        text += f"and.b32 t, ${i}, {kept:#x}; min.u32 t, t, {0x8000 - (0x10000 >> extra):#x}; "
        text += f"prmt.b32 t, t, ${i}, 0x7610; mov.b32 a, ${i}; abs.f32 a, a; "
        text += f"setp.lt.f32 q, a, 0f{weights.ROOM:08X}; selp.b32 ${i}, ${i}, t, q; "
    return text + "good: }"


def _split(extra: int, dithered: bool, n: int) -> str:
    """PTX that splits n weights.

    k is P + (d >> (16 + e)), with half a unit of p if there is a residual: its upper half is p
    then, and the residual is what is left of the lower one if its upper bit is flipped. Without
    residuals nothing is added to a weight that has no room, or to NaN: a test for each takes as
    many instructions as that of `_bounded`, and fewer registers. (It branches because the assembler
    predicates an addition behind a branch; a predicated one becomes a selection.)
    """
    outputs, half = n // 2 + (extra > 0), 0x8000 if extra else 0
    text = f"{{ .reg .pred q; .reg .f32 a; .reg .b32 t, x, y, k<{n}>; "
    for i in range(n):
        text += f"mov.b32 k{i}, ${outputs + i}; mov.b32 t, {half}; "
        if dithered:  # one instruction, with the addition
            d = f"${outputs + n + i}"
            text += f"shf.l.clamp.b32 t, {d}, {half >> (16 - extra)}, {16 - extra}; "
        if not extra:
            text += f"mov.b32 a, k{i}; abs.f32 a, a; setp.lt.f32 q, a, 0f{weights.ROOM:08X}; "
            text += f"@!q bra cut{i}; "
        text += f"add.u32 k{i}, k{i}, t; cut{i}: "
    for i in range(0, n, 2):
        text += f"prmt.b32 ${i // 2}, k{i}, k{i + 1}, 0x7632; "
    if extra == 8:
        text += "prmt.b32 x, k0, k1, 0x0051; prmt.b32 y, k2, k3, 0x0051; "
        text += f"prmt.b32 x, x, y, 0x5410; xor.b32 ${n // 2}, x, 0x80808080; "
    if extra == 16:
        text += f"prmt.b32 x, k0, k1, 0x5410; xor.b32 ${n // 2}, x, 0x80008000; "
    return text + "}"


BOUNDED = tl.constexpr(",".join(["=&r"] * PER_THREAD.value + ["r"] * PER_THREAD.value))
BOUNDED_8, BOUNDED_16 = tl.constexpr(_bounded(8)), tl.constexpr(_bounded(16))
READ_8, READ_16 = tl.constexpr(_read(8, 4)), tl.constexpr(_read(16, 2))
SPLIT_0 = tl.constexpr(_split(0, True, 2))
SPLIT_8 = tl.constexpr(_split(8, True, 4))
SPLIT_16 = tl.constexpr(_split(16, False, 2))


@triton.jit
def ptx_split(w, bits, EXTRA: tl.constexpr):
    """As `split`, with residuals of their own dtype."""
    if EXTRA > 0:
        w = tl.inline_asm_elementwise(
            BOUNDED_8 if EXTRA == 8 else BOUNDED_16, BOUNDED.value, [w], dtype=tl.float32,
            is_pure=True, pack=PER_THREAD,
        )  # fmt: skip
    if EXTRA == 0:
        high = tl.inline_asm_elementwise(
            SPLIT_0.value, "=r,r,r,r,r", [w, bits], dtype=tl.bfloat16, is_pure=True, pack=2
        )
        return high, w
    elif EXTRA == 8:
        return tl.inline_asm_elementwise(
            SPLIT_8.value, "=r,=r,=r,r,r,r,r,r,r,r,r", [w, bits], dtype=(tl.bfloat16, tl.int8),
            is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            SPLIT_16.value, "=r,=r,r,r", [w], dtype=(tl.bfloat16, tl.int16), is_pure=True, pack=2
        )


@triton.jit
def pattern(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def read(p, residual, EXTRA: tl.constexpr, PTX: tl.constexpr):
    """The fp32 weights of a tile p, and of a tile of residuals if there are EXTRA bits."""
    if PTX and EXTRA == 8:
        return tl.inline_asm_elementwise(
            READ_8.value, "=f,=f,=f,=f,r,r,r", [p, residual], dtype=tl.float32, is_pure=True,
            pack=4,
        )  # fmt: skip
    if PTX and EXTRA == 16:
        return tl.inline_asm_elementwise(
            READ_16.value, "=f,=f,r,r", [p, residual], dtype=tl.float32, is_pure=True, pack=2
        )
    w = widen(p, PTX)
    if EXTRA > 0:
        low = residual.to(tl.int32) << (16 - EXTRA)
        whole = plus(pattern(w).to(tl.int32, bitcast=True), low).to(tl.float32, bitcast=True)
        w = tl.where(w == 0.0, w, whole)
    return w


@triton.jit
def split(w, bits, EXTRA: tl.constexpr, DITHERED: tl.constexpr):
    """The bf16 numbers of fp32 weights, and their residuals (int32; anything if EXTRA is 0)."""
    whole = pattern(w)
    room = (whole & MAGNITUDE) < ROOM
    if DITHERED:
        whole += tl.where(room, bits >> (16 + EXTRA), 0)
    high, low = whole, whole
    if EXTRA > 0:
        high = whole + tl.where(room, HALF, 0).to(tl.uint32)
        # The bits below p, less one in p for each half that was added to it.
        low = (whole << 16).to(tl.int32, bitcast=True) >> (32 - EXTRA)
        low = tl.where(room, low, (1 << (EXTRA - 1)) - 1)
        high_bits, kept = high >> 16, (whole & 0xFFFF) >> (16 - EXTRA)
        low = tl.where(room, low, tl.minimum(low, kept.to(tl.int32)))
        none = ((high_bits & 0x7FFF) == 0) | ((pattern(w) & MAGNITUDE) >= INFINITE)
        low = tl.where(none, 0, low)
    nan = (pattern(w) & MAGNITUDE) > INFINITE
    high = tl.where(nan, NAN, high >> 16).to(tl.uint16)
    return high.to(tl.bfloat16, bitcast=True), low


@triton.jit
def write(w, bits, TYPE: tl.constexpr, SPLIT: tl.constexpr, EXTRA: tl.constexpr,
          DITHERED: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """The stored weights of a tile: those in p, and the residual of EXTRA bits beside it."""
    if SPLIT and PTX:
        return ptx_split(w, bits, EXTRA)
    elif SPLIT:
        return split(w, bits, EXTRA, DITHERED)
    else:
        return narrow(w, TYPE), w
