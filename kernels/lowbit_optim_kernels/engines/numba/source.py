"""The text of the Numba engine's modules: its templates, bound to a rule, dtypes and a format.

The templates are `passes`, and that of a format which has one; see `codegen.specialize`. The module
that `Format.numba` names has `njit` functions that read and write one block,

    decode(signed, parts, numbers, n)
    encode(signed, numbers, parts, n)

where `parts` are the addresses of what the block has of the unit's parts, `numbers` those of each
moment's fp32 numbers, and `signed` says which moments have a sign. What follows the end of a short
block is zeros, as `formats.constant` says, so that n is a multiple of 16. The numbers to encode are
finite, and they are rounded to nearest in every case. Or the module has `PASSES`, the name of a
template with functions in place of those of `passes`, which may dither. `DEPENDS` are further
modules that its compiled code depends on.
"""

from __future__ import annotations

import ast
import importlib
import math
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from ...batch import (
    NO_GRADIENT,
    RESIDUAL,
    STEP,
    WEIGHT_BLOCK,
    G,
    P,
    address_columns,
    lasting_column,
    state_columns,
)
from ...codegen.analysis import (
    element_functions,
    element_scalars,
    functions_source,
    hyper_names,
    inputs,
    name_of,
    reads,
    scalar_functions,
    with_fused_sums,
)
from ...codegen.specialize import Item, Variable, Writer, variables
from ...dither import WEIGHT
from ...formats import Format, Unit, constant, units
from ...rules import SIGNED, SQUARE, Chain, Moment, Phase, Rule, RuleFunction
from ...weights import PLAIN, Weights
from . import job
from .vector import LANES

GSCALE, SCALARS = 0, 1  # columns of `scalars`
SIZE = {"f32": 4, "bf16": 2, "f16": 2}
SUMMED = 256  # elements whose terms are added up in fp32, at least
GRAIN = 64  # what a block function's elements are a multiple of

PASSES = f"{__package__}.passes"
WEIGHTS = "lowbit_optim_kernels.weights.numba"
INNER = "@inner"


def code_of(format: Format) -> ModuleType | None:
    """The module with a format's code for this engine, if it has any."""
    return importlib.import_module(format.numba) if format.numba else None


def _writer(format: Format | None = None) -> Writer:
    own = None if format is None else getattr(code_of(format), "PASSES", None)
    return Writer(PASSES, *([own] if own else []))


def _call(fn: RuleFunction) -> SimpleNamespace:
    """A call of a rule's function."""
    return SimpleNamespace(
        function=Variable(name_of(fn)),
        reads=tuple(Item(key=x).value for x in reads(fn)),
        gives=tuple(Item(key=x).value for x in fn.gives),
    )


def column_of(rule: Rule, name: str) -> int:
    """The column of a per-tensor value in `scalars`."""
    return GSCALE if name == "gscale" else SCALARS + rule.scalars().index(name)


def _tables(rule: Rule) -> dict[str, Any]:
    """Names that the templates read about the tables of a rule's tensors."""
    return {
        "ADDRESS_COLUMNS": address_columns(rule), "GEOMETRY": job.Geometry, "CHUNK": job.Chunk,
        "SCALAR_COLUMNS": SCALARS + len(rule.scalars()), "GSCALE": GSCALE, "STEP": STEP,
        "HYPER_COLUMNS": len(hyper_names(rule)), "G_COLUMN": G, "NO_GRADIENT": NO_GRADIENT,
        "JOB": job,
    }  # fmt: skip


def scalar_module(rule: Rule) -> str:
    """Text of the module with the rule's per-tensor arithmetic: `begin`, `combine_0`, ..."""
    writer = _writer()
    hyper, given = hyper_names(rule), set[str]()
    lasting = {
        x.key: {"source": "history" if x.history else "number", "column": lasting_column(rule, k)}
        for k, x in enumerate(rule.lasting)
    }

    def read(name: str, sums: tuple[str, ...]) -> Item:
        if name in sums:
            return Item(key=name, source="sums", column=sums.index(name))
        if name in ("step", "numel", "live"):
            return Item(key=name, source=name)
        if name in given or name == "gscale":
            return Item(key=name, source="scalars", column=column_of(rule, name))
        if name in lasting:
            return Item(key=name, **lasting[name])
        return Item(key=name, source="hyper", column=hyper.index(name))

    def add(name: str, fn: RuleFunction, sums: tuple[str, ...] = (), **bound: Any) -> None:
        reading = tuple(read(x, sums) for x in reads(fn))
        giving = tuple(Item(key=x, column=column_of(rule, x)) for x in fn.gives)
        given.update(fn.gives)
        tables = _tables(rule)
        tables.update(CALL=_call(fn), READS=reading, GIVES=giving, SUMS=len(sums))
        writer.add(name, **tables, **bound)

    add("begin", rule.prepare)
    for k, phase in enumerate(rule.phases):
        add("combine", phase.combine, phase.sums, combine=Variable(f"combine_{k}"))
    kept = tuple(Item(key=x, of=column_of(rule, x), **lasting[x]) for x in rule.kept())
    if kept:
        writer.add("keep", KEPT=kept, **_tables(rule))
    head = "from lowbit_optim_kernels.engines.numba.scalar import *"
    return writer.text(f"{head}\n\n\n{functions_source(scalar_functions(rule), INNER)}")


def _with_fused(source: str) -> str:
    """Source of element functions with one multiplication and addition where there can be."""
    fused = with_fused_sums(ast.parse(source), lambda x: ast.UnaryOp(ast.USub(), x))
    return ast.unparse(ast.fix_missing_locations(fused))


@cache
def codes_tensors(format: Format) -> bool:
    """Whether a format has functions for whole tensors of one moment."""
    return "encode_tensor" in _writer(format).functions


def tensor_function(name: str, signed: bool) -> str:
    """The name of the function `encode_tensor` or `decode_tensor` for a moment."""
    return f"{name}_{'signed' if signed else 'unsigned'}"


def codec_module(format: Format) -> str:
    """Text of the module with a format's functions for whole tensors."""
    writer = _writer(format)
    for signed in (True, False):
        moment = Moment("x", SIGNED if signed else SQUARE)
        (unit,) = units((moment,), format)
        words = ("row", "numbers", *(part.key for part in unit.parts))
        numbers = tuple(Item(key=x, offset=job.WORK + job.WORD * k) for k, x in enumerate(words))
        for name in ("encode_tensor", "decode_tensor"):
            chosen = Variable(tensor_function(name, signed))
            bound = {name: chosen, "MOMENT": moment, "PADS": _pads(unit), "BLOCK": format.block}
            writer.add(name, **bound)
            writer.add(
                "words_share", WORDS=numbers, JOB=job, piece_function=chosen,
                PIECE_ARGUMENTS=variables("word", numbers), words_share=Variable(f"{chosen}_share"),
            )  # fmt: skip
    return writer.text()


def element_module(
    rule: Rule, p_kind: str, g_kind: str, format: Format, weights: Weights = PLAIN,
    shifted: bool = False,
) -> str:  # fmt: skip
    """Text of the module with the rule's passes over elements: `update`, `reduce_0`, ....

    Args:
        rule: the rule.
        p_kind: "f32", "bf16" or "f16", how the parameter is stored.
        g_kind: how the gradient is.
        format: how moments are stored that need not stay exact.
        weights: how the parameter is, beside its dtype.
        shifted: whether it may begin within a block of its random bits.

    Raises:
        NotImplementedError: if the format has no code for this engine, or blocks that are no
            multiple of a vector.
    """
    coded = any(not unit.format.exact for unit in units(rule.moments, format))
    if coded and (not format.numba or format.block % LANES):
        raise NotImplementedError(f"the numba engine cannot run the state format {format.name!r}")
    writer = _writer(format if coded else None)
    passes = _Passes(writer, rule, p_kind, g_kind, format, weights, shifted)
    for k, phase in enumerate(rule.phases):
        passes.add(f"reduce_{k}", phase)
    passes.add("update", None)
    head = ["from lowbit_optim_kernels.engines.numba.element import *"]
    if weights.bits is not None:
        names = f"join_{weights.extra}, split_{weights.extra}"
        head.append(f"from {WEIGHTS} import {names}")
    if coded and not hasattr(code_of(format), "PASSES"):
        names = "decode as decode_block, encode as encode_block"
        head.append(f"from {format.numba} import {names}")
    text = _with_fused(functions_source(element_functions(rule), INNER, literal="f32"))
    return writer.text("\n".join(head) + f"\n\n\n{text}")


class _Passes:
    """Adds the element passes of one rule to a module."""

    def __init__(
        self, writer: Writer, rule: Rule, p_kind: str, g_kind: str, format: Format,
        weights: Weights, shifted: bool,
    ) -> None:  # fmt: skip
        self.writer, self.rule, self.block, self.bits = writer, rule, format.block, format.bits
        self.weights, self.apart = weights, shifted or format.block % WEIGHT_BLOCK > 0
        self.p_kind, self.g_kind = p_kind, g_kind
        self.coded: Unit | None = None
        self.parts: list[Item] = []  # of all units
        self.exact: tuple[Item, ...] = ()
        columns = iter(state_columns(rule.moments, format))
        for unit in units(rule.moments, format):
            items = [
                Item(key=part.key, column=column, width=(part.dtype or torch.float32).itemsize,
                     pad=pad, written=True, per_block=part.per_block)
                for part, pad, column in zip(unit.parts, _pads(unit), columns, strict=False)
            ]  # fmt: skip
            self.parts += items
            if unit.format.exact:
                self.exact = tuple(items)
            else:
                self.coded = unit

    def add(self, name: str, phase: Phase | None) -> None:
        """A pass, as a share; the update for no phase."""
        chain = self.rule.direction if phase is None else phase.terms
        sums = () if phase is None else phase.sums
        terms = tuple(Item(key=x, row=k) for k, x in enumerate(sums))
        self.writer.add(
            "chunks_share", chunks_share=Variable(f"{name}_share"), TERMS=terms,
            FINITE=phase is None or phase.finite, PIECE_ARGUMENTS=(),
            **_tables(self.rule), **self._bound(chain, terms),
        )  # fmt: skip

    def _bound(self, chain: Chain, terms: tuple[Item, ...]) -> dict[str, Any]:
        """Names that the templates of a pass read about its rule and its storage."""
        updates, extra = not terms, self.weights.extra
        wanted = inputs(chain)
        tensors = [
            Item(key="p", column=P, width=SIZE[self.p_kind], pad=0, written=True,
                 read="p" in wanted or updates, load=Variable(f"load_{self.p_kind}"),
                 store=Variable(f"store_{self.p_kind}"), join=Variable(f"join_{extra}"),
                 split=Variable(f"split_{extra}")),
            Item(key="g", column=G, width=SIZE[self.g_kind], pad=0, written=False,
                 read="g" in wanted, load=Variable(f"load_{self.g_kind}")),
            Item(key="residual", column=RESIDUAL, width=extra // 8, pad=0, written=True,
                 read=extra > 0 and ("p" in wanted or updates)),
        ]  # fmt: skip
        has_state = updates or any(moment.key in wanted for moment in self.rule.moments)
        parts = self.parts if has_state else []
        coded = self.coded.moments if self.coded is not None and has_state else ()
        per_element = [x for x in parts if not x.per_block]
        per_block = tuple(x for x in parts if x.per_block)
        read = [x for x in tensors if x.read] + per_element
        operands = tuple(Item(**{**vars(x), "row": k}) for k, x in enumerate(read))
        spare = self.block * max([4, *(x.width for x in self.parts)])  # a scratch operand's bytes
        moments = tuple(
            Item(key=m.key, signed=m.signed, row=k, role=m.role, partner=Item(key=str(m.partner)),
                 stream=m.stream if updates else 0, outlasts=m.outlasts)
            for k, m in enumerate(coded)
        )  # fmt: skip
        dithered = tuple(m for m in moments if m.stream)
        weights_dithered = updates and self.weights.dithered
        return {
            "P": tensors[0], "G": tensors[1], "RESIDUAL": tensors[2], "U": Item(key="u"),
            "SHRINK": Item(key="shrink"), "RATE": Item(key="rate"),
            "MOMENTS": moments, "DITHERED": dithered,
            "WEIGHTS": self.weights, "WEIGHTS_DITHERED": weights_dithered,
            "WEIGHT": WEIGHT, "WEIGHT_BLOCK": WEIGHT_BLOCK, "APART": self.apart,
            "BITS": self.bits,
            "SIGNED": tuple(m.signed for m in coded),
            "EXACT": self.exact if has_state else (),
            "ELEMENT_PARTS": tuple(x for x in per_element if x not in self.exact),
            "BLOCK_PARTS": per_block,
            "OPERANDS": operands,
            "CALLS": tuple(map(_call, chain)),
            "SCALARS": self._scalars(chain, updates),
            "SUMMED": -(-SUMMED // self.block) * self.block,  # in whole blocks
            "BLOCK": self.block, "GRAIN": math.gcd(GRAIN, self.block),
            # Bytes of scratch for a moment: a block's numbers, and those of the one before.
            "ROW": 8 * self.block,
            "SCRATCH": 8 * self.block * max(1, len(self.rule.moments)),
            # Bits of 16 blocks of the weights, and of each moment.
            "HASHES": 64 * (1 + len(moments)),
            "SPARE": spare,
            "SPARES": spare * (3 + sum(not x.per_block for x in self.parts)),
        }  # fmt: skip

    def _scalars(self, chain: Chain, updates: bool) -> tuple[Item, ...]:
        """Per-tensor values and hyperparameters that a pass reads."""
        names = element_scalars(self.rule, chain)
        names += [x for x in ("shrink", "rate") if updates and x not in names]
        hyper, columns = hyper_names(self.rule), self.rule.scalars()
        return tuple(
            Item(key=x, of_tensor=True, column=column_of(self.rule, x))
            if x in columns
            else Item(key=x, of_tensor=False, column=hyper.index(x))
            for x in names
        )


@cache
def _pads(unit: Unit) -> tuple[int, ...]:
    """For each part the bytes of what stands for zero, as an integer; the first is the lowest."""

    def pad(value: float, dtype: torch.dtype) -> int:
        stored = torch.tensor([value], dtype=dtype, device="cpu").view(torch.uint8)
        return int.from_bytes(bytes(stored.tolist()), "little", signed=dtype.itemsize > 1)

    pairs = zip(unit.parts, constant(unit, 0.0), strict=True)
    return tuple(pad(value, part.dtype or torch.float32) for part, value in pairs)
