"""Where the elements of a tile are, in Triton; `passes` says what the tables hold."""

from __future__ import annotations

import triton
import triton.language as tl

from . import plan
from .primitives import narrow
from .scalars import BLOCKS, GEOMETRY, PER_ROW, ROW

WORK = tl.constexpr(plan.WORK)
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
def pointer(row_at, COLUMN: tl.constexpr, TYPE: tl.constexpr):
    return tl.load(row_at + COLUMN).to(tl.pointer_type(TYPES[TYPE]))


@triton.jit
def operand(row_at, base, at, COLUMN: tl.constexpr, TYPE: tl.constexpr, ALIGN: tl.constexpr):
    """Addresses of a tile's elements in one tensor."""
    # Here and not by a function: a hint for what a call gives is lost when the call is inlined.
    first = tl.load(row_at + COLUMN).to(tl.pointer_type(TYPES[TYPE]))
    return tl.multiple_of(first, ALIGN) + base + at


@triton.jit
def narrow_to(x, TYPE: tl.constexpr):
    return narrow(x, TYPES[TYPE])


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
