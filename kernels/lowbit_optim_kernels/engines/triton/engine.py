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
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ...codegen.module_cache import import_source
from ...formats import Unit
from ...formats.dynamic8 import triton as triton_codec
from ...formats.dynamic8 import triton_tables
from ...formats.layout import Layout
from ...plan import Batch, clips, phase_count
from ...rules import Rule
from . import plan as triton_plan
from . import source as triton_source
from .plan import TILE, Kind, Plan
from .primitives import INTERPRETED

NAME = "triton"
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
TYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
CHUNK = 4096  # tiles whose partial sums one program adds up
_HELPERS = (
    "formats.dynamic8.triton",
    "formats.dynamic8.triton_tables",
    "engines.triton.primitives",
)


@cache
def kernels(rule: Rule, ptx: bool) -> ModuleType:
    """The rule's module of Triton kernels."""
    helpers = [importlib.import_module(f"lowbit_optim_kernels.{name}") for name in _HELPERS]
    depends = (triton.__version__, *map(inspect.getsource, helpers))
    label = f"{rule.name}_triton{'_ptx' if ptx else ''}"
    return import_source(label, triton_source.module(rule, ptx), depends)


def takes_ptx(device: torch.device) -> bool:
    """Whether kernels for a device may hold machine instructions of NVIDIA GPUs since Ampere."""
    on_nvidia = device.type == "cuda" and torch.version.hip is None
    if not on_nvidia or INTERPRETED.value:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)  # what cvt.rn.f16x2.f32 needs


@cache
def constants(kinds: tuple[Kind, ...]) -> dict[str, Any]:
    """What makes a specialization of the per-element kernels: the kinds of tiles in one launch."""
    pieces = triton_plan.pieces(kinds)
    typed = ((TYPE[p], TYPE[g], *rest) for p, g, *rest in kinds)
    return {"KINDS": tuple((*kind, n) for kind, n in zip(typed, pieces, strict=True)), "NB": TILE}


_ELEMENTS = {
    "address": "*i64", "geometry": "*i64", "work": "*i32", "hyper": "*fp64", "scalars": "*fp64",
    "floats": "*fp32",
    "count": "*i64", "tables": "*fp32", "partial": "*fp32", "sums": "*fp64",
    "grad_scale": "*fp32", "found_inf": "*fp32",
}  # fmt: skip


def passes(rule: Rule) -> list[str]:
    """Names of the per-element kernels of one step, without percentile clipping."""
    return [*(f"reduce_{k}" for k in range(len(rule.phases))), "update"]


def compile_for(target: GPUTarget, rule: Rule, name: str, *kinds: Kind, **switches: bool) -> Any:
    """Compile one of a rule's kernels for a GPU that need not be there, as a launch would.

    Args:
        target: e.g. GPUTarget("cuda", 90, 32) or GPUTarget("hip", "gfx942", 64).
        rule: the rule.
        name: one of `passes`, "begin" or "combine_0", ...
        kinds: dtypes of p and g, bits, whole, alignment, one or more: see `triton_source`.
        switches: SCALED, GUARDED, MAXIMIZE, UNSCALE; False where not given.

    Returns:
        triton's CompiledKernel.
    """
    kernel = getattr(kernels(rule, target.backend == "cuda"), name)
    given = {**constants(kinds), **switches}
    names = kernel.arg_names
    signature = {argument: _ELEMENTS.get(argument, "constexpr") for argument in names}
    return triton.compile(
        ASTSource(
            kernel, signature,
            constexprs={
                (i,): given.get(argument, False)
                for i, argument in enumerate(names)
                if argument not in _ELEMENTS
            },
            attrs={
                (i,): [["tt.divisibility", 16]]
                for i, argument in enumerate(names)
                if argument in _ELEMENTS
            },
        ),
        target=target,
        options=OPTIONS,
    )  # fmt: skip


@triton.jit
def add_up(partial, sums, geometry, TERMS: tl.constexpr, GEOMETRY: tl.constexpr,
           CHUNK: tl.constexpr, NB: tl.constexpr):  # fmt: skip
    """sums[t, k, c] (fp64) = chunk c of tensor t's partial[:, k] (fp32), always in one order."""
    t = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1)
    c = tl.program_id(2)
    tiles = (tl.load(geometry + t * GEOMETRY + 2) + NB - 1) // NB
    first = tl.load(geometry + t * GEOMETRY + 3)
    at = c * CHUNK + tl.arange(0, CHUNK)
    part = tl.load(partial + (first + at) * TERMS + k, mask=at < tiles, other=0.0)
    at_sum = sums + (t * TERMS + k) * tl.num_programs(2) + c
    tl.store(at_sum, tl.sum(part.to(tl.float64), 0))


@triton.jit
def clip(address, scalars, floats, sums, percentile, STRIDE: tl.constexpr,
         WIDTH: tl.constexpr, FLOATS: tl.constexpr):  # fmt: skip
    """Percentile clipping of tensor t: record sums[t] = ||g||^2, then scale gscale[t].

    gnorm_vec: fp32 (100,), filled with -1 before the first record.
    """
    t = tl.program_id(0)
    square = tl.load(sums + t).to(tl.float32)
    at = scalars + t * WIDTH
    unclipped = tl.load(at)  # here, before the sums below make the warps wait for each other
    live = tl.load(scalars + t * WIDTH + 1) != 0.0
    good = tl.where(live & (square < float("inf")), 1, 0)  # 0 for NaN too
    history = tl.load(address + t * STRIDE + STRIDE - 1).to(tl.pointer_type(tl.float32))
    step = tl.load(tl.load(address + t * STRIDE + 2).to(tl.pointer_type(tl.int64)))
    lane = tl.arange(0, 128)
    used = lane < 100
    seen = tl.load(history + lane, mask=used, other=float("inf"))
    # A fresh history is filled throughout. (Its first slot is read out of `seen`: another warp may
    # have stored there by the time that this one would load it.)
    one_slot = tl.where(tl.sum(tl.where(lane == 0, seen, 0.0), 0) < 0.0, 0, 1)
    here = used & ((lane - (step % 100).to(tl.int32)) * one_slot == 0) & (lane * 0 + good == 1)
    seen = tl.where(here, square, seen)
    tl.store(history + lane, seen, mask=here)
    before = (seen[None, :] < seen[:, None]) | (
        (seen[None, :] == seen[:, None]) & (lane[None, :] < lane[:, None])
    )
    rank = tl.sum(before.to(tl.int32), 1)
    limit = tl.sqrt(tl.sum(tl.where(rank == tl.load(percentile), seen, 0.0), 0))
    norm = tl.sqrt(square)
    scale = tl.where((good == 1) & (norm > limit), limit / tl.where(norm > 0.0, norm, 1.0), 1.0)
    gscale = unclipped * scale
    tl.store(at, gscale)
    tl.store(floats + t * FLOATS, gscale)


class TritonRun:
    """A step of one batch; see `plan.Run`."""

    def __init__(self, batch: Batch) -> None:
        for slot in batch.slots:
            if slot.g.dtype not in TYPE:
                slot.g = slot.g.float()
        self.batch, self.rule = batch, batch.rule
        self.phases = phase_count(batch)
        self.device = batch.slots[0].p.device
        self.ptx = takes_ptx(self.device)
        self.kernels = kernels(self.rule, self.ptx)
        self.tables = triton_tables.packed(self.ptx, self.device)
        self.scaled = batch.maximize or batch.grad_scale is not None or clips(batch)
        with self._guard():
            self.plan: Plan = triton_plan.current(batch)

    def _guard(self) -> contextlib.AbstractContextManager:
        """Triton launches on the current device."""
        if self.device.type == "cpu":
            return contextlib.nullcontext()
        return torch.get_device_module(self.device).device(self.device)

    def _per_tensor_grid(self) -> tuple[int]:
        return (-(-len(self.batch.slots) // triton_source.LANES),)

    def begin(self) -> None:
        batch, plan = self.batch, self.plan
        scale, guard = batch.grad_scale, batch.found_inf
        with self._guard():
            self.kernels.begin[self._per_tensor_grid()](
                plan.address, plan.geometry, plan.hyper, plan.scalars, plan.floats, plan.count,
                plan.hyper if scale is None else scale.to(self.device),
                plan.hyper if guard is None else guard.to(self.device),
                MAXIMIZE=batch.maximize, UNSCALE=scale is not None, GUARDED=guard is not None,
                **OPTIONS,
            )  # fmt: skip

    def _pass(self, name: str, *extra: Tensor, **more: bool) -> None:
        """One launch for all tiles, unless there are none."""
        plan = self.plan
        if not plan.kinds:
            return
        with self._guard():
            getattr(self.kernels, name)[(len(plan.work),)](
                plan.address, plan.geometry, plan.work, plan.floats, self.tables, *extra,
                SCALED=self.scaled, **more, **constants(plan.kinds), **OPTIONS,
            )  # fmt: skip

    def reduce(self, phase: int) -> Tensor:
        plan, first = self.plan, clips(self.batch)
        name, terms = "reduce_clip", 1
        if phase >= first:
            name = f"reduce_{phase - first}"
            terms = len(self.rule.phases[phase - first].terms.gives)
        partial = torch.empty((plan.tiles, terms), dtype=torch.float32, device=self.device)
        self._pass(name, partial)
        chunks = max(1, -(-plan.most_tiles // CHUNK))
        shape = (len(self.batch.slots), terms, chunks)
        sums = torch.empty(shape, dtype=torch.float64, device=self.device)
        with self._guard():
            add_up[shape](
                partial, sums, plan.geometry, TERMS=terms, GEOMETRY=triton_source.GEOMETRY,
                CHUNK=CHUNK, NB=TILE, **OPTIONS,
            )  # fmt: skip
        return sums[:, :, 0] if chunks == 1 else sums.sum(2)

    def combine(self, phase: int, sums: Tensor) -> None:
        plan, first, count = self.plan, clips(self.batch), len(self.batch.slots)
        sums = sums.contiguous()
        with self._guard():
            if first and phase == 0:
                clip[(count,)](
                    plan.address, plan.scalars, plan.floats, sums, plan.percentile,
                    STRIDE=plan.address.shape[1], WIDTH=plan.scalars.shape[1],
                    FLOATS=plan.floats.shape[1], **OPTIONS,
                )  # fmt: skip
                return
            getattr(self.kernels, f"combine_{phase - first}")[self._per_tensor_grid()](
                plan.address, plan.geometry, plan.hyper, plan.scalars, plan.floats, plan.count,
                sums, **OPTIONS,
            )  # fmt: skip

    def finish(self) -> None:
        try:
            self._pass("update", GUARDED=self.batch.found_inf is not None)
        except BaseException:  # while it was compiled: nothing has been launched
            self.cancel()
            raise

    def cancel(self) -> None:
        counts = [slot.step for slot in self.batch.slots]
        if self.batch.found_inf is None:
            torch._foreach_sub_(counts, 1)
            return
        live = (self.batch.found_inf.to(self.device) == 0).to(counts[0].dtype).reshape(())
        torch._foreach_sub_(counts, [live] * len(counts))


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
        kernel[(-(-blocks // TILE),)](*arguments, **constants, NB=TILE, **OPTIONS)


def encode(unit: Unit, values: Sequence[Tensor], layout: Layout, out: Sequence[Tensor]) -> None:
    """Code contiguous tensors into the tensors `out` of a unit's parts; bad numbers give zero."""
    count, device = len(values), values[0].device
    ptx, blocks = takes_ptx(device), layout.rows * layout.blocks_per_row
    table = triton_tables.packed(ptx, device)
    for k, (moment, x) in enumerate(zip(unit.moments, values, strict=True)):
        _launch_by_blocks(
            triton_codec.quantize_kernel, device, blocks, x, out[k], out[count + k], table,
            layout.row, blocks, SIGNED=moment.signed, PTX=ptx,
        )  # fmt: skip


def decode(unit: Unit, stored: Sequence[Tensor], layout: Layout, out: Sequence[Tensor]) -> None:
    """Write the numbers of a unit's moments into the contiguous tensors `out`."""
    count, device = len(out), out[0].device
    ptx, blocks = takes_ptx(device), layout.rows * layout.blocks_per_row
    table = triton_tables.packed(ptx, device)
    for k, (moment, x) in enumerate(zip(unit.moments, out, strict=True)):
        _launch_by_blocks(
            triton_codec.dequantize_kernel, device, blocks, stored[k], stored[count + k], x, table,
            layout.row, blocks, SIGNED=moment.signed, PTX=ptx,
        )  # fmt: skip
