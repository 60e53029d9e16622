"""The GPU engine: the rules through Triton, one launch a pass for all tensors.

Kinds of tiles of which there are very many have a launch of their own.

Tables of addresses, shapes and tiles are built once per set of tensors and stay on the device;
addresses are sent again only when one changes. Hyperparameters, lr and the step are run-time values
in device memory, so nothing is recompiled and a step can be captured in a CUDA graph. Nothing
synchronizes and nothing is read back. Sums are formed per tile and added in a fixed order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ...batch import Batch
from ...codegen.module_cache import import_source
from ...formats import Format, Unit
from ...formats.layout import Layout
from ...rules import Rule
from .. import torch as torch_engine
from . import bindings
from .kinds import ALIGNED, WARPS, Kind, constants, formats_of, module_of
from .primitives import INTERPRETED
from .scalars import add_up
from .tables import LANES, Code, Tables, lanes, tables_for

# Sums are fused where the text says so (`rule_source`). Which others a compiler would fuse depends
# on what else is in a kernel: a tensor would not step to the same bits in every group.
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False}
# Registers of a thread that updates 16-bit weights and two moments of 8 bits, in whole tiles alone,
# by dither. The assembler would take 128 where it spills none into memory with as few: 10 programs
# share a multiprocessor then, not 8, and a step of AdamW8bit takes 1 to 4 % less time on an H200.
# (For less it takes fewer by itself, but would use all that it may; and what reads the numbers of
# two reductions, as LANS does, is spilled with Triton 3.6.)
REGISTERS = 96
ADDED = 4096  # tiles whose partial sums one program adds up


@cache
def kernels(rule: Rule, formats: tuple[Format, ...], ptx: bool) -> ModuleType:
    """The module of Triton kernels of a rule for tiles of these formats.

    Its name only helps readers: before Triton takes compiled code from its cache, it looks at the
    source of all that a kernel calls.
    """
    label = f"{rule.name}_triton{'_ptx' if ptx else ''}"
    return import_source(label, bindings.module(rule, formats, ptx), (triton.__version__,))


def takes_ptx(device: torch.device) -> bool:
    """Whether kernels for a device may hold machine instructions of NVIDIA GPUs since Ampere."""
    on_nvidia = device.type == "cuda" and torch.version.hip is None
    if not on_nvidia or INTERPRETED.value:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)  # what cvt.rn.f16x2.f32 needs


# Types of the kernels' arguments: all are addresses, what else they take are constants.
_POINTERS = {
    "address": "*i64", "geometry": "*i64", "work": "*i32", "hyper": "*fp64", "scalars_": "*fp64",
    "floats": "*fp32", "count": "*i64", "tables": "*fp32", "partial": "*fp32", "sums": "*fp64",
    "grad_scale": "*fp32", "found_inf": "*fp32",
}  # fmt: skip


def passes(rule: Rule) -> list[str]:
    """Names of the per-element kernels of one step, in order."""
    return [*(f"reduce_{k}" for k in range(len(rule.phases))), "update"]


def _options(rule: Rule, name: str, kinds: tuple[Kind, ...], ptx: bool) -> dict[str, Any]:
    """What a launch of a per-element kernel over these kinds is compiled with."""
    kind, coded = kinds[0], [moment for moment in rule.moments if not moment.exact]
    alone = name == "update" and len(kinds) == 1 and kind.whole and kind.align == ALIGNED
    narrow = kind.p.itemsize == 2 and kind.weights.extra == 0
    two = len(coded) == 2 and any(moment.stream for moment in coded)
    limited = two and len(rule.phases) < 2 and kind.format.bits == 8
    return {**OPTIONS, "maxnreg": REGISTERS} if ptx and alone and narrow and limited else OPTIONS


def compile_for(target: GPUTarget, rule: Rule, name: str, *given: tuple, **switches: bool) -> Any:
    """Compile one of a rule's kernels for a GPU that need not be there, as a launch would.

    Args:
        target: e.g. GPUTarget("cuda", 90, 32) or GPUTarget("hip", "gfx942", 64).
        rule: the rule.
        name: one of `passes`, "begin" or "combine_0", ...
        given: what `Kind`s are made of, one or more: dtypes of p and g, format, whole, ...
        switches: SCALED, GUARDED, MAXIMIZE, UNSCALE; False where not given.

    Returns:
        triton's CompiledKernel.
    """
    kinds = tuple(Kind(*each) for each in given)
    formats = formats_of(kinds)
    ptx = target.backend == "cuda" and target.arch >= 80  # as `takes_ptx`
    kernel = getattr(kernels(rule, formats, ptx), name)
    bound = {**constants(kinds, formats), **switches}
    names = kernel.arg_names
    signature = {argument: _POINTERS.get(argument, "constexpr") for argument in names}
    return triton.compile(
        ASTSource(
            kernel, signature,
            constexprs={
                (i,): bound.get(argument, False)
                for i, argument in enumerate(names)
                if argument not in _POINTERS
            },
            attrs={
                (i,): [["tt.divisibility", 16]]
                for i, argument in enumerate(names)
                if argument in _POINTERS
            },
        ),
        target=target,
        options=_options(rule, name, kinds, ptx),
    )  # fmt: skip


def _on(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch.get_device_module(device).device(device)


class TritonRun:
    """A step of one batch; see `batch.Run`."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.rule = batch, batch.rule
        self.phases = len(batch.rule.phases)
        self.device = batch.device
        self.ptx = takes_ptx(self.device)
        self.wrote = False
        clips = "gscale" in batch.rule.scalars()
        self.scaled = batch.maximize or batch.grad_scale is not None or clips
        with _on(self.device):
            self.tables: Tables = tables_for(batch)
            if self.tables.code is None:
                self.tables.code = self._code()
        self.kernels, self.code_tables, self.options = self.tables.code

    def _code(self) -> Code:
        """Which the tables keep: a rule's hash, by which to find it again, is slow."""
        using = self.rule, formats_of(self.tables.kinds), self.ptx
        update = [
            _options(self.rule, "update", each.kinds, self.ptx) for each in self.tables.launches
        ]
        return Code(kernels(*using), bindings.code_tables(*using, self.device), update)

    def _per_tensor_grid(self, in_program: int) -> tuple[int]:
        return (-(-len(self.batch.slots) // in_program),)

    def begin(self) -> None:
        batch, tables = self.batch, self.tables
        scale, guard = batch.grad_scale, batch.found_inf
        with _on(self.device):
            self.kernels.begin[self._per_tensor_grid(lanes(self.rule, self.rule.prepare))](
                tables.address, tables.geometry, tables.hyper, tables.scalars, tables.floats,
                tables.count,
                tables.hyper if scale is None else scale.to(self.device),
                tables.hyper if guard is None else guard.to(self.device),
                MAXIMIZE=batch.maximize, UNSCALE=scale is not None, GUARDED=guard is not None,
                **OPTIONS,
            )  # fmt: skip

    def _pass(self, name: str, *extra: Tensor, **more: bool) -> None:
        """The launches that take all tiles, if there are any."""
        tables, kernel = self.tables, getattr(self.kernels, name)
        with _on(self.device):
            for launch, of_update in zip(tables.launches, self.options, strict=True):
                options = of_update if name == "update" else OPTIONS
                kernel[(launch.programs,)](
                    tables.address, tables.geometry, launch.work, tables.floats, self.code_tables,
                    *extra, SCALED=self.scaled, **more, **launch.constants, **options,
                )  # fmt: skip
                self.wrote = self.wrote or name == "update"

    def reduce(self, phase: int) -> Tensor:
        tables, terms = self.tables, len(self.rule.phases[phase].sums)
        some = bool(self.batch.missing)  # whose sums nobody writes
        new = torch.zeros if some else torch.empty
        partial = new((tables.tiles, terms), dtype=torch.float32, device=self.device)
        self._pass(f"reduce_{phase}", partial, GUARDED=some)
        chunks = max(1, -(-tables.most_tiles // ADDED))
        shape = (len(self.batch.slots), terms, chunks)
        sums = torch.empty(shape, dtype=torch.float64, device=self.device)
        with _on(self.device):
            add_up[shape](
                partial, sums, tables.geometry, tables.tiles_of,
                TERMS=terms, ADDED=ADDED, **OPTIONS,
            )  # fmt: skip
        return sums[:, :, 0] if chunks == 1 else sums.sum(2)

    def combine(self, phase: int, sums: Tensor) -> None:
        tables, kernel = self.tables, getattr(self.kernels, f"combine_{phase}")
        in_program = lanes(self.rule, self.rule.phases[phase].combine)
        with _on(self.device):
            kernel[self._per_tensor_grid(in_program)](
                tables.address, tables.geometry, tables.hyper, tables.scalars, tables.floats,
                tables.count, sums.contiguous(), **OPTIONS,
            )  # fmt: skip

    def finish(self) -> None:
        guarded = self.batch.found_inf is not None or bool(self.batch.missing)
        self._pass("update", GUARDED=guarded)  # while whose kernel is compiled nothing is written
        self._keep()

    def _keep(self) -> None:
        """Store what lasts, if the rule has it."""
        if not self.rule.kept():
            return
        tables = self.tables
        with _on(self.device):
            self.kernels.keep[self._per_tensor_grid(LANES)](
                tables.address, tables.scalars, tables.count, **OPTIONS
            )


def start(batch: Batch) -> TritonRun:
    """Begin a step of a batch of slots of one device in fp32, bf16 or fp16."""
    return TritonRun(batch)


def _whole_tensors(
    name: str, by_torch: Callable, unit: Unit, given: Sequence[Tensor], layout: Layout,
    out: Sequence[Tensor],
) -> None:  # fmt: skip
    """Call this function of the format's module, or where it has none the torch engine's."""
    own = getattr(module_of(unit.format), name, None) if unit.format.triton else None
    if own is None:
        by_torch(unit, given, layout, out)
        return
    with _on(out[0].device):
        own(unit, given, layout, out, takes_ptx(out[0].device), OPTIONS)


def encode(unit: Unit, values: Sequence[Tensor], layout: Layout, out: Sequence[Tensor]) -> None:
    """Code contiguous tensors into the tensors `out` of a unit's parts; bad numbers give zero."""
    _whole_tensors("encode_tensors", torch_engine.encode, unit, values, layout, out)


def decode(unit: Unit, stored: Sequence[Tensor], layout: Layout, out: Sequence[Tensor]) -> None:
    """Write the numbers of a unit's moments into the contiguous tensors `out`."""
    _whole_tensors("decode_tensors", torch_engine.decode, unit, stored, layout, out)
