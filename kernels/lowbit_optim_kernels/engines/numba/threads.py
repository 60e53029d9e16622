"""Several threads for a pass of the Numba engine.

A pass is compiled to a C function `share(job)`, whose job is laid out as the module `job` says. The
template `passes` writes it.

A thread takes its own pieces, then those that others have not come to. So any number of threads
may run a job, and one that lags is helped; and the passes of a step meet a part of a tensor on the
same core, which matters where cores do not share a cache: a parameter that one core has read for a
norm and another one updates would have to be fetched from the first.

The threads are those of the OpenMP team that torch's own operators run on: its workers stay awake
for a while after a backward pass, each on its core, so that they start at once, where a thread of
our own would have to wait for a core that they keep busy. In a forked child, where OpenMP's workers
are gone, and where torch has no OpenMP, a small pool of Python threads takes their place. (Numba's
own threading layers are not used: the default one aborts the process when two threads call it at
once, and its OpenMP layer does when a forked child calls it.)
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .cache import CFunction

PIECES = 32  # of each thread, at most 63: a core that is done waits for a piece of another one

_forked = False


def job_words(
    tickets: np.ndarray, number: int, threads: int, count: int, work: list[int]
) -> list[int]:
    """The words of a job; `tickets` has a row of 8 and one for each thread."""
    threads = max(1, min(threads, count))
    several = threads > 1
    head = [number if several else 0, tickets.ctypes.data, threads, PIECES if several else 1, count]
    return head + work


class Job:
    """All of a job, in memory; it can be run again and again.

    Args:
        share: a share's `cache.c_function`.
        count: how many items it has.
        threads: how many threads to use at most.
        work: the job's words on what it works on.
    """

    def __init__(self, share: CFunction, count: int, threads: int, work: list[int]) -> None:
        self.share, self.threads = share, max(1, min(threads, count))
        self.tickets = np.zeros((1 + self.threads, 8), dtype=np.int64)
        number = thread_number(self.threads)
        self.words = np.array(
            job_words(self.tickets, number, self.threads, count, work), dtype=np.int64
        )
        self.address = self.words.ctypes.data

    def run(self) -> None:
        """Run it all."""
        self.tickets[:] = 0
        openmp = _team(self.threads)
        if self.threads == 1:
            self.share.ctypes(self.address)
        elif openmp is None:
            _pool.run(self)
        else:  # returns when the whole team has, and no signal's handler runs before
            openmp[0](self.share.address, self.address, self.threads, 0)


class _Helper:
    """A call of a share by another thread, which it may begin unless the job is over.

    Who comes first takes the lock: the helper, and the job ends when it has let go; or the job's
    own thread, which never lets go, and the helper does nothing. It holds the job's memory.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.lock = threading.RLock()  # an interrupted `end` is repeated

    def __call__(self) -> None:
        if self.lock.acquire(blocking=False):
            try:
                self.job.share.ctypes(self.job.address)
            finally:
                self.lock.release()

    def end(self) -> None:
        self.lock.acquire()


def _end(helpers: list[_Helper]) -> None:
    """Wait for the helpers that have begun, whatever interrupts the waiting."""
    try:
        for helper in helpers:
            helper.end()
    except BaseException:  # a signal's handler may raise anything
        _end(helpers)
        raise


class _Pool:
    """Python threads that run shares; made anew in a forked child."""

    def __init__(self) -> None:
        self.size = 0
        self.executor: ThreadPoolExecutor | None = None
        self.lock = threading.Lock()

    def run(self, job: Job) -> None:
        """Run a job on this thread and on as many others as it has.

        No other thread is in the share when this returns or raises: what the job works on belongs
        to the caller.
        """
        helpers = [_Helper(job) for _ in range(job.threads - 1)]
        try:
            self._submit(helpers)
            job.share.ctypes(job.address)
        finally:
            _end(helpers)

    def _submit(self, helpers: list[_Helper]) -> None:
        with self.lock:
            if self.executor is None or self.size < len(helpers):
                self.size = len(helpers)
                self.executor = ThreadPoolExecutor(self.size, "lowbit_optim")
            try:
                for helper in helpers:
                    self.executor.submit(helper)
            except RuntimeError:
                # The interpreter shuts down, or the system has no more threads: those there are do
                # it all. What was submitted in vain goes with the executor.
                self.executor = None


_pool = _Pool()


def _in_child() -> None:
    global _forked, _pool
    _forked, _pool = True, _Pool()  # the parent's lock may have been held at the fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


@cache
def _openmp() -> tuple[Any, int] | None:
    """`GOMP_parallel` and the address of `omp_get_thread_num` of torch's OpenMP library, or None.

    GNU's and LLVM's libraries have both, and Intel's. They are looked for as the linker does it for
    torch: first among all that the process has in common, where one is that was preloaded (PyTorch
    advises Intel's on CPUs, whose main thread may then be bound to one core, and with it whatever
    team of another library it made); then in the libraries that libtorch_cpu depends on.
    """
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        of_torch, in_common = ctypes.CDLL(str(path)), ctypes.CDLL(None)
        library = in_common if hasattr(in_common, "GOMP_parallel") else of_torch
        parallel, number = library.GOMP_parallel, library.omp_get_thread_num
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel, ctypes.cast(number, ctypes.c_void_p).value or 0


def thread_number(threads: int) -> int:
    """The first word of a job of this many threads."""
    openmp = _team(threads)
    return 0 if openmp is None else openmp[1]


def _team(threads: int) -> tuple[Any, int] | None:
    """`_openmp`, where a team of this many threads is to be had of it."""
    return None if _forked or threads == 1 else _openmp()


@cache
def let_others() -> int:
    """Address of a C function by which a thread lets others have its core, or 0."""
    try:
        if sys.platform == "win32":
            function = ctypes.windll.kernel32.SwitchToThread
        else:
            function = ctypes.CDLL(None).sched_yield
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0
