"""The CPU engine: the rules through Numba and LLVM, all tensors of a group in one call per pass.

Blocks are dealt out in chunks to a small pool of Python threads; the compiled functions release
the GIL. (Numba's own threading layers are not used: the default one aborts the process when two
threads call it at once, and OpenMP's does when a forked child does.) Results do not depend on the
number of threads: sums are formed per chunk and then added in a fixed order.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import llvmlite
import numba
import numpy as np
import torch
from torch import Tensor

from . import numba_source
from .dynamic8 import BLOCK
from .lower import hyper_names, import_source
from .plan import Batch, Slot, clips, phase_count
from .rules import Rule

NAME = "numba"
KIND = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
CHUNK = 64  # blocks
PIECES = 8  # shares of the chunks per thread: a thread that lags takes fewer
ALONE = 1 << 16  # elements; fewer are not worth waking a thread for

_HELPERS = (
    "numba_codec",
    "numba_element",
    "numba_memory",
    "numba_scalar",
    "numba_tables",
    "numba_vector",
)


@cache
def _depends() -> tuple[str, ...]:
    """What compiled code depends on beside its own text."""
    modules = [importlib.import_module(f".{name}", __package__) for name in _HELPERS]
    versions = (numba.__version__, llvmlite.__version__, np.__version__)
    return (*versions, *map(inspect.getsource, modules))


@cache
def _scalars(rule: Rule) -> ModuleType:
    return import_source(f"{rule.name}_scalar", numba_source.scalar_module(rule), _depends())


@cache
def _elements(rule: Rule, p_kind: str, g_kind: str, bits: int) -> ModuleType:
    source = numba_source.element_module(rule, p_kind, g_kind, bits)
    return import_source(f"{rule.name}_{p_kind}_{g_kind}_{bits}", source, _depends())


@cache
def _shared() -> ModuleType:
    return import_source("shared", numba_source.SHARED, _depends())


class _Pool:
    """Threads that share out pieces of work; made anew in a forked child."""

    def __init__(self) -> None:
        self.pid, self.size = os.getpid(), 0
        self.executor: ThreadPoolExecutor | None = None
        self.lock = threading.Lock()

    def run(self, work: Callable[[int, int], None], count: int, threads: int) -> None:
        """Call work(lo, hi) over ranges that cover range(count), on `threads` threads."""
        threads = min(threads, count)
        if threads <= 1:
            work(0, count)
            return
        pieces = min(count, threads * PIECES)
        bounds = [count * k // pieces for k in range(pieces + 1)]
        ticket = itertools.count()  # next() of it is atomic

        def share() -> None:
            while (k := next(ticket)) < pieces:
                work(bounds[k], bounds[k + 1])

        with self.lock:
            if self.executor is None or self.pid != os.getpid() or self.size < threads - 1:
                self.pid, self.size = os.getpid(), threads - 1
                self.executor = ThreadPoolExecutor(threads - 1, "lowbit_optim")
            helpers: list[Future] = []
            # While the interpreter shuts down there are no new futures: this thread does it all.
            with contextlib.suppress(RuntimeError):
                helpers.extend(self.executor.submit(share) for _ in range(threads - 1))
        share()
        for helper in helpers:
            helper.result()


_pool = _Pool()


def _renew_lock_in_child() -> None:
    _pool.lock = threading.Lock()  # the parent's may have been held at the fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock_in_child)


@dataclass
class _Bucket:
    """Slots of a batch that one compiled function takes, and how they are cut up."""

    module: ModuleType
    chunks: np.ndarray  # int64 (chunks, 3): tensor, first block, blocks
    elements: int


@dataclass
class _Plan:
    """What depends only on the shapes, dtypes and rule of a batch; kept from step to step."""

    key: tuple
    buckets: list[_Bucket]
    geometry: np.ndarray
    scalars: np.ndarray
    address: np.ndarray
    pointers: list[int]


def _key(slot: Slot) -> tuple:
    kinds = (slot.p.dtype, slot.g.dtype, slot.bits, slot.gnorm_vec is not None)
    return (*kinds, slot.rows, slot.row, slot.numel)


def _chunks(slots: list[Slot], members: list[int]) -> np.ndarray:
    rows = []
    for t in members:
        blocks = slots[t].rows * -(-slots[t].row // BLOCK)
        rows += [(t, b, min(CHUNK, blocks - b)) for b in range(0, blocks, CHUNK)]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _geometry(slot: Slot) -> tuple[int, int, int, int]:
    """rows, row, blocks per row, global numel; rows of whole blocks are one long row."""
    if slot.row % BLOCK == 0:
        numel = slot.rows * slot.row
        return 1, numel, numel // BLOCK, slot.numel
    return slot.rows, slot.row, -(-slot.row // BLOCK), slot.numel


def _make_plan(batch: Batch, key: tuple) -> _Plan:
    slots, rule = batch.slots, batch.rule
    members: dict[tuple, list[int]] = {}
    for t, slot in enumerate(slots):
        kinds = (KIND[slot.p.dtype], KIND[slot.g.dtype], slot.bits if rule.moments else 32)
        members.setdefault(kinds, []).append(t)
    buckets = [
        _Bucket(
            _elements(rule, *kinds), _chunks(slots, group), sum(slots[t].p.numel() for t in group)
        )
        for kinds, group in members.items()
    ]
    geometry = [_geometry(slot) for slot in slots]
    columns = numba_source.MOMENTS + 2 * len(rule.moments) + 1
    return _Plan(
        key=key,
        buckets=buckets,
        geometry=np.array(geometry, dtype=np.int64),
        scalars=np.zeros((len(slots), numba_source.SCALARS + len(rule.scalars()))),
        address=np.zeros((len(slots), columns), dtype=np.int64),
        pointers=[],
    )


def _plan(batch: Batch) -> _Plan:
    key = (batch.rule, *map(_key, batch.slots))
    plan = batch.cache.get("plan")
    if plan is None or plan.key != key:
        plan = batch.cache["plan"] = _make_plan(batch, key)
    moments = len(batch.rule.moments)
    pointers = [slot.addresses(moments) for slot in batch.slots]
    if pointers != plan.pointers:
        plan.pointers = pointers
        plan.address[:] = pointers
    return plan


class NumbaRun:
    """A step of one batch; see `plan.Run`."""

    def __init__(self, batch: Batch) -> None:
        self._own_gradients(batch)
        self.batch = batch
        self.phases = phase_count(batch)
        self.plan = _plan(batch)
        values = [float(batch.hyper[name]) for name in hyper_names(batch.rule)]
        self.hyper = np.array(values, dtype=np.float64)
        self.live = batch.found_inf is None or float(batch.found_inf) == 0.0
        self.threads = torch.get_num_threads()

    @staticmethod
    def _own_gradients(batch: Batch) -> None:
        for slot in batch.slots:
            if slot.g.dtype not in KIND:
                slot.g = slot.g.float()

    def begin(self) -> None:
        scale = -1.0 if self.batch.maximize else 1.0
        if self.batch.grad_scale is not None:
            scale /= float(self.batch.grad_scale)
        plan, module = self.plan, _scalars(self.batch.rule)
        module.begin(plan.address, plan.geometry, self.hyper, plan.scalars, scale, self.live)

    def reduce(self, phase: int) -> Tensor:
        rule, plan = self.batch.rule, self.plan
        first = clips(self.batch)
        if first and phase == 0:
            names, name = 1, "reduce_clip"
        else:
            names, name = len(rule.phases[phase - first].terms.gives), f"reduce_{phase - first}"
        sums = np.zeros((len(self.batch.slots), names))
        for bucket in plan.buckets:
            partial = np.empty((len(bucket.chunks), names))
            self._pass(bucket, getattr(bucket.module, name), partial)
            _shared().add_up(bucket.chunks, partial, sums)
        return torch.from_numpy(sums)

    def combine(self, phase: int, sums: Tensor) -> None:
        plan, first = self.plan, clips(self.batch)
        values = sums.contiguous().numpy()
        if first and phase == 0:
            percentile, live = self.batch.percentile, self.live
            _shared().clip(plan.address, plan.scalars, values, percentile, live)
            return
        function = getattr(_scalars(self.batch.rule), f"combine_{phase - first}")
        function(plan.address, plan.geometry, self.hyper, plan.scalars, values)

    def finish(self) -> None:
        if not self.live:
            return
        for bucket in self.plan.buckets:
            self._pass(bucket, bucket.module.update)

    def _pass(self, bucket: _Bucket, function: Callable, *extra: np.ndarray) -> None:
        plan, chunks, hyper = self.plan, bucket.chunks, self.hyper

        def work(lo: int, hi: int) -> None:
            function(lo, hi, plan.address, plan.geometry, chunks, hyper, plan.scalars, *extra)

        _pool.run(work, len(chunks), self.threads if bucket.elements > ALONE else 1)


def start(batch: Batch) -> NumbaRun:
    """Begin a step of a batch of CPU slots in fp32, bf16 or fp16."""
    return NumbaRun(batch)


def quantize(x: Tensor, signed: bool, rows: int, row: int, codes: Tensor, absmax: Tensor) -> None:
    """Quantize contiguous x of rows x row elements into codes and absmax; bad numbers give zero."""
    x = x.float()
    blocks = rows * -(-row // BLOCK)
    at = (x.data_ptr(), codes.data_ptr(), absmax.data_ptr())
    threads = torch.get_num_threads() if x.numel() > ALONE else 1
    function = _shared().quantize_signed if signed else _shared().quantize_unsigned
    _pool.run(lambda lo, hi: function(lo, hi, row, *at), blocks, threads)


def dequantize(
    codes: Tensor, absmax: Tensor, signed: bool, rows: int, row: int, out: Tensor
) -> None:
    """Write the values of codes (rows x row) with scales absmax into out."""
    blocks = rows * -(-row // BLOCK)
    wide = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    at = (wide.data_ptr(), codes.data_ptr(), absmax.data_ptr())
    threads = torch.get_num_threads() if out.numel() > ALONE else 1
    function = _shared().dequantize_signed if signed else _shared().dequantize_unsigned
    _pool.run(lambda lo, hi: function(lo, hi, row, *at), blocks, threads)
    if wide is not out:
        out.copy_(wide)
