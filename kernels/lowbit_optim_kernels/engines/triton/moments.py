"""Reading and writing of a tile's moments, whatever their formats, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from .kinds import WARPS, KindConstants
from .primitives import PER_THREAD, STREAM, abs, finite
from .random import dithered_scale
from .tiles import ALIGNED, WARP, block_bits, joined, load, moment_bits, operand, pointer, store

# Of a kind.
(
    P_TYPE, G_TYPE, FORMAT, WHOLE, ALIGN, PIECE, FAR, SPLIT, EXTRA, DITHERED, LOW_TYPE, RUN,
    BARE_RUN, ROOM, BLOCKS, SHIFTED, ONCE, SPANNED, AHEAD,
) = (tl.constexpr(i) for i in range(len(KindConstants._fields)))  # fmt: skip
BLOCK, UNITS, ORDER, INEXACT = (tl.constexpr(i) for i in range(4))  # of a format
# Of a unit, of each of its tensors, and of its format's functions.
CODEC, MOMENTS, EXACT, INDEX, ELEMENTS, PER_BLOCK, TABLE = (tl.constexpr(i) for i in range(7))
COLUMN, TYPE, PAD, BY_STREAM = (tl.constexpr(i) for i in range(4))
DECODE, SCALES, ENCODE = (tl.constexpr(i) for i in range(3))


@triton.jit
def pick(values, INDICES: tl.constexpr):
    """The values of these indices, as a tuple."""
    out = ()
    for i in tl.static_range(len(INDICES)):
        out = out + (values[INDICES[i]],)
    return out


@triton.jit
def unit_pointers(row_at, UNIT: tl.constexpr, ALIGN: tl.constexpr):
    """Where the tensors of a unit are, of those with a number an element and with one a block."""
    elements, per_block = (), ()
    for k in tl.static_range(len(UNIT[ELEMENTS])):
        elements = elements + (
            pointer(row_at, UNIT[ELEMENTS][k][COLUMN], UNIT[ELEMENTS][k][TYPE], ALIGN),
        )
    for k in tl.static_range(len(UNIT[PER_BLOCK])):
        per_block = per_block + (
            pointer(row_at, UNIT[PER_BLOCK][k][COLUMN], UNIT[PER_BLOCK][k][TYPE], 1),
        )
    return elements, per_block


@triton.jit
def read_unit(of_unit, base, at, block, inside, mask, UNIT: tl.constexpr, KINDS: tl.constexpr,
              KIND: tl.constexpr, READ_ONCE: tl.constexpr):  # fmt: skip
    """What is stored of a unit, per element and per block, and the addresses of both."""
    elements, scales, element_at, scale_at = (), (), (), ()
    for k in tl.static_range(len(UNIT[ELEMENTS])):
        here = operand(of_unit[0][k], base, at, KINDS[KIND][ALIGN], KINDS[KIND][RUN])
        element_at = element_at + (here,)
        elements = elements + (
            load(here, mask, UNIT[ELEMENTS][k][PAD], KINDS[KIND][WHOLE], READ_ONCE),
        )
    for k in tl.static_range(len(UNIT[PER_BLOCK])):
        here = of_unit[1][k] + block
        scale_at = scale_at + (here,)
        scales = scales + (load(here, inside, UNIT[PER_BLOCK][k][PAD], KINDS[KIND][WHOLE]),)
    return elements, scales, element_at, scale_at


@triton.jit
def decoded(stored, tables, UNITS: tl.constexpr, PTX: tl.constexpr):
    """The moments of all units, of which elements and scales are stored.

    Look-ups wait at barriers, which loads are not moved across: all are made before the first.
    """
    out = ()
    for i in tl.static_range(len(UNITS)):
        at = tables + UNITS[i][TABLE]
        out = out + UNITS[i][CODEC][DECODE](*stored[i], at, UNITS[i][MOMENTS], PTX)
    return out


@triton.jit
def all_finite(moments):
    """A mask: all moments of an element are finite.

    One test serves all of them: their sum overflows only next to where one does.
    """
    magnitude = abs(moments[0])
    for k in tl.static_range(1, len(moments)):
        magnitude += abs(moments[k])
    return finite(magnitude)


def _only_finite(moments: int) -> str:
    """PTX that makes all moments of an element 0 where one is not finite, of PER_THREAD elements.

    A sum of products of two moments is finite only if all of them are. So one test serves all
    elements; they are looked at one by one behind a branch that is rarely taken.
    """
    n = PER_THREAD.value
    test = "abs.f32 t, t; setp.lt.f32 q, t, 0f7F800000; "
    text, each = "{ .reg .pred q; .reg .f32 t; mov.f32 t, 0f00000000; ", ""
    for i in range(n):
        x = [f"${k * n + i}" for k in range(moments)]
        pairs = zip(x[::2], [*x[1::2], "0f00000000"], strict=False)
        text += "".join(f"mov.f32 {y}, ${(moments + k) * n + i}; " for k, y in enumerate(x))
        text += "".join(f"fma.rn.f32 t, {y}, {z}, t; " for y, z in pairs)
        each += f"mul.f32 t, {x[0]}, 0f00000000; "
        each += "".join(f"fma.rn.f32 t, {y}, 0f00000000, t; " for y in x[1:]) + test
        each += "".join(f"@!q mov.f32 {y}, 0f00000000; " for y in x)
    return f"{text}{test}@q bra good; {each}good: }}"


THREADS = tl.constexpr(WARPS * WARP.value)  # of a program
OF_ONE, OF_TWO = (tl.constexpr(_only_finite(k)) for k in (1, 2))
ONE, TWO = (
    tl.constexpr(",".join(["=&f"] * k * PER_THREAD.value + ["f"] * k * PER_THREAD.value))
    for k in (1, 2)
)


@triton.jit
def or_zero(moments, mask, WHOLE: tl.constexpr, PTX: tl.constexpr):
    """Moments, or 0 in all of them where one is not finite: that element starts again.

    And 0 outside of the tensor. There they are not always what a code of zero is decoded to: before
    Triton 3.9 a byte from 128 on that is put in place of what is not loaded has its sign extended
    over those that are loaded with it. (Three moments of PER_THREAD elements would take a third
    more registers at the branch.)
    """
    N: tl.constexpr = len(moments)
    PACKED: tl.constexpr = moments[0].shape[0] * moments[0].shape[1] == PER_THREAD * THREADS
    if PTX and WHOLE and PACKED and N <= 2:
        return tl.inline_asm_elementwise(
            OF_ONE if N == 1 else OF_TWO, ONE if N == 1 else TWO, moments,
            dtype=(tl.float32,) * N, is_pure=True, pack=PER_THREAD,
        )  # fmt: skip
    ok, out = all_finite(moments), ()
    if not WHOLE:
        ok &= joined(mask)
    for k in tl.static_range(N):
        out = out + (tl.where(ok, moments[k], 0.0),)
    return out


@triton.jit
def replaced(moments, INDICES: tl.constexpr, new):
    """Moments with those of these indices replaced by new ones."""
    out = ()
    for k in tl.static_range(len(moments)):
        moment = moments[k]
        for i in tl.static_range(len(INDICES)):
            if INDICES[i] == k:
                moment = new[i]
        out = out + (moment,)
    return out


@triton.jit
def bits_of(moments, of_streams, t, block, geometry, MOMENTS: tl.constexpr, ROOM: tl.constexpr,
            FAR: tl.constexpr):  # fmt: skip
    """A tile of random bits for each moment that is dithered; anything for the others."""
    out = ()
    for k in tl.static_range(len(MOMENTS)):
        if MOMENTS[k][STREAM] > 0:  # the stream before all of the moments' is the weights'
            of_stream = of_streams + 2 * MOMENTS[k][STREAM]
            out = out + (moment_bits(of_stream, t, block, geometry, ROOM, FAR),)
        else:
            out = out + (moments[k],)
    return out


@triton.jit
def rounded_scale(scale, of_streams, t, block, geometry, BY_STREAM: tl.constexpr,
                  FAR: tl.constexpr):  # fmt: skip
    """Scales of blocks as they are stored: BY_STREAM, the bits of that stream round them."""
    if BY_STREAM > 0:
        bits = block_bits(of_streams + 2 * BY_STREAM, t, block, geometry, FAR)
        return dithered_scale(scale, bits)
    else:
        return scale


STORE_32, STORE_16 = (  # (assembly has to give something)
    tl.constexpr(f"bar.warp.sync 0xffffffff; st.global.b{width} [$1], $2; mov.b32 $0, 0;")
    for width in (32, 16)
)


@triton.jit
def store_scales(at, x, inside, IN_PLACE: tl.constexpr, WHOLE: tl.constexpr):
    """Store a number of each block, IN_PLACE from all threads that have it: a warp's, with PTX.

    They do so when all of them have read the one before. Else Triton passes numbers to other
    threads, by shared memory and two barriers.
    """
    WIDTH: tl.constexpr = at.dtype.element_ty.primitive_bitwidth
    if IN_PLACE and (WIDTH == 32 or WIDTH == 16):
        tl.inline_asm_elementwise(
            STORE_32 if WIDTH == 32 else STORE_16, "=r,l,r" if WIDTH == 32 else "=r,l,h",
            [at.to(tl.uint64), x.to(at.dtype.element_ty)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        store(at, x, inside, WHOLE)


@triton.jit
def write_moments(
    moments, element_at, scale_at, tables, inside, mask, of_streams, t, block, geometry,
    FORMAT: tl.constexpr, KINDS: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Store new moments, given in the rule's order.

    All scales come before any code, or predicates live long and are spilled into registers.
    """
    if len(FORMAT[INEXACT]) > 0:
        inexact = or_zero(pick(moments, FORMAT[INEXACT]), mask, KINDS[KIND][WHOLE], PTX)
        moments = replaced(moments, FORMAT[INEXACT], inexact)
    RUN_HERE: tl.constexpr = KINDS[KIND][RUN]
    # No thread has an element of another one, and a warp has all of a block. (Of blocks that are
    # dealt a thread may have several, whose addresses would take registers.)
    IN_PLACE: tl.constexpr = (
        PTX and KINDS[KIND][WHOLE] and KINDS[KIND][ALIGN] == ALIGNED
        and FORMAT[BLOCK] <= WARP * RUN_HERE
        and KINDS[KIND][PIECE] * FORMAT[BLOCK] >= THREADS * RUN_HERE
    )  # fmt: skip
    WRITTEN_ONCE: tl.constexpr = KINDS[KIND][ONCE] if PTX else False
    kept, tops = (), ()
    for i in tl.static_range(len(FORMAT[UNITS])):
        values, scales = pick(moments, FORMAT[UNITS][i][INDEX]), ()
        if len(FORMAT[UNITS][i][PER_BLOCK]) > 0:
            scales = FORMAT[UNITS][i][CODEC][SCALES](
                values, FORMAT[UNITS][i][MOMENTS], KINDS[KIND][ALIGN], PTX
            )
        for k in tl.static_range(len(FORMAT[UNITS][i][PER_BLOCK])):
            scale = rounded_scale(
                scales[k], of_streams, t, block, geometry,
                FORMAT[UNITS][i][PER_BLOCK][k][BY_STREAM], KINDS[KIND][FAR],
            )  # fmt: skip
            store_scales(scale_at[i][k], scale, inside, IN_PLACE, KINDS[KIND][WHOLE])
        kept, tops = kept + (values,), tops + (scales,)
    for i in tl.static_range(len(FORMAT[UNITS])):
        random = bits_of(
            kept[i], of_streams, t, block, geometry, FORMAT[UNITS][i][MOMENTS],
            KINDS[KIND][ROOM], KINDS[KIND][FAR],
        )  # fmt: skip
        for k in tl.static_range(len(FORMAT[UNITS][i][ELEMENTS]) - 1, -1, -1):
            coded = FORMAT[UNITS][i][CODEC][ENCODE](
                kept[i], tops[i], random, tables + FORMAT[UNITS][i][TABLE], k,
                FORMAT[UNITS][i][MOMENTS], PTX,
            )  # fmt: skip
            store(element_at[i][k], coded, mask, KINDS[KIND][WHOLE], WRITTEN_ONCE)
