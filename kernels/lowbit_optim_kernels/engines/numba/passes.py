"""Template of the Numba engine's modules: the passes over elements and the per-tensor arithmetic.

Read by `source`, which binds the names in capitals; see `codegen.specialize`. Scalar functions of a
rule run on fp64, one call per tensor; element functions on vectors of 16 fp32 lanes (`vector`).
All addresses come from a table, so that one call steps any number of tensors:

    address   int64   (tensors, ...)  p, g or NO_GRADIENT, step, residual, state, what lasts
    geometry  int64   (tensors, 8)    `job.Geometry`
    hyper     float64 (parts, ...)    hyperparameters
    scalars   float64 (tensors, ...)  gscale, then what the rule's scalar functions give
    chunks    int64   (chunks, 3)     `job.Chunk`
    partial   float64 (chunks, ...)   sums of a reduction's terms over one chunk

A pass is one function, put together as text: Numba would take a second to inline it. So this file
is never run as it stands. A call without arguments that is a statement, as `compute()`, is replaced
by that function's body, which shares the variables of its caller, and `for x in (value,)` binds x
in what is put there. Blocks come as runs of n elements: whole blocks, or one short one, which goes
through padded scratch memory. `at[...]` are a run's addresses, `start` and `stop` a block's first
element and the one after its last, `j` the first of 16 elements, and `row` is where the moments of
the block are. MOMENTS are those that the format codes, EXACT those that are kept as they are. A
format whose module names a template of its own (`PASSES`) replaces functions of this one.

Dither takes random bits by numbers of blocks in the whole tensor: `number` is that of a run's first
block. A parameter's own blocks, of 64, may begin within one of the format's, so `weight_place` is
64 times the number of the one where the run begins, and its lane. They are APART from the format's
where those are no multiple of 64, and in a shard cut within one.
"""

from __future__ import annotations

from math import isfinite

from numpy import float32 as f32

from .dither import block_bits, hash_blocks, hashed, random_bits, random_bits_of_two, stream_key
from .element import only_finite
from .memory import (
    cell_f64,
    cell_i64,
    enter,
    leave,
    load_f32,
    number_of,
    publish,
    read_f64,
    read_i64,
    set_cell_f64,
    stack,
    store_f32,
    take,
    write_f64,
)
from .scalar import count_step, read_step
from .vector import finite, fused, rounded, splat, total, where

# Elements.


def compute():
    """For the 16 elements at j: load what the rule's functions read, and call them."""
    if P.read and WEIGHTS.bits:
        beside = at[RESIDUAL] + RESIDUAL.width * j if WEIGHTS.extra else 0
        P.value = P.join(at[P] + P.width * j, beside)
    elif P.read:
        P.value = P.load(at[P] + P.width * j)
    if G.read:
        G.value = G.load(at[G] + G.width * j) * gscale
    if MOMENTS:
        load_moments()
    for m in EXACT:
        m.value = load_f32(at[m] + 4 * j)
    for call in CALLS:
        call.gives = call.function(*call.reads)


def update_elements():
    compute()
    rate = RATE.value
    w = fused(-rate, U.value, rounded(SHRINK.value, P.value))
    if WEIGHTS.bits:
        store_weights()
    else:
        P.store(at[P] + P.width * j, w)
    if MOMENTS:
        store_moments()
    for m in EXACT:
        store_f32(at[m] + 4 * j, m.value)


def store_weights():
    random = w
    if WEIGHTS.dithered and not APART:
        if j & 1023 == 0:
            hash_blocks(hashes, weight_key, step, (weight_place >> 6) + (j >> 6))
        random = random_bits(hashed(hashes, j >> 6), j & 63)
    elif WEIGHTS.dithered:
        place = weight_place + j
        weight_base = block_bits(weight_key, step, place >> 6)
        following = block_bits(weight_key, step, (place + 15) >> 6)
        random = random_bits_of_two(weight_base, following, place & 63)
    beside = at[RESIDUAL] + RESIDUAL.width * j if WEIGHTS.extra else 0
    P.split(at[P] + P.width * j, beside, w, random)


# Blocks of a format with `decode` and `encode`. Element j of a block's moment is at row + 4 * j.


def read_block():
    row = scratch - 4 * start
    decode_block(
        (*SIGNED,),
        (
            *(at[x] + x.width * start for x in ELEMENT_PARTS),
            *(at[x] + x.width * (start // BLOCK) for x in BLOCK_PARTS),
        ),
        (*(scratch + ROW * m.row for m in MOMENTS),),
        stop - start,
    )


def write_block():
    encode_block(
        (*SIGNED,),
        (*(scratch + ROW * m.row for m in MOMENTS),),
        (
            *(at[x] + x.width * start for x in ELEMENT_PARTS),
            *(at[x] + x.width * (start // BLOCK) for x in BLOCK_PARTS),
        ),
        stop - start,
    )


def load_moments():
    for m in MOMENTS:
        m.value = load_f32(row + ROW * m.row + 4 * j)


def store_moments():
    """An element with one bad number starts again in all."""
    ok = every(finite(m.value) for m in MOMENTS)
    for m in MOMENTS:
        store_f32(row + ROW * m.row + 4 * j, where(ok, m.value, splat(f32(0.0))))


# Passes.


def update_blocks():
    """Update the blocks of a run, at the addresses `at`."""
    if MOMENTS:
        for start in range(0, n, BLOCK):
            stop = start + BLOCK if start + BLOCK < n else n
            read_block()
            for j in range(start, stop, 16):
                update_elements()
            write_block()
    elif WEIGHTS.dithered:
        for i in range(0, n, 64):
            for quarter in (0, 1, 2, 3):
                j = i + 16 * quarter
                update_elements()
    else:
        for j in range(0, n, 16):
            update_elements()


def add_terms():
    """Sums of terms from `first_summed` to `end`; `only` asks for finite ones."""
    for x in TERMS:
        lanes[x] = splat(f32(0.0))
    for start in range(first_summed, end, BLOCK):
        stop = start + BLOCK if start + BLOCK < n else n
        if MOMENTS:
            read_block()
        for j in range(start, stop, 16):
            compute()
            for x in TERMS:
                lanes[x] = lanes[x] + (only_finite(x.value) if only else x.value)
    for x in TERMS:
        run_sum[x] = total(lanes[x])


def mend_sums():
    """Leave out terms that are not finite; nearly always all are, as their sums are then."""
    if not all(isfinite(run_sum[x]) for x in TERMS):
        for only in (True,):
            add_terms()


def reduce_blocks():
    """Sums of terms; of finite ones, lest one bad gradient spoil its tensor's norm.

    The norm of percentile clipping is taken as it is. (Few elements at a time: what is loaded early
    must not have left the first-level cache.)
    """
    for x in TERMS:
        block_sum[x] = 0.0
    for first_summed in range(0, n, SUMMED):
        end = first_summed + SUMMED if first_summed + SUMMED < n else n
        for only in (False,):
            add_terms()
        if FINITE:
            mend_sums()
        for x in TERMS:
            block_sum[x] += run_sum[x]


def read_tensor():
    """Numbers of tensor t, and of its row of hyperparameters."""
    gscale = f32(cell_f64(scalars, t, SCALAR_COLUMNS, GSCALE))
    part = cell_i64(geometry, t, GEOMETRY.WIDTH, GEOMETRY.PART)
    for s in SCALARS:
        if s.of_tensor:
            s.value = f32(cell_f64(scalars, t, SCALAR_COLUMNS, s.column))
        else:
            s.value = f32(cell_f64(hyper, part, HYPER_COLUMNS, s.column))
    tensor_row = cell_i64(geometry, t, GEOMETRY.WIDTH, GEOMETRY.ROW)
    per_row = cell_i64(geometry, t, GEOMETRY.WIDTH, GEOMETRY.BLOCKS_PER_ROW)
    if DITHERED or WEIGHTS_DITHERED:
        step = read_i64(cell_i64(address, t, ADDRESS_COLUMNS, STEP))
        tensor_key = cell_i64(geometry, t, GEOMETRY.WIDTH, GEOMETRY.TENSOR_KEY)
    for m in DITHERED:
        key[m] = stream_key(tensor_key, m.stream)
    if WEIGHTS_DITHERED:
        weight_key = stream_key(tensor_key, WEIGHT)


def enter_run():
    """The run that begins with block b: its sizes, numbers for dither, and addresses `at`."""
    column = b % per_row * BLOCK
    first = b // per_row * tensor_row + column
    whole = (tensor_row - column) // BLOCK
    if whole > last - b:
        whole = last - b
    size = BLOCK * whole if whole > 0 else tensor_row - column
    n = (size + (GRAIN - 1)) // GRAIN * GRAIN
    if DITHERED:
        number = cell_i64(geometry, t, GEOMETRY.WIDTH, GEOMETRY.BLOCKS_BEFORE) + b
    if WEIGHTS_DITHERED:
        weight_row = (tensor_row + (WEIGHT_BLOCK - 1)) // WEIGHT_BLOCK
        weight_place = cell_i64(geometry, t, GEOMETRY.WIDTH, GEOMETRY.WEIGHTS_BEFORE)
        weight_place += b // per_row * weight_row * WEIGHT_BLOCK + column
    for x in BLOCK_PARTS:
        at[x] = cell_i64(address, t, ADDRESS_COLUMNS, x.column) + x.width * b
    for x in OPERANDS:
        home[x] = cell_i64(address, t, ADDRESS_COLUMNS, x.column) + x.width * first
    for x in OPERANDS:
        at[x] = enter(home[x], spare + SPARE * x.row, size, n, x.width, x.pad)


def run_chunks():
    """The blocks of chunks lo..hi."""
    for c in range(lo, hi):
        t = cell_i64(chunks, c, CHUNK.WIDTH, CHUNK.TENSOR)
        if cell_i64(address, t, ADDRESS_COLUMNS, G_COLUMN) == NO_GRADIENT:
            for x in TERMS:
                set_cell_f64(partial, c, len(TERMS), x.row, 0.0)
            continue
        read_tensor()
        for x in TERMS:
            chunk_sum[x] = 0.0
        b = cell_i64(chunks, c, CHUNK.WIDTH, CHUNK.FIRST)
        last = b + cell_i64(chunks, c, CHUNK.WIDTH, CHUNK.BLOCKS)
        while b < last:
            enter_run()
            if TERMS:
                reduce_blocks()
                for x in TERMS:
                    chunk_sum[x] += block_sum[x]
            else:
                update_blocks()
                for x in OPERANDS:
                    if x.written:
                        leave(home[x], at[x], size, x.width)
            b += whole if whole > 1 else 1
        for x in TERMS:
            set_cell_f64(partial, c, len(TERMS), x.row, chunk_sum[x])


# Shares, which `threads` runs: its words, then those of the work.


def read_job():
    thread_number = read_i64(job + JOB.NUMBER)
    tickets = read_i64(job + JOB.TICKETS)
    threads = read_i64(job + JOB.THREADS)
    each = read_i64(job + JOB.EACH)
    count = read_i64(job + JOB.COUNT)


def run_pieces():
    this = number_of(thread_number) if thread_number != 0 else take(tickets)
    for turn in range(threads):
        owner = (this + turn) % threads
        ticket = tickets + JOB.TICKET * (1 + owner)
        piece = take(ticket)
        while piece < each:
            k, pieces = owner * each + piece, threads * each
            lo, hi = count * k // pieces, count * (k + 1) // pieces
            if PIECE_ARGUMENTS:
                piece_function(lo, hi, *PIECE_ARGUMENTS)
            else:
                run_chunks()
            publish(ticket + JOB.DONE, 1 << piece)
            piece = take(ticket)


def chunks_share(job):
    """All chunks of a pass."""
    read_job()
    address = read_i64(job + JOB.ADDRESS)
    geometry = read_i64(job + JOB.GEOMETRY)
    chunks = read_i64(job + JOB.CHUNKS)
    hyper = read_i64(job + JOB.HYPER)
    scalars = read_i64(job + JOB.SCALARS)
    if TERMS:
        partial = read_i64(job + JOB.PARTIAL)
    scratch = stack(SCRATCH)
    if DITHERED or WEIGHTS_DITHERED:
        hashes = stack(HASHES)
    spare = stack(SPARES)
    run_pieces()


def words_share(job):
    """For a function of plain words."""
    read_job()
    for w in WORDS:
        word[w] = read_i64(job + w.offset)
    run_pieces()


# Tensors.


def read_tensors_job():
    """Tensors first..last."""
    first = read_i64(job + JOB.FIRST)
    last = read_i64(job + JOB.LAST)
    address = read_i64(job + JOB.T_ADDRESS)
    geometry = read_i64(job + JOB.T_GEOMETRY)
    hyper = read_i64(job + JOB.T_HYPER)
    scalars = read_i64(job + JOB.T_SCALARS)
    sums = read_i64(job + JOB.T_SUMS)
    taken = read_i64(job + JOB.LIVE) != 0


def see_tensor():
    """Whether tensor t is stepped, and its row of hyperparameters."""
    live = taken and cell_i64(address, t, ADDRESS_COLUMNS, G_COLUMN) != NO_GRADIENT
    part = cell_i64(geometry, t, GEOMETRY.WIDTH, GEOMETRY.PART)


def compute_scalars():
    for x in READS:
        if x.source == "step":
            x.value = read_step(cell_i64(address, t, ADDRESS_COLUMNS, STEP))
        elif x.source == "numel":
            x.value = float(cell_i64(geometry, t, GEOMETRY.WIDTH, GEOMETRY.NUMEL))
        elif x.source == "live":
            x.value = live
        elif x.source == "sums":
            x.value = cell_f64(sums, t, SUMS, x.column)
        elif x.source == "number":
            x.value = read_f64(cell_i64(address, t, ADDRESS_COLUMNS, x.column))
        elif x.source == "history":
            x.value = cell_i64(address, t, ADDRESS_COLUMNS, x.column)
        elif x.source == "scalars":
            x.value = cell_f64(scalars, t, SCALAR_COLUMNS, x.column)
        else:
            x.value = cell_f64(hyper, part, HYPER_COLUMNS, x.column)
    CALL.gives = CALL.function(*CALL.reads)
    for x in GIVES:
        set_cell_f64(scalars, t, SCALAR_COLUMNS, x.column, x.value)


def begin(job):
    read_tensors_job()
    for t in range(first, last):
        see_tensor()
        count_step(cell_i64(address, t, ADDRESS_COLUMNS, STEP), live)
        compute_scalars()


def combine(job):
    read_tensors_job()
    for t in range(first, last):
        see_tensor()
        compute_scalars()


def keep(job):
    """Store the lasting numbers that the scalar functions gave."""
    read_tensors_job()
    for t in range(first, last):
        see_tensor()
        if live:
            for x in KEPT:
                to = cell_i64(address, t, ADDRESS_COLUMNS, x.column)
                write_f64(to, cell_f64(scalars, t, SCALAR_COLUMNS, x.of))
