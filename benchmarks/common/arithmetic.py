"""The bytes that training has to keep for each parameter, worked out from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Shape = Sequence[int]

ROW_LAYOUT_MIN = 64  # elements of a row from which on blocks restart at every row
MIN_8BIT_SIZE = 4096  # the optimizers' default
STEP_BYTES = 8  # an int64 count for each parameter
RESIDUAL_BYTES: dict[int | None, int] = {None: 0, 16: 0, 24: 1, 32: 2}


@dataclass(frozen=True)
class Storage:
    """What a format keeps of the two moments of Adam.

    Attributes:
        element: bytes for each element, of both moments together.
        scales: bytes for each block, of both moments together.
        block: elements of a block.
    """

    element: int
    scales: int = 0
    block: int = 1


STORAGE = {
    "float32": Storage(8),
    "dynamic8": Storage(2, 8, 256),
    "ratio8": Storage(2, 6, 64),
    "ratio4": Storage(1, 6, 64),
}


def blocks(shape: Shape, block: int) -> int:
    """Blocks of a tensor: they restart at every row of 64 elements or more, or run over all."""
    row = math.prod(shape[1:])
    if len(shape) >= 2 and row >= ROW_LAYOUT_MIN:
        return shape[0] * -(-row // block)
    return -(-math.prod(shape) // block)


def state_bytes(shape: Shape, format: str, bits: int | None = None) -> int:
    """Bytes of the state that AdamW keeps of one parameter.

    Args:
        shape: the parameter's.
        format: a name in `STORAGE`.
        bits: `master_weight_bits` of a bf16 parameter.
    """
    numel = math.prod(shape)
    kept = STORAGE["float32" if numel < MIN_8BIT_SIZE else format]
    scales = kept.scales * blocks(shape, kept.block) if kept.scales else 0
    return numel * (kept.element + RESIDUAL_BYTES[bits]) + scales + STEP_BYTES


def largest_bucket(gradients: Iterable[int], bucket_bytes: int) -> int:
    """The most bytes of gradients that wait at once, of those that arrive in this order."""
    largest = waiting = 0
    for size in gradients:
        waiting += size
        largest = max(largest, waiting)
        if waiting >= bucket_bytes:
            waiting = 0
    return largest
