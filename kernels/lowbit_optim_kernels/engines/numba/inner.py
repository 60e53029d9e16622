"""Compilation of functions that only other compiled functions call."""

from __future__ import annotations

from typing import Any

from numba import njit

_WITHOUT_WRAPPERS: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
# Neither Python nor C calls them, and wrappers for these take longer to compile than they do.
inner = njit(nogil=True, error_model="numpy", **_WITHOUT_WRAPPERS)
# A call of these costs registers, or the order of instructions around it.
inlined = njit(nogil=True, error_model="numpy", forceinline=True, **_WITHOUT_WRAPPERS)
