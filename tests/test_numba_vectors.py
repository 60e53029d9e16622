"""What a rule may call on the Numba engine's vectors gives what torch's operators give."""

import operator

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
from lowbit_optim_kernels.engines.numba import element, memory, vector
from lowbit_optim_kernels.engines.torch import PRIMITIVES

NUMBERS = np.float32([np.nan, -np.inf, -3.0, -1e-40, -0.0, 0.0, 0.3, np.inf])
X, Y = np.repeat(NUMBERS, len(NUMBERS)), np.tile(NUMBERS, len(NUMBERS))
COMPARISONS = ("gt", "lt", "ge", "le", "eq", "ne")


def on_vectors(function):
    """A function's values for all pairs of the numbers."""
    from numba import njit

    load, store, out = memory.load_f32, memory.store_f32, np.zeros_like(X)

    @njit
    def run(x, y, to):
        for at in range(0, 4 * len(X), 64):
            store(to + at, function(load(x + at), load(y + at)))

    run(X.ctypes.data, Y.ctypes.data, out.ctypes.data)
    return torch.from_numpy(out)


def assert_equal(got, want):
    torch.testing.assert_close(got, want, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "maximum", "minimum"])
def test_operators_of_two_vectors(name):
    """NaN and infinities included: a bound that stands first keeps NaN."""
    x, y = map(torch.from_numpy, (X, Y))
    if name in PRIMITIVES:
        got, want = on_vectors(getattr(element, name)), PRIMITIVES[name](x, y)
        first = x.isnan() & ~y.isnan()  # where a rule may not rely on either
        got[first], want[first] = 0.0, 0.0
    else:
        got, want = on_vectors(getattr(operator, name)), getattr(operator, name)(x, y)
    assert_equal(got, want)


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_of_two_vectors(name):
    from numba import njit

    compare, where = getattr(operator, name), element.where
    got = on_vectors(njit(lambda x, y: where(compare(x, y), 1.0, 0.0)))
    assert_equal(got, compare(*map(torch.from_numpy, (X, Y))).float())


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv"])
def test_a_result_that_is_not_finite_is_seen_to_be_so(name):
    """The compiler may not conclude from how it came about that it is none."""
    from numba import njit

    compute, finite, where = getattr(operator, name), vector.finite, element.where

    @njit
    def kind(x, y):
        z = compute(x, y)
        return where(z == z, 1.0, 0.0) + where(finite(z), 1.0, 0.0)

    want = compute(*map(torch.from_numpy, (X, Y)))
    assert_equal(on_vectors(kind), (~want.isnan()).float() + want.isfinite().float())


@pytest.mark.parametrize("name", ["sqrt", "abs", "sign"])
def test_functions_of_one_vector(name):
    from numba import njit

    function = getattr(element, name)
    got = on_vectors(njit(lambda x, y: function(x)))
    assert_equal(got, PRIMITIVES[name](torch.from_numpy(X)))


def test_lanes_are_added_up_in_fp64():
    """A sum of squares may be larger than fp32 can hold, and small ones count beside large ones."""
    from numba import njit

    load, total, lanes = memory.load_f32, vector.total, np.full(16, 3e38, np.float32)
    add_up = njit(lambda at: total(load(at)))
    assert add_up(lanes.ctypes.data) == 16 * float(lanes[0])
    lanes[:] = [1e8, *[1.0] * 15]
    assert add_up(lanes.ctypes.data) == 1e8 + 15


def test_a_product_is_part_of_a_sum_where_that_is_written_alone():
    """Elsewhere a compiler would choose, in each rule differently."""
    from numba import njit

    fused, load, store = vector.fused, memory.load_f32, memory.store_f32
    x = np.full(16, 1 + 2**-12, np.float32)
    apart, at_once = np.zeros(16, np.float32), np.zeros(16, np.float32)

    @njit
    def run(at, to, beside):
        store(to, load(at) * load(at) - 1.0)
        store(beside, fused(load(at), load(at), -1.0))

    run(*(array.ctypes.data for array in (x, apart, at_once)))
    assert (apart == 2**-11).all()
    if not vector.X86 or vector.HAS_AVX2 or vector.HAS_AVX512:  # else there is no instruction
        assert (at_once == 2**-11 + 2**-24).all()
