"""Arithmetic once per tensor, in Triton: a lane per tensor, in fp64.

`passes` says what the tables hold, and `bindings` writes the kernels that call `begin`, `combine`
and `keep`; `add_up` and `add_chunks` are kernels themselves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...batch import NO_GRADIENT, STEP, G
from . import random, tables

G, STEP, NO_GRADIENT = (tl.constexpr(i) for i in (G, STEP, NO_GRADIENT))
ROW, ROWS, FIRST_TILE, NUMEL = (tl.constexpr(i) for i in range(4))  # of `geometry`
KEY, BEFORE, WEIGHTS_BEFORE, GEOMETRY = (tl.constexpr(i) for i in range(4, 8))
GSCALE, LIVE = tl.constexpr(tables.GSCALE), tl.constexpr(tables.LIVE)
# Where a value is that a scalar function reads.
OF_STEP, OF_NUMEL, OF_SCALARS, OF_HYPER, OF_SUMS, OF_NUMBER, OF_HISTORY = (
    tl.constexpr(i) for i in range(7)
)


@triton.jit
def lanes(count, LANES: tl.constexpr):
    t = tl.program_id(0) * LANES + tl.arange(0, LANES)
    return t, t < tl.load(count)


@triton.jit
def per_tensor(t, mask, step, address, geometry, hyper, scalars, sums, SOURCE: tl.constexpr):
    """One value for each tensor, from where SOURCE says."""
    if SOURCE[0] == OF_STEP:
        return step
    elif SOURCE[0] == OF_NUMEL:
        return tl.load(geometry + t * GEOMETRY + NUMEL, mask=mask, other=1).to(tl.float64)
    elif SOURCE[0] == OF_SCALARS:
        return tl.load(scalars + t * SOURCE[2] + SOURCE[1], mask=mask, other=0.0)
    elif SOURCE[0] == OF_SUMS:
        return tl.load(sums + t * SOURCE[2] + SOURCE[1], mask=mask, other=0.0)
    elif SOURCE[0] == OF_NUMBER:
        number = tl.load(address + t * SOURCE[2] + SOURCE[1], mask=mask, other=0)
        return tl.load(number.to(tl.pointer_type(tl.float64)), mask=mask, other=0.0)
    elif SOURCE[0] == OF_HISTORY:
        return tl.load(address + t * SOURCE[2] + SOURCE[1], mask=mask, other=0)
    else:
        return tl.load(hyper + SOURCE[1])


@triton.jit
def own_hyper(t, mask, geometry, hyper, WIDTHS: tl.constexpr):
    """The address of each tensor's row of hyperparameters."""
    part = tl.load(geometry + t * GEOMETRY + KEY, mask=mask, other=0) >> 32
    return hyper + part * WIDTHS[2]


@triton.jit
def scalar_function(
    t, mask, step, address, geometry, hyper, scalars, floats, sums,
    FUNCTION: tl.constexpr, SOURCES: tl.constexpr, COLUMNS: tl.constexpr, WIDTHS: tl.constexpr,
):  # fmt: skip
    """Call a rule's function for each tensor and keep what it gives, in fp64 and in fp32.

    COLUMNS has the two columns of each value, WIDTHS the widths of both tables and of `hyper`, of
    which each tensor's row is given.
    """
    values = ()
    for i in tl.static_range(len(SOURCES)):
        value = per_tensor(t, mask, step, address, geometry, hyper, scalars, sums, SOURCES[i])
        values = values + (value,)
    given = FUNCTION(*values)
    if len(COLUMNS) == 1:
        given = (given,)
    for i in tl.static_range(len(COLUMNS)):
        tl.store(scalars + t * WIDTHS[0] + COLUMNS[i][0], given[i], mask=mask)
        tl.store(floats + t * WIDTHS[1] + COLUMNS[i][1], given[i], mask=mask)


@triton.jit
def begin(
    address, geometry, hyper, scalars, floats, count, grad_scale, found_inf,
    MAXIMIZE: tl.constexpr, UNSCALE: tl.constexpr, GUARDED: tl.constexpr, STRIDE: tl.constexpr,
    PREPARE: tl.constexpr, SOURCES: tl.constexpr, COLUMNS: tl.constexpr, WIDTHS: tl.constexpr,
    LANES: tl.constexpr, COPIES: tl.constexpr, STREAMS: tl.constexpr, RANDOM: tl.constexpr,
):  # fmt: skip
    """Count the step, and work out what needs no reduction.

    COPIES are pairs of columns: of `hyper`, and of `floats` where elements read it. From the column
    RANDOM on `floats` has what the random bits of the STREAMS need.
    """
    t, mask = lanes(count, LANES)
    step_at = tl.load(address + t * STRIDE + STEP, mask=mask, other=0)
    step_at = step_at.to(tl.pointer_type(tl.int64))
    step = tl.load(step_at, mask=mask, other=1).to(tl.float64)
    taken = tl.full((), 1.0, tl.float64)
    if GUARDED:
        taken = tl.where(tl.load(found_inf).to(tl.float64) == 0.0, 1.0, 0.0)
    gradient = tl.load(address + t * STRIDE + G, mask=mask, other=NO_GRADIENT)
    live = tl.where(gradient != NO_GRADIENT, taken, 0.0)
    gscale = tl.full((), -1.0 if MAXIMIZE else 1.0, tl.float64)
    if UNSCALE:
        gscale = gscale / tl.load(grad_scale).to(tl.float64)
    step = step + live
    tl.store(step_at, step.to(tl.int64), mask=mask)
    row, floats_row = scalars + t * WIDTHS[0], floats + t * WIDTHS[1]
    tl.store(row + GSCALE, gscale, mask=mask)
    tl.store(row + LIVE, live, mask=mask)
    tl.store(floats_row + GSCALE, gscale, mask=mask)
    tl.store(floats_row + LIVE, live, mask=mask)
    own = own_hyper(t, mask, geometry, hyper, WIDTHS)
    scalar_function(
        t, mask, step, address, geometry, own, scalars, floats, hyper, PREPARE, SOURCES, COLUMNS,
        WIDTHS,
    )  # fmt: skip
    tensor_key = tl.load(geometry + t * GEOMETRY + KEY, mask=mask, other=0).to(tl.uint32)
    of_streams = (floats_row + RANDOM).to(tl.pointer_type(tl.uint32))
    for i in tl.static_range(len(STREAMS)):
        key, rest = random.of_step(tensor_key, step.to(tl.int64).to(tl.uint32), STREAMS[i])
        tl.store(of_streams + 2 * i, key, mask=mask)
        tl.store(of_streams + 2 * i + 1, rest, mask=mask)
    for i in tl.static_range(len(COPIES)):
        tl.store(floats_row + COPIES[i][1], tl.load(own + COPIES[i][0]), mask=mask)


@triton.jit
def combine(
    address, geometry, hyper, scalars, floats, count, sums, STRIDE: tl.constexpr,
    FUNCTION: tl.constexpr, SOURCES: tl.constexpr, COLUMNS: tl.constexpr, WIDTHS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Turn the sums of a phase into per-tensor values."""
    t, mask = lanes(count, LANES)
    step_at = tl.load(address + t * STRIDE + STEP, mask=mask, other=0)
    step = tl.load(step_at.to(tl.pointer_type(tl.int64)), mask=mask, other=1).to(tl.float64)
    own = own_hyper(t, mask, geometry, hyper, WIDTHS)
    scalar_function(
        t, mask, step, address, geometry, own, scalars, floats, sums, FUNCTION, SOURCES, COLUMNS,
        WIDTHS,
    )  # fmt: skip


@triton.jit
def add_up(partial, sums, geometry, tiles, TERMS: tl.constexpr, ADDED: tl.constexpr):
    """sums[c, t, k] (fp64) = chunk c of tensor t's partial[:, k] (fp32), always in one order.

    tiles: int64 (tensors,), how many each tensor has.
    """
    t = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1)
    c = tl.program_id(2)
    first = tl.load(geometry + t * GEOMETRY + FIRST_TILE)
    at = c * ADDED + tl.arange(0, ADDED)
    part = tl.load(partial + (first + at) * TERMS + k, mask=at < tl.load(tiles + t), other=0.0)
    at_sum = sums + (c * tl.num_programs(0) + t) * TERMS + k
    tl.store(at_sum, tl.sum(part.to(tl.float64), 0))


@triton.jit
def add_chunks(sums, tiles, ADDED: tl.constexpr, AT_ONCE: tl.constexpr):
    """sums[0, t, k] = the sum of tensor t's own chunks, whatever longer ones there are."""
    t = tl.program_id(0).to(tl.int64)
    terms = tl.num_programs(1)
    step = tl.num_programs(0) * terms
    own = sums + t * terms + tl.program_id(1)
    chunks = tl.cdiv(tl.load(tiles + t), ADDED)
    total = tl.zeros((AT_ONCE,), tl.float64)
    for first in range(0, chunks, AT_ONCE):
        c = first + tl.arange(0, AT_ONCE)
        total += tl.load(own + c * step, mask=c < chunks, other=0.0)
    tl.store(own, tl.sum(total, 0))


@triton.jit
def keep(
    address, scalars, count, STRIDE: tl.constexpr, WIDTH: tl.constexpr, KEPT: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Store what lasts, unless the step does not count.

    KEPT are pairs of columns: of `address`, and of `scalars`.
    """
    t, mask = lanes(count, LANES)
    mask &= tl.load(scalars + t * WIDTH + LIVE, mask=mask, other=0.0) != 0.0
    for i in tl.static_range(len(KEPT)):
        number = tl.load(address + t * STRIDE + KEPT[i][0], mask=mask, other=0)
        value = tl.load(scalars + t * WIDTH + KEPT[i][1], mask=mask, other=0.0)
        tl.store(number.to(tl.pointer_type(tl.float64)), value, mask=mask)
