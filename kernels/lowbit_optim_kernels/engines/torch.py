"""The engine that runs anywhere: the rules over torch operators, one tensor at a time.

It needs no compiler, works on any device and float dtype (fp64 stays fp64), and goes through a
tensor in slabs of 1/128 of it, or of 65,536 elements if these are more, so that its temporaries
stay small.
"""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import dither
from ..batch import WEIGHT_BLOCK, Batch, Slot
from ..codegen.analysis import inputs, reads
from ..devices import refuse_capture, scalar_dtype
from ..formats import Part, Unit, compute_dtype, constant, finite_in_all, units
from ..formats.layout import Layout
from ..rules import HISTORY, Chain, Phase, RuleFunction

SLAB = 1 << 16  # elements; small tensors are done in one piece


def _where(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, Tensor):
        return a if condition else b
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        # Two Python numbers would come out in torch's default dtype, and lose digits.
        a = torch.full((), a, dtype=scalar_dtype(condition.device), device=condition.device)
    return torch.where(condition, a, b)


def _maximum(a: Any, b: Any) -> Any:
    return torch.maximum(a, b) if isinstance(a, Tensor) else b.clamp(min=a)


def _minimum(a: Any, b: Any) -> Any:
    return torch.minimum(a, b) if isinstance(a, Tensor) else b.clamp(max=a)


def _on_tensors(fn: Callable) -> Callable:
    return lambda x: (
        fn(x) if isinstance(x, Tensor) else fn(torch.tensor(x, dtype=torch.float64, device="cpu"))
    )


def recorded(
    histories: Sequence[Tensor], step: Tensor, x: Tensor, rank: float, live: Any
) -> Tensor:
    """See `rules.Lasting`; a history for each element of x."""
    history = torch.stack(list(histories))
    here = torch.arange(HISTORY, device=x.device) == torch.remainder(step, HISTORY)[:, None]
    fresh = history[:, 0] < 0  # and so throughout
    ok = x.isfinite() & live & ((x > 0) | ~fresh)
    record = ok[:, None] & (here | fresh[:, None])
    history = torch.where(record, x[:, None].to(history.dtype), history)
    torch._foreach_copy_(list(histories), list(history.unbind()))
    return torch.where(ok, history.sort(dim=1).values[:, int(rank)].to(x.dtype), torch.inf)


PRIMITIVES = {
    "sqrt": _on_tensors(torch.sqrt),
    "where": _where,
    "abs": torch.abs,
    "sign": torch.sign,
    "maximum": _maximum,
    "minimum": _minimum,
    "power": torch.pow,
    "log": _on_tensors(torch.log),
    "exp": _on_tensors(torch.exp),
    "single": lambda x: x.float().to(x.dtype),
    "recorded": recorded,
}


@cache
def bind(fn: RuleFunction) -> tuple[Callable, tuple[str, ...], tuple[str, ...]]:
    """A rule function over torch operators, the names it reads and the names it gives."""
    names = {
        name: value if not callable(value) else bind(value)[0]
        for name, value in fn.__globals__.items()
        if name in fn.__code__.co_names and name not in PRIMITIVES
    }
    names["__builtins__"] = builtins
    bound = types.FunctionType(fn.__code__, {**names, **PRIMITIVES}, fn.__name__)
    return bound, reads(fn), getattr(fn, "gives", ())


def call(fn: RuleFunction, values: dict) -> dict:
    """Run a rule function on the names it reads; the names it gives, with their values."""
    bound, names, gives = bind(fn)
    result = bound(*(values[name] for name in names))
    return dict(zip(gives, result if isinstance(result, tuple) else (result,), strict=True))


def call_chain(chain: Chain, values: dict) -> None:
    """Run a chain on `values`, which then have what it gives."""
    for fn in chain:
        values.update(call(fn, values))


Slab = tuple[slice, slice, slice]
ALL: Slab = (slice(None), slice(None), slice(None))


def slabs(rows: int, row: int, block: int) -> Iterator[Slab]:
    """Rectangles (rows, columns, blocks of a row) that cover a tensor, each of a few blocks."""
    if rows * row == 0:
        return
    limit = max(SLAB, rows * row // 128)
    if row <= limit:
        step = max(1, limit // max(1, row))
        for r in range(0, rows, step):
            yield slice(r, min(r + step, rows)), slice(None), slice(None)
        return
    width = limit // block * block
    for r in range(rows):
        for c in range(0, row, width):
            yield slice(r, r + 1), slice(c, c + width), slice(c // block, (c + width) // block)


def _in_blocks(x: Tensor, block: int, pad: float) -> Tensor:
    """(rows, columns) as (rows, blocks, block), the last block filled up."""
    short = -x.shape[1] % block
    x = torch.nn.functional.pad(x, (0, short), value=pad) if short else x
    return x.reshape(x.shape[0], -1, block)


@dataclass
class Random:
    """The random bits of one step of a parameter.

    Attributes:
        tensor_key: the parameter's.
        step: the number of the step, from 1.
        before: the number of its first block in the whole parameter; of weights, the place of its
            first element there.
        device: where the bits are wanted.
    """

    tensor_key: int
    step: Tensor
    before: int
    device: torch.device

    def fractions(self, stream: int, slab: Slab, shape: tuple[int, int], block: int) -> Tensor:
        """Numbers in [0, 1) for the blocks of a slab, fp32 of shape (rows, blocks, block).

        Args:
            stream: what is rounded by them.
            slab: a part of the parameter.
            shape: rows and elements of a row.
            block: elements of a block.
        """
        rows, columns = self._at(slab, shape)
        blocks = columns[::block] // block
        numbers = self.before + rows[:, None] * -(-shape[1] // block) + blocks
        bits = self._bits(stream, numbers[..., None], torch.arange(block, device=self.device))
        return dither.fraction(bits, torch.float32)

    def of_weights(self, slab: Slab, shape: tuple[int, int]) -> Tensor:
        """32 bits for each weight of a slab, (rows, columns)."""
        rows, columns = self._at(slab, shape)
        in_row = -(-shape[1] // WEIGHT_BLOCK) * WEIGHT_BLOCK
        places = self.before + rows[:, None] * in_row + columns
        return self._bits(dither.WEIGHT, places // WEIGHT_BLOCK, places % WEIGHT_BLOCK)

    def _at(self, slab: Slab, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Numbers of the slab's rows and columns."""
        rows = torch.arange(*slab[0].indices(shape[0]), device=self.device)
        return rows, torch.arange(*slab[1].indices(shape[1]), device=self.device)

    def _bits(self, stream: int, blocks: Tensor, lanes: Tensor) -> Tensor:
        return dither.bits(dither.stream_key(self.tensor_key, stream), self.step, blocks, lanes)


class _UnitView:
    """The tensors of a unit of one parameter, read and written a slab at a time."""

    def __init__(self, unit: Unit, stored: Sequence[Tensor], rows: int, row: int) -> None:
        self.unit, self.format, self.shape = unit, unit.format, (rows, row)
        blocks = -(-row // unit.format.block)  # said, as a tensor without rows does not tell it
        self.views = [
            x.view(rows, blocks if part.per_block else row) for part, x in self._pairs(stored)
        ]

    def _pairs(self, stored: Sequence[Tensor]) -> list[tuple[Part, Tensor]]:
        return list(zip(self.unit.parts, stored, strict=True))

    def _of_slab(self, slab: Slab) -> list[Tensor]:
        rows, columns, blocks = slab
        return [
            x[rows, blocks if part.per_block else columns] for part, x in self._pairs(self.views)
        ]

    def read(self, slab: Slab, dtype: torch.dtype) -> list[Tensor]:
        """The numbers of each moment."""
        stored, moments = self._of_slab(slab), self.unit.moments
        if self.format.exact:
            return self.format.decode(moments, stored, dtype)
        pads = constant(self.unit, 0.0)
        in_blocks = [
            x[..., None] if part.per_block else _in_blocks(x, self.format.block, pad)
            for (part, x), pad in zip(self._pairs(stored), pads, strict=True)
        ]
        columns = stored[0].shape[1]
        decoded = self.format.decode(moments, in_blocks, dtype)
        return [x.flatten(1)[:, :columns] for x in decoded]

    def write(self, slab: Slab, values: Sequence[Tensor], random: Random | None = None) -> None:
        """Store the numbers of each moment, finite ones unless the format is exact.

        Moments that have a stream are rounded by its random bits.
        """
        stored, moments = self._pairs(self._of_slab(slab)), self.unit.moments
        if self.format.exact:
            for (_, old), new in zip(stored, self.format.encode(moments, values), strict=True):
                old.copy_(new)
            return
        in_blocks = [_in_blocks(x, self.format.block, 0.0) for x in values]
        fractions = [
            random.fractions(m.stream, slab, self.shape, self.format.block).to(values[0].dtype)
            if random is not None and m.stream
            else None
            for m in moments
        ]
        by = (fractions,) if any(x is not None for x in fractions) else ()
        coded = self.format.encode(moments, in_blocks, *by)
        for (part, old), new in zip(stored, coded, strict=True):
            old.copy_(new.squeeze(-1) if part.per_block else new.flatten(1)[:, : old.shape[1]])


class TorchRun:
    """A step of one batch; see `batch.Run`."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.phases = len(batch.rule.phases)
        self.device = batch.device
        self.scalar_dtype = scalar_dtype(self.device)
        self.values: dict[str, Any] = {
            name: value.to(self.device, self.scalar_dtype) if isinstance(value, Tensor) else value
            for name, value in batch.hyper[0].items()
        }
        self.live = None if batch.found_inf is None else batch.found_inf.to(self.device) == 0
        self.wrote = False

    def _count(self) -> None:
        counts = self.batch.counts
        if self.live is None:
            torch._foreach_add_(counts, 1)
        else:
            torch._foreach_add_(counts, [self.live.to(counts[0].dtype)] * len(counts))

    def begin(self) -> None:
        batch, slots = self.batch, self.batch.slots
        sign = -1.0 if batch.maximize else 1.0
        scale = torch.full((len(slots),), sign, dtype=self.scalar_dtype, device=self.device)
        if batch.grad_scale is not None:
            scale = scale / batch.grad_scale.to(device=self.device, dtype=self.scalar_dtype)
        numels = [float(slot.numel) for slot in slots]
        self.values["gscale"] = scale
        self.values["live"] = True if self.live is None else self.live
        steps = torch.stack([slot.step for slot in slots]) + self.values["live"]
        self.values["step"] = steps.to(self.scalar_dtype)
        self.values["numel"] = torch.tensor(numels, dtype=self.scalar_dtype, device=self.device)
        for k, lasting in enumerate(batch.rule.lasting):
            tensors = [slot.lasting[k] for slot in slots]
            self.values[lasting.key] = tensors if lasting.history else torch.stack(tensors)
        self.values.update(call(batch.rule.prepare, self.values))
        self._count()

    def reduce(self, phase: int) -> Tensor:
        chosen = self.batch.rule.phases[phase]
        return torch.stack([self._sum_terms(i, chosen) for i in range(len(self.batch.slots))])

    def combine(self, phase: int, sums: Tensor) -> None:
        chosen = self.batch.rule.phases[phase]
        named = dict(zip(chosen.sums, sums.unbind(1), strict=True))
        self.values.update(call(chosen.combine, {**self.values, **named}))

    def finish(self) -> None:
        # A step that an AMP scaler found to overflow leaves everything as it was.
        if self.live is not None and not bool(self.live):
            return
        rule = self.batch.rule
        for i, slot in enumerate(self.batch.slots):
            units_of = self._units(slot)
            for slab in slabs(slot.rows, slot.row, slot.format.block):
                self._write(i, slot, units_of, slab)
            for lasting, kept in zip(rule.lasting, slot.lasting, strict=True):
                if not lasting.history:
                    kept.copy_(self.values[lasting.key][i])

    def _sum_terms(self, i: int, phase: Phase) -> Tensor:
        slot = self.batch.slots[i]
        total = torch.zeros(len(phase.sums), dtype=self.scalar_dtype, device=self.device)
        wanted = inputs(phase.terms)
        units_of = [x for x in self._units(slot) if wanted.intersection(x.unit.keys)]
        for slab in slabs(slot.rows, slot.row, slot.format.block):
            values = self._elements(i, slot, units_of, slab)
            call_chain(phase.terms, values)
            for k, name in enumerate(phase.sums):
                term = values[name]
                if phase.finite:
                    term = torch.where(term.isfinite(), term, 0.0)
                total[k] += term.sum(dtype=self.scalar_dtype)
        return total

    def _elements(self, i: int, slot: Slot, units_of: list[_UnitView], slab: Slab) -> dict:
        """Everything the rule may read, for the elements of a slab of slot i."""
        rows, columns, _ = slab
        dtype = compute_dtype(slot.p)
        shape = (slot.rows, slot.row)
        values = {
            name: value[i].to(dtype) if isinstance(value, Tensor) and value.ndim else value
            for name, value in self.values.items()
        }
        p, residual = self._weights(slot, slab)
        values["p"] = slot.weights.read(p, residual, dtype)
        values["g"] = slot.g.view(shape)[rows, columns].to(dtype) * values["gscale"]
        for view in units_of:
            values.update(zip(view.unit.keys, view.read(slab, dtype), strict=True))
        return values

    @staticmethod
    def _weights(slot: Slot, slab: Slab) -> tuple[Tensor, Tensor | None]:
        """A slab of the parameter and of its residual."""
        rows, columns, _ = slab
        p, residual = slot.p.view(slot.rows, slot.row), slot.residual
        if residual is not None:
            residual = residual.view(slot.rows, slot.row)[rows, columns]
        return p[rows, columns], residual

    def _units(self, slot: Slot) -> list[_UnitView]:
        views, at = [], 0
        for unit in units(self.batch.rule.moments, slot.format):
            stored = slot.state[at : at + len(unit.parts)]
            views.append(_UnitView(unit, stored, slot.rows, slot.row))
            at += len(unit.parts)
        return views

    def _write(self, i: int, slot: Slot, units_of: list[_UnitView], slab: Slab) -> None:
        values = self._elements(i, slot, units_of, slab)
        call_chain(self.batch.rule.direction, values)
        new_p = values["shrink"] * values["p"] - values["rate"] * values["u"]
        p, residual = self._weights(slot, slab)
        random = None
        if slot.weights.dithered:
            weights = Random(slot.tensor_key, slot.step, slot.weights_before, self.device)
            random = weights.of_weights(slab, (slot.rows, slot.row))
        self.wrote = True
        slot.weights.write(new_p, p, residual, random)
        of_moments = Random(slot.tensor_key, slot.step, slot.blocks_before, self.device)
        for view in units_of:
            new = [values[key] for key in view.unit.keys]
            view.write(slab, new if view.format.exact else finite_in_all(new), of_moments)


def start(batch: Batch) -> TorchRun:
    """Begin a step of a batch of slots, which may differ in dtype and state width."""
    refuse_capture(batch.device, "the torch engine takes numbers from the host in every step")
    return TorchRun(batch)


def encode(unit: Unit, values: Sequence[Tensor], layout: Layout, out: Sequence[Tensor]) -> None:
    """Code contiguous tensors into the tensors `out` of a unit's parts; bad numbers give zero."""
    rows, row = layout.rows, layout.row
    view = _UnitView(unit, out, rows, row)
    for slab in slabs(rows, row, layout.block):
        parts = [x.view(rows, row)[slab[0], slab[1]] for x in values]
        view.write(slab, finite_in_all([x.to(compute_dtype(x)) for x in parts]))


def decode(unit: Unit, stored: Sequence[Tensor], layout: Layout, out: Sequence[Tensor]) -> None:
    """Write the numbers of a unit's moments into the contiguous tensors `out`."""
    rows, row = layout.rows, layout.row
    view = _UnitView(unit, stored, rows, row)
    for slab in slabs(rows, row, layout.block):
        for x, values in zip(out, view.read(slab, compute_dtype(out[0])), strict=True):
            x.view(rows, row)[slab[0], slab[1]] = values.to(x.dtype)
