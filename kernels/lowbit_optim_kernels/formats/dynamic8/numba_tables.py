"""Tables of the Numba engine's codec: codes as floating-point numbers of their own.

Let the *position* of a code be |code - 127| (signed) or code + 1 (unsigned). A magnitude
y = |x| / absmax falls into one of nine segments e: 0 below the first decade, 1..7 the decades, 8
the code of 1.0. Segment e holds the positions 2**E to 2**(E+1) - 1 with E = e + BIAS, and inside it

    position = floor(2**E * v),    v = min(y * slope[e] + 8/9, just below 2)

(8/9 is what `offset` of `dynamic8.pieces` comes to). So a position, as a float, has its exponent
from the segment and its mantissa from v; no comparison is needed, and ties go down because the
floor of the largest float below a midpoint does. Slopes are fitted to the fp32 codebook.

Where AVX-512 looks a segment up by y's exponent, it looks at the lowest bits of the field only. A y
below 2**-31 is taken for one that is 2**32 times as large, or 2**64, and its position comes out as
many times too small: less than one.

By dither a number takes one of the two positions around it. With n = 2**E and F = n v - 1/2, which
is a whole number at a position's own value, it lies at

    z = min(F, (F + 2 (2 n - 1)) / 3, (5 F - 2 n) / 3)

between them: two segments' positions next to each other are 3 steps of the lower one apart, or 3/5
of the upper. Its position is floor(z + u). The one of segment 8 has none above it; a slope of its
own leads beyond it, and what is above the largest code becomes that one.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from . import create_dynamic_map

BIAS = {True: -1, False: 0}
OFFSET = float(np.float32(8.0 / 9.0))
# Less than half the smallest code of the signed map, for what cannot do with less. Of the unsigned
# one a positive number never becomes zero: those below the smallest code, which is 3.25e-7, are
# taken for LEAST to be rounded to nearest, and by dither for a little more than that code.
SMALLEST, LEAST, LEAST_DITHERED = 2.0**-30, 2.5e-7, 3.25e-7 * (1.0 + 2.0**-20)


@cache
def book(signed: bool) -> np.ndarray:
    """The codebook; fp32 (256,)."""
    return create_dynamic_map(signed).numpy()


def _best_slope(y: np.ndarray, want: np.ndarray, ideal: float, scale: int) -> float:
    """The fp32 slope near `ideal` that gives the fewest of y a wrong position."""
    best, fewest = ideal, len(y) + 1
    for i in range(-12, 13):
        slope = np.float32(ideal) + np.float32(i) * np.spacing(np.float32(ideal))
        v = (y * np.float64(slope) + OFFSET).astype(np.float32).astype(np.float64)
        wrong = int(np.count_nonzero(np.floor(v * scale) != want))
        if wrong < fewest:
            best, fewest = float(slope), wrong
    return best


@cache
def segments(signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """The largest fp32 y of segments 0..7, and the slopes of segments 0..8."""
    values = book(signed).astype(np.float64)
    of_position = values[127:] if signed else np.concatenate([[-1.0], values])
    midpoint = (of_position[:-1] + of_position[1:]) / 2
    nearest = midpoint.astype(np.float32)
    below = np.where(nearest > midpoint, np.nextafter(nearest, np.float32(0)), nearest)
    tops, slopes = [], [0.0]
    for e in range(7):
        n = 2**e if signed else 2 ** (e + 1)
        # A positive unsigned number never becomes zero: segment 0 is zero alone.
        tops.append(below[n - 1] if signed or e else np.float32(0))
        slope = 10.0 ** (6 - e) / 0.9
        if n > 1:
            edges = below[n : 2 * n - 1]
            steps = range(-7, 9)  # floats around each edge; up to the edge is the lower position
            y = np.concatenate([(edges.view(np.int32) + i).view(np.float32) for i in steps])
            want = np.concatenate([np.arange(n, 2 * n - 1) + (i > 0) for i in steps])
            slope = _best_slope(y.astype(np.float64), want, slope, n)
        slopes.append(slope)
    tops.append(below[2 * n - 1])
    slopes.append(1.0 + 1.0 / 512 - OFFSET)  # y = 1 comes out just above 1
    return np.array(tops), np.array(slopes)


def dithered_slopes(signed: bool) -> np.ndarray:
    """The slopes of `segments` for positions by dither."""
    slopes = segments(signed)[1].copy()
    slopes[8] = 1.25 - OFFSET
    return slopes


def octave_table(tops: np.ndarray, first: int) -> np.ndarray:
    """The addend to the bits of y by which its exponent field is `first`, one more above each top.

    uint32 (32,), indexed by the low five bits of y's own field. An octave has at most one of the
    tops inside; there the mantissa's carry adds the one.
    """
    table = np.zeros(32, dtype=np.uint64)
    for exponent in range(96, 128):
        low, high = (2.0 ** (k - 127) for k in (exponent, exponent + 1))
        base = first + int(np.sum(tops < low))
        inside = tops[(tops >= low) & (tops < high)]
        add = ((base - exponent) << 23) % 2**32
        if len(inside):
            add += 2**23 - 1 - (int(inside[0].view(np.uint32)) & (2**23 - 1))
        table[exponent & 31] = add % 2**32
    return table.astype(np.uint32)


def slope_table(signed: bool) -> np.ndarray:
    """Slopes by the low four bits of the exponent field 127 + E; fp32 (16,)."""
    table = np.zeros(16, dtype=np.float32)
    for e, slope in enumerate(segments(signed)[1]):
        table[(e + BIAS[signed] + 127) & 15] = slope
    return table


def _first_values(signed: bool) -> np.ndarray:
    """The smallest y of segments 1..7; fp32."""
    return book(signed)[[2 ** (e + BIAS[signed]) + (127 if signed else -1) for e in range(1, 8)]]


@cache
def gap_tables() -> np.ndarray:
    """The unsigned map around the gaps above segments e = 1..8, by e's low three bits; fp32 (2, 8).

    Let d be how far y is above the first value of the next segment, in 3 steps of the lower one,
    less 1/2. Up to there from the segment's middle, and beyond to the middle of the next,

        code + 1/2 = 2**(e + 1) + min(3 d + 3, d, (3 d - 1) / 5)        d = y * slope + start

    Above segment 8, the code of 1.0, is nothing. 1/2 is added for random bits around zero.
    """
    tables = np.zeros((2, 8), np.float32)
    tables[1] = (255.5 - 512 - 3) / 3
    for e in range(1, 8):
        n, end = 2**e, 10.0 ** (e - 7)
        slope = n / (2.7 * end)
        tables[:, e] = slope, -(end + 2.25 * end / n) * slope - 0.5
    return tables


@cache
def gap_guess() -> tuple[float, int]:
    """(a, b): a * bits(y) + b, rounded, is the entry of `gap_tables`; see `guess`.

    Entries change every 3.1 octaves down from segment 8: within each segment, and below the first.
    """
    bits = float(segments(False)[0][7].astype(np.float32).view(np.int32))
    b = round(7.5 - bits / (3.1 * 2.0**23))
    return (7.5 - b) / bits, b


@cache
def line_tables(signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """The z of dithered codes as lines: where all but the last end, and they; fp32 (n,), (3, 16).

    z = min(f, f / 3 + t[2]) of f = y * t[0] + t[1], less two where it is unsigned: a code is one
    less than a position, and `numba_encode._cut` adds one. A line ends at the first value of the
    next segment. The signed map's first two are zero and the gap next to it.
    """
    tops, slopes = segments(signed)[0], dithered_slopes(signed)
    first, *others = _first_values(signed)
    ends, lines, one = [*others, tops[7]], [], 0 if signed else 2
    if signed:
        ends = [tops[0], first, *ends]
        lines = [(0.0, 0.0, 0.0), (5 * slopes[1] / 3, (5 * OFFSET - 4.5) / 3, np.inf)]
    for e in range(1, 9):
        n = 2 ** (e + BIAS[signed])
        near_end = (4 * n - 2 - 2 * one) / 3 if e < 8 else np.inf
        lines.append((n * slopes[e], n * OFFSET - 0.5 - one, near_end))
    tables = np.zeros((3, 16), np.float32)
    tables[:, : len(lines)] = np.transpose(lines)
    return np.array(ends, np.float32), tables


@cache
def guess(signed: bool) -> tuple[float, int]:
    """(a, b): a * bits(y) + b, rounded, is the segment of y or the one before.

    The bits of a float, as an integer, are nearly linear in its logarithm. The line turns in the
    middle of a segment, where it is an octave and a half from turning too early or too late. (b is
    whole, so that it can be added to a large number.)
    """
    ends = segments(signed)[0].astype(np.float32)
    if not signed:
        ends[0] = LEAST
    bits = ends.view(np.int32).astype(np.float64)
    middle, turns = (bits[:-1] + bits[1:]) / 2, np.arange(0.5, 7)
    b = round(np.polyfit(middle, turns, 1)[1])
    return float(np.mean((turns - b) / middle)), b


@cache
def decoding_lines(signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Slopes and offsets of the codebook's values, within an ulp of them or two; fp32 (8,).

    Of a position f, with power the power of two in it, both with the code's sign,

        value = slope (f - power) + offset power      signed
        value = slope f + offset                      unsigned

    rounded once, by the low three bits of f's exponent field. The last position, 1.0, has a line of
    its own; the unsigned position 1, which is zero, shares it.
    """
    slopes, offsets = np.zeros(8, np.float32), np.zeros(8, np.float32)
    for e in range(7):
        n = 2**e if signed else 2 ** (e + 1)
        f, first = np.arange(n, 2 * n), n if signed else 0
        want = book(signed)[f + 127 if signed else f - 1]
        slope = 0.9 * 10.0 ** (e - 6) / n
        offset = 10.0 ** (e - 6) * (0.45 / n - 0.8) + slope * first
        place = (127 + e + (not signed)) & 7
        slopes[place], offsets[place] = _best_line(f - first, first or 1, want, slope, offset)
    if signed:
        offsets[6] = 1.0 / 128
    else:
        slopes[7], offsets[7] = 1.0 / 255, -1.0 / 255
    return slopes, offsets


def _best_line(
    x: np.ndarray, power: int, want: np.ndarray, slope: float, offset: float
) -> tuple[np.float32, np.float32]:
    """The fp32 slope and offset / power near these that give the values nearest to those wanted."""
    first, second = np.float32(slope), np.float32(offset / power)
    best, least = (first, second), np.inf
    for i in range(-2, 3):
        s = first + np.float32(i) * np.spacing(first)
        for j in range(-8, 9):
            t = second + np.float32(j) * np.spacing(second)
            value = (x * np.float64(s) + np.float64(t) * power).astype(np.float32)
            off = float(np.max(np.abs(value - want) / np.spacing(want)))
            if off < least:
                best, least = (s, t), off
    return best
