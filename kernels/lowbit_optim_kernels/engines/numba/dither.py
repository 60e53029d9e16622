"""Random bits of `dither` for the Numba engine: a hash for each block, an addition for each lane.

Blocks are hashed 16 at a time into memory, from where a block's bits are spread over a vector.

Single numbers are int64 here, of which the low 32 bits count; vectors of bits are those of `F`.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...batch import WEIGHT_BLOCK
from ...dither import ROUNDS, SPACE, TIME
from .inner import inlined
from .vector import (
    LANES,
    F,
    constant,
    f32,
    fill,
    i32,
    i64,
    like,
    of_one,
    of_two,
    pointer,
    spread,
    vector,
)

_LANES = [lane * SPACE % 2**32 for lane in range(LANES)]


def mix(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The hash of a number, or of each lane."""
    for shift, factor in ROUNDS:
        x = b.mul(b.xor(x, b.lshr(x, like(x, shift))), like(x, factor))
    return b.xor(x, b.lshr(x, like(x, 16)))


@of_two(types.int64)
def stream_key(b: ir.IRBuilder, tensor_key: ir.Value, stream: ir.Value) -> ir.Value:
    """The key of one stream of a parameter."""
    return b.zext(mix(b, b.trunc(b.add(tensor_key, stream), i32)), i64)


@intrinsic
def block_bits(typing, key, step, block):
    """Bits of a block's first lane, by its number in the whole parameter."""

    def emit(context, b, signature_, args):
        key, step = (b.trunc(x, i32) for x in args[:2])
        low, high = b.trunc(args[2], i32), b.trunc(b.lshr(args[2], ir.Constant(i64, 32)), i32)
        base = b.add(mix(b, b.xor(low, key)), mix(b, b.add(high, key)))
        return b.zext(b.add(base, b.mul(step, ir.Constant(i32, TIME))), i64)

    return types.int64(types.int64, types.int64, types.int64), emit


@intrinsic
def hash_blocks(typing, hashes, key, step, block):
    """Store the `block_bits` of 16 blocks from `block` on: uint32, at an address aligned to 64."""

    def emit(context, b, signature_, args):
        block = args[3]
        key, step, first = (b.trunc(x, i32) for x in args[1:])
        key, first = spread(b, key), spread(b, first)
        low = b.add(first, constant(i32, range(LANES)))
        high = spread(b, b.trunc(b.lshr(block, ir.Constant(i64, 32)), i32))
        high = b.sub(high, b.sext(b.icmp_unsigned("<", low, first), vector(i32)))
        bits = b.add(mix(b, b.xor(low, key)), mix(b, b.add(high, key)))
        bits = b.add(bits, spread(b, b.mul(step, ir.Constant(i32, TIME))))
        b.store(bits, pointer(b, args[0], vector(i32)), align=64)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), emit


@of_two(types.int64)
def hashed(b: ir.IRBuilder, hashes: ir.Value, k: ir.Value) -> ir.Value:
    """The `block_bits` of a run's block k, where `hash_blocks` was given every sixteenth."""
    place = b.shl(b.and_(k, ir.Constant(i64, LANES - 1)), ir.Constant(i64, 2))
    return b.zext(b.load(pointer(b, b.add(hashes, place), i32)), i64)


@inlined
def next_hashed(hashes, key, step, first, k):
    """The `block_bits` of block k of a run that begins at `first`, of which each is asked once."""
    if k % LANES == 0:
        hash_blocks(hashes, key, step, first + k)
    return hashed(hashes, k)


def _bits(b: ir.IRBuilder, base: ir.Value, lane: ir.Value) -> ir.Value:
    # The lane is mostly known, so that one addition of a constant vector is left.
    first = spread(b, b.mul(b.trunc(lane, i32), ir.Constant(i32, SPACE)))
    return b.add(spread(b, b.trunc(base, i32)), b.add(first, constant(i32, _LANES)))


@intrinsic
def random_bits(typing, base, lane):
    """The bits of 16 lanes, of which `lane` is the first; `base` is the block's `block_bits`."""

    def emit(context, b, signature_, args):
        return b.bitcast(_bits(b, *args), vector(f32))

    return F(types.int64, types.int64), emit


@intrinsic
def random_bits_of_two(typing, base, following, lane):
    """`random_bits` of a block of WEIGHT_BLOCK, and from its end on of the following one."""

    def emit(context, b, signature_, args):
        base, following, lane = args
        left = b.sub(ir.Constant(i64, WEIGHT_BLOCK), lane)
        within = b.icmp_signed("<", constant(i32, range(LANES)), spread(b, b.trunc(left, i32)))
        bits = b.select(within, _bits(b, base, lane), _bits(b, following, b.neg(left)))
        return b.bitcast(bits, vector(f32))

    return F(types.int64, types.int64, types.int64), emit


@of_one(types.int64, F)
def first_bits(b: ir.IRBuilder, base: ir.Value) -> ir.Value:
    """The bits of the first 16 lanes of a block."""
    return b.bitcast(_bits(b, base, ir.Constant(i64, 0)), vector(f32))


@of_one(F)
def next_bits(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """The bits of the 16 lanes after those of `bits`."""
    step = fill(i32, LANES * SPACE % 2**32)
    return b.bitcast(b.add(b.bitcast(bits, vector(i32)), step), vector(f32))


@of_one(F)
def fractions(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Bits as numbers in [0, 1)."""
    upper = b.sitofp(b.lshr(b.bitcast(bits, vector(i32)), fill(i32, 8)), vector(f32))
    return b.fmul(upper, fill(f32, 2.0**-24), flags=("contract",))
