"""Device assertions, which Triton compiles with TRITON_DEBUG=1: of integers that overflow, too.

A user who looks for a fault in other kernels sets that for all of them.
"""

from types import SimpleNamespace

import pytest
import torch

import cases
import test_cut_vectors
import test_steps

pytest.importorskip("triton.knobs", reason="needs a Triton whose debug mode a process can set")

import triton
import triton.language as tl

from benchmarks.static.ptx.launch import emulated
from benchmarks.static.ptx.memory import FaultError

KEYS = ("format", "weights", "tiles", "gradients", "arch")
STEPS = [
    ("AdamW", "dynamic8", "bf16_of_16", "mixed", "bad", 90),
    ("AdEMAMix", "dynamic8", "fp32", "unaligned", "scaled", 80),
    ("LAMB", "ratio8", "bf16_of_24", "offset", "bad", 90),
    ("AdamW", "ratio4", "fp16", "unaligned", "bad", 75),
    ("LARS", "float32", "bf16_of_32", "masked", "wide", 120),
]


@pytest.fixture(autouse=True)
def debug_mode(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "debug", True)


@triton.jit
def square(x, y):
    lane = tl.arange(0, 32)
    numbers = tl.load(x + lane)
    tl.store(y + lane, numbers * numbers)


def test_a_failed_assertion_is_told():
    given, squares = torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    with emulated(90):
        square[(1,)](given, squares)
        assert torch.equal(squares, given * given)
        given[7] = 2**16
        with pytest.raises(FaultError, match="int32 overflow detected for operation mul"):
            square[(1,)](given, squares)


@pytest.mark.parametrize("row", STEPS, ids=lambda row: "-".join(map(str, row)))
def test_steps_have_no_integers_that_overflow(row):
    name, *rest = row
    case = next(case for case in cases.FUSED_CASES if case.name == name)
    settings = SimpleNamespace(**dict(zip(KEYS, rest, strict=True)))
    test_steps.test_emulated_steps_are_those_of_torch(case, settings)


@pytest.mark.parametrize("origin", test_cut_vectors.ORIGINS)
def test_blocks_may_have_numbers_of_any_size(origin):
    test_steps.test_pieces_of_a_vector_are_stepped_as_in_the_whole(origin, 24)
