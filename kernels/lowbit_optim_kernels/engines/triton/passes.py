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

`bindings` writes the kernels, each a call of a function here or in `reductions` with constants: a
RULE and the FORMATS are tuples, and what stands where in them is named below. A function of a rule
or of a format is such a constant too. (Triton 3.7 loses the names of a NamedTuple, and no tuple can
hold None: what is not needed is any tensor.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...batch import RESIDUAL, G, P
from ...weights import triton as stored_weights
from .grid import NUMBER
from .kinds import TILE
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
    unit_pointers,
    write_moments,
)
from .primitives import fused, negative, widen
from .scalars import GSCALE, LIVE
from .tiles import (
    TYPES,
    load,
    number_at,
    operand,
    place,
    pointer,
    row_of_work,
    store,
    weight_bits,
)

NUMBER, TILE = tl.constexpr(NUMBER), tl.constexpr(TILE)
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
def tensor(
    t, address, floats, RULE: tl.constexpr, FORMAT: tl.constexpr, KINDS: tl.constexpr,
    KIND: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """A tensor's scalars, what g is scaled by, and where p, its residual, g and the state are.

    All of it is read before anything of the tensor, so that a program waits for it once.
    """
    row_at = address + t * RULE[STRIDE]
    row_of = floats + t * RULE[WIDTH]
    ALIGN_HERE: tl.constexpr = KINDS[KIND][ALIGN]
    scalars = ()
    for i in tl.static_range(len(RULE[SCALARS])):
        if RULE[SCALARS][i][IS_LITERAL]:  # the compiler drops a multiplication by 1
            scalars = scalars + (tl.full((), RULE[SCALARS][i][VALUE], tl.float32),)
        else:
            scalars = scalars + (number_at(row_of, RULE[SCALARS][i][COLUMN]),)
    p, low, g, scale = t, t, t, t  # of what is not read, anything
    if RULE[LOADS][OF_P]:
        p = pointer(row_at, P, KINDS[KIND][P_TYPE], ALIGN_HERE)
        if KINDS[KIND][EXTRA] > 0:
            low = pointer(row_at, RESIDUAL, KINDS[KIND][LOW_TYPE], ALIGN_HERE)
    if RULE[LOADS][OF_G]:
        g = pointer(row_at, G, KINDS[KIND][G_TYPE], ALIGN_HERE)
        if SCALED:
            scale = tl.load(row_of + GSCALE)
    units = ()
    if RULE[LOADS][OF_MOMENTS]:
        for i in tl.static_range(len(FORMAT[UNITS])):
            units = units + (unit_pointers(row_at, FORMAT[UNITS][i], ALIGN_HERE),)
    return scalars, scale, p, low, g, units


@triton.jit
def read(
    t, of_tensor, geometry, work, tables, piece, RULE: tl.constexpr, FORMAT: tl.constexpr,
    KINDS: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """The values that the rule's functions may read, of NB blocks of a tile from `piece` on.

    Scalars, p, g, and moments in the rule's order; the addresses of p, its residual and the tensors
    of each unit; and which blocks and elements there are.
    """
    values, scale, of_p, of_low, of_g, of_units = of_tensor
    RUN_HERE: tl.constexpr = KINDS[KIND][RUN if RULE[LOADS][OF_MOMENTS] else BARE_RUN]
    READ_ONCE: tl.constexpr = KINDS[KIND][ONCE] if RULE[PTX] else False
    base, at, block, inside, mask = place(
        t, piece, geometry, work, FORMAT[BLOCK], KINDS[KIND][ROOM], KINDS[KIND][BLOCKS],
        KINDS[KIND][WHOLE], KINDS[KIND][ALIGN], RUN_HERE, KINDS[KIND][SPANNED],
        KINDS[KIND][AHEAD] if RULE[PTX] else 0, NB,
    )  # fmt: skip
    p_at, low_at, p, g, low = base, base, base, base, base  # of what is not read, anything
    if RULE[LOADS][OF_P]:
        p_at = operand(of_p, base, at, KINDS[KIND][ALIGN], RUN_HERE)
        p = load(p_at, mask, 0, KINDS[KIND][WHOLE], READ_ONCE)
        if KINDS[KIND][EXTRA] > 0:
            low_at = operand(of_low, base, at, KINDS[KIND][ALIGN], RUN_HERE)
            low = load(low_at, mask, 0, KINDS[KIND][WHOLE], READ_ONCE)
        p = stored_weights.read(p, low, KINDS[KIND][EXTRA], RULE[PTX])
    if RULE[LOADS][OF_G]:
        g_at = operand(of_g, base, at, KINDS[KIND][ALIGN], RUN_HERE)
        g = widen(load(g_at, mask, 0, KINDS[KIND][WHOLE], READ_ONCE), RULE[PTX])
        if SCALED:
            g *= scale
    stored, moments, element_at, scale_at = (), (), (), ()
    if RULE[LOADS][OF_MOMENTS]:
        for i in tl.static_range(len(FORMAT[UNITS])):
            elements, scales, elements_at, scales_at = read_unit(
                of_units[i], base, at, block, inside, mask, FORMAT[UNITS][i], KINDS, KIND, READ_ONCE
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
    t, of_tensor, geometry, work, floats, tables, piece, RULE: tl.constexpr, WRITES: tl.constexpr,
    FORMAT: tl.constexpr, KINDS: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr,
    NB: tl.constexpr,
):  # fmt: skip
    """Write parameters and moments of NB blocks of a tile."""
    values, addresses, block, inside, mask = read(
        t, of_tensor, geometry, work, tables, piece, RULE, FORMAT, KINDS, KIND, SCALED, NB
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
    WRITTEN_ONCE: tl.constexpr = KINDS[KIND][ONCE] if RULE[PTX] else False
    store(addresses[0], high, mask, KINDS[KIND][WHOLE], WRITTEN_ONCE)
    if KINDS[KIND][EXTRA] > 0:
        low = low.to(TYPES[KINDS[KIND][LOW_TYPE]])
        store(addresses[1], low, mask, KINDS[KIND][WHOLE], WRITTEN_ONCE)
    write_moments(
        pick(values, WRITES[NEW]), addresses[2], addresses[3], tables, inside, mask, of_streams, t,
        block, geometry, FORMAT, KINDS, KIND, RULE[PTX],
    )  # fmt: skip


@triton.jit
def update_tile(
    t, address, geometry, work, floats, tables, RULE: tl.constexpr, WRITES: tl.constexpr,
    FORMAT: tl.constexpr, KINDS: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    of_tensor = tensor(t, address, floats, RULE, FORMAT, KINDS, KIND, SCALED)
    for piece in range(0, TILE // KINDS[KIND][ROOM], KINDS[KIND][PIECE]):
        update_blocks(
            t, of_tensor, geometry, work, floats, tables, piece, RULE, WRITES, FORMAT, KINDS, KIND,
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
