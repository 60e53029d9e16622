"""Positions of the elements of a tile, in Triton; `passes` says what the tables hold."""

from __future__ import annotations

import triton
import triton.language as tl

from ...batch import WEIGHT_BLOCK
from . import grid, kinds, random
from .primitives import plus
from .scalars import BEFORE, GEOMETRY, ROW, ROWS, WEIGHTS_BEFORE

WORK, WEIGHT_BLOCK = tl.constexpr(grid.WORK), tl.constexpr(WEIGHT_BLOCK)
TILE, SPAN = tl.constexpr(kinds.TILE), tl.constexpr(grid.SPAN)
ALIGNED = tl.constexpr(kinds.ALIGNED)
LINE, FULL, SHORT = (tl.constexpr(x) for x in (kinds.LINE, kinds.FULL, kinds.SHORT))
TYPES = tl.constexpr(tuple(kinds.TYPES.values()))  # a dtype is a number in tuples
WARP = tl.constexpr(32)  # NVIDIA's
SECTOR = tl.constexpr(32)  # bytes that memory is read in at least


@triton.jit
def in_rows(x, ALIGN: tl.constexpr, ROW: tl.constexpr):
    """A tile [blocks, elements] as [..., blocks, neighbours], the first dimension of a thread.

    So neighbouring threads take ALIGN elements each, and a thread more of the same block. Of a tile
    in two dimensions the compiler would give it elements of many blocks, and what is done once a
    block would be done up to as often as there are elements.
    """
    BY_THREAD: tl.constexpr = x.shape[1] // ROW
    x = tl.permute(tl.reshape(x, [x.shape[0], BY_THREAD, ROW]), [1, 0, 2])
    if x.dtype.is_ptr():
        BYTES: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
        x = tl.multiple_of(tl.max_contiguous(x, (1, 1, ROW)), (1, 1, ALIGN * BYTES))
    elif x.dtype == tl.int1:
        x = tl.max_constancy(x, (1, 1, ALIGN))
    return x


@triton.jit
def dealt(x, ALIGN: tl.constexpr, RUN: tl.constexpr):
    """A tile whose blocks start at multiples of 1 or 4, `in_rows` of all that a warp takes at once.

    They are shorter where a format asks for a RUN of 16: what is done once a block costs it most.
    """
    MOST: tl.constexpr = WARP * ALIGN if RUN < 16 else (16 if ALIGN == 1 else 32)
    ROW: tl.constexpr = min(x.shape[1], MOST)
    return in_rows(x, ALIGN, ROW)


@triton.jit
def joined(x):
    """A tile as [blocks, elements], if it is `in_rows`."""
    if len(x.shape) == 3:
        x = tl.reshape(tl.permute(x, [1, 0, 2]), [x.shape[1], x.shape[0] * x.shape[2]])
    return x


@triton.jit
def row_of_work(work, SPANNED: tl.constexpr):
    """A program's row of `work`, and which of the row's tiles it takes."""
    if SPANNED:
        return work + WORK * (tl.program_id(0) // SPAN), tl.program_id(0) % SPAN
    else:
        return work + WORK * tl.program_id(0), 0


@triton.jit
def blocks_of(t, piece, geometry, work, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
              SPANNED: tl.constexpr, NB: tl.constexpr):  # fmt: skip
    """The NB blocks of a tile from `piece` on.

    The row of the tile's first one and its number there; of each how many rows it is further down,
    and its number there.
    """
    here, of_span = row_of_work(work, SPANNED)
    line = tl.load(here + 2).to(tl.int64)
    first = tl.load(here + 3) + of_span * (TILE // BLOCK)
    tile = tl.arange(0, NB) + piece
    if BLOCKS == LINE:
        return first.to(tl.int64) * 0, first, tile * 0, first + tile
    elif BLOCKS == FULL:
        full = (tl.load(geometry + t * GEOMETRY + ROW) // BLOCK).to(tl.uint32)
        down = ((first + tile).to(tl.uint32) // full).to(tl.int32)
        return line, first, down, first + tile - down * full.to(tl.int32)
    else:
        return line, first, tile, first + tile * 0


@triton.jit
def place(t, piece, geometry, work, BLOCK: tl.constexpr, ROOM: tl.constexpr,
          BLOCKS: tl.constexpr, WHOLE: tl.constexpr, ALIGN: tl.constexpr,
          RUN: tl.constexpr, SPANNED: tl.constexpr, AHEAD: tl.constexpr,
          NB: tl.constexpr):  # fmt: skip
    """Positions of the NB blocks of a tile from `piece` on: offsets, block numbers, masks.

    The offsets are one of the tile and, added to it, those of blocks and of elements in a block;
    and if the program asks for a tile AHEAD, that of this one.
    """
    line, first, down, column = blocks_of(t, piece, geometry, work, BLOCK, BLOCKS, SPANNED, NB)
    row = tl.load(geometry + t * GEOMETRY + ROW)
    base = tl.multiple_of(line * row + first.to(tl.int64) * BLOCK, ALIGN)
    start = down * (row if BLOCKS == SHORT else row.to(tl.int32))  # of neighbours 32 bits will do
    if BLOCKS != SHORT:
        start += (column - first) * BLOCK
    start = tl.multiple_of(start, ALIGN)
    per_row = (row + (BLOCK - 1)) // BLOCK
    block = (line * per_row).to(tl.int32) + down * per_row.to(tl.int32) + column
    lane = tl.arange(0, ROOM)
    if WHOLE:
        inside, mask = column, column  # not needed
    else:
        size = tl.minimum(row - column.to(tl.int64) * BLOCK, BLOCK).to(tl.int32)
        size = tl.where(line + down < tl.load(geometry + t * GEOMETRY + ROWS), size, 0)
        inside = size > 0
        mask = lane[None, :] < tl.multiple_of(tl.maximum(size, 0), ALIGN)[:, None]
        if ALIGN < ALIGNED:
            mask = dealt(mask, ALIGN, RUN)
    if AHEAD > 0:  # of the last tiles, which none come after, for its own
        to_come = base + tl.where(base + (AHEAD + 1) * TILE <= row, AHEAD * TILE, 0)
        return base, (start, lane, to_come), block, inside, mask
    else:
        return base, (start, lane), block, inside, mask


@triton.jit
def block_bits(of_stream, t, block, geometry, FAR: tl.constexpr):
    """The random bits of a stream for the first element of each of these blocks of a format."""
    number = random.numbered(tl.load(geometry + t * GEOMETRY + BEFORE), block, FAR)
    return random.of_blocks(number, of_stream, FAR)


@triton.jit
def moment_bits(of_stream, t, block, geometry, ROOM: tl.constexpr, FAR: tl.constexpr):
    """The random bits of a stream for each element of these blocks of a format."""
    first = block_bits(of_stream, t, block, geometry, FAR)
    return random.of_lanes(first[:, None], tl.arange(0, ROOM)[None, :])


@triton.jit
def weight_bits(of_stream, t, piece, geometry, work, BLOCK: tl.constexpr, ROOM: tl.constexpr,
                BLOCKS: tl.constexpr, SPANNED: tl.constexpr, NB: tl.constexpr,
                FAR: tl.constexpr, SHIFTED: tl.constexpr):  # fmt: skip
    """The random bits that round the weights of the NB blocks of a tile from `piece` on.

    Of a SHIFTED tensor each 64 of them are in two blocks.
    """
    lane = tl.arange(0, ROOM)
    line, _first, down, column = blocks_of(t, piece, geometry, work, BLOCK, BLOCKS, SPANNED, NB)
    row = tl.load(geometry + t * GEOMETRY + ROW)
    before = (line + down) * ((row + (WEIGHT_BLOCK - 1)) // WEIGHT_BLOCK)
    column = column.to(tl.int64)
    start = tl.load(geometry + t * GEOMETRY + WEIGHTS_BEFORE)
    if SHIFTED:
        shift = (start % WEIGHT_BLOCK).to(tl.int32)
        start = start // WEIGHT_BLOCK
    if BLOCK < WEIGHT_BLOCK:
        in_row = before + column * BLOCK // WEIGHT_BLOCK
        number = random.numbered(start, in_row, FAR)[:, None]
        first = random.of_blocks(number, of_stream, FAR)
        place = (column * BLOCK % WEIGHT_BLOCK).to(tl.int32)[:, None] + lane[None, :]
    else:
        number = random.numbered(start, before + column * (BLOCK // WEIGHT_BLOCK), FAR)[:, None]
        if ROOM > WEIGHT_BLOCK:
            number = plus(number, (lane // WEIGHT_BLOCK).to(number.dtype)[None, :])
        first = random.of_blocks(number, of_stream, FAR)
        place = (lane % WEIGHT_BLOCK)[None, :]
    if SHIFTED:
        place += shift
    bits = random.of_lanes(first, place)
    if SHIFTED:
        after = random.of_blocks(plus(number, 1), of_stream, FAR)
        beyond = random.of_lanes(after, place - WEIGHT_BLOCK)
        bits = tl.where(place < WEIGHT_BLOCK, bits, beyond)
    return bits


@triton.jit
def number_at(row, COLUMN: tl.constexpr):
    """A number of a row of `floats`, which one load brings with its neighbour."""
    pair = tl.load(row.to(tl.pointer_type(tl.int64)) + COLUMN // 2)
    half = pair >> 32 if COLUMN % 2 else pair
    return half.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def pointer(row_at, COLUMN: tl.constexpr, TYPE: tl.constexpr, ALIGN: tl.constexpr):
    """Where a tensor is; it is aligned unless ALIGN is 1."""
    # Here and not where it is added to: a hint for an argument is lost.
    at = tl.load(row_at + COLUMN).to(tl.pointer_type(TYPES[TYPE]))
    return tl.multiple_of(at, 16 if ALIGN > 1 else 1)  # bytes


@triton.jit
def ask(first, to_come):
    """Have a tile of a tensor brought into the L2 cache."""
    BYTES: tl.constexpr = TILE * (first.dtype.element_ty.primitive_bitwidth // 8)
    tile = (first + to_come).to(tl.uint64)
    tl.inline_asm_elementwise(  # (assembly has to give something)
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l",
        [tile + SECTOR * tl.arange(0, BYTES // SECTOR)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def operand(first, base, at, ALIGN: tl.constexpr, RUN: tl.constexpr):
    """Addresses of a tile's elements in the tensor at `first`; a thread takes at most RUN in a row.

    Those of blocks come first: what is added for an element then is a number in its instructions.
    """
    start, lane = at[0], at[1]
    if len(at) == 3:
        ask(first, at[2])
    here = ((first + base) + start)[:, None] + lane[None, :]
    return dealt(here, ALIGN, RUN) if ALIGN < ALIGNED else tl.max_contiguous(here, (1, RUN))


@triton.jit
def load(at, mask, PAD: tl.constexpr, WHOLE: tl.constexpr, ONCE: tl.constexpr = False):
    """The numbers at the addresses of a tile, or one a block; PAD outside of the mask.

    ONCE: caches should drop them before others.
    """
    POLICY: tl.constexpr = "evict_first" if ONCE else ""
    if WHOLE:
        x = tl.load(at, eviction_policy=POLICY)
    else:
        x = tl.load(at, mask=mask, other=PAD, eviction_policy=POLICY)
    return joined(x)


@triton.jit
def store(at, x, mask, WHOLE: tl.constexpr, ONCE: tl.constexpr = False):
    POLICY: tl.constexpr = "evict_first" if ONCE else ""
    if len(at.shape) == 3:
        x = in_rows(x, 1, at.shape[2])
    if WHOLE:
        tl.store(at, x, eviction_policy=POLICY)
    else:
        tl.store(at, x, mask=mask, eviction_policy=POLICY)
