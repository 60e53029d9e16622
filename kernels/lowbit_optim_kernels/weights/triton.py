"""How weights are read and written in Triton; the package's text says what is computed.

With PTX (NVIDIA only) what differs is of no account: NaN is the machine's own 0x7FFF, whatever its
residual; a residual may be there beside p = 0, where it is not read; and that of a weight beyond
3.3895e38 is not limited.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from .. import weights
from ..engines.triton.primitives import narrow, widen

ROOM, NAN = tl.constexpr(weights.ROOM), tl.constexpr(weights.NAN)
INFINITE = tl.constexpr(weights.INFINITE)
MAGNITUDE, HALF = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x8000)


def _read(p: int, residual: int, selectors: Sequence[int]) -> str:
    """PTX that joins bf16 numbers from register p on and residuals.

    Args:
        p: the number of the first register of the bf16 numbers.
        residual: that of the residuals.
        selectors: of the bytes of each residual, shifted and with its sign.
    """
    text = "{ .reg .pred q0, q1; .reg .b32 l, b, z; mov.b32 z, 0; "
    for i, selector in enumerate(selectors):
        half = f"${p + i // 2}"
        if i % 2:
            text += f"and.b32 b, {half}, 0xffff0000; "
        else:  # for two at once; zeros are the same halves in fp16
            text += f"setp.neu.f16x2 q0|q1, {half}, z; shl.b32 b, {half}, 16; "
        text += f"prmt.b32 l, ${residual}, 0, {selector:#x}; "
        text += f"@q{i % 2} add.u32 b, b, l; mov.b32 ${i}, b; "
    return text + "}"


def _split(extra: int, dithered: bool, n: int) -> str:
    """PTX that splits n weights.

    A weight that has no larger bf16 number to be rounded to, or NaN, is cut off. Of others k is
    P + (d >> (16 + e)), with half a unit of p if there is a residual: its upper half is p then, and
    the residual is what is left of the lower one if its upper bit is flipped. (It branches because
    the assembler predicates an addition behind a branch; a predicated one becomes a selection.)
    """
    outputs, half = n // 2 + (extra > 0), 0x8000 if extra else 0
    text = "{ .reg .pred q; .reg .f32 a; .reg .b32 t, x, y; "
    text += f".reg .b32 k<{n}>; "
    for i in range(n):
        w, d = f"${outputs + i}", f"${outputs + n + i}"
        text += f"mov.b32 a, {w}; abs.f32 a, a; setp.lt.f32 q, a, 0f{weights.ROOM:08X}; "
        text += f"mov.b32 k{i}, {w}; mov.b32 t, {half}; "
        if dithered:  # one instruction, with the addition
            text += f"shf.l.clamp.b32 t, {d}, {half >> (16 - extra)}, {16 - extra}; "
        text += f"@!q bra cut{i}; add.u32 k{i}, k{i}, t; "
        if extra:
            text += f"bra done{i}; cut{i}: xor.b32 k{i}, k{i}, {half}; done{i}: "
        else:
            text += f"cut{i}: "
    for i in range(0, n, 2):
        text += f"prmt.b32 ${i // 2}, k{i}, k{i + 1}, 0x7632; "
    if extra == 8:
        text += "prmt.b32 x, k0, k1, 0x0051; prmt.b32 y, k2, k3, 0x0051; "
        text += f"prmt.b32 x, x, y, 0x5410; xor.b32 ${n // 2}, x, 0x80808080; "
    if extra == 16:
        text += f"prmt.b32 x, k0, k1, 0x5410; xor.b32 ${n // 2}, x, 0x80008000; "
    return text + "}"


# Bytes of a register, 4 of one that is 0, and with 8 a byte's sign eight times.
READ_8 = tl.constexpr(_read(4, 6, [0x8804, 0x9914, 0xAA24, 0xBB34]))
READ_16 = tl.constexpr(_read(2, 3, [0x9910, 0xBB32]))
SPLIT_0 = tl.constexpr(_split(0, True, 2))
SPLIT_8 = tl.constexpr(_split(8, True, 4))
SPLIT_16 = tl.constexpr(_split(16, False, 2))


@triton.jit
def ptx_split(w, bits, EXTRA: tl.constexpr):
    """As `split`, with residuals of their own dtype."""
    if EXTRA == 0:
        high = tl.inline_asm_elementwise(
            SPLIT_0.value, "=r,r,r,r,r", [w, bits], dtype=tl.bfloat16, is_pure=True, pack=2
        )
        return high, w
    elif EXTRA == 8:  # noqa: RET505 (Triton takes a second return only in the other branch)
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
        whole = (pattern(w).to(tl.int32, bitcast=True) + low).to(tl.float32, bitcast=True)
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
    """What is stored of the weights of a tile, in p and beside it; the second is for EXTRA bits."""
    if SPLIT and PTX:
        return ptx_split(w, bits, EXTRA)
    elif SPLIT:  # noqa: RET505 (Triton takes a second return only in the other branch)
        return split(w, bits, EXTRA, DITHERED)
    else:
        return narrow(w, TYPE), w
