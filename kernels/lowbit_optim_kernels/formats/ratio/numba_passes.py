"""Template of the passes over blocks of `ratio8` and `ratio4`: in place of the engine's own.

A block is four vectors. They are decoded, updated and encoded in registers: what is encoded, roots
of squares, ratios and numbers, waits there for the block's scales. Numbers that are not finite are
seen in the largest ones, and put right in a block that has some.
"""

from __future__ import annotations

from numpy import float32 as f32

from ...engines.numba.dither import first_bits, fractions, next_bits, next_hashed
from ...engines.numba.element import INFINITY
from ...engines.numba.memory import read_f32, write_f32
from ...engines.numba.vector import (
    finite,
    highest,
    reach,
    reach_unsigned,
    rounded,
    splat,
    sqrt,
    where,
)
from .numba import (
    RATIO_4,
    RATIO_8,
    SQUARE_4,
    SQUARE_8,
    ZERO_4,
    ZERO_8,
    dithered_ratio_code,
    dithered_scale,
    dithered_soft_code,
    inverse_of_scale,
    joined,
    load_codes,
    load_lower,
    load_upper,
    of_ratio,
    of_soft,
    put_codes,
    ratio_code,
    ratio_scale,
    ratio_to,
    ratio_to_least,
    read_bf16,
    root_of,
    soft_code,
    soft_scale,
    square_code,
    square_scale,
    write_bf16,
)


def read_block():
    for m in MOMENTS:
        for x in BLOCK_PARTS:
            if x.key == m.key + "_scale" and m.role == "square":
                scale[m] = read_f32(at[x] + start // (BLOCK // 4))
            elif x.key == m.key + "_scale":
                scale[m] = read_bf16(at[x] + start // (BLOCK // 2))


def load_moments():
    if BITS == 4:
        for x in ELEMENT_PARTS:
            for m in MOMENTS:
                if m.role == "square":
                    code[m] = load_upper(at[x] + j)
                else:
                    code[m] = load_lower(at[x] + j) - ZERO_4
    else:
        for m, x in zip(MOMENTS, ELEMENT_PARTS):
            if m.role == "square":
                code[m] = load_codes(at[x] + j)
            else:
                code[m] = load_codes(at[x] + j) - ZERO_8
    for m in MOMENTS:
        if m.role == "square":
            root[m] = root_of(code[m], scale[m])
            m.value = rounded(root[m], root[m])
    for m in MOMENTS:
        if m.role == "ratio":
            m.value = of_ratio(code[m], scale[m], root[m.partner])
        elif m.role != "square":
            m.value = of_soft(code[m], scale[m])


def store_moments():
    """Keep what is coded, of the block's vector `quarter`, and the largest so far."""
    for m in MOMENTS:
        if m.role == "square":
            coded[m, quarter] = sqrt(m.value)
            top[m] = reach_unsigned(top[m], coded[m, quarter])
    for m in MOMENTS:
        if m.role == "ratio" and not m.outlasts:
            coded[m, quarter] = ratio_to(m.value, coded[m.partner, quarter])
            top[m] = reach(top[m], coded[m, quarter])
        elif m.role != "square":
            coded[m, quarter] = m.value
            top[m] = reach(top[m], coded[m, quarter])


def mend():
    """An element with one bad number starts again in all moments."""
    for m in MOMENTS:
        top[m] = splat(f32(0.0))
    for quarter in (0, 1, 2, 3):
        ok = every(finite(coded[m, quarter]) for m in MOMENTS)
        for m in MOMENTS:
            coded[m, quarter] = where(ok, coded[m, quarter], splat(f32(0.0)))
            top[m] = reach(top[m], coded[m, quarter])
    for m in MOMENTS:
        largest[m] = highest(top[m])


def divide():
    """Make ratios of moments that outlast their squares, whose scales these need."""
    for m in MOMENTS:
        if m.outlasts:
            least = square_scale(largest[m.partner], SQUARE_8 if BITS == 8 else SQUARE_4)
            top[m] = splat(f32(0.0))
            for quarter in (0, 1, 2, 3):
                coded[m, quarter] = ratio_to_least(
                    coded[m, quarter], coded[m.partner, quarter], least
                )
                top[m] = reach(top[m], coded[m, quarter])
            largest[m] = highest(top[m])


def new_scales():
    for m in MOMENTS:
        if m.role == "square":
            new_scale[m] = square_scale(largest[m], SQUARE_8 if BITS == 8 else SQUARE_4)
            inverse[m] = inverse_of_scale(new_scale[m])
        elif m.role == "ratio":
            new_scale[m] = ratio_scale(
                largest[m], RATIO_8 if BITS == 8 else RATIO_4, m.stream and BITS == 8
            )
            inverse[m] = inverse_of_scale(new_scale[m])
        else:
            new_scale[m] = soft_scale(largest[m], m.stream)
        if m.stream:
            its_hashes = hashes + 64 * (1 + m.row)
            base = next_hashed(its_hashes, key[m], step, number, start // BLOCK)
            bits[m] = first_bits(base)
        for x in BLOCK_PARTS:
            if x.key == m.key + "_scale" and m.role == "square":
                write_f32(at[x] + start // (BLOCK // 4), new_scale[m])
            elif x.key == m.key + "_scale" and m.stream and BITS == 8:
                write_bf16(at[x] + start // (BLOCK // 2), dithered_scale(new_scale[m], base))
            elif x.key == m.key + "_scale":
                write_bf16(at[x] + start // (BLOCK // 2), new_scale[m])


def encode():
    """Codes of the vector `quarter` of the block before."""
    for m in MOMENTS:
        if m.stream:
            random[m] = fractions(bits[m])
            bits[m] = next_bits(bits[m])
        if m.role == "square":
            new_code[m, quarter] = square_code(
                past[m, quarter],
                inverse[m],
                random[m] if m.stream else splat(f32(0.5)),
                SQUARE_8 if BITS == 8 else SQUARE_4,
            )
        elif m.role == "ratio" and m.stream:
            new_code[m, quarter] = dithered_ratio_code(
                past[m, quarter],
                inverse[m],
                ZERO_8 if BITS == 8 else ZERO_4,
                random[m],
                RATIO_8 if BITS == 8 else RATIO_4,
            )
        elif m.role == "ratio":
            new_code[m, quarter] = ratio_code(
                past[m, quarter], inverse[m], ZERO_8 if BITS == 8 else ZERO_4
            )
        elif m.stream:
            new_code[m, quarter] = dithered_soft_code(past[m, quarter], new_scale[m], random[m])
        else:
            new_code[m, quarter] = soft_code(past[m, quarter], new_scale[m])


def store_codes():
    """Write the codes of the block before."""
    if BITS == 4:
        for m in MOMENTS:
            if m.role == "ratio":
                for quarter in (0, 1, 2, 3):
                    new_code[m, quarter] = joined(
                        new_code[m, quarter], new_code[m.partner, quarter]
                    )
                for x in ELEMENT_PARTS:
                    put_codes(past_at[x], *(new_code[m, quarter] for quarter in (0, 1, 2, 3)))
    else:
        for m, x in zip(MOMENTS, ELEMENT_PARTS):
            put_codes(past_at[x], *(new_code[m, quarter] for quarter in (0, 1, 2, 3)))


def update_blocks():
    for x in ELEMENT_PARTS:
        past_at[x] = scratch  # before the first block there is none
    for m in MOMENTS:
        new_scale[m] = inverse[m] = f32(0.0)
        if m.stream:
            bits[m] = splat(f32(0.0))
        for quarter in (0, 1, 2, 3):
            past[m, quarter] = splat(f32(0.0))
    for start in range(0, n, BLOCK):
        read_block()
        for m in MOMENTS:
            top[m] = splat(f32(0.0))
        for quarter in (0, 1, 2, 3):
            j = start + 16 * quarter
            update_elements()
        for quarter in (0, 1, 2, 3):
            encode()
        store_codes()
        largest[MOMENTS] = tuple(highest(top[m]) for m in MOMENTS)
        if not all(largest[m] < INFINITY for m in MOMENTS):
            mend()
        divide()
        new_scales()
        for x in ELEMENT_PARTS:
            past_at[x] = at[x] + start
        for m in MOMENTS:
            for quarter in (0, 1, 2, 3):
                past[m, quarter] = coded[m, quarter]
    for quarter in (0, 1, 2, 3):
        encode()
    store_codes()
