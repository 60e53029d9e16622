"""The grid of tiles: which programs step the tensors of a batch, and what code they take.

The last block of a row is short where a block does not divide it. Were it in a tile with full ones,
most of the tile's elements could be missing, and all of it would need a mask. So the full blocks
of a tensor's rows make tiles, and the short ones make others, narrower and of more blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...batch import WEIGHT_BLOCK, Slot
from ...formats import Format, parts_of
from ...rules import Moment
from .kinds import ALIGNED, FULL, LINE, SHORT, TILE, Kind

ALIGNMENTS = ALIGNED, 4, 1  # elements that blocks may start at multiples of
NARROWEST = 16  # elements of a tile's block, at least
NUMBER = 2**20  # what counts the kind in the first column of `work`: room for 2048 of them
WORK = 4  # width of `work`
FAR = 2**32  # blocks whose numbers fit 32 bits
# Tiles of a kind that is launched by itself. With others it is a function in the machine code, and
# the kernel may take a third more registers: that of Lion8bit 96 where it takes 70 alone, and its
# step in bf16 13 % more time. A launch more takes the host some 30 us.
ALONE = 2**15
# Tiles that share a row of `work` where a kind of long tensors is launched by itself: 1 to 3 % less
# time of a step on an H200, whose programs find the row in a cache, and no 16 bytes a tile. Long
# are tensors of so many spans that programs beyond their ends, which do nothing, are few.
SPAN, LONG = 512, 8


class TileRange(NamedTuple):
    """Tiles of one kind of a tensor, one after the other.

    Attributes:
        kind: of the tiles.
        tile: the first one's number in the tensor.
        tiles: how many there are.
        block: where the first one begins among the tensor's blocks that are LINE, FULL or SHORT.
        per_row: how many of those a row has.
        before: blocks of a row that come before those.
    """

    kind: Kind
    tile: int
    tiles: int
    block: int
    per_row: int
    before: int = 0


Member = tuple[int, ...]  # of a kind: a tensor, and what follows the kind in its TileRange


@dataclass
class Grid:
    """Tiles of a batch.

    Attributes:
        kinds: of the tiles there are, in one order whatever that of the tensors.
        work: a row for each program, or SPAN of them; `passes` says what it holds.
        launches: the kinds of each launch, and where its rows of `work` end.
        tiles: how many each tensor has.
        shapes: the row of each tensor, and how many there are.
    """

    kinds: tuple[Kind, ...]
    work: np.ndarray
    launches: list[tuple[tuple[Kind, ...], int]]
    tiles: list[int]
    shapes: list[tuple[int, int]]


def blocks_of_tile(format: Format) -> int:
    """The number of full blocks in a tile.

    Raises:
        ValueError: blocks do not divide a tile, or do not start at aligned addresses.
    """
    block = format.block
    if not NARROWEST <= block <= TILE or TILE % block:
        limits = f"{NARROWEST} to {TILE}"
        raise ValueError(f"{format.name} has blocks of {block}; the Triton engine takes {limits}")
    return TILE // block


def _has_scales(moments: tuple[Moment, ...], format: Format) -> bool:
    return any(part.per_block for part in parts_of(moments, format))


def _shape(slot: Slot, scaled: bool) -> tuple[int, int]:
    """A slot's row, and how many there are.

    Full blocks in rows, and state without scales, whose blocks mean nothing, count as one row, if
    the random bits for weights, which are counted in blocks of their own, allow for it.
    """
    rows, row = slot.rows, slot.row
    unbroken = not slot.weights.dithered or row % WEIGHT_BLOCK == 0
    if unbroken and (row % slot.format.block == 0 or not scaled):
        return rows * row, 1
    return row, rows


def _is_far(slot: Slot) -> bool:
    """Whether a block of a slot has a number of more than 32 bits."""
    blocks = slot.rows * -(-slot.row // slot.format.block)
    of_weights = slot.rows * -(-slot.row // WEIGHT_BLOCK)
    of_weights += -(-slot.weights_before // WEIGHT_BLOCK)
    last = max(slot.blocks_before + blocks, of_weights)
    return last > FAR


def _tile_ranges(slot: Slot, row: int, rows: int, aligned: bool) -> Iterator[TileRange]:
    """The tiles of a slot: those of neighbours or of full blocks, then those of short ones."""
    block, in_tile = slot.format.block, blocks_of_tile(slot.format)
    full, rest = divmod(row, block)
    align = next(n for n in ALIGNMENTS if row % n == 0) if aligned else 1
    whole_align = align if rows > 1 or not aligned else ALIGNED
    tensors, storage = (slot.p.dtype, slot.g.dtype, slot.format), (slot.weights, _is_far(slot))
    blocks, per_row = (FULL, full) if rows > 1 else (LINE, -(-row // block))
    whole, tiles = rows * full // in_tile, -(-rows * per_row // in_tile)
    if whole:
        kind = Kind(*tensors, True, whole_align, *storage, blocks, shifted=slot.shifted)
        yield TileRange(kind, 0, whole, 0, per_row)
    if whole < tiles:
        kind = Kind(*tensors, False, align, *storage, blocks, shifted=slot.shifted)
        yield TileRange(kind, whole, tiles - whole, whole * in_tile, per_row)
    if rest and rows > 1:
        room = max(NARROWEST, 1 << (rest - 1).bit_length())
        kind = Kind(*tensors, False, align, *storage, SHORT, room)
        yield TileRange(kind, tiles, -(-rows // kind.in_tile), 0, 1, full)


def make_grid(slots: Sequence[Slot], moments: tuple[Moment, ...], aligned: Sequence[bool]) -> Grid:
    """The grid for these slots, and whether each one's addresses are aligned."""
    formats = {slot.format.name: slot.format for slot in slots}  # a format's own hash is slow
    scaled = {name: _has_scales(moments, format) for name, format in formats.items()}
    shapes = [_shape(slot, scaled[slot.format.name]) for slot in slots]
    members: dict[Kind, list[Member]] = {}
    tiles = [0] * len(slots)
    for i, slot in enumerate(slots):
        for kind, *run in _tile_ranges(slot, *shapes[i], aligned[i]):
            members.setdefault(kind, []).append((i, *run))
            tiles[i] += run[1]
    members = _spanned(members)
    kinds = tuple(sorted(members, key=_order))
    work, launches = [np.zeros((0, WORK), dtype=np.int32)], []
    for together in _launches({kind: _tiles(members[kind]) for kind in kinds}):
        work += [_programs(number, kind, members[kind]) for number, kind in enumerate(together)]
        launches.append((together, sum(map(len, work))))
    return Grid(kinds, np.concatenate(work), launches, tiles, shapes)


def _tiles(members: Sequence[Member]) -> int:
    return sum(tiles for _, _, tiles, *_ in members)


def _spanned(members: dict[Kind, list[Member]]) -> dict[Kind, list[Member]]:
    """The members with the long ones of a kind apart, where they are enough for a launch.

    The others then have to be so as well, or few: beside other kinds they would take more time.
    """
    found: dict[Kind, list[Member]] = {}
    for kind, of_kind in members.items():
        least = LONG * SPAN if kind.whole and kind.blocks == LINE else math.inf
        long = [member for member in of_kind if member[2] >= least]
        others = [member for member in of_kind if member[2] < least]
        in_long, in_others = _tiles(long), _tiles(others)
        if in_long >= ALONE and (in_others >= ALONE or in_others <= in_long / 8):
            found[kind._replace(spanned=True)] = long
            found |= {kind: others} if others else {}
        else:
            found[kind] = of_kind
    return found


def _launches(tiles: dict[Kind, int]) -> list[tuple[Kind, ...]]:
    """The kinds that are launched together: those of few tiles, each other kind by itself."""
    few = tuple(kind for kind, count in tiles.items() if count < ALONE)
    alone = [(kind,) for kind, count in tiles.items() if count >= ALONE]
    return [launch for launch in (*alone, few) if launch]


def _order(kind: Kind) -> tuple:
    """Whole tiles first; one order of the same kinds, so that they share a specialization."""
    p, g, format, whole, align, weights, far, blocks, short, shifted, spanned = kind
    stored = str(p), str(g), weights.bits or 0, far, shifted, not spanned
    return not whole, blocks, format.bits, format.name, -align, short, stored


def _programs(number: int, kind: Kind, members: Sequence[Member]) -> np.ndarray:
    """The rows of `work` of a kind's tiles."""
    tensor, tile, tiles, block, per_row, before = np.array(members, dtype=np.int64).T
    span = SPAN if kind.spanned else 1
    rows = -(-tiles // span)
    each = np.repeat(np.arange(len(members)), rows)
    within = span * (np.arange(len(each)) - (np.cumsum(rows) - rows)[each])
    row, column = np.divmod(block[each] + within * kind.in_tile, per_row[each])
    column += before[each]
    counted = np.minimum(tiles[each] - within, span) if kind.spanned else number
    entries = tensor[each] + counted * NUMBER, tile[each] + within, row, column
    return np.stack(entries, axis=1).astype(np.int32)
