"""The look-up tables of the Triton codec: the codebooks, and the straight lines of the encoder.

To encode, a moment is scaled to y = moment * (SCALE / absmax). The top bits of y's bit pattern, its
exponent and 2 (signed) or 4 (unsigned) bits of its mantissa, name a cell, and in every cell one
line z = slope * y + start, rounded to the nearest integer, is the nearest code less an offset. Of
the signed map y is a magnitude, and z gets the sign.

Why one line is enough: inside a decade of the code the map is linear, and where a decade ends a
line can hit the last midpoint between neighbouring codes and the one behind it. So all midpoints
lie on 18 or 19 lines, and it suffices that those of each cell lie on one of them. Where the edges
of the cells fall among the midpoints is free: that is BETA, 1 <= BETA < 2, found by search. 4 cells
per octave are enough for the signed map and 16 for the unsigned one. Nothing is approximated: each
line is fitted to the midpoints of the fp32 codebook itself, and misses none by more than 2e-5 of a
code.

A bank of shared memory serves one address at a time, so look-ups in one bank wait for each other.
The 32 signed cells of 8 octaves lie in banks of their own, once their slopes and once their starts.
The unsigned map has four times as many: there a cell has one byte, the number of its line, and 16
lines lie in banks of their own.

A code that is rounded by dither needs z between the midpoints, too. From the last value of a decade
to the first of the next it rises by one code in what are 3 steps of the lower decade, or 3/5 of the
upper. So with g the steps beyond the last value of the decade that is nearest, z is

    z = last + min(g, g / 3, (g + 2) / 5)            g = slope * y + start

with y = magnitude / absmax, scaled so that it is 1 where 1.0 becomes the nearest value. At most one
end of a decade lies in an octave: 32 cells are enough, which shared memory serves at once. They
are looked up by y's exponent. Of the unsigned map last is a linear function of start.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from . import TOP_CODE, ZERO_CODE, create_dynamic_map, pieces

# Of the unsigned map and of the signed one.
SCALE = 1.50537109375, 1.2769775390625  # BETA
SHIFT = 2.0**-31  # added to y: keeps its exponent in 96..127 without a maximum
BITS = 4, 2  # of the mantissa that tell cells apart
CELLS = tuple(32 * 2**bits for bits in BITS)
OFFSET = 128, 127
LINES = 32  # room for those of a map
HALF_LESS = 5e-7  # taken off the z of the tie beside zero, which takes the lower code
NUDGE = 2.0**-39  # of absmax: what turns a negative tie there when whole tensors are coded
IN_LINE = 1e-4  # of a code: what the rounding of the codebook puts midpoints off a line at most
OCTAVES = 128  # exponents that y has: y < 2
LAST = -1.8, -1.1  # of the unsigned map: last = LAST[0] * start + LAST[1]


def _midpoints(signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Magnitudes where the nearest code changes, and the z halfway between."""
    values = create_dynamic_map(signed).numpy().astype(np.float64)
    first = ZERO_CODE[signed] + (0 if signed else 1)  # between codes 0 and 1 the change is at 0
    middle = (values[1:] + values[:-1]) / 2
    z = np.arange(255) + 0.5 - OFFSET[signed]
    return middle[first:], z[first:]


def _edges(signed: bool) -> np.ndarray:
    """The lower edge of every cell, in y, and the end of the last one."""
    bits = BITS[signed]
    first = (np.arange(32 * 2**bits + 1, dtype=np.uint32) + (96 << bits)) << np.uint32(23 - bits)
    return first.view(np.float32).astype(np.float64)


def _fit(y: np.ndarray, z: np.ndarray, up: bool) -> np.ndarray:
    """The line, in fp32 numbers, that comes nearest to the midpoints (y, z)."""
    slope = (z[-1] - z[0]) / (y[-1] - y[0])
    if up:  # half an ulp too high on average, in y and in z
        z = z - 0.5 * (_ulp(z) + slope * _ulp(y))
    # The start's rounding is the larger error; a neighbouring slope makes up for it.
    nearby = np.float32(slope).view(np.int32) + np.arange(-32, 33, dtype=np.int32)
    slopes = nearby.view(np.float32).astype(np.float64)
    rest = z - slopes[:, None] * y
    starts = ((rest.max(1) + rest.min(1)) / 2).astype(np.float32).astype(np.float64)
    best = np.abs(rest - starts[:, None]).max(1).argmin()
    return np.array([slopes[best], starts[best]])


def _ulp(x: np.ndarray) -> np.ndarray:
    """The distance of fp32 numbers of this size from the next one."""
    return np.spacing(np.abs(x).astype(np.float32)).astype(np.float64)


def _fits(y: np.ndarray, z: np.ndarray, up: bool) -> list[np.ndarray]:
    """Lines through as many neighbouring midpoints as are in line; each begins where one ends."""
    found, first = [], 0
    while first < len(y) - 1:
        slope = (z[first + 1] - z[first]) / (y[first + 1] - y[first])
        off = np.abs(z[first] + slope * (y[first:] - y[first]) - z[first:]) > IN_LINE
        last = first + int(off.argmax()) - 1 if off.any() else len(y) - 1
        found.append(_fit(y[first : last + 1], z[first : last + 1], up))
        first = last
    return found


@cache
def lines(signed: bool, up: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """fp32 (LINES, 2): slope and start of every line, and int8 (cells,), which of them cells have.

    Args:
        signed: which map.
        up: for y and z rounded up (`fma.rp`), with which the unsigned map keeps a positive moment
            from code 0 without an instruction of its own.
    """
    (middle, z), edges, scale = _midpoints(signed), _edges(signed), SCALE[signed]
    y, top = middle * scale + SHIFT, scale * (1 + 1e-6)
    fits = np.array([*_fits(y, z, up), (0.0, z[0] - 0.5)])  # the last: below the first midpoint
    if signed:
        fits[0, 1] -= HALF_LESS
    chosen = []
    for low, high in zip(edges[:-1], np.minimum(edges[1:], top), strict=True):
        inside = (y >= low) & (y < high)
        below, above = z[y < low].max(initial=z[0] - 1), z[y >= high].min(initial=z[-1] + 1)
        missed = np.abs(fits[:, :1] * y[inside] + fits[:, 1:] - z[inside]).max(1, initial=0.0)
        room = np.minimum(fits @ (low, 1) - below, above - fits @ (high, 1))
        chosen.append(int(np.where(missed < IN_LINE, room, -1.0).argmax()))
    if not signed:
        # y = SHIFT exactly is zero: z = -127.5, a tie, goes to the even -128. An ulp above is -127.
        chosen[0], fits = len(fits), np.vstack([fits, (2.0**30, -float(OFFSET[False]))])
    table = np.pad(fits, ((0, LINES - len(fits)), (0, 0)))
    return table.astype(np.float32), np.array(chosen, dtype=np.int8)


def dither_scale(signed: bool) -> float:
    """The y of a magnitude of absmax."""
    return 1.0 / pieces(signed).threshold[-1]


def first_midpoint() -> float:
    """The largest y of the signed map that is zero."""
    return dither_scale(True) * pieces(True).threshold[0]


def _start_of_top() -> float:
    """The start < 0, of slope 0, at which an unsigned z is TOP_CODE."""
    factor, constant = np.array(LAST, dtype=np.float32).astype(np.float64)
    nearby = np.float32((TOP_CODE - constant) / (1 + factor)).view(np.int32) + np.arange(-64, 64)
    starts = nearby.astype(np.int32).view(np.float32)
    last = (factor * starts.astype(np.float64) + constant).astype(np.float32)
    return float(starts[np.nonzero(last + starts == TOP_CODE)[0][0]])


@cache
def octaves(signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """fp32 (128, 2), slope and start of every octave of y, and fp32 (128,), its `last`.

    An unsigned number below the first value may have any z up to 1, but zero none above 0; of the
    signed map nothing is asked below `first_midpoint`.
    """
    table, shift, scale = pieces(signed), 0 if signed else 1, dither_scale(signed)
    of_decades = (table.inverse_slope, table.offset, table.last)
    slope, offset, last = (np.array(x[1:8]) for x in of_decades)
    begins = ((last + shift + 1) / 2 - shift - offset) / slope * scale  # of decades, in y
    rows = []
    for low in 2.0 ** np.arange(1 - OCTAVES, 0):
        e = next(e for e in range(7) if e == 6 or begins[e + 1] > low)
        # Below the first value, up from zero, a code takes 3/5 of a step.
        steeper = 5 / 3 if signed and 2 * low <= begins[0] else 1.0
        rows.append((steeper * slope[e] / scale, steeper * (offset[e] - last[e]), last[e]))
    # 1.0: of the unsigned map start + last is 255 exactly.
    rows.append((0.0, 0.0, TOP_CODE - 127) if signed else (0.0, _start_of_top(), TOP_CODE))
    made = np.array(rows).astype(np.float32)
    made[0, :2] = 0.0  # of zero
    return made[:, :2], made[:, 2]


@cache
def packed(up: bool, device: torch.device) -> Tensor:
    """The kernels' one table: both codebooks, the lines of both maps, and what dither needs.

    fp32 (1600,); `triton` says where what is.
    """
    books = [create_dynamic_map(signed).numpy() for signed in (True, False)]
    cells, last = octaves(True)
    (signed, signed_cells), (unsigned, unsigned_cells) = lines(True), lines(False, up)
    parts = [
        *books, signed[signed_cells].T, unsigned, unsigned_cells.view(np.float32), cells,
        octaves(False)[0], last,
    ]  # fmt: skip
    return torch.from_numpy(np.concatenate([part.ravel() for part in parts])).to(device)
