"""The look-up tables of the Triton codec: the codebooks, and one straight line per cell.

To encode, a moment is scaled to y = moment * (SCALE / absmax). The top bits of y's bit pattern, its
exponent and 2 (signed) or 4 (unsigned) bits of its mantissa, name a cell, and in every cell one
line z = slope * y + start, rounded to the nearest integer, is the nearest code less an offset.

Why one line is enough: inside a decade of the code the map is linear, and where a decade ends one
line can still hit two midpoints between neighbouring codes exactly. So it suffices that no cell
holds three midpoints that are not in line. Where the edges of the cells fall among the midpoints is
free: that is BETA, 1 <= BETA < 2, found by search. 4 cells per octave are enough for the signed map
and 16 for the unsigned one. Nothing is approximated: each line is fitted to the midpoints of the
fp32 codebook itself, and misses none by more than 1e-5 of a code.

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

from . import TOP_CODE, create_dynamic_map, pieces

BETA_SIGNED, BETA_UNSIGNED = 1.27685546875, 1.2626953125
SCALE_SIGNED = BETA_SIGNED * 2.0**14  # y stays inside fp16, and what is under 2**-14 is code 127
SCALE_UNSIGNED = BETA_UNSIGNED
SHIFT = 2.0**-31  # added to the unsigned y: keeps its exponent in 96..127 without a maximum
OFFSET_SIGNED, OFFSET_UNSIGNED = 127, 128
CELLS_SIGNED, CELLS_UNSIGNED = 256, 512
OCTAVES = 128  # exponents that y has: y < 2
LAST = -1.8, -1.1  # of the unsigned map: last = LAST[0] * start + LAST[1]

Line = tuple[float, float]
Midpoints = tuple[np.ndarray, np.ndarray, int]


def _midpoints(signed: bool) -> list[Midpoints]:
    """Per sign: magnitudes where the nearest code changes, the z halfway between, the sign."""
    values = create_dynamic_map(signed).numpy().astype(np.float64)
    middle = (values[1:] + values[:-1]) / 2
    z = np.arange(255) + 0.5 - (OFFSET_SIGNED if signed else OFFSET_UNSIGNED)
    if signed:
        return [(middle[127:], z[127:], 1), (-middle[126::-1], z[126::-1], -1)]
    return [(middle[1:], z[1:], 1)]  # between codes 0 and 1 the change is at 0: cell 0


def _edges(signed: bool) -> np.ndarray:
    """The lower edge of every cell of one sign, in y, and the end of the last one."""
    if signed:
        # The conversion to fp16 rounds to nearest: a cell begins half an fp16 ulp early.
        half = np.arange(1, 124, dtype=np.uint16) << 8
        here = half.view(np.float16).astype(np.float64)
        before = (half - np.uint16(1)).view(np.float16).astype(np.float64)
        return np.concatenate([[0.0], (here + before) / 2])
    first = (np.arange(513, dtype=np.uint32) + (96 << 4)) << np.uint32(19)
    return first.view(np.float32).astype(np.float64)


def _fit(y: np.ndarray, z: np.ndarray, low: float, high: float, sign: int) -> Line:
    """The line, in fp32 numbers, that comes nearest to the midpoints (y, z) of cell [low, high)."""
    if len(y) == 1:  # any slope: stay well inside half a code on either side
        slope = sign * 0.4 / max(y[0] - low, high - y[0])
        z = z - 1e-6  # the exact tie beside zero takes the lower code
    else:
        slope = (z[-1] - z[0]) / (y[-1] - y[0])
    # The start's rounding is the larger error; a neighbouring slope makes up for it.
    nearby = np.float32(slope).view(np.int32) + np.arange(-32, 33, dtype=np.int32)
    slopes = nearby.view(np.float32).astype(np.float64)
    rest = z - slopes[:, None] * y
    starts = ((rest.max(1) + rest.min(1)) / 2).astype(np.float32).astype(np.float64)
    best = np.abs(rest - starts[:, None]).max(1).argmin()
    return float(slopes[best]), float(starts[best])


def _lines(midpoints: Midpoints, signed: bool) -> list[Line]:
    """The lines of all cells of one sign."""
    middle, z, sign = midpoints
    y = middle * SCALE_SIGNED if signed else middle * SCALE_UNSIGNED + SHIFT
    edges = _edges(signed)
    top = (SCALE_SIGNED if signed else SCALE_UNSIGNED) * (1 + 1e-6)
    code = 0.0 if signed else 1.0 - OFFSET_UNSIGNED
    lines = []
    for low, high in zip(edges[:-1], np.minimum(edges[1:], top), strict=True):
        inside = np.nonzero((y >= low) & (y < high))[0]
        if len(inside):
            lines.append(_fit(y[inside], z[inside], low, high, sign))
            code = float(z[inside[-1]] + sign / 2)
        else:
            lines.append((0.0, code))
    half = CELLS_SIGNED // 2 if signed else CELLS_UNSIGNED
    return lines + lines[-1:] * (half - len(lines))


@cache
def lines(signed: bool, up: bool = False) -> np.ndarray:
    """fp32 (cells, 2): slope and start of every cell.

    Args:
        signed: which map.
        up: for y and z rounded up (`fma.rp`), with which the unsigned map keeps a positive moment
            from code 0 without an instruction of its own.
    """
    sides = _midpoints(signed)
    table = np.array(_lines(sides[0], signed))
    if signed:
        negative = np.array(_lines(sides[1], signed)) * [-1.0, 1.0]  # in y, which is negative there
        return np.concatenate([table, negative]).astype(np.float32)
    if up:  # half an ulp too high on average, in y and in z
        edges = _edges(False)
        middle = (edges[:-1] + edges[1:]) / 2
        z = table[:, 0] * middle + table[:, 1]
        table[:, 1] -= 0.5 * np.spacing(np.abs(z).astype(np.float32)).astype(np.float64)
        table[:, 1] -= 0.5 * table[:, 0] * np.spacing(middle.astype(np.float32)).astype(np.float64)
    # y = SHIFT exactly means zero: z = -127.5, a tie, goes to the even -128. One ulp above is -127.
    table[0] = 2.0**30, -float(OFFSET_UNSIGNED)
    return table.astype(np.float32)


def dither_scale(signed: bool) -> float:
    """What y is for a magnitude of absmax."""
    return 1.0 / pieces(signed).threshold[-1]


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

    An unsigned number below the first value may have any z up to 1; a signed one is between zero
    and that.
    """
    table, shift, scale = pieces(signed), 0 if signed else 1, dither_scale(signed)
    of_decades = (table.inverse_slope, table.offset, table.last)
    slope, offset, last = (np.array(x[1:8]) for x in of_decades)
    begins = ((last + shift + 1) / 2 - shift - offset) / slope * scale  # of decades, in y
    rows = []
    for low in 2.0 ** np.arange(1 - OCTAVES, 0):
        high = 2 * low
        if signed and high <= begins[0]:
            rows.append((3.0 / begins[0], 0.0, 0.0))
            continue
        e = next(e for e in range(7) if e == 6 or begins[e + 1] > low)
        rows.append((slope[e] / scale, offset[e] - last[e], last[e]))
    # 1.0: of the unsigned map start + last is 255 exactly.
    rows.append((0.0, 0.0, TOP_CODE - 127) if signed else (0.0, _start_of_top(), TOP_CODE))
    made = np.array(rows).astype(np.float32)
    return made[:, :2], made[:, 2]


@cache
def packed(up: bool, device: torch.device) -> Tensor:
    """The kernels' one table: both codebooks, the lines of both maps, and what dither needs.

    fp32 (2688,), the last of which are octaves, signed and unsigned, and `last` of the signed.
    """
    books = [create_dynamic_map(signed).numpy() for signed in (True, False)]
    (cells, last), (unsigned_cells, _) = octaves(True), octaves(False)
    table = np.concatenate([
        *books, lines(True).ravel(), lines(False, up).ravel(), cells.ravel(),
        unsigned_cells.ravel(), last,
    ])  # fmt: skip
    return torch.from_numpy(table).to(device)
