"""Compiled functions of CPUs touch no memory but that of their tensors, by a byte."""

import sys

import pytest

from cases import FUSED_CASES, one_per_class
from protocol import python

pytest.importorskip("numba")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no mprotect")
NAMES = [case.name for case in one_per_class(FUSED_CASES)]
TOUCH = """
import ctypes, torch
from guarded_memory import guarded
x = guarded(torch.zeros(5), at_end={at_end})
ctypes.string_at(x.data_ptr() + {offset}, 1)
"""


@pytest.mark.parametrize("at_end", [False, True])
def test_a_byte_beside_a_guarded_tensor_cannot_be_read(at_end):
    inside, outside = (19, 20) if at_end else (0, -1)
    python(TOUCH.format(at_end=at_end, offset=inside))
    with pytest.raises(AssertionError):
        python(TOUCH.format(at_end=at_end, offset=outside))


@pytest.mark.slow
@pytest.mark.parametrize("at_end", [False, True])
def test_codes_are_made_and_read_within_their_tensors(at_end):
    python(f"from guarded_memory import code; code(at_end={at_end})")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_steps_stay_within_their_tensors(name):
    script = f"""
import warnings
import torch
warnings.filterwarnings("ignore", ".*lacks instructions for float16")
from guarded_memory import train_all
torch.set_num_threads(2)
print(train_all("{name}"))
"""
    assert int(python(script, timeout=300)) > 0
