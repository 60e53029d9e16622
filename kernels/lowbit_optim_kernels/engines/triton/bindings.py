"""The generated module of a rule: its functions, and kernels that call `passes` with constants.

What a launch specializes a kernel for costs time to hash at every launch. So all that follows from
the rule and from the formats of the tiles is bound here, in the text of thin kernels, as numbers
and names; KINDS and a few switches are left.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...batch import address_columns, lasting_column, state_columns
from ...codegen.analysis import (
    element_functions,
    element_names,
    element_scalars,
    functions_source,
    hyper_names,
    inputs,
    name_of,
    reads,
    scalar_functions,
)
from ...formats import Format, Part, Unit, constant, units
from ...rules import Chain, Moment, Phase, Rule, RuleFunction
from . import rule_source
from .kinds import module_of, number_of
from .primitives import ROLES
from .tables import GSCALE, LANES, LIVE, SCALARS, float_names, lanes, random_column, streams

FIXED = {"gscale": GSCALE, "live": LIVE}  # columns of values that are no rule's own
TABLE_ALIGNMENT = 32  # fp32 numbers that a format's table starts at a multiple of

HEADER = """\
import triton
import triton.language as tl
from lowbit_optim_kernels.engines.triton import passes, reductions, scalars
from lowbit_optim_kernels.engines.triton.primitives import (
    abs, exp, fused, log, maximum, minimum, negative, power, recorded, sign, single, where,
    {divide} as divide, {sqrt} as sqrt,
)
"""

BEGIN = """\
@triton.jit
def begin(
    address, geometry, hyper, scalars_, floats, count, grad_scale, found_inf,
    MAXIMIZE: tl.constexpr, UNSCALE: tl.constexpr, GUARDED: tl.constexpr,
):
    scalars.begin(
        address, geometry, hyper, scalars_, floats, count, grad_scale, found_inf,
        MAXIMIZE, UNSCALE, GUARDED,
        {stride}, {call}, {copies}, {streams}, {random},
    )
"""

COMBINE = """\
@triton.jit
def {name}(address, geometry, hyper, scalars_, floats, count, sums):
    scalars.combine(
        address, geometry, hyper, scalars_, floats, count, sums,
        {stride}, {call},
    )
"""

KEEP = """\
@triton.jit
def keep(address, scalars_, count):
    scalars.keep(address, scalars_, count, {stride}, {width}, {kept}, {lanes})
"""

# Only a kernel may end before its last line; a function that it calls has to run to its end.
FIND_TILE = """\
    t, kind = passes.tensor_and_kind(work, KINDS, {ptx})
    if KINDS[0][passes.SPANNED]:
        if kind <= 0:
            return
    if GUARDED:
        if passes.skipped(t, floats, {width}):
            return
"""

REDUCE = (
    """\
@triton.jit
def {name}(
    address, geometry, work, floats, tables, partial,
    GUARDED: tl.constexpr, KINDS: tl.constexpr, SCALED: tl.constexpr,
):
"""
    + FIND_TILE
    + """\
    reductions.reduce(
        t, kind, address, geometry, work, floats, tables, partial,
        {rule},
        {terms},
        {formats},
        KINDS, SCALED,
    )
"""
)

UPDATE = (
    """\
@triton.jit
def update(
    address, geometry, work, floats, tables,
    GUARDED: tl.constexpr, KINDS: tl.constexpr, SCALED: tl.constexpr,
):
"""
    + FIND_TILE
    + """\
    passes.update(
        t, kind, address, geometry, work, floats, tables,
        {rule},
        {writes},
        {formats},
        KINDS, SCALED,
    )
"""
)


def _used(rule: Rule, formats: Sequence[Format]) -> list[Format]:
    """The formats of all units, each once."""
    return list(dict.fromkeys(unit.format for f in formats for unit in units(rule.moments, f)))


def _with_tables(rule: Rule, formats: Sequence[Format], ptx: bool) -> list[tuple[Format, Tensor]]:
    """The look-up tables of all formats in use, each filled up to a multiple of TABLE_ALIGNMENT."""
    found = []
    for format in _used(rule, formats):
        table = module_of(format).table(ptx, torch.device("cpu"))
        if table is not None:
            found.append(
                (format, torch.nn.functional.pad(table, (0, -len(table) % TABLE_ALIGNMENT)))
            )
    return found


@cache
def code_tables(rule: Rule, formats: tuple[Format, ...], ptx: bool, device: torch.device) -> Tensor:
    """Look-up tables, the argument `tables` of the per-element kernels, for any stream.

    So it comes whole from the host, by a copy that is over when `to` returns.
    """
    found = [table for _, table in _with_tables(rule, formats, ptx)]
    return torch.cat(found or [torch.zeros(TABLE_ALIGNMENT, device="cpu")]).to(
        device, torch.float32
    )


def _as_coded(unit: Unit) -> list[Unit]:
    """A unit as its format's functions take it: at once, or a moment at a time."""
    if not getattr(module_of(unit.format), "SEPARATE", False):
        return [unit]
    format = unit.format
    return [
        Unit(format, (moment,), (k,), format.parts((moment,)))
        for k, moment in zip(unit.index, unit.moments, strict=True)
    ]


def module(rule: Rule, formats: Sequence[Format], ptx: bool) -> str:
    """Text of the module with all kernels of a rule.

    Args:
        rule: the rule.
        formats: of the tiles that the kernels take, in the order that KINDS count them.
        ptx: for an NVIDIA GPU: single machine instructions where Triton itself would take several.
    """
    return _Writer(rule, formats, ptx).module()


def _literals(rule: Rule) -> dict[str, float]:
    """Per-tensor values that `prepare` gives as a number and no phase replaces."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(rule.prepare)))
    (result,) = (node.value for node in ast.walk(tree) if isinstance(node, ast.Return))
    values = result.elts if isinstance(result, ast.Tuple) else [result]
    given = zip(rule.prepare.gives, values, strict=True)
    replaced = {name for phase in rule.phases for name in phase.combine.gives}
    return {
        name: node.value
        for name, node in given
        if isinstance(node, ast.Constant) and isinstance(node.value, float) and name not in replaced
    }


def _tuple(values: Sequence[Any]) -> str:
    """Source of a tuple of numbers, of source, and of such tuples."""
    texts = [
        x if isinstance(x, str) else _tuple(x) if isinstance(x, (tuple, list)) else repr(x)
        for x in values
    ]
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


class _Writer:
    """Writes the kernels of one rule."""

    def __init__(self, rule: Rule, formats: Sequence[Format], ptx: bool) -> None:
        self.rule, self.ptx, self.formats = rule, ptx, formats
        self.keys = [moment.key for moment in rule.moments]
        self.hyper, self.columns, self.floats = hyper_names(rule), rule.scalars(), float_names(rule)
        self.stride = address_columns(rule)
        self.streams, self.random = streams(rule), random_column(rule)
        floats_width = self.random + 2 * len(self.streams)
        self.widths = SCALARS + len(self.columns), floats_width, len(self.hyper)
        self.given: set[str] = set()  # by the scalar functions so far
        self.lasting = {
            x.key: (f"scalars.OF_{'HISTORY' if x.history else 'NUMBER'}", lasting_column(rule, k))
            for k, x in enumerate(rule.lasting)
        }
        self.used = _used(rule, formats)

    def module(self) -> str:
        rule = self.rule
        fast = "ptx_" if self.ptx else ""
        functions = (*scalar_functions(rule), *element_functions(rule))
        parts = [
            HEADER.format(divide=f"{fast}divide", sqrt=f"{fast}sqrt")
            + "".join(f"import {f.triton} as format_{i}\n" for i, f in enumerate(self.used)),
            rule_source.for_triton(
                functions_source(functions, "@triton.jit"),
                {name_of(fn) for fn in element_functions(rule)},
            ),
            self._begin(),
        ]
        for k, phase in enumerate(rule.phases):
            call = self._per_tensor(phase.combine, phase.sums)
            parts.append(COMBINE.format(name=f"combine_{k}", stride=self.stride, call=call))
            parts.append(self._reduction(f"reduce_{k}", phase))
        parts.append(self._update())
        if rule.kept():
            parts.append(self._keep())
        return "\n\n".join(parts)

    # Per-tensor kernels.

    def _per_tensor(self, fn: RuleFunction, sums: Sequence[str] = ()) -> str:
        """A scalar function, where its values come from, where they go, widths of the tables."""
        sources = []
        for name in reads(fn):
            if name in sums:
                sources.append(("scalars.OF_SUMS", sums.index(name), len(sums)))
            elif name in ("step", "numel"):
                sources.append((f"scalars.OF_{name.upper()}", 0, 0))
            elif name in FIXED or name in self.given:
                sources.append(("scalars.OF_SCALARS", self._column(name), self.widths[0]))
            elif name in self.lasting:
                sources.append((*self.lasting[name], self.stride))
            else:
                sources.append(("scalars.OF_HYPER", self.hyper.index(name), 0))
        self.given.update(fn.gives)
        kept = [(self._column(x), self._float(x)) for x in fn.gives]
        constants = _tuple(sources), _tuple(kept), _tuple(self.widths), str(lanes(self.rule, fn))
        return ", ".join([name_of(fn), *constants])

    def _column(self, name: str) -> int:
        return FIXED[name] if name in FIXED else SCALARS + self.columns.index(name)

    def _float(self, name: str) -> int:
        return FIXED[name] if name in FIXED else SCALARS + self.floats.index(name)

    def _keep(self) -> str:
        """The kernel that stores the lasting numbers."""
        kept = [(self.lasting[x][1], self._column(x)) for x in self.rule.kept()]
        return KEEP.format(stride=self.stride, width=self.widths[0], kept=_tuple(kept), lanes=LANES)

    def _begin(self) -> str:
        copies = [
            (self.hyper.index(x), self._float(x)) for x in self.floats if x not in self.columns
        ]
        call = self._per_tensor(self.rule.prepare)
        return BEGIN.format(
            stride=self.stride, call=call, copies=_tuple(copies), streams=_tuple(self.streams),
            random=self.random,
        )  # fmt: skip

    # Per-element kernels.

    def _format(self, format: Format, offsets: dict[Format, int]) -> tuple:
        """Elements of a block, the units, where each moment is among theirs, which are coded."""
        moments, columns = self.rule.moments, iter(state_columns(self.rule.moments, format))
        order: list[int] = []
        inexact: list[int] = []
        made = []
        for unit in units(moments, format):
            pads = zip(unit.parts, constant(unit, 0.0), strict=True)
            given = {part: (next(columns), pad) for part, pad in pads}
            inexact += () if unit.format.exact else unit.index
            for one in _as_coded(unit):
                order += one.index
                made.append(self._unit(one, given, offsets.get(unit.format, 0)))
        return format.block, made, [order.index(k) for k in range(len(moments))], inexact

    def _unit(self, unit: Unit, given: dict[Part, tuple[int, float]], offset: int) -> tuple:
        """A unit's functions, and its tensors: column, dtype, filling and, per block, stream."""
        tensors = []
        for part in unit.parts:
            column, pad = given[part]
            dtype = part.dtype or torch.float32  # which elements are computed in
            filling = float(pad) if dtype.is_floating_point else int(pad)
            tensors.append((column, number_of(dtype), filling))
        elements, per_block = unit.split(tensors)
        moments = [self._moment(moment, unit) for moment in unit.moments]
        dithered = [part.dithered for part in unit.parts if part.per_block]
        per_block = [
            (*tensor, moments[k][-1] if dithered[k] else 0) for k, tensor in enumerate(per_block)
        ]
        module = f"format_{self.used.index(unit.format)}"
        # Without scales there is no function of them to call; another name stands in its place.
        names = ("decode", "scales" if per_block else "decode", "encode")
        functions = tuple(f"{module}.{name}" for name in names)
        return functions, moments, unit.format.exact, unit.index, elements, per_block, offset

    def _moment(self, moment: Moment, unit: Unit) -> tuple[bool, int, int, bool, int]:
        """The description of a moment for a format's functions; `primitives` names its fields."""
        dithered = bool(moment.stream) and not unit.format.exact
        partner = unit.keys.index(moment.partner) if moment.partner in unit.keys else -1
        stream = self.streams.index(moment.stream) if dithered else 0
        return moment.signed, ROLES.index(moment.role), partner, moment.outlasts, stream

    def _formats(self) -> str:
        at, offsets = 0, {}
        for format, table in _with_tables(self.rule, self.formats, self.ptx):
            offsets[format] = at
            at += len(table)
        return _tuple([self._format(format, offsets) for format in self.formats])

    def _rule(self, chain: Chain, wanted: set[str], writes: bool) -> tuple[str, list[str]]:
        """Source of what `passes.read` needs of a rule, and names of the values that there are.

        Args:
            chain: functions to be called.
            wanted: what these and others read that none of them gives.
            writes: whether parameters and moments are written.
        """
        scalars = element_scalars(self.rule, chain) + sorted(wanted - element_names(self.rule))
        scalars += ["shrink", "rate"] if writes else []
        scalars = list(dict.fromkeys(scalars))
        literals = _literals(self.rule)
        names = [*scalars, "p", "g", *self.keys]
        loads = writes or "p" in wanted, "g" in wanted, writes or bool(wanted & set(self.keys))
        calls = []
        for fn in chain:
            calls.append(self._call(fn, names))
            names += fn.gives
        columns = [(self._float(x), x in literals, literals.get(x, 0.0)) for x in scalars]
        constants = self.stride, self.widths[1], columns, loads, calls, self.ptx, self.random
        return _tuple(constants), names

    @staticmethod
    def _call(fn: RuleFunction, names: list[str], *more: object) -> str:
        """A function, where the values are that it reads, and how many it gives.

        Of values with one name the last one counts.
        """
        at = {name: i for i, name in enumerate(names)}
        return _tuple([name_of(fn), [at[x] for x in reads(fn)], len(fn.gives), *more])

    def _reduction(self, name: str, phase: Phase) -> str:
        """The kernel that sums the terms of a phase over each tile."""
        *before, terms = phase.terms
        rule, names = self._rule(tuple(before), inputs(phase.terms), False)
        call = self._call(terms, names, phase.finite)
        return REDUCE.format(
            name=name, width=self.widths[1], rule=rule, terms=call, formats=self._formats(),
            ptx=self.ptx,
        )  # fmt: skip

    def _update(self) -> str:
        """The kernel that writes parameters and moments."""
        rule, names = self._rule(self.rule.direction, inputs(self.rule.direction), True)
        last = {name: i for i, name in enumerate(names)}  # new moments follow the old
        moments = [last[key] for key in self.keys]
        writes = _tuple([last["u"], last["shrink"], last["rate"], moments])
        return UPDATE.format(
            width=self.widths[1], rule=rule, writes=writes, formats=self._formats(), ptx=self.ptx
        )
