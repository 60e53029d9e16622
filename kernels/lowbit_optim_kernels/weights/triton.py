"""How weights are read and written in Triton; the package's text says what is computed."""

from __future__ import annotations

import triton
import triton.language as tl

from ..engines.triton.primitives import narrow, widen
from . import INFINITE, NAN, ROOM

ROOM, INFINITE, NAN = tl.constexpr(ROOM), tl.constexpr(INFINITE), tl.constexpr(NAN)
MAGNITUDE, HALF = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x8000)


@triton.jit
def pattern(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def read(p, residual, EXTRA: tl.constexpr, PTX: tl.constexpr):
    """The fp32 weights of a tile p, and of a tile of residuals if there are EXTRA bits."""
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
          DITHERED: tl.constexpr):  # fmt: skip
    """What is stored of the weights of a tile, in p and beside it; the second is for EXTRA bits."""
    if SPLIT:
        return split(w, bits, EXTRA, DITHERED)
    else:  # noqa: RET505 (Triton takes a second return only in the other branch)
        return narrow(w, TYPE), w
