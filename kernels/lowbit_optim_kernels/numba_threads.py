"""Several threads for a pass of the Numba engine.

A pass is compiled to a C function `share(job)`, where `job` is the address of int64 words:

    0  the next piece, which shares count up atomically
    1  how many items (chunks, blocks) the pass has
    2  how many pieces the items are cut into
    3  and on: what the pass works on

Any number of threads may run one job's share at once; each takes pieces until none is left.

The threads are those of the OpenMP team that torch's own operators run on: its workers stay awake
for a while after a backward pass, each on its core, so that they start at once, where a thread of
our own would have to wait for a core that they keep busy. In a forked child, where OpenMP's workers
are gone, and where torch has no OpenMP, a small pool of Python threads takes their place. (Numba's
own threading layers are not used: the default one aborts the process when two threads call it at
once, and its OpenMP layer does when a forked child calls it.)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
import torch

NEXT, COUNT, PIECES, WORK = 0, 1, 2, 3  # words of a job
PIECES_PER_THREAD = 8  # a thread that lags takes fewer

_forked = False


class _Pool:
    """Python threads that run shares; made anew in a forked child."""

    def __init__(self) -> None:
        self.size = 0
        self.executor: ThreadPoolExecutor | None = None
        self.lock = threading.Lock()

    def run(self, share: Any, job: int, threads: int) -> None:
        """Run the share on this thread and on `threads` - 1 others."""
        with self.lock:
            if self.executor is None or self.size < threads - 1:
                self.size = threads - 1
                self.executor = ThreadPoolExecutor(threads - 1, "lowbit_optim")
            helpers: list[Future] = []
            # While the interpreter shuts down there are no new futures: this thread does it all.
            with contextlib.suppress(RuntimeError):
                helpers.extend(self.executor.submit(share, job) for _ in range(threads - 1))
        share(job)
        for helper in helpers:
            helper.result()


_pool = _Pool()


def _in_child() -> None:
    global _forked, _pool
    _forked, _pool = True, _Pool()  # the parent's lock may have been held at the fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


@cache
def _openmp() -> Any:
    """`GOMP_parallel` of the OpenMP library that torch is linked with, or None.

    GNU's and LLVM's libraries have it, and Intel's. A symbol that is looked up in libtorch_cpu is
    also looked for in the libraries that it depends on.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        parallel = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


@cache
def compiled_share(module: ModuleType, name: str) -> Any:
    """The C function of a generated module's share; compiled, or loaded, at the first call."""
    return numba.cfunc("void(int64)", cache=True, error_model="numpy")(getattr(module, name))


def run(share: Any, count: int, threads: int, work: list[int]) -> None:
    """Run all of a job.

    Args:
        share: a `compiled_share`.
        count: how many items it has.
        threads: how many threads to use at most.
        work: the words from `WORK` on.
    """
    threads = min(threads, count)
    pieces = min(count, threads * PIECES_PER_THREAD) if threads > 1 else 1
    words = np.array([0, count, pieces, *work], dtype=np.int64)
    job = words.ctypes.data
    if threads <= 1:
        share.ctypes(job)
        return
    parallel = None if _forked else _openmp()
    if parallel is None:
        _pool.run(share.ctypes, job, threads)
    else:
        parallel(share.address, job, threads, 0)
