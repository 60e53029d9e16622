"""What `conftest` has Triton's interpreter check."""

import pytest
import torch

from protocol import NEEDS_TRITON

pytest.importorskip("triton", minversion="3.4", reason=NEEDS_TRITON)

import triton
import triton.language as tl

from lowbit_optim_kernels.engines.triton.primitives import INTERPRETED, times


@triton.jit
def squares(x, y, WRAPS: tl.constexpr):
    lane = tl.arange(0, 4)
    numbers = tl.load(x + lane)
    tl.store(y + lane, times(numbers, numbers) if WRAPS else numbers * numbers)


@pytest.mark.skipif(not INTERPRETED.value, reason="kernels are compiled here, not interpreted")
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8], ids=str)
def test_integers_overflow_where_they_may_alone(dtype):
    largest = torch.iinfo(dtype).max
    given, found = torch.tensor([1, 2, 3, 4], dtype=dtype), torch.zeros(4, dtype=dtype)
    squares[(1,)](given, found, WRAPS=False)
    assert torch.equal(found, given * given)
    given[2] = largest
    with pytest.raises(Exception, match="overflows: mul of"):
        squares[(1,)](given, found, WRAPS=False)
    squares[(1,)](given, found, WRAPS=True)
    assert torch.equal(found, given * given)
