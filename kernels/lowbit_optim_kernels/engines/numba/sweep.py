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
phase's `combine`; else 0. The first of its tickets has beside it how many threads would combine,
and 1 when that is done.

A thread goes on to the next pass when all of a reduction is done, whoever did it. A piece of a
thread that another program keeps from its core is done again by others: a reduction's results are
read once, and what such a thread finds out when it comes back, from numbers that are updated
already, is left where nobody reads it any more.
"""

from __future__ import annotations

from .inner import inner
from .memory import (
    call_with,
    cell_f64,
    cell_i64,
    move,
    number_of,
    pause,
    publish,
    read_i64,
    seen,
    set_cell_f64,
    stack,
    take,
    write_i64,
)

ROW = 15  # words
JOB = 11  # of them the pass's
JOB_BYTES, OWN_TICKETS = 8 * JOB, 128
TICKETS, THREADS, EACH, COUNT = 8, 16, 24, 32  # bytes of a row
CHUNKS, PARTIAL, SHARE, TERMS, SUMS, COMBINE = 56, 80, 88, 96, 104, 112
COMBINING, COMBINED = 8, 16  # bytes of its tickets
PAUSES = 1 << 12  # some 100 us; a chunk takes a tenth, if nobody keeps its thread from a core


@inner
def done(row, owner):
    """Bits of the pieces of a thread that are done."""
    return seen(read_i64(row + TICKETS) + 64 * (1 + owner) + 8)


@inner
def not_done(row):
    """How many threads have pieces that are not."""
    full, found = (1 << read_i64(row + EACH)) - 1, 0
    for owner in range(read_i64(row + THREADS)):
        if done(row, owner) != full:
            found += 1
    return found


@inner
def do_again(row):
    """Pieces that are not done, each as a job of its own."""
    tickets, threads = read_i64(row + TICKETS), read_i64(row + THREADS)
    each, count = read_i64(row + EACH), read_i64(row + COUNT)
    job, own = stack(JOB_BYTES), stack(OWN_TICKETS)
    for k in range(threads * each):
        owner, piece = k // each, k % each
        if done(row, owner) >> piece & 1:
            continue
        lo, hi = count * k // (threads * each), count * (k + 1) // (threads * each)
        move(job, row, JOB_BYTES)
        for at in range(0, OWN_TICKETS, 8):
            write_i64(own + at, 0)
        write_i64(job, 0)
        write_i64(job + TICKETS, own)
        write_i64(job + THREADS, 1)
        write_i64(job + EACH, 1)
        write_i64(job + COUNT, hi - lo)
        write_i64(job + CHUNKS, read_i64(row + CHUNKS) + 24 * lo)
        write_i64(job + PARTIAL, read_i64(row + PARTIAL) + 8 * read_i64(row + TERMS) * lo)
        call_with(read_i64(row + SHARE), job)
        publish(tickets + 64 * (1 + owner) + 8, 1 << piece)


@inner
def end_reduction(row):
    """Wait for the pieces that others have, or do them again."""
    chunks = 1 + read_i64(row + COUNT) // (read_i64(row + THREADS) * read_i64(row + EACH))
    pauses = 0
    while not_done(row) > 0:
        if pauses == PAUSES * chunks:
            do_again(row)
        else:
            pauses += 1
            pause()


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


@inner
def combine_once(row, tensor, let_others):
    """By the thread that comes first; the others wait."""
    tickets = read_i64(row + TICKETS)
    if take(tickets + COMBINING) == 0:
        combine_tensors(row, tensor)
        publish(tickets + COMBINED, 1)
    pauses = 0
    while seen(tickets + COMBINED) == 0:
        pauses += 1
        pause()
        if pauses > PAUSES and let_others != 0:
            number_of(let_others)


def sweep(job):
    """A thread's part of all passes."""
    rows, count = read_i64(job + 40), read_i64(job + 48)
    tensor, let_others = read_i64(job + 56), read_i64(job + 64)
    for r in range(count):
        row = rows + 8 * ROW * r
        call_with(read_i64(row + SHARE), row)
        if read_i64(row + TERMS) > 0:
            end_reduction(row)
            combine_once(row, tensor, let_others)
