"""Passes over tensors in one job, a window of tensors after the other.

A rule with norms reads parameters and gradients in its reductions and again in its update. Taken
for a few tensors at a time, the second reading finds them in a cache that the cores share.

`sweep(job)` is a share as `threads` describes it, whose words of work are

    0  a row for each pass over a window
    1  how many
    2  the job of `combine`, of a tensor that is written here
    3  address of a C function by which a thread lets others have its core, or 0

and a row the job of a pass over chunks of whole tensors, the address of its share, and of a
reduction how many terms it has, the address of their sums over tensors (float64), and that of the
phase's `combine`; else 0. Its tickets begin with 0, how many pieces are done, 0 or more for those
who would combine, and 1 when that is done.

A thread goes on to the next pass when nobody has a piece of a reduction any more, whoever had it:
one that another program keeps from its core does not hold up the others unless it has a piece.
"""

from __future__ import annotations

from .inner import inner
from .memory import (
    call_with,
    cell_f64,
    cell_i64,
    number_of,
    pause,
    publish,
    read_i64,
    seen,
    set_cell_f64,
    take,
    write_i64,
)

ROW = 15  # words
TICKETS, THREADS, EACH, COUNT = 8, 16, 24, 32  # bytes of a row
CHUNKS, PARTIAL, SHARE, TERMS, SUMS, COMBINE = 56, 80, 88, 96, 104, 112
DONE, COMBINING, COMBINED = 8, 16, 24  # bytes of its tickets
PAUSES = 1 << 12  # some 100 us; a piece takes less, if nobody keeps its thread from a core


@inner
def wait(address, value, let_others):
    """Until a number is what other threads make it."""
    pauses = 0
    while seen(address) != value:
        pauses += 1
        pause()
        if pauses > PAUSES and let_others != 0:
            number_of(let_others)


@inner
def combine_tensors(row, tensor):
    """Add up the terms of each tensor's chunks, in their order, and call `combine` for it."""
    chunks, partial, count = read_i64(row + CHUNKS), read_i64(row + PARTIAL), read_i64(row + COUNT)
    terms, sums, combine = read_i64(row + TERMS), read_i64(row + SUMS), read_i64(row + COMBINE)
    for c in range(count):
        t = cell_i64(chunks, c, 3, 0)
        begins = c == 0 or cell_i64(chunks, c - 1, 3, 0) != t
        for k in range(terms):
            before = 0.0 if begins else cell_f64(sums, t, terms, k)
            set_cell_f64(sums, t, terms, k, before + cell_f64(partial, c, terms, k))
        if combine != 0 and (c == count - 1 or cell_i64(chunks, c + 1, 3, 0) != t):
            write_i64(tensor, t)
            write_i64(tensor + 8, t + 1)
            write_i64(tensor + 48, sums)
            call_with(combine, tensor)


def sweep(job):
    """A thread's part of all passes."""
    rows, count = read_i64(job + 40), read_i64(job + 48)
    tensor, let_others = read_i64(job + 56), read_i64(job + 64)
    for r in range(count):
        row = rows + 8 * ROW * r
        call_with(read_i64(row + SHARE), row)
        if read_i64(row + TERMS) > 0:
            tickets = read_i64(row + TICKETS)
            wait(tickets + DONE, read_i64(row + THREADS) * read_i64(row + EACH), let_others)
            if take(tickets + COMBINING) == 0:
                combine_tensors(row, tensor)
                publish(tickets + COMBINED)
            wait(tickets + COMBINED, 1, let_others)
