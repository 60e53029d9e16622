"""Sums over tensors in Triton: of the terms of a rule's phases, tile by tile; see `passes`."""

from __future__ import annotations

import triton
import triton.language as tl

from .moments import ALIGN, BLOCKS, FORMAT, ROOM, SPANNED, WHOLE
from .passes import CALLS, CLEAN, GIVES, TILE, call, chain, read, tensor
from .primitives import only_finite, total
from .scalars import FIRST_TILE, GEOMETRY
from .tiles import SHORT, joined, row_of_work


@triton.jit
def terms_of_blocks(
    t, of_tensor, geometry, work, tables, piece, RULE: tl.constexpr, TERMS: tl.constexpr,
    FORMAT: tl.constexpr, KINDS: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr,
    NB: tl.constexpr,
):  # fmt: skip
    """The terms of a sum for each element of NB blocks, and where elements are."""
    values, _addresses, _block, _inside, mask = read(
        t, of_tensor, geometry, work, tables, piece, RULE, FORMAT, KINDS, KIND, SCALED, NB
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
    of_tensor = tensor(t, address, floats, RULE, FORMAT, KINDS, KIND, SCALED)
    NB: tl.constexpr = TILE // KINDS[KIND][ROOM]
    PIECES: tl.constexpr = min(NB, 8 if KINDS[KIND][BLOCKS] == SHORT else 4)
    if KINDS[KIND][ALIGN] == 1:
        sums = ()
        for _ in tl.static_range(TERMS[GIVES]):
            sums = sums + (tl.zeros([PIECES], tl.float32),)
        for piece in range(0, NB, NB // PIECES):
            terms, mask = terms_of_blocks(
                t, of_tensor, geometry, work, tables, piece, RULE, TERMS, FORMAT, KINDS, KIND,
                SCALED, NB // PIECES,
            )  # fmt: skip
            of_piece = sums_of_blocks(terms, mask, TERMS[CLEAN], KINDS[KIND][WHOLE])
            sums = put(sums, of_piece, tl.arange(0, PIECES) == piece // (NB // PIECES))
        sums_at = partial_at(t, geometry, work, partial, TERMS[GIVES], KINDS[KIND][SPANNED])
        for i in tl.static_range(TERMS[GIVES]):
            tl.store(sums_at + i, tl.sum(sums[i], 0))
    else:
        terms, mask = terms_of_blocks(
            t, of_tensor, geometry, work, tables, 0, RULE, TERMS, FORMAT, KINDS, KIND, SCALED,
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
