"""The Numba engine's functions that no rule enters: sums, percentile clipping, the codec alone."""

from __future__ import annotations

from ...plan import STEP
from .source import GSCALE, INNER
from .threads import share


def _codec_functions(name: str, kind: str, pad: int) -> str:
    words = ("{}",) * 4
    return f"""
{INNER}
def quantize_{name}(lo, hi, row, x_at, codes_at, absmax_at):
    scratch, spare = stack(1024), stack(2048)
    per_row = (row + 255) // 256
    for b in range(lo, hi):
        column = b % per_row * 256
        first = b // per_row * row + column
        size = min(row - column, 256)
        n = (size + 63) // 64 * 64
        x = enter(x_at + 4 * first, spare, size, n, 4, 0)
        top = splat(f32(0.0))
        for j in range(0, n, 16):
            v = only_finite(load_f32(x + 4 * j))
            top = maximum(top, abs(v))
            store_f32(scratch + 4 * j, v)
        largest = highest(top)
        write_f32(absmax_at + 4 * b, largest)
        codes = enter(codes_at + first, spare + 1024, size, n, 1, {pad})
        encode_{kind}(scratch, inverse_of(scratch, largest, n), codes, n)
        leave(codes_at + first, codes, size, 1)


{share(f"quantize_{name}", (), words)}


{INNER}
def dequantize_{name}(lo, hi, row, x_at, codes_at, absmax_at):
    spare = stack(2048)
    per_row = (row + 255) // 256
    for b in range(lo, hi):
        column = b % per_row * 256
        first = b // per_row * row + column
        size = min(row - column, 256)
        n = (size + 63) // 64 * 64
        codes = enter(codes_at + first, spare, size, n, 1, {pad})
        x = x_at + 4 * first if size == n else spare + 1024
        scale = read_f32(absmax_at + 4 * b)
        decode_{kind}(codes, x, n)
        for j in range(0, n, 16):
            store_f32(x + 4 * j, load_f32(x + 4 * j) * scale)
        leave(x_at + 4 * first, x, size, 4)


{share(f"dequantize_{name}", (), words)}
"""


SHARED = f"""\
import math

import numpy as np

from lowbit_optim_kernels.engines.numba.element import *


{INNER}
def add_up(chunks, partial, sums):
    for c in range(chunks.shape[0]):
        for k in range(sums.shape[1]):
            sums[chunks[c, 0], k] += partial[c, k]


{INNER}
def clip(address, scalars, sums, percentile, live):
    last = address.shape[1] - 1
    sorted_squares = np.empty(100, np.float32)
    for t in range(address.shape[0]):
        square = f32(sums[t, 0])
        if not (live and math.isfinite(square)):
            continue
        at = address[t, last]
        slot = read_i64(address[t, {STEP}]) % 100
        fresh = read_f32(at) < 0.0
        for k in range(100):
            if fresh or k == slot:
                write_f32(at + 4 * k, square)
            sorted_squares[k] = read_f32(at + 4 * k)
        sorted_squares.sort()
        limit, norm = math.sqrt(sorted_squares[percentile]), math.sqrt(square)
        if norm > limit:
            scalars[t, {GSCALE}] *= limit / norm
{_codec_functions("signed", "s", 127)}
{_codec_functions("unsigned", "u", 0)}"""
