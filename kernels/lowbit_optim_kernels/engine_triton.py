"""The GPU engine: the rules through Triton, one launch per pass for all tensors of a group.

Tables of addresses, shapes and tiles are built once per set of tensors and stay on the device;
addresses are sent again only when one changes. Hyperparameters, lr and the step are run-time values
in device memory, so nothing is recompiled and a step can be captured in a CUDA graph. Nothing
synchronizes and nothing is read back. Sums are formed per tile and added in a fixed order.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import triton_codec, triton_source
from .dynamic8 import BLOCK
from .lower import hyper_names, import_source
from .plan import Batch, Slot, clips, phase_count
from .rules import Rule

NAME = "triton"
TILE = 8  # blocks per program
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
TYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_HELPERS = ("triton_codec", "triton_primitives")


@cache
def kernels(rule: Rule) -> ModuleType:
    """The rule's module of Triton kernels."""
    helpers = [importlib.import_module(f".{name}", __package__) for name in _HELPERS]
    depends = (triton.__version__, *map(inspect.getsource, helpers))
    return import_source(f"{rule.name}_triton", triton_source.module(rule), depends)


@triton.jit
def add_up(partial, sums, ranges, TERMS: tl.constexpr):
    """sums[t, k] (fp64) = partial[ranges[t]:ranges[t + 1], k] (fp32), always in the same order."""
    t = tl.program_id(0)
    k = tl.program_id(1)
    start = tl.load(ranges + t)
    stop = tl.load(ranges + t + 1)
    lane = tl.arange(0, 1024)
    total = tl.zeros([1024], tl.float64)
    for first in range(start, stop, 1024):
        at = first + lane
        part = tl.load(partial + at * TERMS + k, mask=at < stop, other=0.0)
        total += part.to(tl.float64)
    tl.store(sums + t * TERMS + k, tl.sum(total, 0))


@triton.jit
def clip(address, scalars, sums, percentile, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Percentile clipping of tensor t: record sums[t] = ||g||^2, then scale gscale[t].

    gnorm_vec: fp32 (100,), filled with -1 before the first record.
    """
    t = tl.program_id(0)
    square = tl.load(sums + t).to(tl.float32)
    live = tl.load(scalars + t * WIDTH + 1) != 0.0
    good = tl.where(live & (square < float("inf")), 1, 0)  # 0 for NaN too
    history = tl.load(address + t * STRIDE + STRIDE - 1).to(tl.pointer_type(tl.float32))
    step = tl.load(tl.load(address + t * STRIDE + 2).to(tl.pointer_type(tl.float32)))
    lane = tl.arange(0, 128)
    used = lane < 100
    seen = tl.load(history + lane, mask=used, other=float("inf"))
    one_slot = tl.where(tl.load(history) < 0.0, 0, 1)  # a fresh history is filled throughout
    here = used & ((lane - step.to(tl.int32) % 100) * one_slot == 0) & (lane * 0 + good == 1)
    seen = tl.where(here, square, seen)
    tl.store(history + lane, seen, mask=here)
    before = (seen[None, :] < seen[:, None]) | (
        (seen[None, :] == seen[:, None]) & (lane[None, :] < lane[:, None])
    )
    rank = tl.sum(before.to(tl.int32), 1)
    limit = tl.sqrt(tl.sum(tl.where(rank == tl.load(percentile), seen, 0.0), 0))
    norm = tl.sqrt(square)
    scale = tl.where((good == 1) & (norm > limit), limit / tl.where(norm > 0.0, norm, 1.0), 1.0)
    at = scalars + t * WIDTH
    tl.store(at, tl.load(at) * scale)


@dataclass
class _Bucket:
    """Slots of a batch that one specialization of the kernels takes."""

    constants: dict
    work: Tensor  # int64 (programs, 2): tensor, first block
    ranges: Tensor  # int64 (slots + 1,): programs of each tensor


@dataclass
class _Plan:
    """Device tables of a batch, kept from step to step."""

    key: tuple
    buckets: list[_Bucket]
    geometry: Tensor
    address: Tensor
    scalars: Tensor
    hyper: Tensor
    count: Tensor
    percentile: Tensor
    pointers: list[list[int]] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)


def _aligned(slot: Slot) -> bool:
    wide = (slot.p, slot.g, *slot.moments)
    return slot.row % 16 == 0 and all(x.data_ptr() % 16 == 0 for x in wide)


def _key(slot: Slot) -> tuple:
    kinds = (slot.p.dtype, slot.g.dtype, slot.bits, _aligned(slot))
    return (*kinds, slot.rows, slot.row, slot.numel)


def _constants(slot: Slot, rule: Rule) -> dict:
    aligned = _aligned(slot)
    return {
        "P_TYPE": TYPE[slot.p.dtype],
        "G_TYPE": TYPE[slot.g.dtype],
        "BITS": slot.bits if rule.moments else 32,
        "FLAT": slot.rows == 1 or slot.row % BLOCK == 0,
        "ALIGN": 16 if aligned else 1,
        "POINTER_ALIGN": 16 if aligned else 1,
        "NB": TILE,
    }


def _geometry(slot: Slot) -> tuple[int, int, int, int]:
    """rows, row, blocks per row, global numel; whole blocks in rows count as one long row."""
    if slot.row % BLOCK == 0:
        numel = slot.rows * slot.row
        return 1, numel, numel // BLOCK, slot.numel
    return slot.rows, slot.row, -(-slot.row // BLOCK), slot.numel


def _bucket(constants: dict, members: list[int], geometry: list, device: torch.device) -> _Bucket:
    work, ranges = [], [0]
    first_block = []
    for t in range(len(geometry)):
        blocks = geometry[t][0] * geometry[t][2] if t in set(members) else 0
        programs = -(-blocks // TILE)
        if programs:
            starts = torch.arange(programs, dtype=torch.int64) * TILE
            first_block.append(starts)
            work.append(torch.full((programs,), t, dtype=torch.int64))
        ranges.append(ranges[-1] + programs)
    empty = torch.zeros(0, dtype=torch.int64)
    columns = (torch.cat([empty, *work]), torch.cat([empty, *first_block]))
    table = torch.stack(columns, dim=1).contiguous().to(device)
    return _Bucket(constants, table, torch.tensor(ranges, dtype=torch.int64).to(device))


def _make_plan(batch: Batch, key: tuple) -> _Plan:
    slots, rule, device = batch.slots, batch.rule, batch.slots[0].p.device
    members: dict[tuple, list[int]] = {}
    for t, slot in enumerate(slots):
        members.setdefault(tuple(_constants(slot, rule).items()), []).append(t)
    geometry = [_geometry(slot) for slot in slots]
    width = triton_source.SCALARS + len(rule.scalars())
    columns = triton_source.address_columns(rule)
    names = hyper_names(rule)

    def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return _Plan(
        key=key,
        buckets=[_bucket(dict(c), m, geometry, device) for c, m in members.items()],
        geometry=torch.tensor(geometry, dtype=torch.int64).to(device),
        address=zeros(len(slots), columns, dtype=torch.int64),
        scalars=zeros(len(slots), width),
        hyper=zeros(max(1, len(names))),
        count=torch.tensor([len(slots)], dtype=torch.int64).to(device),
        percentile=torch.tensor([batch.percentile], dtype=torch.int64).to(device),
    )


class TritonRun:
    """A step of one batch; see `plan.Run`."""

    def __init__(self, batch: Batch) -> None:
        for slot in batch.slots:
            if slot.g.dtype not in TYPE:
                slot.g = slot.g.float()
        self.batch, self.rule = batch, batch.rule
        self.phases = phase_count(batch)
        self.device = batch.slots[0].p.device
        self.kernels = kernels(self.rule)
        self.tables = triton_codec.tables(self.device)
        key = (self.rule, batch.percentile, *map(_key, batch.slots))
        plan = batch.cache.get("plan")
        if plan is None or plan.key != key:
            plan = batch.cache["plan"] = _make_plan(batch, key)
        self.plan: _Plan = plan
        self._send_addresses()
        self._send_hyperparameters()

    def _guard(self) -> contextlib.AbstractContextManager:
        if self.device.type == "cpu":
            return contextlib.nullcontext()
        return torch.get_device_module(self.device).device(self.device)

    def _send(self, target: Tensor, values: list) -> None:
        """Copy numbers to a device table without waiting for the device."""
        source = torch.tensor(values, dtype=target.dtype, pin_memory=self.device.type == "cuda")
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.plan.kept.append(source)  # a replay reads it again
        target.copy_(source.reshape(target.shape), non_blocking=True)

    def _send_addresses(self) -> None:
        moments = len(self.rule.moments)
        pointers = []
        for slot in self.batch.slots:
            row = [slot.p.data_ptr(), slot.g.data_ptr(), slot.step.data_ptr()]
            row += [x.data_ptr() for x in slot.moments]
            row += [x.data_ptr() for x in slot.absmax] if slot.absmax else [0] * moments
            row.append(0 if slot.gnorm_vec is None else slot.gnorm_vec.data_ptr())
            pointers.append(row)
        if pointers != self.plan.pointers:
            self._send(self.plan.address, pointers)
            self.plan.pointers = pointers

    def _send_hyperparameters(self) -> None:
        names = hyper_names(self.rule)
        given = [self.batch.hyper[name] for name in names]
        on_host = [0.0 if isinstance(value, Tensor) else float(value) for value in given]
        if on_host and on_host != self.plan.values:
            self._send(self.plan.hyper, on_host)
            self.plan.values = on_host
        for i, value in enumerate(given):
            if isinstance(value, Tensor):
                self.plan.hyper[i].copy_(value.reshape(()), non_blocking=True)

    def _per_tensor_grid(self) -> tuple[int]:
        return (-(-len(self.batch.slots) // triton_source.LANES),)

    def begin(self) -> None:
        batch, plan = self.batch, self.plan
        scale, guard = batch.grad_scale, batch.found_inf
        with self._guard():
            self.kernels.begin[self._per_tensor_grid()](
                plan.address, plan.geometry, plan.hyper, plan.scalars, plan.count,
                plan.hyper if scale is None else scale.to(self.device),
                plan.hyper if guard is None else guard.to(self.device),
                MAXIMIZE=batch.maximize, SCALED=scale is not None, GUARDED=guard is not None,
            )  # fmt: skip

    def _pass(self, name: str, bucket: _Bucket, *extra: Tensor, **constants: bool) -> None:
        plan = self.plan
        if len(bucket.work) == 0:
            return
        with self._guard():
            getattr(self.kernels, name)[(len(bucket.work),)](
                plan.address, plan.geometry, bucket.work, plan.hyper, plan.scalars, *self.tables,
                *extra, **constants, **bucket.constants, **OPTIONS,
            )  # fmt: skip

    def reduce(self, phase: int) -> Tensor:
        first = clips(self.batch)
        if first and phase == 0:
            name, terms = "reduce_clip", 1
        else:
            name, terms = f"reduce_{phase - first}", len(self.rule.phases[phase - first].terms.gives)
        count = len(self.batch.slots)
        total = None
        for bucket in self.plan.buckets:
            shape = (max(1, len(bucket.work)), terms)
            partial = torch.empty(shape, dtype=torch.float32, device=self.device)
            self._pass(name, bucket, partial)
            sums = torch.empty((count, terms), dtype=torch.float64, device=self.device)
            with self._guard():
                add_up[(count, terms)](partial, sums, bucket.ranges, TERMS=terms)
            total = sums if total is None else total + sums
        assert total is not None
        return total

    def combine(self, phase: int, sums: Tensor) -> None:
        plan, first, count = self.plan, clips(self.batch), len(self.batch.slots)
        with self._guard():
            if first and phase == 0:
                clip[(count,)](
                    plan.address, plan.scalars, sums, plan.percentile,
                    STRIDE=plan.address.shape[1], WIDTH=plan.scalars.shape[1],
                )  # fmt: skip
                return
            getattr(self.kernels, f"combine_{phase - first}")[self._per_tensor_grid()](
                plan.address, plan.geometry, plan.hyper, plan.scalars, plan.count, sums
            )

    def finish(self) -> None:
        for bucket in self.plan.buckets:
            self._pass("update", bucket, GUARDED=self.batch.found_inf is not None)


def start(batch: Batch) -> TritonRun:
    """Begin a step of a batch of slots of one device in fp32, bf16 or fp16."""
    return TritonRun(batch)


def _launch_by_blocks(kernel, device: torch.device, blocks: int, *arguments, **constants) -> None:
    if blocks == 0:
        return
    guard = contextlib.nullcontext()
    if device.type != "cpu":
        guard = torch.get_device_module(device).device(device)
    with guard:
        kernel[(-(-blocks // TILE),)](*arguments, **constants, NB=TILE, num_warps=4)


def quantize(x: Tensor, signed: bool, rows: int, row: int, codes: Tensor, absmax: Tensor) -> None:
    """Quantize contiguous x of rows x row elements into codes and absmax; bad numbers give zero."""
    table = triton_codec.tables(x.device)[2 if signed else 3]
    blocks = absmax.numel()
    _launch_by_blocks(
        triton_codec.quantize_kernel, x.device, blocks, x, codes, absmax, table, row, blocks,
        SIGNED=signed,
    )  # fmt: skip


def dequantize(codes: Tensor, absmax: Tensor, signed: bool, rows: int, row: int, out: Tensor) -> None:
    """Write the values of codes (rows x row) with scales absmax into out."""
    table = triton_codec.tables(codes.device)[0 if signed else 1]
    blocks = absmax.numel()
    _launch_by_blocks(
        triton_codec.dequantize_kernel, codes.device, blocks, codes, absmax, out, table, row, blocks
    )
