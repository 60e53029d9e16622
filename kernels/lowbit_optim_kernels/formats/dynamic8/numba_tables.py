"""Tables of the Numba engine's codec: codes as floating-point numbers of their own.

Let the *position* of a code be |code - 127| (signed) or code + 1 (unsigned). A magnitude
y = |x| / absmax falls into one of nine segments e: 0 below the first decade, 1..7 the decades, 8
the code of 1.0. Segment e holds the positions 2**E to 2**(E+1) - 1 with E = e + BIAS, and inside it

    position = floor(2**E * v),    v = min(y * slope[e] + 8/9, just below 2)

(8/9 is what `offset` of `dynamic8.pieces` comes to). So a position, as a float, has its exponent
from the segment and its mantissa from v; no comparison is needed, and ties go down because the
floor of the largest float below a midpoint does. Slopes are fitted to the fp32 codebook.

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
# y is kept as y * 2**DOWN: its exponent field is then 1..31, and 0 for y < 2**-30.
DOWN = -96


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


def octave_table(signed: bool) -> np.ndarray:
    """What to add to the bits of y * 2**DOWN so that the exponent becomes E; uint32 (32,).

    Indexed by the exponent field. An octave has at most one segment boundary inside; there the
    mantissa's carry adds the one.
    """
    tops = segments(signed)[0]
    table = np.zeros(32, dtype=np.uint64)
    for exponent in range(32):
        low, high = (2.0 ** (k - 127 - DOWN) for k in (exponent, exponent + 1))
        base = 127 + BIAS[signed] + int(np.sum(tops < low))
        inside = tops[(tops >= low) & (tops < high)]
        add = ((base - exponent) << 23) % 2**32
        if len(inside):
            add += 2**23 - 1 - (int(inside[0].view(np.uint32)) & (2**23 - 1))
        if not signed and exponent == 0:
            add = (128 << 23) - 1  # zero gets position 0, anything above it segment 1
        table[exponent] = add % 2**32
    return table.astype(np.uint32)


def slope_table(signed: bool, slopes: np.ndarray) -> np.ndarray:
    """Slopes for y * 2**DOWN by the low four bits of the exponent field 127 + E; fp64 (16,)."""
    table = np.zeros(16)
    for e, slope in enumerate(slopes):
        table[(e + BIAS[signed] + 127) & 15] = slope * 2.0**-DOWN
    return table


def line_tables(signed: bool) -> np.ndarray:
    """The z of dithered codes, as lines for each segment; fp64 (4, 16), indexed as `slope_table`.

    z = min(f, f / 3 + t[2], 5 f / 3 + t[3]) of f = y * 2**DOWN * t[0] + t[1], less one where it is
    unsigned: in codes, not positions. Zero's is 0, or NaN, which comes out below any code.
    """
    tables = np.zeros((4, 16))
    one = 0 if signed else 1
    for e, slope in enumerate(dithered_slopes(signed)):
        n = 2.0 ** (e + BIAS[signed])
        line = [n * slope * 2.0**-DOWN, n * OFFSET - 0.5 - one]
        line += [(4 * n - 2 - 2 * one) / 3, (2 * one - 2 * n) / 3]
        zero = [0.0, 0.0 if signed else np.nan, 0.0, 0.0]
        tables[:, (e + BIAS[signed] + 127) & 15] = line if e else zero
    return tables
