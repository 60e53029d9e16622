"""Instructions that compute something of registers alone: functions of arrays, by opcode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from . import arithmetic as ar
from .arithmetic import Array, dtype_of, flush, is_float, wide
from .parser import UnsupportedError, width


class Operation(NamedTuple):
    """What an opcode computes.

    Attributes:
        function: of an array for each operand.
        inputs: types that the operands are read as.
    """

    function: Callable[..., Array]
    inputs: tuple[str, ...]


_MODES = ("rn", "rz", "rm", "rp")
_ORDERED = ("eq", "ne", "lt", "le", "gt", "ge")
_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
    "hs": np.greater_equal,
}  # fmt: skip
_BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}


def operation(opcode: tuple[str, ...], operands: int = 2) -> Operation:
    """What an opcode computes.

    Args:
        opcode: its parts.
        operands: how many there are; the smallest or largest number may be one of three.

    Raises:
        UnsupportedError: for one that the emulator does not know.
    """
    name, modifiers, kind = opcode[0], opcode[1:-1], opcode[-1]
    if kind.endswith("x2"):  # all ones of a comparison are half for each half
        given = ("u16" if x in ("u32", "s32") else x for x in opcode[:-1])
        return _packed(operation((*given, kind[:-2])), kind)
    if name in ("add", "sub", "fma") and modifiers[1:] == ("f32",) and kind in ("f16", "bf16"):
        return _of_halves(operation(opcode[:-1]), kind)
    make = _MAKERS.get(name)
    found = make(name, modifiers, kind) if make else None
    if found is None:
        raise UnsupportedError(f"the emulator does not know the instruction {'.'.join(opcode)}")
    if name in ("min", "max") and operands == 3:
        of_two = found.function
        return Operation(lambda a, b, c: of_two(of_two(a, b), c), (kind,) * 3)
    return found


def _packed(single: Operation, kind: str) -> Operation:
    """An operation on both halves of registers; a comparison gives a column for each half."""
    halves, whole = [dtype_of(given) for given in single.inputs], dtype_of(kind)

    def function(*operands: Array) -> Array:
        pairs = (
            np.ascontiguousarray(x).view(half).reshape(-1, 2)
            for x, half in zip(operands, halves, strict=True)
        )
        found = np.ascontiguousarray(single.function(*pairs))
        return found if found.dtype == bool else found.view(whole).ravel()

    return Operation(function, (kind,) * len(single.inputs))


def _of_halves(single: Operation, kind: str) -> Operation:
    """An operation on fp32 numbers, of which all but the last are halves."""

    def function(*operands: Array) -> Array:
        *halves, last = operands
        return single.function(*(wide(x, kind) for x in halves), last)

    return Operation(function, (kind,) * (len(single.inputs) - 1) + single.inputs[-1:])


def _taken(modifiers: tuple[str, ...], allowed: tuple[str, ...]) -> bool:
    return set(modifiers) <= set(allowed)


def _flushing(function: Callable[..., Array], kind: str, modifiers: tuple[str, ...]) -> Callable:
    """A function that takes and gives zeros for subnormal numbers of a type, if it is .ftz."""
    if "ftz" not in modifiers or kind not in ("f16", "f32"):
        return function
    dtype = dtype_of(kind)

    def flushed(*operands: Array) -> Array:
        found = function(*(flush(x) if x.dtype == dtype else x for x in operands))
        return flush(found) if found.dtype == dtype else found

    return flushed


def _float_sum(name: str, modifiers: tuple[str, ...], kind: str) -> Operation | None:
    """add, sub and mul: NumPy's where it rounds as they do, else exact ones, rounded."""
    if not _taken(modifiers, (*_MODES, "ftz")):
        return None
    mode = next((m for m in modifiers if m in _MODES), "rn")
    plain = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name]
    if mode == "rn" and kind in ("f32", "f64"):
        return Operation(_flushing(plain, kind, modifiers), (kind, kind))
    if kind == "f64":
        return None

    def exact(a: Array, b: Array) -> Array:
        a, b = wide(a, kind), wide(b, kind)
        if name == "mul":
            return ar.rounded(a.astype(np.float64) * b.astype(np.float64), kind, mode)
        b = -b if name == "sub" else b
        return ar.rounded(ar.fused(a, np.ones_like(a), b, mode), kind, mode)

    return Operation(_flushing(exact, kind, modifiers), (kind, kind))


def _sum(name: str, modifiers: tuple[str, ...], kind: str) -> Operation | None:
    if is_float(kind):
        return _float_sum(name, modifiers, kind)
    if name == "mul":
        return _product(name, modifiers, kind)
    whole = {"add": np.add, "sub": np.subtract}[name]
    return None if modifiers else Operation(whole, (kind, kind))


def _product(name: str, modifiers: tuple[str, ...], kind: str) -> Operation | None:
    """mul and mad of integers."""
    if len(modifiers) != 1 or modifiers[0] not in ("lo", "hi", "wide") or is_float(kind):
        return None
    how, bits, given = modifiers[0], width(kind), kind
    if how == "lo":
        product: Callable[[Array, Array], Array] = np.multiply
    elif how == "hi" and bits == 64:
        product = _high_of_64
    else:
        double = dtype_of(f"{kind[0]}{2 * bits}")
        given = f"{kind[0]}{2 * bits}" if how == "wide" else kind

        def product(a: Array, b: Array) -> Array:
            found = a.astype(double) * b.astype(double)
            return found if how == "wide" else (found >> double(bits)).astype(dtype_of(kind))

    if name == "mul":
        return Operation(product, (kind, kind))
    return Operation(lambda a, b, c: product(a, b) + c, (kind, kind, given))


def _high_of_64(a: Array, b: Array) -> Array:
    pairs = zip(*(x.tolist() for x in np.broadcast_arrays(a, b)), strict=True)
    return np.array([x * y >> 64 for x, y in pairs], a.dtype)


def _dot(name: str, modifiers: tuple[str, ...], kind: str) -> Operation | None:
    """dp2a: the sum of two products, of halves by the lower or upper bytes, and a third number."""
    if modifiers not in (("lo", "s32"), ("hi", "s32")) or kind != "s32":
        return None
    return Operation(partial(ar.dot, upper=modifiers[0] == "hi"), ("b32", "b32", "s32"))


def _fma(name: str, modifiers: tuple[str, ...], kind: str) -> Operation | None:
    mode = modifiers[0] if modifiers else ""
    if mode not in _MODES or not _taken(modifiers[1:], ("ftz",)) or not is_float(kind):
        return None
    if kind == "f64":
        return Operation(ar.fused_double, (kind,) * 3) if mode == "rn" else None

    def once(a: Array, b: Array, c: Array) -> Array:
        return ar.rounded(ar.fused(wide(a, kind), wide(b, kind), wide(c, kind), mode), kind, mode)

    return Operation(_flushing(once, kind, modifiers), (kind,) * 3)


def _divide(name: str, modifiers: tuple[str, ...], kind: str) -> Operation | None:
    if kind in ("f32", "f64") and name == "div":
        if _taken(modifiers, ("rn", "full", "approx", "ftz")):
            return Operation(_flushing(np.divide, kind, modifiers), (kind, kind))
        return None
    which = 0 if name == "div" else 1
    if modifiers or is_float(kind):
        return None
    return Operation(lambda a, b: ar.quotient(*np.broadcast_arrays(a, b))[which], (kind, kind))


def _upper_half(x: Array) -> Array:
    """fp64 without the lower 32 bits, which approximations of fp64 neither read nor give."""
    return (x.view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)


def _of_one(name: str, modifiers: tuple[str, ...], kind: str) -> Operation | None:
    """sqrt, rcp, rsqrt, ex2 and lg2: approximations are the correctly rounded results."""
    function = {
        "sqrt": np.sqrt, "rcp": np.reciprocal, "rsqrt": lambda x: 1.0 / np.sqrt(x),
        "ex2": np.exp2, "lg2": np.log2,
    }[name]  # fmt: skip
    if not _taken(modifiers, ("rn", "approx", "ftz")):
        return None
    if kind == "f64":
        if "approx" not in modifiers:
            return Operation(function, (kind,))
        return Operation(lambda x: _upper_half(function(_upper_half(x))), (kind,))
    if kind != "f32":
        return None

    def single(x: Array) -> Array:
        return function(x.astype(np.float64)).astype(np.float32)

    return Operation(_flushing(single, kind, modifiers), (kind,))


def _sign(name: str, modifiers: tuple[str, ...], kind: str) -> Operation | None:
    """abs, neg and copysign; of floats they change one bit."""
    if not is_float(kind):
        whole = {"abs": np.abs, "neg": np.negative}.get(name)
        return Operation(whole, (kind,)) if whole and not modifiers else None
    bits = width(kind)
    unsigned = ar.UNSIGNED[bits]
    sign, rest = unsigned(1 << (bits - 1)), unsigned((1 << (bits - 1)) - 1)
    if name == "copysign":  # the sign of the first, the magnitude of the second
        return Operation(lambda a, b: (a & sign) | (b & rest), (f"b{bits}",) * 2)
    if not _taken(modifiers, ("ftz",)):
        return None
    changed = (lambda x: x & rest) if name == "abs" else (lambda x: x ^ sign)
    if modifiers and kind in ("f16", "f32"):
        return Operation(lambda x: flush(changed(x).view(dtype_of(kind))), (f"b{bits}",))
    return Operation(changed, (f"b{bits}",))


def _extremum(name: str, modifiers: tuple[str, ...], kind: str) -> Operation | None:
    largest = name == "max"
    if not is_float(kind):
        whole = np.maximum if largest else np.minimum
        return None if modifiers else Operation(whole, (kind, kind))
    if not _taken(modifiers, ("NaN", "ftz")):
        return None
    chosen = partial(ar.extremum, kind=kind, largest=largest, nan="NaN" in modifiers)
    return Operation(_flushing(chosen, kind, modifiers), (kind, kind))


def _compared(how: str, kind: str, modifiers: tuple[str, ...]) -> Callable[..., Array] | None:
    """Comparisons; with a u after the name they hold where an operand is NaN."""
    if not is_float(kind):
        return _COMPARISONS.get(how)
    unordered = len(how) == 3 and how[2] == "u"
    base = _COMPARISONS.get(how[:2] if unordered else how)
    if how not in ("num", "nan") and how[:2] not in _ORDERED:
        return None

    def compare(a: Array, b: Array) -> Array:
        a, b = wide(a, kind), wide(b, kind)
        nan = np.isnan(a) | np.isnan(b)
        if base is None:
            return nan if how == "nan" else ~nan
        return (base(a, b) | nan) if unordered else (base(a, b) & ~nan)

    return _flushing(compare, kind, modifiers)


def _setp(name: str, modifiers: tuple[str, ...], kind: str) -> Operation | None:
    compare = _compared(modifiers[0], kind, modifiers) if modifiers else None
    if compare is None or not _taken(modifiers[1:], ("ftz",)):
        return None
    return Operation(compare, (kind, kind))


def _set(name: str, modifiers: tuple[str, ...], kind: str) -> Operation | None:
    """1.0 or 0, or all ones or none, where a comparison holds."""
    how, *flags, given = modifiers
    compare = _compared(how, kind, tuple(flags))
    if compare is None or not _taken(tuple(flags), ("ftz",)):
        return None
    if given not in ("f32", "u16", "u32", "s32"):
        return None
    true = np.float32(1.0) if given == "f32" else ~ar.UNSIGNED[width(given)](0)
    return Operation(lambda a, b: np.where(compare(a, b), true, true.dtype.type(0)), (kind, kind))


def _logic(name: str, modifiers: tuple[str, ...], kind: str) -> Operation | None:
    if modifiers:
        return None
    return Operation(_BITWISE[name], (kind, kind) if name != "not" else (kind,))


def _bits(name: str, modifiers: tuple[str, ...], kind: str) -> Operation | None:
    """Shifts, fields, bytes and look-ups of bits."""
    words = ("b32",) * 3
    if name in ("shl", "shr") and not modifiers:
        return Operation(partial(ar.shifted, left=name == "shl"), (kind, "u32"))
    if name == "shf" and kind == "b32":
        left, wrap = modifiers[0] == "l", modifiers[1] == "wrap"
        return Operation(partial(ar.funnel, left=left, wrap=wrap), (*words[:2], "u32"))
    if name == "bfe" and kind[0] in "us" and not modifiers:
        return Operation(ar.field, (kind, "u32", "u32"))
    if name == "prmt" and kind == "b32" and not modifiers:
        return Operation(ar.permuted, words)
    if name == "lop3" and kind == "b32" and not modifiers:
        return Operation(ar.lookup3, (*words, "b32"))
    if name == "bfi" and kind in ("b32", "b64") and not modifiers:
        return Operation(_inserted, (kind, kind, "u32", "u32"))
    return None


def _inserted(a: Array, b: Array, start: Array, length: Array) -> Array:
    ones = np.ones(np.broadcast_shapes(a.shape, b.shape), a.dtype)
    start, length = start & 255, length & 255
    mask = ar.shifted(ar.shifted(ones, length, True) - a.dtype.type(1), start, True)
    return (b & ~mask) | (ar.shifted(a, start, True) & mask)


def _select(name: str, modifiers: tuple[str, ...], kind: str) -> Operation | None:
    bits = f"b{width(kind)}"
    return None if modifiers else Operation(lambda a, b, p: np.where(p, a, b), (bits, bits, "pred"))


def _move(name: str, modifiers: tuple[str, ...], kind: str) -> Operation | None:
    """mov, and cvta, which changes nothing: a generic address is that of the space."""
    spaces = ("to", "global", "shared", "local") if name == "cvta" else ()
    return Operation(np.copy, (kind,)) if _taken(modifiers, spaces) else None


def _convert(name: str, modifiers: tuple[str, ...], kind: str) -> Operation | None:
    """cvt: what comes before the types is how to round, or that two numbers are packed."""
    if modifiers[:2] == ("pack", "sat") and (*modifiers[3:], kind) == ("s32", "b32"):
        return Operation(partial(ar.packed, kind=modifiers[2]), ("s32", "s32", "b32"))
    *how, given = modifiers
    mode = next((m for m in how if m in _MODES), "rn")
    whole = next((m for m in how if m in ar.TO_WHOLE), None)
    if not _taken(tuple(how), (*_MODES, *ar.TO_WHOLE, "ftz")):
        return None
    if given in ("f16x2", "bf16x2") and kind == "f32":
        return Operation(partial(_pair, kind=given[:-2], mode=mode), ("f32", "f32"))
    to_float, of_float = is_float(given), is_float(kind)
    if to_float and of_float:
        return Operation(_flushing(_between(given, kind, mode, whole), "f32", tuple(how)), (kind,))
    if of_float:
        if whole is None:
            return None
        function = _flushing(partial(ar.to_integer, kind=given, how=whole), "f32", tuple(how))
        return Operation(lambda x: function(wide(x, kind)), (kind,))
    if to_float:
        if mode != "rn" or given in ("bf16", "f16"):
            return None
        return Operation(lambda x: x.astype(dtype_of(given)), (kind,))
    return None if how else Operation(lambda x: x.astype(dtype_of(given)), (kind,))


def _between(given: str, kind: str, mode: str, whole: str | None) -> Callable[[Array], Array]:
    """Conversion of one float type to another, perhaps to whole numbers."""

    def convert(x: Array) -> Array:
        x = wide(x, kind)
        if whole:
            x = ar.TO_WHOLE[whole](x)
        return ar.rounded(x.astype(np.float64), given, mode)

    return convert


def _pair(high: Array, low: Array, kind: str, mode: str) -> Array:
    """Two fp32 numbers as halves of a word, the first in the upper one."""
    bits = [
        ar.rounded(x.astype(np.float64), kind, mode).view(np.uint16).astype(np.uint32)
        for x in (high, low)
    ]
    return bits[0] << np.uint32(16) | bits[1]


_MAKERS: dict[str, Callable[[str, tuple[str, ...], str], Operation | None]] = {
    **dict.fromkeys(("add", "sub", "mul"), _sum),
    **dict.fromkeys(("div", "rem"), _divide),
    **dict.fromkeys(("sqrt", "rcp", "rsqrt", "ex2", "lg2"), _of_one),
    **dict.fromkeys(("abs", "neg", "copysign"), _sign),
    **dict.fromkeys(("min", "max"), _extremum),
    **dict.fromkeys(("and", "or", "xor", "not"), _logic),
    **dict.fromkeys(("shl", "shr", "shf", "bfe", "bfi", "prmt", "lop3"), _bits),
    "mad": _product,
    "dp2a": _dot,
    "fma": _fma,
    "setp": _setp,
    "set": _set,
    "selp": _select,
    **dict.fromkeys(("mov", "cvta"), _move),
    "cvt": _convert,
}
