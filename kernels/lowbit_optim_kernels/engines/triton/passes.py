"""The passes of a step in Triton, for any rule and any formats.

A program takes a tile of one tensor, so that one launch covers any number of tensors. A tile is
TILE elements: as many blocks of its tensor's format. Tables on the device:

    address   int64 (tensors, ...)   p, g, step, then columns that `plan.state_columns` deals out
    geometry  int64 (tensors, 5)     row, blocks per row, blocks, first tile, global numel
    hyper     fp64  (...)            hyperparameters
    scalars   fp64  (tensors, ...)   gscale, live, then what the rule's scalar functions give
    floats    fp32  (tensors, ...)   the same, and the hyperparameters that elements need
    work      int32 (programs, 4)    tensor + kind * NUMBER, first block, its row, its number there
    partial   fp32  (tiles, terms)   sums of a reduction's terms over one tile
    tables    fp32  (...)            look-up tables of the formats, one after the other

A tile is WHOLE when its blocks are full, one after the other, and at aligned addresses: it needs no
mask. ALIGN is 16 where every block starts at a multiple of 16 elements, else 1. These two, the
dtypes of p and g, and the format are a tile's kind. With one kind in a launch all is one function
in the machine code. With several there is one for each: were they inlined, the compiler would give
the tiles of all kinds one layout, and with it other accesses and another order of sums than a kind
has alone. So a tensor's bits do not depend on its neighbours.

`bindings` writes the kernels, each a call of a function here with constants: a RULE and the FORMATS
are tuples, and what stands where in them is named below. A function of a rule or of a format is
such a constant too. (Triton 3.7 loses the names of a NamedTuple; a tuple that a function gives back
cannot hold None, so that what is not needed is any tensor.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...plan import G, P
from . import plan
from .primitives import abs, finite, narrow, only_finite, total, widen
from .scalars import BLOCKS, FIRST_TILE, GEOMETRY, GSCALE, LIVE, PER_ROW, ROW

NUMBER, TILE, WORK = (tl.constexpr(x) for x in (plan.NUMBER, plan.TILE, plan.WORK))
P, G = tl.constexpr(P), tl.constexpr(G)  # columns of `address`

TYPES = tl.constexpr(tuple(plan.TYPES.values()))  # a dtype is a number in tuples
P_TYPE, G_TYPE, FORMAT, WHOLE, ALIGN, PIECE = (tl.constexpr(i) for i in range(6))  # of a kind
BLOCK, UNITS, ORDER, INEXACT = (tl.constexpr(i) for i in range(4))  # of a format
# Of a unit, of each of its tensors, and of its format's functions.
CODEC, SIGNED, EXACT, INDEX, ELEMENTS, PER_BLOCK, TABLE = (tl.constexpr(i) for i in range(7))
COLUMN, TYPE, PAD = (tl.constexpr(i) for i in range(3))
DECODE, SCALES, ENCODE = (tl.constexpr(i) for i in range(3))
# Of a rule in one pass, and of one of its functions.
STRIDE, WIDTH, SCALARS, LOADS, DIRECTION, PTX = (tl.constexpr(i) for i in range(6))
FUNCTION, READS, GIVES, CLEAN = (tl.constexpr(i) for i in range(4))
U, SHRINK, RATE, MOMENTS = (tl.constexpr(i) for i in range(4))  # of what the update writes


@triton.jit
def pick(values, INDICES: tl.constexpr):
    """The values of these indices, as a tuple."""
    out = ()
    for i in tl.static_range(len(INDICES)):
        out = out + (values[INDICES[i]],)
    return out


@triton.jit
def call(values, CALL: tl.constexpr):
    """What a rule's function gives for its share of the values, as a tuple."""
    given = CALL[FUNCTION](*pick(values, CALL[READS]))
    if CALL[GIVES] == 1:
        return (given,)
    else:  # noqa: RET505 (Triton takes a second return only in the other branch)
        return given


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


@triton.jit
def tensor_and_kind(work, KINDS: tl.constexpr):
    """A program's tensor, and the number of its tile's kind."""
    entry = tl.load(work + WORK * tl.program_id(0))
    if len(KINDS) == 1:
        return entry.to(tl.int64), entry
    else:  # noqa: RET505
        return (entry % NUMBER).to(tl.int64), entry // NUMBER


@triton.jit
def skipped(t, floats, WIDTH: tl.constexpr):
    """Whether a gradient scaler found this step to overflow."""
    return tl.load(floats + t * WIDTH + LIVE) == 0.0


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
def narrow_to(x, TYPE: tl.constexpr):
    return narrow(x, TYPES[TYPE])


@triton.jit
def operand(row_at, base, at, COLUMN: tl.constexpr, TYPE: tl.constexpr, ALIGN: tl.constexpr):
    """Addresses of a tile's elements in one tensor."""
    # Here and not by a function: a hint for what a call gives is lost when the call is inlined.
    first = tl.load(row_at + COLUMN).to(tl.pointer_type(TYPES[TYPE]))
    return tl.multiple_of(first, ALIGN) + base + at


@triton.jit
def read_unit(row_at, tables, base, at, block, inside, mask,
              UNIT: tl.constexpr, KINDS: tl.constexpr, I: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """The moments of a unit, and the addresses of its tensors, per element and per block."""
    elements, scales, element_at, scale_at = (), (), (), ()
    for k in tl.static_range(len(UNIT[ELEMENTS])):
        here = operand(
            row_at, base, at, UNIT[ELEMENTS][k][COLUMN], UNIT[ELEMENTS][k][TYPE], KINDS[I][ALIGN]
        )
        element_at = element_at + (here,)
        elements = elements + (load(here, mask, UNIT[ELEMENTS][k][PAD], KINDS[I][WHOLE]),)
    for k in tl.static_range(len(UNIT[PER_BLOCK])):
        here = pointer(row_at, UNIT[PER_BLOCK][k][COLUMN], UNIT[PER_BLOCK][k][TYPE]) + block
        scale_at = scale_at + (here,)
        scales = scales + (load(here, inside, UNIT[PER_BLOCK][k][PAD], KINDS[I][WHOLE]),)
    moments = UNIT[CODEC][DECODE](elements, scales, tables + UNIT[TABLE], UNIT[SIGNED], PTX)
    return moments, element_at, scale_at


@triton.jit
def read(t, address, floats, tables, base, at, block, inside, mask, RULE: tl.constexpr,
         FORMAT: tl.constexpr, KINDS: tl.constexpr, I: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """What the rule's functions may read: scalars, p, g, and moments in the rule's order.

    And the addresses of p and of the tensors of each unit.
    """
    row_at = address + t * RULE[STRIDE]
    row_of = floats + t * RULE[WIDTH]
    values = ()
    for i in tl.static_range(len(RULE[SCALARS])):
        if RULE[SCALARS][i][1] is None:
            values = values + (tl.load(row_of + RULE[SCALARS][i][0]),)
        else:  # the compiler drops a multiplication by 1
            values = values + (tl.full((), RULE[SCALARS][i][1], tl.float32),)
    p_at, p, g = at, at, at
    if RULE[LOADS][0]:
        p_at = operand(row_at, base, at, P, KINDS[I][P_TYPE], KINDS[I][ALIGN])
        p = widen(load(p_at, mask, 0, KINDS[I][WHOLE]), RULE[PTX])
    if RULE[LOADS][1]:
        g_at = operand(row_at, base, at, G, KINDS[I][G_TYPE], KINDS[I][ALIGN])
        g = widen(load(g_at, mask, 0, KINDS[I][WHOLE]), RULE[PTX])
        if SCALED:
            g *= tl.load(row_of + GSCALE)
    moments, element_at, scale_at = (), (), ()
    if RULE[LOADS][2]:
        for i in tl.static_range(len(FORMAT[UNITS])):
            decoded, elements, scales = read_unit(
                row_at, tables, base, at, block, inside, mask, FORMAT[UNITS][i], KINDS, I, RULE[PTX]
            )
            moments = moments + decoded
            element_at = element_at + (elements,)
            scale_at = scale_at + (scales,)
        moments = pick(moments, FORMAT[ORDER])
    return values + (p, g) + moments, p_at, element_at, scale_at


@triton.jit
def all_finite(moments):
    """Where all moments of an element are finite.

    One test serves all of them: their sum overflows only next to where one does.
    """
    magnitude = abs(moments[0])
    for k in tl.static_range(1, len(moments)):
        magnitude += abs(moments[k])
    return finite(magnitude)


@triton.jit
def or_zero(moments, ok):
    """Moments, or 0 in all of them where one is bad: that element starts again."""
    out = ()
    for k in tl.static_range(len(moments)):
        out = out + (tl.where(ok, moments[k], 0.0),)
    return out


@triton.jit
def write_moments(moments, element_at, scale_at, tables, inside, mask, FORMAT: tl.constexpr,
                  PTX: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """Store new moments, given in the rule's order.

    All scales come before any code, or predicates live long and are spilled into registers.
    """
    ok = mask
    if len(FORMAT[INEXACT]) > 0:
        ok = all_finite(pick(moments, FORMAT[INEXACT]))
    kept, tops = (), ()
    for i in tl.static_range(len(FORMAT[UNITS])):
        values, scales = pick(moments, FORMAT[UNITS][i][INDEX]), ()
        if not FORMAT[UNITS][i][EXACT]:
            values = or_zero(values, ok)
        if len(FORMAT[UNITS][i][PER_BLOCK]) > 0:
            scales = FORMAT[UNITS][i][CODEC][SCALES](values, FORMAT[UNITS][i][SIGNED])
        for k in tl.static_range(len(FORMAT[UNITS][i][PER_BLOCK])):
            store(scale_at[i][k], scales[k], inside, WHOLE)
        kept, tops = kept + (values,), tops + (scales,)
    for i in tl.static_range(len(FORMAT[UNITS]) - 1, -1, -1):
        for k in tl.static_range(len(FORMAT[UNITS][i][ELEMENTS]) - 1, -1, -1):
            coded = FORMAT[UNITS][i][CODEC][ENCODE](
                kept[i], tops[i], tables + FORMAT[UNITS][i][TABLE], k, FORMAT[UNITS][i][SIGNED], PTX
            )
            store(element_at[i][k], coded, mask, WHOLE)


@triton.jit
def update_blocks(
    t, address, geometry, work, floats, tables, piece, RULE: tl.constexpr, WRITES: tl.constexpr,
    FORMAT: tl.constexpr, KINDS: tl.constexpr, I: tl.constexpr, SCALED: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """Write parameters and moments of NB blocks of a tile."""
    base, at, block, inside, mask = place(
        t, piece, geometry, work, FORMAT[BLOCK], KINDS[I][WHOLE], KINDS[I][ALIGN], NB
    )
    values, p_at, element_at, scale_at = read(
        t, address, floats, tables, base, at, block, inside, mask, RULE, FORMAT, KINDS, I, SCALED
    )
    p = values[len(RULE[SCALARS])]
    values = values + call(values, RULE[DIRECTION])
    new = values[WRITES[SHRINK]] * p - values[WRITES[RATE]] * values[WRITES[U]]
    store(p_at, narrow_to(new, KINDS[I][P_TYPE]), mask, KINDS[I][WHOLE])
    moments = pick(values, WRITES[MOMENTS])
    write_moments(
        moments, element_at, scale_at, tables, inside, mask, FORMAT, RULE[PTX], KINDS[I][WHOLE]
    )


@triton.jit
def update_tile(
    t, address, geometry, work, floats, tables, RULE: tl.constexpr, WRITES: tl.constexpr,
    FORMAT: tl.constexpr, KINDS: tl.constexpr, I: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    for piece in range(0, TILE // FORMAT[BLOCK], KINDS[I][PIECE]):
        update_blocks(
            t, address, geometry, work, floats, tables, piece, RULE, WRITES, FORMAT, KINDS, I, SCALED,
            KINDS[I][PIECE],
        )  # fmt: skip


@triton.jit(noinline=True)
def called_update_tile(
    t, address, geometry, work, floats, tables, RULE: tl.constexpr, WRITES: tl.constexpr,
    FORMAT: tl.constexpr, KINDS: tl.constexpr, I: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    update_tile(
        t, address, geometry, work, floats, tables, RULE, WRITES, FORMAT, KINDS, I, SCALED
    )


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
    FORMAT: tl.constexpr, KINDS: tl.constexpr, I: tl.constexpr, SCALED: tl.constexpr,
    NB: tl.constexpr,
):  # fmt: skip
    """The terms of a sum for each element of NB blocks, and where elements are."""
    base, at, block, inside, mask = place(
        t, piece, geometry, work, FORMAT[BLOCK], KINDS[I][WHOLE], KINDS[I][ALIGN], NB
    )
    values, _p_at, _element_at, _scale_at = read(
        t, address, floats, tables, base, at, block, inside, mask, RULE, FORMAT, KINDS, I, SCALED
    )
    if RULE[DIRECTION] is not None:
        values = values + call(values, RULE[DIRECTION])
    return call(values, TERMS), mask


@triton.jit
def clean(term, mask, CLEAN: tl.constexpr, WHOLE: tl.constexpr):
    """What counts of a term: finite numbers, within the tensor."""
    if CLEAN:
        term = only_finite(term)
    if not WHOLE:
        term = tl.where(mask, term, 0.0)
    return term


@triton.jit
def sums_of_blocks(terms, mask, CLEAN: tl.constexpr):
    """The sums of some blocks: of a single one in a tensor of size 1."""
    cleaned, out = (), ()
    for i in tl.static_range(len(terms)):
        cleaned = cleaned + (clean(terms[i], mask, CLEAN, False),)
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
    FORMAT: tl.constexpr, KINDS: tl.constexpr, I: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Sum terms over a tile; an unaligned one piece by piece, as its update does."""
    NB: tl.constexpr = TILE // FORMAT[BLOCK]
    PIECES: tl.constexpr = NB // KINDS[I][PIECE]
    if KINDS[I][ALIGN] == 1:
        sums = ()
        for _ in tl.static_range(TERMS[GIVES]):
            sums = sums + (tl.zeros([PIECES], tl.float32),)
        for piece in range(0, NB, KINDS[I][PIECE]):
            terms, mask = terms_of_blocks(
                t, address, geometry, work, floats, tables, piece, RULE, TERMS, FORMAT, KINDS, I,
                SCALED, KINDS[I][PIECE],
            )  # fmt: skip
            of_piece = sums_of_blocks(terms, mask, TERMS[CLEAN])
            sums = put(sums, of_piece, tl.arange(0, PIECES) == piece // KINDS[I][PIECE])
        sums_at = partial_at(t, geometry, work, partial, NB, TERMS[GIVES])
        for i in tl.static_range(TERMS[GIVES]):
            tl.store(sums_at + i, tl.sum(sums[i], 0))
    else:
        terms, mask = terms_of_blocks(
            t, address, geometry, work, floats, tables, 0, RULE, TERMS, FORMAT, KINDS, I, SCALED, NB
        )
        sums_at = partial_at(t, geometry, work, partial, NB, TERMS[GIVES])
        for i in tl.static_range(TERMS[GIVES]):
            tl.store(sums_at + i, total(clean(terms[i], mask, TERMS[CLEAN], KINDS[I][WHOLE])))


@triton.jit
def partial_at(t, geometry, work, partial, NB: tl.constexpr, TERMS: tl.constexpr):
    """Where a program's sums go."""
    tile = tl.load(geometry + t * GEOMETRY + FIRST_TILE)
    tile += tl.load(work + WORK * tl.program_id(0) + 1) // NB
    return partial + tile * TERMS


@triton.jit(noinline=True)
def called_sum_tile(
    t, address, geometry, work, floats, tables, partial, RULE: tl.constexpr, TERMS: tl.constexpr,
    FORMAT: tl.constexpr, KINDS: tl.constexpr, I: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    sum_tile(
        t, address, geometry, work, floats, tables, partial, RULE, TERMS, FORMAT, KINDS, I, SCALED
    )


@triton.jit
def reduce(
    address, geometry, work, floats, tables, partial, RULE: tl.constexpr,
    TERMS: tl.constexpr, FORMATS: tl.constexpr, KINDS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Sum the terms of a phase over a program's tile."""
    t, kind = tensor_and_kind(work, KINDS)
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
