"""The GPU engine: the rules through Triton, one launch a pass for all tensors.

Kinds of tiles of which there are very many have a launch of their own.

Tables of addresses, shapes and tiles are built once per set of tensors and stay on the device;
addresses are sent again only when one changes. Hyperparameters, lr and the step are run-time values
in device memory, so nothing is recompiled and a step can be captured in a CUDA graph. Nothing
synchronizes and nothing is read back. Sums are formed per tile and added in a fixed order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType, ModuleType
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
from .scalars import add_chunks, add_up
from .tables import LANES, Code, Tables, lanes, tables_for

# Sums are fused where the text says so (`rule_source`). Which others a compiler would fuse depends
# on what else is in a kernel: a tensor would not step to the same bits in every group.
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False}
NONE: Mapping[str, Any] = MappingProxyType({})
# Registers of a thread that updates 16-bit weights and two moments of 8 bits, in whole tiles alone,
# by dither. The assembler would take 128 where it spills none into memory with as few: 10 programs
# share a multiprocessor then, not 8, and a step of AdamW8bit takes 1 to 4 % less time on an H200.
# (For less it takes fewer by itself, but would use all that it may; and what reads the numbers of
# two reductions, as LANS does, is spilled with Triton 3.6.)
REGISTERS = 96
ADDED = 4096  # tiles whose partial sums one program adds up
CHUNKS_AT_ONCE = 256  # of which another one adds up so many at a time


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
        self.on = _on(self.device)
        self.wrote = False
        with self.on:
            self.tables: Tables = tables_for(batch)
            if self.tables.code is None:
                self.tables.code = self._code()
        self.code = self.tables.code

    def _code(self) -> Code:
        """Which the tables keep: a rule's hash, by which to find it again, is slow."""
        batch, ptx = self.batch, takes_ptx(self.device)
        using = self.rule, formats_of(self.tables.kinds), ptx
        update = [_options(self.rule, "update", each.kinds, ptx) for each in self.tables.launches]
        clips = "gscale" in self.rule.scalars()
        scaled = batch.maximize or batch.grad_scale is not None or clips
        return Code(kernels(*using), bindings.code_tables(*using, self.device), update, scaled)

    def _launch(
        self, key: Any, kernel: Any, programs: tuple[int, int, int], tensors: Sequence[Tensor],
        constants: Mapping[str, Any] = NONE, options: Mapping[str, Any] = OPTIONS,
    ) -> None:  # fmt: skip
        """See `Compiled.launch`."""
        with self.on:
            self.tables.compiled.launch(key, kernel, programs, tensors, constants, options)

    def _of_tensors(
        self, name: str, in_program: int, tensors: Sequence[Tensor], key: Any,
        constants: Mapping[str, Any] = NONE,
    ) -> None:  # fmt: skip
        """Launch a kernel that takes so many tensors a program."""
        programs = -(-len(self.batch.slots) // in_program)
        kernel = getattr(self.code.kernels, name)
        self._launch(key, kernel, (programs, 1, 1), tensors, constants)

    def begin(self) -> None:
        batch, tables = self.batch, self.tables
        scale, guard = batch.grad_scale, batch.found_inf
        tensors = (
            tables.address, tables.geometry, tables.hyper, tables.scalars, tables.floats,
            tables.count,
            tables.hyper if scale is None else scale.to(self.device),
            tables.hyper if guard is None else guard.to(self.device),
        )  # fmt: skip
        constants = {
            "MAXIMIZE": batch.maximize, "UNSCALE": scale is not None, "GUARDED": guard is not None,
        }  # fmt: skip
        key = "begin" if scale is None and guard is None else None  # a scaler's lie anywhere
        self._of_tensors("begin", lanes(self.rule, self.rule.prepare), tensors, key, constants)

    def _pass(self, name: str, guarded: bool, *extra: Tensor) -> None:
        """The launches that take all tiles, if there are any."""
        tables, code = self.tables, self.code
        kernel = getattr(code.kernels, name)
        for i, (launch, of_update) in enumerate(zip(tables.launches, code.options, strict=True)):
            tensors = (
                tables.address, tables.geometry, launch.work, tables.floats, code.tables, *extra
            )  # fmt: skip
            constants = {"GUARDED": guarded, "SCALED": code.scaled, **launch.constants}
            options = of_update if name == "update" else OPTIONS
            programs = launch.programs, 1, 1
            self._launch((name, i, guarded), kernel, programs, tensors, constants, options)
            self.wrote = self.wrote or name == "update"

    def reduce(self, phase: int) -> Tensor:
        tables, terms = self.tables, len(self.rule.phases[phase].sums)
        some = bool(self.batch.missing)  # whose sums nobody writes
        new = torch.zeros if some else torch.empty
        partial = new((tables.tiles, terms), dtype=torch.float32, device=self.device)
        self._pass(f"reduce_{phase}", some, partial)
        chunks, slots = max(1, -(-tables.most_tiles // ADDED)), len(self.batch.slots)
        sums = torch.empty((chunks, slots, terms), dtype=torch.float64, device=self.device)
        self._launch(
            ("add_up", phase), add_up, (slots, terms, chunks),
            (partial, sums, tables.geometry, tables.tiles_of), {"TERMS": terms, "ADDED": ADDED},
        )  # fmt: skip
        if chunks > 1:
            self._launch(
                ("add_chunks", phase), add_chunks, (slots, terms, 1), (sums, tables.tiles_of),
                {"ADDED": ADDED, "AT_ONCE": CHUNKS_AT_ONCE},
            )  # fmt: skip
        return sums[0]

    def combine(self, phase: int, sums: Tensor) -> None:
        tables, name = self.tables, f"combine_{phase}"
        tensors = (
            tables.address, tables.geometry, tables.hyper, tables.scalars, tables.floats,
            tables.count, sums.contiguous(),
        )  # fmt: skip
        self._of_tensors(name, lanes(self.rule, self.rule.phases[phase].combine), tensors, name)

    def finish(self) -> None:
        # While a kernel is compiled nothing is written.
        self._pass("update", self.batch.found_inf is not None or bool(self.batch.missing))
        self._keep()

    def _keep(self) -> None:
        """Store what lasts, if the rule has it."""
        if self.rule.kept():
            tables = self.tables
            tensors = (tables.address, tables.scalars, tables.count)
            self._of_tensors("keep", LANES, tensors, "keep")


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
