"""Numba names machine code by function name and a counter; from the disk cache, names can meet."""

import importlib
from collections import Counter

import pytest

pytest.importorskip("numba")
from numba.core.registry import CPUDispatcher

MODULES = (
    "engines.numba.element",
    "engines.numba.memory",
    "engines.numba.scalar",
    "formats.dynamic8.numba",
)


def test_compiled_helpers_have_names_of_their_own():
    """Two helpers of one name and module would be mixed up when code of two processes is loaded."""
    found = {}
    for name in MODULES:
        module = importlib.import_module(f"lowbit_optim_kernels.{name}")
        for value in vars(module).values():
            if isinstance(value, CPUDispatcher):
                found[id(value)] = (value.py_func.__module__, value.py_func.__qualname__)
    assert len(found) >= 15
    repeated = [name for name, count in Counter(found.values()).items() if count > 1]
    assert not repeated, f"one name for several compiled functions: {repeated}"
