"""Kinds of tiles: all that the code of a tile depends on, and the constants made of it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton.language as tl

from ...formats import Format
from ...weights import PLAIN, Weights

# Elements per program: 16 a thread. On an H200 AdamW8bit's step in fp32 takes 7 % longer with twice
# as many on 4 warps, which wait for each other at barriers, 8 % with as many on 4 warps, and in
# bf16 2.5 times as long with half as many on one, of which Triton makes look-ups another way.
TILE, WARPS = 1024, 2
ALIGNED = 16  # elements: the widest access to codes
# Tiles ahead of its own that a program asks the L2 cache for, where a format says so.
AHEAD = 512
# The blocks of a tile are neighbours in a tensor of one row, full blocks of rows, or short ones.
LINE, FULL, SHORT = range(3)

TYPES = {
    torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16,
    torch.uint8: tl.uint8, torch.int8: tl.int8, torch.int16: tl.int16, torch.int32: tl.int32,
    torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5,
}  # fmt: skip


class Kind(NamedTuple):
    """All that the code for a tile depends on.

    Attributes:
        p, g: dtypes.
        format: of the moments.
        whole: whether all blocks are there and full, so that nothing needs a mask.
        align: elements that every block starts at a multiple of.
        weights: how p is stored.
        far: whether numbers of blocks, which random bits are made of, take more than 32 bits.
        blocks: LINE, FULL or SHORT.
        short: elements that a tile has room for in a SHORT block.
        shifted: whether p may begin within a block of its random bits.
        spanned: whether a row of `work` is one of SPAN tiles; of whole ones that are LINE.
    """

    p: torch.dtype
    g: torch.dtype
    format: Format
    whole: bool
    align: int
    weights: Weights = PLAIN
    far: bool = False
    blocks: int = LINE
    short: int = 0
    shifted: bool = False
    spanned: bool = False

    @property
    def room(self) -> int:
        """Elements that a tile has room for in a block."""
        return self.short or self.format.block

    @property
    def in_tile(self) -> int:
        """Blocks of a tile."""
        return TILE // self.room


class KindConstants(NamedTuple):
    """What kernels know of a kind; `moments` names where in the tuple they find it.

    Attributes:
        p_type, g_type: the numbers of dtypes; see `number_of`.
        format: the number of the format in the launch.
        whole, align, far, room, blocks, shifted, spanned: as of the kind.
        piece: blocks that a program updates at a time.
        split, extra, dithered: whether `weights.split` rounds p, and how it does.
        low_type: the number of the residual's dtype; -1 without one.
        run, bare_run: most elements that a thread takes in a row, in passes that read moments and
            in others.
        once: whether caches should drop elements first, if they are an NVIDIA GPU's since Ampere.
            (Before Volta they cannot be told.)
        ahead: how many tiles ahead programs ask for elements there, or 0.
    """

    p_type: int
    g_type: int
    format: int
    whole: bool
    align: int
    piece: int
    far: bool
    split: bool
    extra: int
    dithered: bool
    low_type: int
    run: int
    bare_run: int
    room: int
    blocks: int
    shifted: bool
    once: bool
    spanned: bool
    ahead: int


def number_of(dtype: torch.dtype) -> int:
    """The number that stands for a dtype in the constants of a kernel."""
    return list(TYPES).index(dtype)


def module_of(format: Format) -> ModuleType:
    """A format's functions for Triton; see docs/adding_a_format.md."""
    return importlib.import_module(format.triton)


def formats_of(kinds: Sequence[Kind]) -> tuple[Format, ...]:
    """The formats of these kinds, each once."""
    return tuple(dict.fromkeys(kind.format for kind in kinds))


def pieces(kinds: Sequence[Kind]) -> list[int]:
    """Blocks of a tile that a program updates at a time, for each kind.

    A kernel takes the registers of its largest kind, and with more of them fewer programs share a
    multiprocessor. So only the best aligned whole tiles of the narrowest state, or a kind without
    others, are updated at once, the rest in halves, and unaligned blocks, which are read element by
    element, in halves too and beside aligned ones in quarters, short ones in eighths. (Each piece
    brings tables into shared memory.)
    """
    lightest = min(((kind.format.bits, -kind.align) for kind in kinds if kind.whole), default=None)
    aligned = any(kind.align > 1 for kind in kinds)

    def of(kind: Kind) -> int:
        light = kind.whole and (kind.format.bits, -kind.align) == lightest
        heavy = aligned and kind.align == 1
        undivided = kind.align > 1 and (light or len(kinds) == 1)
        parts = 1 if undivided else (8 if kind.short else 4) if heavy else 2
        return max(1, kind.in_tile // parts)

    return [of(kind) for kind in kinds]


def constants(kinds: tuple[Kind, ...], formats: Sequence[Format]) -> dict[str, Any]:
    """Constants by which per-element kernels are specialized: the kinds of tiles in a launch.

    Args:
        kinds: of the launch.
        formats: of which the kernels were written, in this order.
    """
    number = {format: i for i, format in enumerate(formats)}
    found = (
        _constants_of(kind, number[kind.format], piece)
        for kind, piece in zip(kinds, pieces(kinds), strict=True)
    )
    return {"KINDS": tuple(map(tuple, found))}


def _constants_of(kind: Kind, format: int, piece: int) -> KindConstants:
    weights = kind.weights
    run, bare_run = _lengths(kind)
    return KindConstants(
        p_type=number_of(kind.p),
        g_type=number_of(kind.g),
        format=format,
        whole=kind.whole,
        align=kind.align,
        piece=piece,
        far=kind.far,
        split=weights.bits is not None,
        extra=weights.extra,
        dithered=weights.dithered,
        low_type=-1 if weights.residual is None else number_of(weights.residual),
        run=run,
        bare_run=bare_run,
        room=kind.room,
        blocks=kind.blocks,
        shifted=kind.shifted,
        once=_once(kind),
        spanned=kind.spanned,
        ahead=_ahead(kind),
    )


def _lengths(kind: Kind) -> tuple[int, int]:
    """Most elements that a thread takes in a row: in a pass that reads moments, and in others.

    16 bytes of p and g: with more, a warp would read every other 16 bytes at a time. A format of
    whose kernels something else is the limit has a RUN of its own.
    """
    bare = 16 // max(kind.p.itemsize, kind.g.itemsize)
    return getattr(module_of(kind.format), "RUN", bare), bare


def _once(kind: Kind) -> bool:
    """Whether caches should drop elements first: where a format says so, whose tables lie there.

    Not in fp32, whose steps take 2 to 4 % more time so on an H200.
    """
    return kind.p.itemsize == 2 and getattr(module_of(kind.format), "ONCE", False)


def _ahead(kind: Kind) -> int:
    """How far ahead programs ask for tiles, or 0: in fp32, where memory is the limit without."""
    asks = getattr(module_of(kind.format), "AHEAD", False)
    return AHEAD if asks and kind.spanned and kind.p.itemsize == 2 else 0
