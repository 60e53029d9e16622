"""Numbers of PTX on NumPy arrays: one rounding where the instruction has one, in its direction."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from .parser import UnsupportedError, width

Array = NDArray
UNSIGNED = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
TO_WHOLE = {"rmi": np.floor, "rni": np.rint, "rzi": np.trunc, "rpi": np.ceil}
_FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
NAN_BF16 = np.uint16(0x7FFF)


def dtype_of(kind: str) -> type:
    """The dtype of a type's arrays; bf16, and packed pairs of halves, are bits."""
    if kind in _FLOATS:
        return _FLOATS[kind]
    return SIGNED[width(kind)] if kind[0] == "s" else UNSIGNED[width(kind)]


def is_float(kind: str) -> bool:
    return kind in _FLOATS or kind == "bf16"


def flush(x: Array) -> Array:
    """Subnormal numbers as zeros of the same sign."""
    return np.where(np.abs(x) < np.finfo(x.dtype).tiny, np.copysign(x.dtype.type(0), x), x)


def wide(x: Array, kind: str) -> Array:
    """Halves as fp32, other floats as they are."""
    if kind == "bf16":
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x.astype(np.float32) if kind == "f16" else x


def to_odd(near: Array, rest: Array) -> Array:
    """near + rest in fp64, inexact results with an odd last bit: rounding again rounds once."""
    near = np.atleast_1d(near)
    bits = near.view(np.int64)
    inexact = np.isfinite(rest) & (rest != 0) & np.isfinite(near) & (bits & 1 == 0)
    away = np.where((rest > 0) == (near > 0), 1, -1)
    return (bits + np.where(inexact, away, 0)).view(np.float64)


def fused(a: Array, b: Array, c: Array, mode: str = "rn") -> Array:
    """a * b + c of numbers of at most fp32, rounded to odd in fp64."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)  # exact
    total = product + c
    back = total - product
    found = to_odd(total, (product - (total - back)) + (c - back))
    if mode == "rm":  # where numbers cancel, zero is negative
        negative = np.signbit(product) | np.signbit(c)
        found = np.where((found == 0) & negative, -0.0, found)
    return found


def rounded(exact: Array, kind: str, mode: str = "rn") -> Array:
    """fp64 numbers in a narrower type. Inexact ones are to have been rounded to odd."""
    if kind == "f64":
        return exact
    if kind == "f16" and mode == "rn":
        return exact.astype(np.float16)
    near = exact.astype(np.float32)
    if kind == "bf16":
        cut = to_nearer(near, exact, "rz")
        sticky = cut.view(np.uint32) | np.where(cut == exact, 0, 1).astype(np.uint32)
        return to_bf16(sticky.view(np.float32), mode)
    if kind != "f32":
        raise UnsupportedError(f"the emulator does not round .{kind} by .{mode}")
    return to_nearer(near, exact, mode)


def to_nearer(near: Array, exact: Array, mode: str) -> Array:
    """fp32 numbers next to fp64 ones, in the direction of the mode."""
    if mode == "rn":
        return near
    back, infinity = near.astype(np.float64), np.float32(np.inf)
    wrong, towards = {
        "rm": (back > exact, -infinity),
        "rp": (back < exact, infinity),
        "rz": (np.abs(back) > np.abs(exact), np.float32(0)),
    }[mode]
    return np.where(wrong, np.nextafter(near, towards), near).astype(np.float32)


def to_bf16(x: Array, mode: str = "rn") -> Array:
    """fp32 numbers as bits of bf16, to nearest even or cut off."""
    if mode not in ("rn", "rz"):
        raise UnsupportedError(f"the emulator does not round .bf16 by .{mode}")
    bits, half = np.ascontiguousarray(x).view(np.uint32), np.uint32(16)
    if mode == "rn":
        bits = bits + np.uint32(0x7FFF) + ((bits >> half) & np.uint32(1))
    return np.where(np.isnan(x), NAN_BF16, bits >> half).astype(np.uint16)


def fused_double(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in fp64, rounded once: by fractions, for each different triple."""
    numbers = np.stack(np.broadcast_arrays(a, b, c), axis=1).view(np.uint64)
    distinct, where = np.unique(numbers, axis=0, return_inverse=True)
    values = distinct.view(np.float64)
    plain = values[:, 0] * values[:, 1] + values[:, 2]
    for i in np.flatnonzero(np.isfinite(values).all(1)):
        x, y, z = (Fraction(float(v)) for v in values[i])
        exact = x * y + z
        if exact:  # the sign of a zero is as in two steps
            try:
                plain[i] = float(exact)
            except OverflowError:
                plain[i] = np.inf if exact > 0 else -np.inf
    return plain[where.reshape(-1)]


def extremum(a: Array, b: Array, kind: str, largest: bool, nan: bool) -> Array:
    """The smaller or larger number; NaN only of two, or of one if `nan`; -0 is less than 0."""
    x, y = np.broadcast_arrays(wide(a, kind), wide(b, kind))
    order = (x > y) if largest else (x < y)
    zeros = (x == 0) & (y == 0)
    order = np.where(zeros, np.signbit(y) == largest, order)
    first = (order | np.isnan(y)) & ~np.isnan(x)
    found = np.where(first, x, y)
    if nan:
        found = np.where(np.isnan(x) | np.isnan(y), np.nan, found)
    return rounded(found.astype(np.float64), kind)


def to_integer(x: Array, kind: str, how: str) -> Array:
    """Floats as integers of a type, clamped to what it holds."""
    whole = TO_WHOLE[how](x.astype(np.float64))
    dtype, bits = dtype_of(kind), width(kind)
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    bad = dtype(most) - dtype(most >> 1) if kind[0] == "u" else dtype(least)
    if x.dtype != np.float64 and bits < 64:
        bad = dtype(0)
    inside = (whole > float(least)) & (whole < float(most))
    found = np.where(inside, whole, 0).astype(dtype)
    found = np.where(whole >= float(most), dtype(most), found)
    found = np.where(whole <= float(least), dtype(least), found)
    return np.where(np.isnan(whole), bad, found).astype(dtype)


def shifted(x: Array, by: Array, left: bool) -> Array:
    """Shifts, whose distance is clamped to the width."""
    bits = x.dtype.itemsize * 8
    far = by >= bits
    near = np.where(far, 0, by).astype(x.dtype)
    fill = np.where(x < 0, -1, 0) if x.dtype.kind == "i" and not left else 0
    return np.where(far, fill, x << near if left else x >> near).astype(x.dtype)


def field(x: Array, start: Array, length: Array) -> Array:
    """`length` bits of a number from bit `start` on, with copies of the last as its sign if any.

    Beyond the number's own last bit lie copies of that if it has a sign.
    """
    bits = x.dtype.itemsize * 8
    start, length = start & 255, length & 255
    plain = x.view(UNSIGNED[bits])
    mask = shifted(np.ones_like(plain), length, True) - plain.dtype.type(1)
    found = shifted(x, start, False).view(plain.dtype) & mask
    if x.dtype.kind == "i":
        last = np.minimum(start + length - 1, bits - 1)
        negative = (shifted(plain, last, False) & plain.dtype.type(1)).astype(bool) & (length > 0)
        found = np.where(negative, found | ~mask, found)
    return found.view(x.dtype)


def permuted(a: Array, b: Array, selector: Array) -> Array:
    """Bytes of two words; bit 3 of a selector's nibble gives copies of a byte's sign."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    out = np.zeros(np.broadcast_shapes(both.shape, selector.shape), np.uint32)
    for i in range(4):
        nibble = selector >> np.uint32(4 * i)
        byte = both >> ((nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8))
        byte = (byte & np.uint64(255)).astype(np.uint32)
        sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        byte = np.where(nibble & np.uint32(8), sign, byte)
        out |= byte << np.uint32(8 * i)
    return out


def packed(high: Array, low: Array, rest: Array, kind: str) -> Array:
    """Two int32 clamped to a type of 8 bits, the first above the second, below half a word."""
    least, most = np.iinfo(dtype_of(kind)).min, np.iinfo(dtype_of(kind)).max
    first, second = (
        np.clip(x, least, most).astype(np.uint32) & np.uint32(255) for x in (high, low)
    )
    return rest << np.uint32(16) | first << np.uint32(8) | second


def funnel(low: Array, high: Array, by: Array, left: bool, wrap: bool) -> Array:
    """The upper or lower word of a shifted pair."""
    by = (by & np.uint32(31)) if wrap else np.minimum(by, np.uint32(32))
    both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    by = by.astype(np.uint64)
    return (((both << by) >> np.uint64(32)) if left else (both >> by)).astype(np.uint32)


def lookup3(a: Array, b: Array, c: Array, table: Array) -> Array:
    """Any function of three bits: bit 4a + 2b + c of the table."""
    out = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), a.dtype)
    for i in range(8):
        if int(table[0]) >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def dot(a: Array, b: Array, c: Array, upper: bool) -> Array:
    """Signed halves of a by the lower or upper two signed bytes of b, and c."""
    halves = np.ascontiguousarray(a).view(np.int16).reshape(-1, 2).astype(np.int32)
    by = np.ascontiguousarray(b).view(np.int8).reshape(-1, 2, 2)[:, int(upper)]
    return (halves * by).sum(1, dtype=np.int32) + c


def quotient(a: Array, b: Array) -> tuple[Array, Array]:
    """Quotients and remainders of integers, cut off towards zero; all ones by 0."""
    zero = b == 0
    by = np.where(zero, 1, b).astype(a.dtype)
    whole = a // by
    if a.dtype.kind == "i":
        whole = whole + ((whole < 0) & (whole * by != a))
    return np.where(zero, ~a.dtype.type(0), whole).astype(a.dtype), a - whole.astype(a.dtype) * by
