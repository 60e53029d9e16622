"""The CPU engine: the rules through Numba and LLVM, all tensors of a group in one call per pass.

Blocks are dealt out in chunks to threads (`threads`). Results do not depend on their number:
sums are formed per chunk and then added in a fixed order.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import llvmlite
import numba
import numpy as np
import torch
from torch import Tensor

from ... import dither, plan, rules, weights
from ...codegen.analysis import hyper_names
from ...codegen.module_cache import import_source
from ...formats import Format, Unit
from ...formats.layout import Layout
from ...plan import WEIGHT_BLOCK, Batch, G, Slot, address_columns
from ...rules import Moment, Rule
from .. import torch as engine_torch
from . import source as numba_source
from . import threads as numba_threads
from .cache import CFunction, c_function

KIND = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
CHUNK = 1 << 14  # elements, in whole blocks
ALONE = 1 << 16  # elements; fewer are not worth waking a thread for

_HELPERS = ("cache", "dither", "element", "inner", "memory", "scalar", "vector")


@cache
def _depends(format: Format | None = None) -> tuple[str, ...]:
    """What compiled code depends on beside its own text."""
    modules = [importlib.import_module(f"{__package__}.{name}") for name in _HELPERS]
    modules += [dither, plan, rules, weights, importlib.import_module(numba_source.WEIGHTS)]
    code = None if format is None else numba_source.code_of(format)
    if code is not None:
        modules += [sys.modules[type(format).__module__], code, *getattr(code, "DEPENDS", ())]
    versions = (numba.__version__, llvmlite.__version__, np.__version__)
    return (*versions, *map(inspect.getsource, modules))


@cache
def _scalars(rule: Rule) -> ModuleType:
    source = numba_source.scalar_module(rule)
    return import_source(f"{rule.name}_scalar", source, _depends())


@cache
def _elements(
    rule: Rule, p_kind: str, g_kind: str, format: Format, stored: weights.Weights, shifted: bool
) -> ModuleType:
    source = numba_source.element_module(rule, p_kind, g_kind, format, stored, shifted)
    return import_source(f"{rule.name}_{p_kind}_{g_kind}_{format.name}", source, _depends(format))


@cache
def _codec(format: Format) -> ModuleType:
    return import_source(
        f"codec_{format.name}", numba_source.codec_module(format), _depends(format)
    )


@dataclass
class _Bucket:
    """Slots of a batch that one compiled function takes, and how they are cut up."""

    passes: dict[str, CFunction]
    chunks: np.ndarray  # int64 (chunks, 3): tensor, first block, blocks
    elements: int

    def __post_init__(self) -> None:
        self.table = self.chunks.ctypes.data

    def add_up(self, partial: np.ndarray, sums: np.ndarray) -> None:
        """Add terms of the chunks (chunks, terms) to those of tensors, in the chunks' order."""
        tensors, terms = self.chunks[:, :1], sums.shape[1]
        places = (tensors * terms + np.arange(terms)).ravel()
        sums += np.bincount(places, partial.ravel(), sums.size).reshape(sums.shape)


@dataclass
class _Plan:
    """What depends only on the shapes, dtypes and rule of a batch; kept from step to step."""

    buckets: list[_Bucket]
    per_tensor: dict[str, CFunction]
    geometry: np.ndarray
    scalars: np.ndarray
    address: np.ndarray

    def __post_init__(self) -> None:
        self.tables = [array.ctypes.data for array in (self.address, self.geometry, self.scalars)]


def _chunks(slots: list[Slot], members: list[int]) -> np.ndarray:
    rows = []
    for t in members:
        block = slots[t].format.block
        blocks, chunk = slots[t].rows * -(-slots[t].row // block), max(1, CHUNK // block)
        rows += [(t, b, min(chunk, blocks - b)) for b in range(0, blocks, chunk)]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _geometry(slot: Slot) -> tuple[int, ...]:
    """A row of the table that `passes` describes; rows of whole blocks are one long row."""
    block, rows, row = slot.format.block, slot.rows, slot.row
    whole = math.lcm(block, WEIGHT_BLOCK) if slot.weights.dithered else block
    if row % whole == 0:
        rows, row = 1, rows * row
    numbers = (slot.tensor_key, slot.blocks_before, slot.weights_before)
    return rows, row, -(-row // block), slot.numel, *numbers


def _compiled(module: ModuleType, names: list[str], suffix: str = "") -> dict[str, CFunction]:
    """Functions of a module, compiled before a step begins: one that has begun can be finished."""
    return {name: c_function(module, name + suffix) for name in names}


def _make_plan(batch: Batch) -> _Plan:
    slots, rule = batch.slots, batch.rule
    members: dict[tuple, list[int]] = {}
    for t, slot in enumerate(slots):
        kinds = (KIND[slot.p.dtype], KIND[slot.g.dtype], slot.format, slot.weights, slot.shifted)
        members.setdefault(kinds, []).append(t)
    names = [f"reduce_{k}" for k in range(len(rule.phases))]
    names.append("update")
    buckets = [
        _Bucket(
            _compiled(_elements(rule, *kinds), names, "_share"),
            _chunks(slots, group),
            sum(slots[t].p.numel() for t in group),
        )
        for kinds, group in members.items()
    ]
    geometry = [_geometry(slot) for slot in slots]
    per_tensor = ["begin", *(f"combine_{k}" for k in range(len(rule.phases)))]
    per_tensor += ["keep"] if rule.kept() else []
    return _Plan(
        buckets=buckets,
        per_tensor=_compiled(_scalars(rule), per_tensor),
        geometry=np.array(geometry, dtype=np.int64),
        scalars=np.zeros((len(slots), numba_source.SCALARS + len(rule.scalars()))),
        address=np.zeros((len(slots), address_columns(rule)), dtype=np.int64),
    )


def _plan(batch: Batch) -> _Plan:
    if batch.tables is None:
        batch.tables = _make_plan(batch)
    plan: _Plan = batch.tables
    if batch.reused:
        plan.address[:, G] = batch.gradient_addresses
    else:
        plan.address[:] = batch.addresses
    return plan


class NumbaRun:
    """A step of one batch; see `plan.Run`."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.phases = len(batch.rule.phases)
        self.plan = _plan(batch)
        values = [float(batch.hyper[name]) for name in hyper_names(batch.rule)]
        self.hyper = np.array(values, dtype=np.float64)
        self.hyper_table = self.hyper.ctypes.data
        self.live = batch.found_inf is None or float(batch.found_inf) == 0.0
        self.threads = torch.get_num_threads()

    def begin(self) -> None:
        scale = -1.0 if self.batch.maximize else 1.0
        if self.batch.grad_scale is not None:
            scale /= float(self.batch.grad_scale)
        self.plan.scalars[:, numba_source.GSCALE] = scale
        self._per_tensor("begin")

    def reduce(self, phase: int) -> Tensor:
        terms = len(self.batch.rule.phases[phase].sums)
        sums = np.zeros((len(self.batch.slots), terms))
        for bucket in self.plan.buckets:
            partial = np.empty((len(bucket.chunks), terms))
            self._pass(bucket, f"reduce_{phase}", partial)
            bucket.add_up(partial, sums)
        return torch.from_numpy(sums)

    def combine(self, phase: int, sums: Tensor) -> None:
        self._per_tensor(f"combine_{phase}", sums.contiguous().numpy())

    def finish(self) -> None:
        if not self.live:
            return
        for bucket in self.plan.buckets:
            self._pass(bucket, "update")
        if self.batch.rule.kept():
            self._per_tensor("keep")

    def cancel(self) -> None:
        if self.live:
            torch._foreach_sub_([slot.step for slot in self.batch.slots], 1)

    def _per_tensor(self, name: str, sums: np.ndarray | None = None) -> None:
        address, geometry, scalars = self.plan.tables
        words = [len(self.batch.slots), address, geometry, self.hyper_table, scalars]
        words += [0 if sums is None else sums.ctypes.data, int(self.live)]
        numba_threads.call(self.plan.per_tensor[name], words)

    def _pass(self, bucket: _Bucket, name: str, partial: np.ndarray | None = None) -> None:
        address, geometry, scalars = self.plan.tables
        work = [address, geometry, bucket.table, self.hyper_table, scalars]
        if partial is not None:
            work.append(partial.ctypes.data)
        threads = self.threads if bucket.elements > ALONE else 1
        numba_threads.run(bucket.passes[name], len(bucket.chunks), threads, work)


def start(batch: Batch) -> NumbaRun:
    """Begin a step of a batch of CPU slots in fp32, bf16 or fp16."""
    return NumbaRun(batch)


def encode(unit: Unit, values: Sequence[Tensor], layout: Layout, out: Sequence[Tensor]) -> None:
    """Code contiguous tensors into the tensors `out` of a unit's parts; bad numbers give zero.

    By the format's functions for whole tensors of one moment, else by torch operators.
    """
    if not numba_source.codes_tensors(unit.format):
        engine_torch.encode(unit, values, layout, out)
        return
    for moment, x in zip(unit.moments, values, strict=True):
        _code("encode_tensor", moment, x.float(), _stored(unit, moment, out), layout, unit.format)


def decode(unit: Unit, stored: Sequence[Tensor], layout: Layout, out: Sequence[Tensor]) -> None:
    """Write the numbers of a unit's moments into the contiguous tensors `out`; see `encode`."""
    if not numba_source.codes_tensors(unit.format):
        engine_torch.decode(unit, stored, layout, out)
        return
    for moment, x in zip(unit.moments, out, strict=True):
        wide = x if x.dtype == torch.float32 else torch.empty_like(x, dtype=torch.float32)
        _code("decode_tensor", moment, wide, _stored(unit, moment, stored), layout, unit.format)
        if wide is not x:
            x.copy_(wide)


def _stored(unit: Unit, moment: Moment, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of one moment, of a format that codes each by itself."""
    own = unit.format.parts((moment,))
    return [x for part, x in zip(unit.parts, tensors, strict=True) if part in own]


def _code(
    name: str, moment: Moment, x: Tensor, stored: list[Tensor], layout: Layout, format: Format
) -> None:
    share = f"{numba_source.tensor_function(name, moment.signed)}_share"
    threads = torch.get_num_threads() if layout.rows * layout.row > ALONE else 1
    function = c_function(_codec(format), share)
    work = [layout.row, *(tensor.data_ptr() for tensor in (x, *stored))]
    numba_threads.run(function, layout.rows * layout.blocks_per_row, threads, work)
