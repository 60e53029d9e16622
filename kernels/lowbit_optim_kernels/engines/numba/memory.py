"""Memory by address for the Numba engine: vectors in three dtypes, single numbers, blocks."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .inner import inner
from .vector import X86, F, call, f32, f64, fill, i8, i16, i32, i64, like, of_one, pointer, vector


def _loader(element: ir.Type, widen: Callable) -> Callable:
    """16 consecutive numbers of a dtype as a vector; no alignment is assumed beyond the dtype's."""

    @of_one(types.int64, F)
    def load(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
        at = pointer(b, address, vector(element))
        return widen(b, b.load(at, align=4 if element is f32 else 2))

    return load


def _storer(element: ir.Type, narrow: Callable) -> Callable:
    @intrinsic
    def store(typing, address, x):
        def emit(context, b, signature_, args):
            at = pointer(b, args[0], vector(element))
            b.store(narrow(b, args[1]), at, align=4 if element is f32 else 2)
            return context.get_dummy_value()

        return types.void(types.int64, F), emit

    return store


def _from_bf16(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return b.bitcast(b.shl(b.zext(x, vector(i32)), fill(i32, 16)), vector(f32))


def rounded_bits(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Bits of fp32 whose upper half is the nearest bf16 number, ties to even; not of NaN."""
    odd = b.and_(b.lshr(bits, like(bits, 16)), like(bits, 1))
    return b.add(b.add(bits, like(bits, 0x7FFF)), odd)


def _to_bf16(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """NaN stays NaN. (The machine's own instruction flushes subnormals.)"""
    is_nan = b.fcmp_unordered("uno", x, x)
    rounded = rounded_bits(b, b.bitcast(x, vector(i32)))
    rounded = b.select(is_nan, fill(i32, 0x7FC00000), rounded)
    return b.trunc(b.lshr(rounded, fill(i32, 16)), vector(i16))


_half = ir.HalfType()
load_f32 = _loader(f32, lambda b, x: x)
load_bf16 = _loader(i16, _from_bf16)
load_f16 = _loader(_half, lambda b, x: b.fpext(x, vector(f32)))
store_f32 = _storer(f32, lambda b, x: x)
store_bf16 = _storer(i16, _to_bf16)
store_f16 = _storer(_half, lambda b, x: b.fptrunc(x, vector(_half)))


def _reader(number: types.Type, element: ir.Type) -> Callable:
    """One number at an address."""
    return of_one(types.int64, number)(lambda b, at: b.load(pointer(b, at, element)))


def _writer(number: types.Type, element: ir.Type) -> Callable:
    @intrinsic
    def write(typing, address, x):
        def emit(context, b, signature_, args):
            b.store(args[1], pointer(b, args[0], element))
            return context.get_dummy_value()

        return types.void(types.int64, number), emit

    return write


read_i64, write_i64 = (make(types.int64, i64) for make in (_reader, _writer))
read_f32, write_f32 = (make(types.float32, f32) for make in (_reader, _writer))
read_f64, write_f64 = (make(types.float64, f64) for make in (_reader, _writer))
read_byte = of_one(types.int64)(lambda b, at: b.zext(b.load(pointer(b, at, i8)), i64))
write_byte = _writer(types.uint8, i8)


@of_one(types.int64)
def take(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """The int64 number at an address, which is then one more; atomic."""
    return b.atomic_rmw("add", pointer(b, address, i64), ir.Constant(i64, 1), "monotonic")


@intrinsic
def publish(typing, address, bits):
    """Set bits of the int64 number at an address; who has `seen` them sees all that was before."""

    def emit(context, b, signature_, args):
        b.atomic_rmw("or", pointer(b, args[0], i64), args[1], "release")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@of_one(types.int64)
def seen(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """The int64 number at an address, which other threads may write."""
    return b.load_atomic(pointer(b, address, i64), "acquire", 8)


@of_one(types.int64)
def number_of(b: ir.IRBuilder, function: ir.Value) -> ir.Value:
    """The result of the C function `int function(void)` at an address."""
    return b.sext(b.call(pointer(b, function, ir.FunctionType(i32, [])), []), i64)


@intrinsic
def call_with(typing, function, word):
    """Call the C function `void function(int64)` at an address."""

    def emit(context, b, signature_, args):
        b.call(pointer(b, args[0], ir.FunctionType(ir.VoidType(), [i64])), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def pause(typing):
    """Tell the core that it is in a loop that waits, if it has an instruction for that."""

    def emit(context, b, signature_, args):
        if X86:
            call(b, "llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), emit


def _cell(b: ir.IRBuilder, table: list, element: ir.Type) -> ir.Value:
    """The address of a cell in a table of 8-byte numbers, by its number of columns."""
    address, row, columns, column = table
    place = b.add(b.mul(row, columns), column)
    return pointer(b, b.add(address, b.shl(place, ir.Constant(i64, 3))), element)


def _cell_reader(number: types.Type, element: ir.Type) -> Callable:
    @intrinsic
    def cell(typing, table, row, columns, column):
        returns = number(types.int64, types.int64, types.int64, types.int64)
        return returns, lambda c, b, s, a: b.load(_cell(b, a, element))

    return cell


cell_i64, cell_f64 = _cell_reader(types.int64, i64), _cell_reader(types.float64, f64)


@intrinsic
def set_cell_f64(typing, table, row, columns, column, x):
    """Store a number of the fp64 table at an address."""

    def emit(context, b, signature_, args):
        b.store(args[4], _cell(b, args[:4], f64))
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(int64, int64, int64, int64, types.float64), emit


@intrinsic(prefer_literal=True)
def stack(typing, size):
    """Address of `size` bytes (a literal) of the caller's stack, aligned to 64."""
    count = size.literal_value

    def emit(context, b, signature_, args):
        with b.goto_entry_block():
            memory = b.alloca(ir.ArrayType(i8, count))
            memory.align = 64
        return b.ptrtoint(memory, i64)

    return types.int64(size), emit


@intrinsic
def move(typing, target, source, size):
    """Copy `size` bytes between places that do not overlap."""

    def emit(context, b, signature_, args):
        target_at, source_at = pointer(b, args[0], i8), pointer(b, args[1], i8)
        cgutils.raw_memcpy(b, target_at, source_at, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@inner
def enter(home, spare, size, n, width, pad):
    """Address of a block's operand: its home, or a copy in `spare` filled up from size to n.

    An element has `width` bytes; those of the pad are an integer, the first its lowest.
    """
    if size == n:
        return home
    for i in range(size * width, n * width):
        write_byte(spare + i, pad >> (8 * (i % width)))
    move(spare, home, size * width)
    return spare


@inner
def leave(home, at, size, width):
    """Copy a block's operand back to its home if it was elsewhere."""
    if at != home:
        move(home, at, size * width)
