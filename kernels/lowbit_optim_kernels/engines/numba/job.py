"""Layouts of the jobs that compiled functions are called with: int64 words, counted here in bytes.

A job of pieces, which `threads` runs, begins with

    NUMBER    address of a C function that says the number of the calling thread, or 0
    TICKETS   address of tickets, rows of 64 bytes that begin with an atomic counter: of threads,
              then of each thread's pieces, with a bit for each one that is done beside it
    THREADS   how many threads there are at most
    EACH      how many pieces each of them has
    COUNT     how many items (chunks, blocks) all pieces have

and has from WORK on what the function works on: of a pass over chunks the addresses of the tables
that `passes` describes.

A row of a sweep is the job of such a pass; then SHARE, the address of the pass's function, and of a
reduction TERMS, how many it has, and the addresses of their SUMS over tensors (float64) and of the
phase's COMBINE; else 0.

A job of tensors is of the per-tensor arithmetic of those from FIRST to before LAST, with the
address of a phase's sums over tensors (float64) or 0; LIVE is 0 where an AMP scaler skips the step.

`Geometry` and `Chunk` number the columns of the tables `geometry` and `chunks`, of int64, too.
"""

from __future__ import annotations

from collections.abc import Sequence

WORD = 8

NUMBER, TICKETS, THREADS, EACH, COUNT, WORK = range(0, 6 * WORD, WORD)
ADDRESS, GEOMETRY, CHUNKS, HYPER, SCALARS, PARTIAL = range(WORK, WORK + 6 * WORD, WORD)

SHARE, TERMS, SUMS, COMBINE, ROW = range(PARTIAL + WORD, PARTIAL + 6 * WORD, WORD)

FIRST, LAST, T_ADDRESS, T_GEOMETRY, T_HYPER, T_SCALARS, T_SUMS, LIVE = range(0, 8 * WORD, WORD)

TICKET = 64  # bytes of a row of tickets
DONE = WORD  # in a thread's: bits of the pieces that are done
# In the first: how many threads would combine, and 1 when that is done.
COMBINING, COMBINED = WORD, 2 * WORD


class Geometry:
    """Columns of a tensor's row; those from TENSOR_KEY on are attributes of its `Slot`."""

    ROWS, ROW, BLOCKS_PER_ROW, NUMEL, TENSOR_KEY, BLOCKS_BEFORE, WEIGHTS_BEFORE, PART = range(8)
    WIDTH = 8


class Chunk:
    """Columns of a chunk's row: its tensor, the first of its blocks, and how many there are."""

    TENSOR, FIRST, BLOCKS = range(3)
    WIDTH = 3


CHUNK_BYTES = Chunk.WIDTH * WORD


def tensor_words(first: int, last: int, tables: Sequence[int]) -> list[int]:
    """The words of a job of tensors that are stepped, without sums.

    Args:
        first: the first tensor.
        last: the one after the last.
        tables: addresses of the first four of `passes`' tables: addresses, geometry,
            hyperparameters and scalars.
    """
    return [first, last, *tables, 0, 1]
