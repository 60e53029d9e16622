"""The bare names of rule functions, for Triton. They must be jit functions: the interpreter patches
the attributes of `tl` only, so a bare `tl.sqrt` in a generated module would stay unpatched.

The functions `ptx_...` take one machine instruction of an NVIDIA GPU where Triton's own take
several: they return a result within 2 ulp, and treat subnormal numbers as zero. They do so for fp32
elements only: what is computed once per tensor, in fp64, is exact everywhere.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import core

from ...rules import HISTORY, RATIO, SIGN, SQUARE
from ...rules import SIGNED as SIGNED_ROLE

HISTORY = tl.constexpr(HISTORY)
# What a format's functions are told of each moment: whether it has a sign, its role, where among
# the moments the square is that a ratio is divided by, whether it outlasts that, and whether it is
# dithered (0 if not).
SIGNED, ROLE, PARTNER, OUTLASTS, STREAM = (tl.constexpr(i) for i in range(5))
ROLES = (SIGNED_ROLE, SIGN, SQUARE, RATIO)  # a role is its number here
PER_THREAD = tl.constexpr(16)  # elements of a thread in a whole tile, of which one test can be made


@triton.jit
def where(condition, a, b):
    return tl.where(condition, a, b)


# Triton's interpreter cuts off the low bits on the way to bf16 where machines round to nearest.
INTERPRETED = tl.constexpr(not isinstance(where, triton.JITFunction))


# Integers that may wrap around. Triton's own operators assert that none does, with TRITON_DEBUG=1.
# (`tl` has but one of the functions before 3.6.)


@triton.jit
def plus(a, b):
    return core.add(a, b, sanitize_overflow=False)


@triton.jit
def minus(a, b):
    return core.sub(a, b, sanitize_overflow=False)


@triton.jit
def times(a, b):
    return core.mul(a, b, sanitize_overflow=False)


@triton.jit
def narrow(x, TYPE: tl.constexpr):
    """fp32 to the dtype TYPE, rounding to nearest even."""
    if INTERPRETED and tl.bfloat16 == TYPE:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = plus(bits, 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(TYPE)


@triton.jit
def widen(x, PTX: tl.constexpr):
    """Any float to fp32. For bf16 the compiler alone takes 1.5 instructions an element."""
    if PTX and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    if INTERPRETED and x.dtype == tl.bfloat16:  # whose subnormal numbers the interpreter gets wrong
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def sqrt(x):
    return tl.sqrt(x)


@triton.jit
def ptx_sqrt(x):
    if x.dtype == tl.float32:
        return tl.inline_asm_elementwise(
            "sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.sqrt(x)


@triton.jit
def divide(a, b):
    return a / b


@triton.jit
def ptx_reciprocal(x):
    """1 / x of fp32 within 1 ulp; 0 for x > 2**126."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def ptx_divide(a, b):
    if b.dtype == tl.float32:
        return a * ptx_reciprocal(b)
    return a / b


@triton.jit
def fused(a, b, c):
    """A * b + c, rounded once."""
    return tl.fma(a, b, c)


@triton.jit
def negative(x):
    """-x, which Triton would take for 0 - x."""
    return x * -1.0


@triton.jit
def abs(x):
    return tl.abs(x)


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sign(x):
    """1, -1, or 0 for zero and NaN; of fp32 by its sign bit, which takes an instruction less."""
    if x.dtype == tl.float32:
        bits = (x.to(tl.int32, bitcast=True) & -0x80000000) | 0x3F800000
        return tl.where(tl.abs(x) > 0.0, bits.to(tl.float32, bitcast=True), 0.0)
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


@triton.jit
def positive(x, PTX: tl.constexpr):
    """1 where x > 0, else 0."""
    if PTX:
        return tl.inline_asm_elementwise(
            "set.gt.f32.f32 $0, $1, 0f00000000;", "=f,f", [x], dtype=tl.float32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        return tl.where(x > 0.0, 1.0, 0.0)


@triton.jit
def log(x):
    return tl.log(x)


@triton.jit
def exp(x):
    return tl.exp(x)


@triton.jit
def power(x, y):
    return tl.where(y == 0.0, 1.0, tl.exp(y * tl.log(x)))


@triton.jit
def total(x):
    """Sum of a tile."""
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def finite(x):
    """True where x is neither NaN nor infinite."""
    return tl.abs(x) < float("inf")


@triton.jit
def only_finite(x):
    """x, or 0 where it is NaN or infinite."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def single(x):
    return x.to(tl.float32).to(tl.float64)


@triton.jit
def recorded(history, step, x, rank, live):
    """See `rules.Lasting`, for a tensor at a time: all arguments are of shape (1,)."""
    lane = tl.arange(0, 128)
    used = lane < HISTORY
    at = history.to(tl.pointer_type(tl.float32)) + lane
    seen = tl.load(at, mask=used, other=float("inf"))
    # A fresh history is filled throughout. (Its first number is read out of `seen`: another warp
    # may have stored there by the time that this one would load it.)
    one_place = tl.where(tl.sum(tl.where(lane == 0, seen, 0.0), 0) < 0.0, 0, 1)
    good = tl.where((live != 0.0) & (tl.abs(x) < float("inf")), 1, 0)  # 0 for NaN too
    good = tl.where(x > 0.0, good, good * one_place)
    place = (step.to(tl.int64) % HISTORY).to(tl.int32)
    here = used & ((lane - place) * one_place == 0) & (lane * 0 + good == 1)
    seen = tl.where(here, x.to(tl.float32), seen)
    tl.store(at, seen, mask=here)
    before = (seen[None, :] < seen[:, None]) | (
        (seen[None, :] == seen[:, None]) & (lane[None, :] < lane[:, None])
    )
    order = tl.sum(before.to(tl.int32), 1)
    chosen = tl.sum(tl.where(order == rank.to(tl.int32), seen, 0.0), 0).to(tl.float64)
    return tl.where(good == 1, chosen, float("inf"))
