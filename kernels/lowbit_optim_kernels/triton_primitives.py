"""The bare names of rule functions, for Triton. They must be jit functions: the interpreter patches
the attributes of `tl` only, so a bare `tl.sqrt` in a generated module would stay unpatched.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Triton's interpreter cuts off the low bits on the way to bf16 where machines round to nearest.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def narrow(x, TYPE: tl.constexpr):
    """fp32 to the dtype TYPE, rounding to nearest even."""
    if INTERPRETED and tl.bfloat16 == TYPE:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(TYPE)


@triton.jit
def sqrt(x):
    return tl.sqrt(x)


@triton.jit
def where(condition, a, b):
    return tl.where(condition, a, b)


@triton.jit
def abs(x):
    return tl.abs(x)


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b)


@triton.jit
def minimum(a, b):
    return tl.minimum(a, b)


@triton.jit
def sign(x):
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


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
def finite(x):
    """True where x is neither NaN nor infinite."""
    return tl.abs(x) < float("inf")


@triton.jit
def only_finite(x):
    """x, or 0 where it is NaN or infinite."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)
