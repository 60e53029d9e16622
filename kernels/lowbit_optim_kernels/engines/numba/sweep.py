"""Passes over tensors in one job, a window of tensors after the other.

A rule with norms reads parameters and gradients in its reductions and again in its update. Taken
for a few tensors at a time, the second reading finds them in a cache that the cores share.

`sweep(job)` is a share as `threads` describes it, whose words of work are

    ROWS         a row for each pass over a window; see `job`
    ROW_COUNT    how many
    TENSOR       the job of `combine`, of a tensor that is written here
    LET_OTHERS   address of a C function by which a thread lets others have its core, or 0

A thread goes on to the next pass when all of a reduction is done, whoever did it. A piece of a
thread that another program keeps from its core is done again by others: a reduction's results are
read once, and what such a thread finds out when it comes back, from numbers that are updated
already, is left where nobody reads it any more.
"""

from __future__ import annotations

from .inner import inner
from .job import (
    CHUNK_BYTES,
    CHUNKS,
    COMBINE,
    COMBINED,
    COMBINING,
    COUNT,
    DONE,
    EACH,
    FIRST,
    LAST,
    NUMBER,
    PARTIAL,
    ROW,
    SHARE,
    SUMS,
    T_SUMS,
    TERMS,
    THREADS,
    TICKET,
    TICKETS,
    WORD,
    WORK,
)
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

OWN_TICKETS = 2 * TICKET  # of a job for one thread
ROWS, ROW_COUNT, TENSOR, LET_OTHERS = range(WORK, WORK + 4 * WORD, WORD)
PAUSES = 1 << 12  # some 100 us; a chunk takes a tenth, if nobody keeps its thread from a core


@inner
def done(row, owner):
    """Bits of the pieces of a thread that are done."""
    return seen(read_i64(row + TICKETS) + TICKET * (1 + owner) + DONE)


@inner
def not_done(row):
    """The number of threads with pieces that are not done."""
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
    job, own = stack(SHARE), stack(OWN_TICKETS)
    for k in range(threads * each):
        owner, piece = k // each, k % each
        if done(row, owner) >> piece & 1:
            continue
        lo, hi = count * k // (threads * each), count * (k + 1) // (threads * each)
        move(job, row, SHARE)
        for at in range(0, OWN_TICKETS, WORD):
            write_i64(own + at, 0)
        write_i64(job + NUMBER, 0)
        write_i64(job + TICKETS, own)
        write_i64(job + THREADS, 1)
        write_i64(job + EACH, 1)
        write_i64(job + COUNT, hi - lo)
        write_i64(job + CHUNKS, read_i64(row + CHUNKS) + CHUNK_BYTES * lo)
        write_i64(job + PARTIAL, read_i64(row + PARTIAL) + 8 * read_i64(row + TERMS) * lo)
        call_with(read_i64(row + SHARE), job)
        publish(tickets + TICKET * (1 + owner) + DONE, 1 << piece)


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
            write_i64(tensor + FIRST, t)
            write_i64(tensor + LAST, t + 1)
            write_i64(tensor + T_SUMS, sums)
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
    rows, count = read_i64(job + ROWS), read_i64(job + ROW_COUNT)
    tensor, let_others = read_i64(job + TENSOR), read_i64(job + LET_OTHERS)
    for r in range(count):
        row = rows + ROW * r
        call_with(read_i64(row + SHARE), row)
        if read_i64(row + TERMS) > 0:
            end_reduction(row)
            combine_once(row, tensor, let_others)
