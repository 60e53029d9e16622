"""What the tests of the cache folder share: scripts that take first steps, and marks."""

import json
import os

import pytest

from lowbit_optim_kernels.codegen import module_cache
from protocol import python

VARIABLE = module_cache.CACHE_VARIABLE
MODES = pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs POSIX modes and owners")

# A step of a parameter of 5000 elements, for scripts that run in a process of their own.
STEP = """
import torch, lowbit_optim
p = torch.nn.Parameter(torch.ones(5000))
p.grad = torch.ones(5000)
optimizer = lowbit_optim.AdamW8bit([p], lr=0.1)
"""
FIRST_STEP = """
import json
from first_steps import *
"""


def steps(script, timeout=280, **environment):
    """What a script with `first_steps` prints, read as JSON."""
    return json.loads(python(FIRST_STEP + script, timeout=timeout, **environment))
