"""Template of the passes over blocks of `dynamic8`: in place of the Numba engine's own functions.

A block's moments are decoded, but not scaled, into scratch memory. Its new scales are known only
after its last element, so it is encoded while the next block is updated, 64 elements in turn: an
update waits for divisions and square roots, encoding does not.
"""

from __future__ import annotations

from numpy import float32 as f32

from ...engines.numba.dither import first_bits, next_hashed
from ...engines.numba.element import INFINITY, only_finite
from ...engines.numba.inner import inlined, inner
from ...engines.numba.memory import enter, leave, load_f32, read_f32, stack, store_f32, write_f32
from ...engines.numba.vector import absolute as abs
from ...engines.numba.vector import (
    finite,
    highest,
    maximum,
    reach,
    reach_above,
    reach_below,
    reach_unsigned,
    scaled,
    splat,
    where,
)
from .numba import (
    HALF,
    LARGEST,
    LEAST,
    MOST,
    REACH,
    decode_s,
    decode_u,
    encode_dithered_s,
    encode_dithered_u,
    encode_s,
    encode_u,
    exact_s,
    exact_u,
    inverse_of,
)
from .numba_registers import pinned


def read_block():
    """Scratch memory holds this block and the one before in turn."""
    row = scratch + 4 * (start & BLOCK) - 4 * start
    for m, codes, scales in zip(MOMENTS, ELEMENT_PARTS, BLOCK_PARTS):
        (decode_s if m.signed else decode_u)(
            at[codes] + start, row + ROW * m.row + 4 * start, stop - start
        )
        scale[m] = read_f32(at[scales] + start // (BLOCK // 4))


def load_moments():
    for m in MOMENTS:
        m.value = scaled(load_f32(row + ROW * m.row + 4 * j), scale[m])


def store_moments():
    for m in MOMENTS:
        store_f32(row + ROW * m.row + 4 * j, m.value)
        note_extremes()


def note_extremes():
    """The largest magnitude of m; if dithered, the highest number and the lowest by themselves.

    They take as many instructions, and the lowest is multiplied once a block.
    """
    if m.signed and m.stream:
        top[m] = pinned(reach_above(top[m], m.value))
        low[m] = pinned(reach_below(low[m], m.value))
    else:
        top[m] = pinned((reach if m.signed else reach_unsigned)(top[m], m.value))


def forget_extremes():
    top[m] = splat(f32(0.0))
    if m.signed and m.stream:
        low[m] = splat(f32(-0.0))


def join_extremes():
    """See `dynamic8` for what a lowest number counts as."""
    if m.signed and m.stream:
        top[m] = reach(top[m], low[m] * REACH)


def new_scales():
    """Store the block's scales, and have what multiplies the moments to encode them."""
    for m in MOMENTS:
        join_extremes()
    largest[MOMENTS] = tuple(highest(top[m]) for m in MOMENTS)
    if all(LEAST < largest[m] < MOST for m in MOMENTS):
        inverse[MOMENTS] = tuple(f32(1.0) / largest[m] for m in MOMENTS)
    else:
        largest[MOMENTS], inverse[MOMENTS] = mend(row + 4 * start, stop - start, *largest[MOMENTS])
    for m, scales in zip(MOMENTS, BLOCK_PARTS):
        write_f32(at[scales] + start // (BLOCK // 4), largest[m])
        if m.stream:
            its_hashes = hashes + 64 * (1 + m.row)
            base = next_hashed(its_hashes, key[m], step, number, start // BLOCK)
            bits[m] = first_bits(base if m.signed else base + HALF)


@inner
def mend(row, n, *largest):
    """Repair a block with unusual numbers: zeroes for what is not finite, other scales."""
    if not all(largest[m] < INFINITY for m in MOMENTS):
        for m in MOMENTS:
            forget_extremes()
        for j in range(0, n, 16):
            for m in MOMENTS:
                m.value = load_f32(row + ROW * m.row + 4 * j)
            ok = every(finite(m.value) for m in MOMENTS)
            for m in MOMENTS:
                m.value = where(ok, m.value, splat(f32(0.0)))
                store_f32(row + ROW * m.row + 4 * j, m.value)
                note_extremes()
        for m in MOMENTS:
            join_extremes()
            largest[m] = min(highest(top[m]), LARGEST)
    for m in MOMENTS:
        inverse[m] = inverse_of(row + ROW * m.row, largest[m], n)
    return (*largest[MOMENTS], *inverse[MOMENTS])


@inlined
def update_vector():
    """A function, as it is called five times and Numba takes its time for each line."""
    update_elements()


def encode_elements():
    """Codes of `coded_count` elements from `coded_from` on, whose numbers are at `coded`."""
    for m, codes in zip(MOMENTS, ELEMENT_PARTS):
        if m.stream:
            bits[m] = (encode_dithered_s if m.signed else encode_dithered_u)(
                coded + ROW * m.row, inverse[m], at[codes] + coded_from, coded_count, bits[m]
            )
        else:
            (encode_s if m.signed else encode_u)(
                coded + ROW * m.row, inverse[m], at[codes] + coded_from, coded_count
            )


def update_blocks():
    for m in MOMENTS:
        inverse[m] = f32(0.0)
        if m.stream:
            bits[m] = splat(f32(0.0))
    row = start = stop = 0
    for start in range(0, n, BLOCK):
        stop = start + BLOCK if start + BLOCK < n else n
        read_block()
        past = scratch + 4 * (~start & BLOCK)
        for m in MOMENTS:
            forget_extremes()
        if start == 0:
            for j in range(start, stop, 16):
                update_vector()
        else:
            for i in range(start, stop, 64):
                for quarter in (0, 1, 2, 3):
                    j = i + 16 * quarter
                    update_vector()
                coded, coded_from, coded_count = past + 4 * (i - start), i - BLOCK, 64
                encode_elements()
        new_scales()
    coded, coded_from, coded_count = row + 4 * start, start, stop - start
    encode_elements()


def block_of_tensor():
    """Block b of a tensor whose blocks restart every `row`: where it is, its size, and padded."""
    column = b % per_row * BLOCK
    first = b // per_row * row + column
    size = min(row - column, BLOCK)
    n = (size + 63) // 64 * 64


@inner
def encode_tensor(lo, hi, row, x_at, codes_at, absmax_at):
    """Blocks lo..hi of a whole tensor, whose scales are stored as they are."""
    scratch, spare = stack(4 * BLOCK), stack(8 * BLOCK)
    per_row = (row + (BLOCK - 1)) // BLOCK
    for b in range(lo, hi):
        block_of_tensor()
        x = enter(x_at + 4 * first, spare, size, n, 4, 0)
        top = splat(f32(0.0))
        for j in range(0, n, 16):
            v = only_finite(load_f32(x + 4 * j))
            top = maximum(top, abs(v))
            store_f32(scratch + 4 * j, v)
        largest = highest(top)
        write_f32(absmax_at + 4 * b, largest)
        codes = enter(codes_at + first, spare + 4 * BLOCK, size, n, 1, PADS[0])
        (encode_s if MOMENT.signed else encode_u)(
            scratch, inverse_of(scratch, largest, n), codes, n
        )
        leave(codes_at + first, codes, size, 1)


@inner
def decode_tensor(lo, hi, row, x_at, codes_at, absmax_at):
    spare = stack(8 * BLOCK)
    per_row = (row + (BLOCK - 1)) // BLOCK
    for b in range(lo, hi):
        block_of_tensor()
        codes = enter(codes_at + first, spare, size, n, 1, PADS[0])
        x = x_at + 4 * first if size == n else spare + 4 * BLOCK
        scale = read_f32(absmax_at + 4 * b)
        (exact_s if MOMENT.signed else exact_u)(codes, x, n)
        for j in range(0, n, 16):
            store_f32(x + 4 * j, load_f32(x + 4 * j) * scale)
        leave(x_at + 4 * first, x, size, 4)
