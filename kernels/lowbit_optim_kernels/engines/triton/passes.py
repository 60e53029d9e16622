"""The passes of a step in Triton, for any rule and any formats.

A program takes a tile of one tensor, so that one launch covers any number of tensors. A tile has
room for TILE elements: as many blocks of its tensor's format. Tables on the device:

    address   int64 (tensors, ...)   p, g, step, residual, then `batch.state_columns`, what lasts
    geometry  int64 (tensors, 7)     row, rows, first tile, global numel, key (32 bits; above them
                                     part) and numbers of the first blocks of its random bits; of
                                     weights that are SHIFTED the place of the first element
    hyper     fp64  (parts, ...)     hyperparameters
    scalars   fp64  (tensors, ...)   gscale, live, then what the rule's scalar functions give
    floats    fp32  (tensors, ...)   the same, and the hyperparameters that elements need; two
                                     uint32 numbers for every stream of random bits
    work      int32 (programs, 4)    tensor + kind * NUMBER, number of the tile in it, row of
                                     the first block, its number there; of kinds that are SPANNED
                                     a row for SPAN programs, with the number of tiles for the kind
    partial   fp32  (tiles, terms)   sums of a reduction's terms over one tile
    tables    fp32  (...)            look-up tables of the formats, one after the other

A tile's blocks are neighbours in a tensor of one row (LINE), full blocks of rows (FULL), or the
short ones that rows end in (SHORT), for which it has just as much ROOM as a power of two that they
fit in. It is WHOLE when its blocks are full and all there: it needs no mask. Every block starts at
a multiple of ALIGN elements, which is 16, 4 or 1. These, the dtypes of p and g, how weights are
stored, the format, whether numbers of blocks may be FAR, of more than 32 bits, and whether p is
SHIFTED, a shard that was cut within a block of its random bits, are a tile's kind. With one kind in
a launch all is one function in the machine code. With several there is one for each: were they
inlined, the compiler would give the tiles of all kinds one layout, and with it other accesses and
another order of sums than a kind has alone. So a tensor's bits do not depend on its neighbours.

`bindings` writes the kernels, each a call of a function here with constants: a RULE and the FORMATS
are tuples, and what stands where in them is named below. A function of a rule or of a format is
such a constant too. (Triton 3.7 loses the names of a NamedTuple, and no tuple can hold None: what
is not needed is any tensor.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...batch import RESIDUAL, G, P
from ...weights import triton as stored_weights
from . import grid
from .moments import (
    AHEAD,
    ALIGN,
    BARE_RUN,
    BLOCK,
    BLOCKS,
    DITHERED,
    EXTRA,
    FAR,
    FORMAT,
    G_TYPE,
    LOW_TYPE,
    ONCE,
    ORDER,
    P_TYPE,
    PIECE,
    ROOM,
    RUN,
    SHIFTED,
    SPANNED,
    SPLIT,
    UNITS,
    WHOLE,
    decoded,
    pick,
    read_unit,
    write_moments,
)
from .primitives import fused, negative, only_finite, total, widen
from .scalars import FIRST_TILE, GEOMETRY, GSCALE, LIVE
from .tiles import (
    SHORT,
    TYPES,
    joined,
    load,
    number_at,
    operand,
    place,
    row_of_work,
    store,
    weight_bits,
)

NUMBER, TILE = tl.constexpr(grid.NUMBER), tl.constexpr(grid.TILE)
# Columns of `address`.
P, G, RESIDUAL = tl.constexpr(P), tl.constexpr(G), tl.constexpr(RESIDUAL)

# Of a rule in one pass, and of one of its functions.
STRIDE, WIDTH, SCALARS, LOADS, CALLS, PTX, RANDOM = (tl.constexpr(i) for i in range(7))
COLUMN, IS_LITERAL, VALUE = (tl.constexpr(i) for i in range(3))  # of one of SCALARS
OF_P, OF_G, OF_MOMENTS = (tl.constexpr(i) for i in range(3))  # of LOADS
FUNCTION, READS, GIVES, CLEAN = (tl.constexpr(i) for i in range(4))
U, SHRINK, RATE, NEW = (tl.constexpr(i) for i in range(4))  # of what the update writes


@triton.jit
def call(values, CALL: tl.constexpr):
    """The results of a rule's function for its share of the values, as a tuple."""
    given = CALL[FUNCTION](*pick(values, CALL[READS]))
    if CALL[GIVES] == 1:
        return (given,)
    else:
        return given


@triton.jit
def chain(values, CALLS: tl.constexpr):
    """The values, and after them what functions give that are called one after the other."""
    for i in tl.static_range(len(CALLS)):
        values = values + call(values, CALLS[i])
    return values


@triton.jit
def tensor_and_kind(work, KINDS: tl.constexpr, PTX: tl.constexpr):
    """A program's tensor, and the number of its tile's kind.

    Of a span there is one kind: instead the number of its tiles from this one on.
    """
    here, of_span = row_of_work(work, KINDS[0][SPANNED])
    entry = tl.load(here)
    if PTX:
        # Plus 0, which the assembler takes for a thread's own number: it would keep addresses that
        # follow from one of the program in uniform registers, and copy them for every load.
        entry = tl.inline_asm_elementwise(
            "{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 t, t, 10; add.u32 $0, $1, t; }",
            "=r,r", [entry], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    if len(KINDS) == 1 and not KINDS[0][SPANNED]:
        return entry.to(tl.int64), entry
    else:
        return (entry % NUMBER).to(tl.int64), entry // NUMBER - of_span


@triton.jit
def skipped(t, floats, WIDTH: tl.constexpr):
    """Whether a tensor has no gradient, or a gradient scaler found this step to overflow."""
    return tl.load(floats + t * WIDTH + LIVE) == 0.0


@triton.jit
def read(
    t, address, geometry, work, floats, tables, piece, RULE: tl.constexpr, FORMAT: tl.constexpr,
    KINDS: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """The values that the rule's functions may read, of NB blocks of a tile from `piece` on.

    Scalars, p, g, and moments in the rule's order; the addresses of p, its residual and the tensors
    of each unit; and which blocks and elements there are.
    """
    RUN_HERE: tl.constexpr = KINDS[KIND][RUN if RULE[LOADS][OF_MOMENTS] else BARE_RUN]
    base, at, block, inside, mask = place(
        t, piece, geometry, work, FORMAT[BLOCK], KINDS[KIND][ROOM], KINDS[KIND][BLOCKS],
        KINDS[KIND][WHOLE], KINDS[KIND][ALIGN], RUN_HERE, KINDS[KIND][SPANNED],
        KINDS[KIND][AHEAD] if RULE[PTX] else 0, NB,
    )  # fmt: skip
    row_at = address + t * RULE[STRIDE]
    row_of = floats + t * RULE[WIDTH]
    values = ()
    for i in tl.static_range(len(RULE[SCALARS])):
        if RULE[SCALARS][i][IS_LITERAL]:  # the compiler drops a multiplication by 1
            values = values + (tl.full((), RULE[SCALARS][i][VALUE], tl.float32),)
        else:
            values = values + (number_at(row_of, RULE[SCALARS][i][COLUMN]),)
    p_at, low_at, p, g, low = base, base, base, base, base  # of what is not read, anything
    if RULE[LOADS][OF_P]:
        p_at = operand(row_at, base, at, P, KINDS[KIND][P_TYPE], KINDS[KIND][ALIGN], RUN_HERE)
        p = load(p_at, mask, 0, KINDS[KIND][WHOLE], KINDS[KIND][ONCE])
        if KINDS[KIND][EXTRA] > 0:
            low_at = operand(
                row_at, base, at, RESIDUAL, KINDS[KIND][LOW_TYPE], KINDS[KIND][ALIGN],
                RUN_HERE,
            )  # fmt: skip
            low = load(low_at, mask, 0, KINDS[KIND][WHOLE], KINDS[KIND][ONCE])
        p = stored_weights.read(p, low, KINDS[KIND][EXTRA], RULE[PTX])
    if RULE[LOADS][OF_G]:
        g_at = operand(row_at, base, at, G, KINDS[KIND][G_TYPE], KINDS[KIND][ALIGN], RUN_HERE)
        g = widen(load(g_at, mask, 0, KINDS[KIND][WHOLE], KINDS[KIND][ONCE]), RULE[PTX])
        if SCALED:
            g *= tl.load(row_of + GSCALE)
    stored, moments, element_at, scale_at = (), (), (), ()
    if RULE[LOADS][OF_MOMENTS]:
        for i in tl.static_range(len(FORMAT[UNITS])):
            elements, scales, elements_at, scales_at = read_unit(
                row_at, base, at, block, inside, mask, FORMAT[UNITS][i], KINDS, KIND
            )
            stored = stored + ((elements, scales),)
            element_at = element_at + (elements_at,)
            scale_at = scale_at + (scales_at,)
        moments = pick(decoded(stored, tables, FORMAT[UNITS], RULE[PTX]), FORMAT[ORDER])
    addresses = p_at, low_at, element_at, scale_at
    return values + (p, g) + moments, addresses, block, inside, mask


@triton.jit
def moved(p, u, shrink, rate, LITERAL: tl.constexpr):
    """The new weights; a shrink that is a LITERAL is 1, and the compiler drops it."""
    if LITERAL:
        return fused(negative(u), rate, shrink * p)
    else:
        return fused(shrink, p, negative(u * rate))


@triton.jit
def update_blocks(
    t, address, geometry, work, floats, tables, piece, RULE: tl.constexpr, WRITES: tl.constexpr,
    FORMAT: tl.constexpr, KINDS: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr,
    NB: tl.constexpr,
):  # fmt: skip
    """Write parameters and moments of NB blocks of a tile."""
    values, addresses, block, inside, mask = read(
        t, address, geometry, work, floats, tables, piece, RULE, FORMAT, KINDS, KIND, SCALED, NB
    )
    of_streams = (floats + t * RULE[WIDTH] + RULE[RANDOM]).to(tl.pointer_type(tl.uint32))
    p = values[len(RULE[SCALARS])]
    values = chain(values, RULE[CALLS])
    new = moved(
        p, values[WRITES[U]], values[WRITES[SHRINK]], values[WRITES[RATE]],
        RULE[SCALARS][WRITES[SHRINK]][IS_LITERAL],
    )  # fmt: skip
    bits = new
    if KINDS[KIND][DITHERED]:  # the first stream is theirs
        bits = weight_bits(
            of_streams, t, piece, geometry, work, FORMAT[BLOCK], KINDS[KIND][ROOM],
            KINDS[KIND][BLOCKS], KINDS[KIND][SPANNED], NB, KINDS[KIND][FAR], KINDS[KIND][SHIFTED],
        )  # fmt: skip
    high, low = stored_weights.write(
        new, bits, TYPES[KINDS[KIND][P_TYPE]], KINDS[KIND][SPLIT],
        KINDS[KIND][EXTRA], KINDS[KIND][DITHERED], RULE[PTX],
    )  # fmt: skip
    store(addresses[0], high, mask, KINDS[KIND][WHOLE], KINDS[KIND][ONCE])
    if KINDS[KIND][EXTRA] > 0:
        low = low.to(TYPES[KINDS[KIND][LOW_TYPE]])
        store(addresses[1], low, mask, KINDS[KIND][WHOLE], KINDS[KIND][ONCE])
    write_moments(
        pick(values, WRITES[NEW]), addresses[2], addresses[3], tables, inside, mask, of_streams, t,
        block, geometry, FORMAT, KINDS, KIND, RULE[PTX],
    )  # fmt: skip


@triton.jit
def update_tile(
    t, address, geometry, work, floats, tables, RULE: tl.constexpr, WRITES: tl.constexpr,
    FORMAT: tl.constexpr, KINDS: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    for piece in range(0, TILE // KINDS[KIND][ROOM], KINDS[KIND][PIECE]):
        update_blocks(
            t, address, geometry, work, floats, tables, piece, RULE, WRITES, FORMAT, KINDS, KIND,
            SCALED, KINDS[KIND][PIECE],
        )  # fmt: skip


# With several kinds of tiles in a launch each is a function of its own in the machine code.
called_update_tile = triton.jit(update_tile.fn, noinline=True)


@triton.jit
def update(
    t, kind, address, geometry, work, floats, tables, RULE: tl.constexpr, WRITES: tl.constexpr,
    FORMATS: tl.constexpr, KINDS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Write the parameters and moments of a program's tile.

    RULE: as `read` takes it. WRITES: where the values are that are written.
    """
    if len(KINDS) == 1:
        update_tile(
            t, address, geometry, work, floats, tables, RULE, WRITES,
            FORMATS[KINDS[0][FORMAT]], KINDS, 0, SCALED,
        )  # fmt: skip
    else:
        for i in tl.static_range(len(KINDS)):
            if kind == i:
                called_update_tile(
                    t, address, geometry, work, floats, tables, RULE, WRITES,
                    FORMATS[KINDS[i][FORMAT]], KINDS, i, SCALED,
                )  # fmt: skip


@triton.jit
def terms_of_blocks(
    t, address, geometry, work, floats, tables, piece, RULE: tl.constexpr, TERMS: tl.constexpr,
    FORMAT: tl.constexpr, KINDS: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr,
    NB: tl.constexpr,
):  # fmt: skip
    """The terms of a sum for each element of NB blocks, and where elements are."""
    values, _addresses, _block, _inside, mask = read(
        t, address, geometry, work, floats, tables, piece, RULE, FORMAT, KINDS, KIND, SCALED, NB
    )
    return call(chain(values, RULE[CALLS]), TERMS), mask


@triton.jit
def clean(term, mask, CLEAN: tl.constexpr, WHOLE: tl.constexpr):
    """A term with zeros where it does not count: outside of the tensor, or not finite."""
    if CLEAN:
        term = only_finite(term)
    if not WHOLE:
        term = tl.where(joined(mask), term, 0.0)
    return term


@triton.jit
def sums_of_blocks(terms, mask, CLEAN: tl.constexpr, WHOLE: tl.constexpr):
    """The sums of some blocks: of a single one in a tensor of size 1."""
    cleaned, out = (), ()
    for i in tl.static_range(len(terms)):
        cleaned = cleaned + (clean(terms[i], mask, CLEAN, WHOLE),)
    for i in tl.static_range(len(terms)):
        by_block = tl.sum(cleaned[i], 1)
        out = out + (by_block if by_block.shape[0] == 1 else tl.sum(by_block, 0),)
    return out


@triton.jit
def put(sums, of_piece, here):
    """The sums of a tile's pieces, with those of one of them where `here`."""
    out = ()
    for i in tl.static_range(len(sums)):
        out = out + (tl.where(here, of_piece[i], sums[i]),)
    return out


@triton.jit
def sum_tile(
    t, address, geometry, work, floats, tables, partial, RULE: tl.constexpr, TERMS: tl.constexpr,
    FORMAT: tl.constexpr, KINDS: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Sum terms over a tile, of unaligned blocks in quarters, short ones in eighths.

    Those are read element by element, and would take most registers of a kernel.
    """
    NB: tl.constexpr = TILE // KINDS[KIND][ROOM]
    PIECES: tl.constexpr = min(NB, 8 if KINDS[KIND][BLOCKS] == SHORT else 4)
    if KINDS[KIND][ALIGN] == 1:
        sums = ()
        for _ in tl.static_range(TERMS[GIVES]):
            sums = sums + (tl.zeros([PIECES], tl.float32),)
        for piece in range(0, NB, NB // PIECES):
            terms, mask = terms_of_blocks(
                t, address, geometry, work, floats, tables, piece, RULE, TERMS, FORMAT, KINDS, KIND,
                SCALED, NB // PIECES,
            )  # fmt: skip
            of_piece = sums_of_blocks(terms, mask, TERMS[CLEAN], KINDS[KIND][WHOLE])
            sums = put(sums, of_piece, tl.arange(0, PIECES) == piece // (NB // PIECES))
        sums_at = partial_at(t, geometry, work, partial, TERMS[GIVES], KINDS[KIND][SPANNED])
        for i in tl.static_range(TERMS[GIVES]):
            tl.store(sums_at + i, tl.sum(sums[i], 0))
    else:
        terms, mask = terms_of_blocks(
            t, address, geometry, work, floats, tables, 0, RULE, TERMS, FORMAT, KINDS, KIND, SCALED,
            NB,
        )  # fmt: skip
        sums_at = partial_at(t, geometry, work, partial, TERMS[GIVES], KINDS[KIND][SPANNED])
        for i in tl.static_range(TERMS[GIVES]):
            tl.store(sums_at + i, total(clean(terms[i], mask, TERMS[CLEAN], KINDS[KIND][WHOLE])))


@triton.jit
def partial_at(t, geometry, work, partial, TERMS: tl.constexpr, SPANNED: tl.constexpr):
    """The addresses of a program's sums."""
    here, of_span = row_of_work(work, SPANNED)
    tile = tl.load(geometry + t * GEOMETRY + FIRST_TILE) + tl.load(here + 1) + of_span
    return partial + tile * TERMS


called_sum_tile = triton.jit(sum_tile.fn, noinline=True)


@triton.jit
def reduce(
    t, kind, address, geometry, work, floats, tables, partial, RULE: tl.constexpr,
    TERMS: tl.constexpr, FORMATS: tl.constexpr, KINDS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Sum the terms of a phase over a program's tile."""
    if len(KINDS) == 1:
        sum_tile(
            t, address, geometry, work, floats, tables, partial, RULE, TERMS,
            FORMATS[KINDS[0][FORMAT]], KINDS, 0, SCALED,
        )  # fmt: skip
    else:
        for i in tl.static_range(len(KINDS)):
            if kind == i:
                called_sum_tile(
                    t, address, geometry, work, floats, tables, partial, RULE, TERMS,
                    FORMATS[KINDS[i][FORMAT]], KINDS, i, SCALED,
                )  # fmt: skip
