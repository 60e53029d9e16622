"""Layout of blocks: how a tensor's elements fall into blocks that share a scale."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

BLOCK = 256  # elements, unless a format says otherwise
ROW_LAYOUT_MIN = 64  # rows shorter than this would waste most of a block


@dataclass(frozen=True)
class Layout:
    """Blocks of a tensor, decided by its *global* shape alone.

    With ndim >= 2 and at least 64 elements in a dim-0 slice blocks restart at every slice, so that
    any shard along dim 0 is a valid piece; otherwise they run over the flattened tensor.

    Attributes:
        rows: how often blocks restart.
        row: elements after which they do; rows * row are all.
        by_rows: whether the scales' shape tells rows.
        block: elements of a block; the last one of a row may be short.
    """

    rows: int
    row: int
    by_rows: bool
    block: int = BLOCK

    @staticmethod
    def of(shape: torch.Size | tuple[int, ...], block: int = BLOCK) -> Layout:
        """The layout of a tensor of this (global) shape."""
        numel = math.prod(shape)
        row = math.prod(shape[1:])
        if len(shape) >= 2 and row >= ROW_LAYOUT_MIN:  # of a shard without rows, too
            return Layout(shape[0], row, True, block)
        return Layout(1, numel, False, block)

    @property
    def blocks_per_row(self) -> int:
        """Blocks in a row, the last of which may be short."""
        return -(-self.row // self.block)

    def positions_before(self, first: int) -> int:
        """The elements that whole blocks have room for before a row of dimension 0.

        Of a flattened tensor, where a shard may begin within a block, the elements before this one.
        """
        return first * self.blocks_per_row * self.block if self.by_rows else first

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """Shape of the scales: (rows, blocks per row), or (blocks,) for a flattened layout."""
        return (self.rows, self.blocks_per_row) if self.by_rows else (self.blocks_per_row,)
