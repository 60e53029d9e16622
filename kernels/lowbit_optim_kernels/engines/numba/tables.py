"""The Numba engine's tables of a batch: compiled functions and tables, made once and kept."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from ...batch import WEIGHT_BLOCK, Batch, G, P, Slot, address_columns
from ...codegen.analysis import hyper_names
from ...rules import Rule
from . import job, modules, source
from . import threads as numba_threads
from .cache import CFunction, c_function

DTYPE_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
CHUNK = 1 << 14  # elements, in whole blocks
ALONE = 1 << 16  # elements; so few are not worth waking a thread for
WINDOW = 1 << 18  # elements for each thread: 2 MiB of a cache, for parameters and gradients in fp32


def threads_for(elements: int, threads: int) -> int:
    """The number of threads that so many elements are worth, of those there are."""
    return threads if elements > ALONE else 1


@dataclass
class Bucket:
    """Slots of a batch that one compiled function takes, and how they are cut up."""

    passes: dict[str, CFunction]
    chunks: np.ndarray  # int64 (chunks, 3): tensor, first block, blocks
    sizes: list[int]  # elements of each slot

    def chunk(self, c: int) -> int:
        """The address of a chunk's row."""
        return self.chunks.ctypes.data + self.chunks.strides[0] * c

    def windows(self, most: int) -> list[tuple[int, int, int]]:
        """First chunk, chunks and elements of each: a tensor, or more that have no more in all."""
        found, first, last, elements = [], 0, 0, 0
        ends = np.flatnonzero(np.diff(self.chunks[:, 0], append=-1)) + 1
        for end, size in zip(ends.tolist(), self.sizes, strict=True):
            if last > first and elements + size > most:
                found.append((first, last - first, elements))
                first, elements = last, 0
            last, elements = end, elements + size
        return [*found, (first, last - first, elements)]


@dataclass
class Tables:
    """Tables of a batch by its shapes, dtypes and rule; kept from step to step.

    `rows` are the addresses that were put into `address` last, but for what each step has anew.
    """

    rule: Rule
    buckets: list[Bucket]
    per_tensor: dict[str, CFunction]
    geometry: np.ndarray
    scalars: np.ndarray
    address: np.ndarray
    hyper: np.ndarray

    def __post_init__(self) -> None:
        arrays = (self.address, self.geometry, self.hyper, self.scalars)
        self.table_addresses = [array.ctypes.data for array in arrays]
        self.words = np.array(
            job.tensor_words(0, len(self.address), self.table_addresses), dtype=np.int64
        )
        self.words_address = self.words.ctypes.data
        self.rows: list[list[int]] = []
        self.sweeps: dict[tuple[int, int, bool], Sweep] = {}

    def sweep(self, threads: int, whole: bool) -> Sweep:
        """The passes, for whole tensors or for shards."""
        key = numba_threads.thread_number(threads), threads, whole
        if key not in self.sweeps:
            self.sweeps[key] = Sweep(self, *key)
        return self.sweeps[key]

    def call(self, name: str, live: bool, sums: int = 0) -> None:
        """The per-tensor arithmetic of all tensors: `sums` and `live` are words of its job."""
        self.words[job.T_SUMS // job.WORD :] = sums, live
        self.per_tensor[name].ctypes(self.words_address)


class Sweep:
    """Passes over the tables' tensors as `sweep` takes them, with a number of threads.

    Attributes:
        parts: rows for `sweep`. Whole tensors have one part, which does it all, shards one for each
            phase, which reduces them, and one that updates them.
        sums: of each phase, float64 (tensors, terms).
    """

    def __init__(self, tables: Tables, number: int, threads: int, whole: bool) -> None:
        phases = tables.rule.phases
        most = WINDOW * threads if whole and phases else sys.maxsize
        windows = [
            (bucket, *window) for bucket in tables.buckets for window in bucket.windows(most)
        ]
        begins = np.cumsum([0, *(chunks for _, _, chunks, _ in windows)])
        self.threads = threads_for(sum(elements for *_, elements in windows), threads)
        self.partial = [np.empty((begins[-1], len(phase.sums))) for phase in phases]
        self.sums = [np.empty((len(tables.address), len(phase.sums))) for phase in phases]
        self.combined = np.array(job.tensor_words(0, 0, tables.table_addresses), dtype=np.int64)
        self.tickets = np.zeros((len(windows), 1 + len(phases), 1 + threads, 8), dtype=np.int64)
        table = np.zeros((len(windows), 1 + len(phases), job.ROW // job.WORD), dtype=np.int64)
        address, geometry, hyper, scalars = tables.table_addresses
        for w, (bucket, first, chunks, elements) in enumerate(windows):
            work = [address, geometry, bucket.chunk(first), hyper, scalars, 0]
            several = threads_for(elements, threads)
            for k, share in enumerate(bucket.passes.values()):
                own = self.tickets[w, k]
                words = numba_threads.job_words(own, number, several, chunks, work)
                table[w, k, : job.TERMS // job.WORD] = [*words, share.address]
        for k, (partial, sums) in enumerate(zip(self.partial, self.sums, strict=True)):
            table[:, k, job.PARTIAL // job.WORD] = (
                partial.ctypes.data + partial.strides[0] * begins[:-1]
            )
            combine = tables.per_tensor[f"combine_{k}"].address if whole else 0
            table[:, k, job.TERMS // job.WORD :] = sums.shape[1], sums.ctypes.data, combine
        parts = [table] if whole else [table[:, k] for k in range(1 + len(phases))]
        self.parts = [np.ascontiguousarray(part).reshape(-1, table.shape[-1]) for part in parts]
        combined, let_others = self.combined.ctypes.data, numba_threads.let_others()
        self.jobs = [
            numba_threads.Job(
                modules.sweep(), self.threads, self.threads,
                [rows.ctypes.data, len(rows), combined, let_others],
            )
            for rows in self.parts
        ]  # fmt: skip

    def run(self, part: int) -> None:
        """Run a part."""
        self.tickets[:] = 0
        self.jobs[part].run()


def _chunks(slots: list[Slot], members: list[int]) -> np.ndarray:
    rows = []
    for t in members:
        block = slots[t].format.block
        blocks, chunk = slots[t].rows * -(-slots[t].row // block), max(1, CHUNK // block)
        rows += [(t, b, min(chunk, blocks - b)) for b in range(0, max(1, blocks), chunk)]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _geometry(slot: Slot) -> tuple[int, ...]:
    """A row of the table that `passes` describes; rows of whole blocks are one long row."""
    block, rows, row = slot.format.block, slot.rows, slot.row
    whole = math.lcm(block, WEIGHT_BLOCK) if slot.weights.dithered else block
    if row % whole == 0:
        rows, row = 1, rows * row
    numbers = (slot.tensor_key, slot.blocks_before, slot.weights_before, slot.part)
    return rows, row, -(-row // block), slot.numel, *numbers


def _compiled(module: ModuleType, names: list[str], suffix: str = "") -> dict[str, CFunction]:
    """Functions of a module, compiled before a step begins: one that has begun can be finished."""
    return {name: c_function(module, name + suffix) for name in names}


def _make_tables(batch: Batch) -> Tables:
    slots, rule = batch.slots, batch.rule
    members: dict[tuple, list[int]] = {}
    for t, slot in enumerate(slots):
        variant = (
            DTYPE_NAMES[slot.p.dtype],
            DTYPE_NAMES[slot.g.dtype],
            slot.format,
            slot.weights,
            slot.shifted,
        )
        members.setdefault(variant, []).append(t)
    names = [f"reduce_{k}" for k in range(len(rule.phases))]
    names.append("update")
    buckets = [
        Bucket(
            _compiled(modules.elements(rule, *variant), names, "_share"),
            _chunks(slots, group),
            [slots[t].p.numel() for t in group],
        )
        for variant, group in members.items()
    ]
    geometry = [_geometry(slot) for slot in slots]
    per_tensor = ["begin", *(f"combine_{k}" for k in range(len(rule.phases)))]
    per_tensor += ["keep"] if rule.kept() else []
    return Tables(
        rule=rule,
        buckets=buckets,
        per_tensor=_compiled(modules.scalars(rule), per_tensor),
        geometry=np.array(geometry, dtype=np.int64),
        scalars=np.zeros((len(slots), source.SCALARS + len(rule.scalars()))),
        address=np.zeros((len(slots), address_columns(rule)), dtype=np.int64),
        hyper=np.zeros((len(batch.parts), len(hyper_names(rule)))),
    )


def tables_for(batch: Batch) -> Tables:
    """The tables of a batch, with this step's addresses."""
    if batch.tables is None:
        batch.tables = _make_tables(batch)
    tables: Tables = batch.tables
    if tables.rows is not batch.addresses:
        tables.address[:], tables.rows = batch.addresses, batch.addresses
    if batch.reused:
        tables.address[:, G] = batch.gradient_addresses
        for place, address in batch.param_addresses.items():
            tables.address[place, P] = address
    return tables
