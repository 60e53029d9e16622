"""Where the elements of a tile are, in Triton; `passes` says what the tables hold."""

from __future__ import annotations

import triton
import triton.language as tl

from ...plan import WEIGHT_BLOCK
from . import plan, random
from .scalars import BEFORE, BLOCKS, GEOMETRY, PER_ROW, ROW, WEIGHTS_BEFORE

WORK, WEIGHT_BLOCK = tl.constexpr(plan.WORK), tl.constexpr(WEIGHT_BLOCK)
TYPES = tl.constexpr(tuple(plan.TYPES.values()))  # a dtype is a number in tuples


@triton.jit
def place(t, piece, geometry, work, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
          ALIGN: tl.constexpr, NB: tl.constexpr):  # fmt: skip
    """Where the NB blocks of a tile from `piece` on are: offsets, block numbers, masks.

    The offsets start from a multiple of 16 if each block's are.
    """
    program = tl.program_id(0)
    first = tl.load(work + WORK * program + 1)
    tile = tl.arange(0, NB) + piece
    lane = tl.arange(0, BLOCK)
    if WHOLE:
        base = tl.multiple_of(first.to(tl.int64) * BLOCK, 16)
        at = tile[:, None] * BLOCK + lane[None, :]
        inside, mask = tile, at  # not needed
    else:
        line = tl.load(work + WORK * program + 2).to(tl.int64)
        left = tl.load(work + WORK * program + 3)
        row = tl.load(geometry + t * GEOMETRY + ROW)
        per_row = tl.load(geometry + t * GEOMETRY + PER_ROW).to(tl.uint32)
        inside = tile < tl.load(geometry + t * GEOMETRY + BLOCKS) - first
        down = ((left + tile).to(tl.uint32) // per_row).to(tl.int32)
        column = left + tile - down * per_row.to(tl.int32)
        start = down * row.to(tl.int32) + (column - left) * BLOCK  # blocks of a tile are neighbours
        size = tl.minimum(row - column.to(tl.int64) * BLOCK, BLOCK).to(tl.int32)
        size = tl.multiple_of(tl.where(inside, size, 0), ALIGN)
        base = tl.multiple_of(line * row + left.to(tl.int64) * BLOCK, ALIGN)
        at = tl.multiple_of(start, ALIGN)[:, None] + lane[None, :]
        mask = lane[None, :] < size[:, None]
    return base, at, first + tile, inside, mask


@triton.jit
def moment_bits(of_stream, t, block, geometry, BLOCK: tl.constexpr, FAR: tl.constexpr):
    """The random bits of a stream for each element of these blocks of a format."""
    number = random.numbered(tl.load(geometry + t * GEOMETRY + BEFORE), block, FAR)
    first = random.of_blocks(number, of_stream, FAR)
    return random.of_lanes(first[:, None], tl.arange(0, BLOCK)[None, :])


@triton.jit
def weight_bits(of_stream, t, piece, geometry, work, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
                NB: tl.constexpr, FAR: tl.constexpr):  # fmt: skip
    """The random bits that round the weights of the NB blocks of a tile from `piece` on."""
    program = tl.program_id(0)
    tile = tl.arange(0, NB) + piece
    lane = tl.arange(0, BLOCK)
    if WHOLE:
        column = tl.load(work + WORK * program + 1).to(tl.int64) + tile
        before = tile * 0
    else:
        line = tl.load(work + WORK * program + 2).to(tl.int64)
        left = tl.load(work + WORK * program + 3)
        row = tl.load(geometry + t * GEOMETRY + ROW)
        per_row = tl.load(geometry + t * GEOMETRY + PER_ROW).to(tl.uint32)
        down = ((left + tile).to(tl.uint32) // per_row).to(tl.int32)
        column = (left + tile - down * per_row.to(tl.int32)).to(tl.int64)
        before = (line + down) * ((row + (WEIGHT_BLOCK - 1)) // WEIGHT_BLOCK)
    start = tl.load(geometry + t * GEOMETRY + WEIGHTS_BEFORE)
    if BLOCK < WEIGHT_BLOCK:
        in_row = before + column * BLOCK // WEIGHT_BLOCK
        number = random.numbered(start, in_row, FAR)
        first = random.of_blocks(number, of_stream, FAR)[:, None]
        place = (column * BLOCK % WEIGHT_BLOCK).to(tl.int32)[:, None] + lane[None, :]
    else:
        number = random.numbered(start, before + column * (BLOCK // WEIGHT_BLOCK), FAR)[:, None]
        if BLOCK > WEIGHT_BLOCK:
            number += (lane // WEIGHT_BLOCK).to(number.dtype)[None, :]
        first = random.of_blocks(number, of_stream, FAR)
        place = (lane % WEIGHT_BLOCK)[None, :]
    return random.of_lanes(first, place)


@triton.jit
def number_at(row, COLUMN: tl.constexpr):
    """A number of a row of `floats`, which one load brings with its neighbour."""
    pair = tl.load(row.to(tl.pointer_type(tl.int64)) + COLUMN // 2)
    half = pair >> 32 if COLUMN % 2 else pair
    return half.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def pointer(row_at, COLUMN: tl.constexpr, TYPE: tl.constexpr):
    return tl.load(row_at + COLUMN).to(tl.pointer_type(TYPES[TYPE]))


@triton.jit
def operand(row_at, base, at, COLUMN: tl.constexpr, TYPE: tl.constexpr, ALIGN: tl.constexpr,
            RUN: tl.constexpr):  # fmt: skip
    """Addresses of a tile's elements in one tensor; a thread takes at most RUN in a row."""
    # Here and not by a function: a hint for what a call gives is lost when the call is inlined.
    first = tl.load(row_at + COLUMN).to(tl.pointer_type(TYPES[TYPE]))
    return tl.max_contiguous(tl.multiple_of(first, ALIGN) + base + at, (1, RUN))


@triton.jit
def load(at, mask, PAD: tl.constexpr, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(at)
    else:  # noqa: RET505
        return tl.load(at, mask=mask, other=PAD)


@triton.jit
def store(at, x, mask, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(at, x)
    else:
        tl.store(at, x, mask=mask)
