"""Numba's compiled functions, kept by `module_cache`.

Numba's own disk cache reads pickles without looking at who wrote them or whether they are whole, a
damaged one ends every later process, and a full disk ends the step that compiles. So this takes its
place, through the interface that Numba calls its caches by: one file a function and signature
(and processor), which `module_cache` has checked before anything is unpickled.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any

from numba.core import sigutils
from numba.core.caching import _Cache
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from ...codegen import module_cache


class StoredFunction(_Cache):
    """The compiled code of one function of a generated module.

    The module's name says everything else that the code depends on.
    """

    def __init__(self, function: FunctionType) -> None:
        self.function = function

    @property
    def cache_path(self) -> str | None:
        folder = module_cache.cache_folder()
        return None if folder is None else str(folder)

    def _name(self, signature: Any, codegen: Any) -> str:
        """Of a signature on a processor, whose name and features the codegen knows."""
        key = repr((signature, codegen.magic_tuple()))
        digest = hashlib.sha256(key.encode()).hexdigest()[:24]
        return f"{self.function.__module__}.{self.function.__qualname__}.{digest}"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        data = module_cache.load(self._name(sig, target_context.codegen()))
        if data is None:
            return None
        return CompileResult._rebuild(target_context, *pickle.loads(data))

    def save_overload(self, sig: Any, data: Any) -> None:
        # Code with addresses of this process in it; none of ours, unless a helper goes wrong.
        if data.library.has_dynamic_globals:
            return
        try:
            reduced = data._reduce()
        except RuntimeError:  # Ctrl-C kept LLVM from handing the code over, which runs all the same
            return
        module_cache.store(self._name(sig, data.codegen), dumps(reduced))

    def enable(self) -> None:
        """Always on: the methods that switch it are the interface's."""

    disable = flush = enable


def keep(module: ModuleType, names: Iterable[str]) -> ModuleType:
    """The module, with the compiled code of these `njit` functions kept on disk."""
    for name in names:
        dispatcher = getattr(module, name)
        dispatcher._cache = StoredFunction(dispatcher.py_func)
    return module


def kept_cfunc(signature: str, function: FunctionType, **options: Any) -> CFunc:
    """As `numba.cfunc(signature, **options)(function)`, its compiled code kept on disk."""
    compiled: Any = CFunc(function, sigutils.normalize_signature(signature), {}, options)
    compiled._cache = StoredFunction(function)
    compiled.compile()
    return compiled
