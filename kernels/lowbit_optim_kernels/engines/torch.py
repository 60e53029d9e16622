"""The engine that runs anywhere: the rules over torch operators, one tensor at a time.

It needs no compiler, works on any device and float dtype (fp64 stays fp64), and goes through a
tensor in spans of at most 1/128 of it so that its temporaries stay small.
"""

from __future__ import annotations

import builtins
import inspect
import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..formats.dynamic8 import BLOCK, block_absmax, decode, encode
from ..plan import GNORM_HISTORY, Batch, Slot, clips, phase_count
from ..rules import RuleFunction

NAME = "torch"
SPAN = 1 << 16  # elements; small tensors are done in one piece


def _where(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, Tensor):
        return a if condition else b
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        # Two Python numbers would come out in torch's default dtype, and lose digits.
        dtype = torch.float32 if condition.device.type == "mps" else torch.float64
        a = torch.tensor(a, dtype=dtype, device=condition.device)
    return torch.where(condition, a, b)


def _maximum(a: Any, b: Any) -> Any:
    return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp(min=b)


def _minimum(a: Any, b: Any) -> Any:
    return torch.minimum(a, b) if isinstance(b, Tensor) else a.clamp(max=b)


def _on_tensors(fn: Callable) -> Callable:
    return lambda x: (
        fn(x) if isinstance(x, Tensor) else fn(torch.tensor(x, dtype=torch.float64, device="cpu"))
    )


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
    return bound, tuple(inspect.signature(fn).parameters), getattr(fn, "gives", ())


def call(fn: RuleFunction, values: dict) -> dict:
    """Run a rule function on the names it reads; the names it gives, with their values."""
    bound, reads, gives = bind(fn)
    result = bound(*(values[name] for name in reads))
    return dict(zip(gives, result if isinstance(result, tuple) else (result,), strict=True))


def spans(slot: Slot) -> Iterator[tuple[slice, slice, slice]]:
    """Rectangles (rows, columns, blocks of a row) that cover the slot, each of a few blocks."""
    if slot.p.numel() == 0:
        return
    limit = max(SPAN, slot.p.numel() // 128)
    if slot.row <= limit:
        step = max(1, limit // max(1, slot.row))
        for r in range(0, slot.rows, step):
            yield slice(r, min(r + step, slot.rows)), slice(None), slice(None)
        return
    width = limit // BLOCK * BLOCK
    for r in range(slot.rows):
        for c in range(0, slot.row, width):
            yield slice(r, r + 1), slice(c, c + width), slice(c // BLOCK, (c + width) // BLOCK)


def _in_blocks(x: Tensor) -> Tensor:
    """(rows, columns) as (rows, blocks, 256), the last block filled up with zeros."""
    short = -x.shape[1] % BLOCK
    x = torch.nn.functional.pad(x, (0, short)) if short else x
    return x.reshape(x.shape[0], -1, BLOCK)


def decode_rows(codes: Tensor, absmax: Tensor, signed: bool, dtype: torch.dtype) -> Tensor:
    """Values of codes (rows, columns) with scales (rows, blocks)."""
    scale = absmax.repeat_interleave(BLOCK, dim=1)[:, : codes.shape[1]]
    return decode(codes, scale, signed, dtype)


def encode_rows(x: Tensor, signed: bool, codes: Tensor, absmax: Tensor) -> None:
    """Quantize finite x (rows, columns) into codes (rows, columns) and scales (rows, blocks)."""
    blocks = _in_blocks(x)
    scale = block_absmax(blocks)
    absmax.copy_(scale.squeeze(-1))
    codes.copy_(encode(blocks, scale, signed).flatten(1)[:, : x.shape[1]])


class TorchRun:
    """A step of one batch; see `plan.Run`."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.phases = phase_count(batch)
        self.device = batch.slots[0].p.device
        on_mps = self.device.type == "mps"  # which has no fp64
        self.scalar_dtype = torch.float32 if on_mps else torch.float64
        self.values: dict[str, Any] = {
            name: value.to(self.device, self.scalar_dtype) if isinstance(value, Tensor) else value
            for name, value in batch.hyper.items()
        }
        self.live = None if batch.found_inf is None else batch.found_inf.to(self.device) == 0

    def _count(self, steps: int) -> None:
        counts = [slot.step for slot in self.batch.slots]
        if self.live is None:
            torch._foreach_add_(counts, steps)
        else:
            live = (steps * self.live).to(counts[0].dtype).reshape(())
            torch._foreach_add_(counts, [live] * len(counts))

    def cancel(self) -> None:
        self._count(-1)

    def begin(self) -> None:
        batch, slots = self.batch, self.batch.slots
        steps = [slot.step for slot in slots]
        self._count(1)
        sign = -1.0 if batch.maximize else 1.0
        scale = torch.full((len(slots),), sign, dtype=self.scalar_dtype, device=self.device)
        if batch.grad_scale is not None:
            scale = scale / batch.grad_scale.to(device=self.device, dtype=self.scalar_dtype)
        numels = [float(slot.numel) for slot in slots]
        self.values["gscale"] = scale
        self.values["step"] = torch.stack(steps).to(self.scalar_dtype)
        self.values["numel"] = torch.tensor(numels, dtype=self.scalar_dtype, device=self.device)
        self.values.update(call(batch.rule.prepare, self.values))

    def reduce(self, phase: int) -> Tensor:
        batch = self.batch
        if clips(batch) and phase == 0:
            sums = [self._gradient_square(i) for i in range(len(batch.slots))]
        else:
            terms = batch.rule.phases[phase - clips(batch)].terms
            sums = [self._sum_terms(i, terms) for i in range(len(batch.slots))]
        return torch.stack(sums)

    def combine(self, phase: int, sums: Tensor) -> None:
        batch = self.batch
        if clips(batch) and phase == 0:
            self.values["gscale"] = self.values["gscale"] * self._clip(sums[:, 0])
            return
        rule_phase = batch.rule.phases[phase - clips(batch)]
        named = dict(zip(rule_phase.terms.gives, sums.unbind(1), strict=True))
        self.values.update(call(rule_phase.combine, {**self.values, **named}))

    def finish(self) -> None:
        # A step that an AMP scaler found to overflow leaves everything as it was.
        if self.live is not None and not bool(self.live):
            return
        for i, slot in enumerate(self.batch.slots):
            for span in spans(slot):
                self._write(i, slot, span)

    def _clip(self, squares: Tensor) -> Tensor:
        """Record ||g||^2 of each tensor and return the factors of percentile clipping."""
        vectors = [slot.gnorm_vec for slot in self.batch.slots if slot.gnorm_vec is not None]
        history = torch.stack(vectors)
        squares = squares.float()
        index = torch.remainder(self.values["step"], GNORM_HISTORY).to(torch.int64)
        here = torch.arange(GNORM_HISTORY, device=self.device) == index[:, None]
        ok = squares.isfinite()
        if self.live is not None:
            ok = ok & self.live
        record = ok[:, None] & (here | (history[:, :1] < 0))  # a fresh history is -1 throughout
        history = torch.where(record, squares[:, None], history)
        torch._foreach_copy_(vectors, list(history.unbind()))
        limit = history.sort(dim=1).values[:, self.batch.percentile].to(self.scalar_dtype).sqrt()
        norm = squares.to(self.scalar_dtype).sqrt()
        return torch.where(ok & (norm > limit), limit / norm, 1.0)

    def _gradient_square(self, i: int) -> Tensor:
        slot = self.batch.slots[i]
        total = torch.zeros(1, dtype=self.scalar_dtype, device=self.device)
        scale = self.values["gscale"][i]
        for rows, columns, _ in spans(slot):
            g = slot.g.view(slot.rows, slot.row)[rows, columns].to(self._compute(slot))
            total += (g * scale.to(g.dtype)).square().sum(dtype=self.scalar_dtype)
        return total

    def _sum_terms(self, i: int, terms: RuleFunction) -> Tensor:
        slot = self.batch.slots[i]
        total = torch.zeros(len(terms.gives), dtype=self.scalar_dtype, device=self.device)
        for span in spans(slot):
            values = self._elements(i, slot, span)
            if "u" in bind(terms)[1]:
                values["u"] = call(self.batch.rule.direction, values)["u"]
            for k, term in enumerate(call(terms, values).values()):
                finite = torch.where(term.isfinite(), term, 0.0)
                total[k] += finite.sum(dtype=self.scalar_dtype)
        return total

    @staticmethod
    def _compute(slot: Slot) -> torch.dtype:
        return torch.float64 if slot.p.dtype == torch.float64 else torch.float32

    def _elements(self, i: int, slot: Slot, span: tuple[slice, slice, slice]) -> dict:
        """Everything the rule may read, for the elements of a span of slot i."""
        rows, columns, blocks = span
        dtype = self._compute(slot)
        shape = (slot.rows, slot.row)
        values = {
            name: value[i].to(dtype) if isinstance(value, Tensor) and value.ndim else value
            for name, value in self.values.items()
        }
        values["p"] = slot.p.view(shape)[rows, columns].to(dtype)
        values["g"] = slot.g.view(shape)[rows, columns].to(dtype) * values["gscale"]
        for k, moment in enumerate(self.batch.rule.moments):
            stored = slot.moments[k].view(shape)[rows, columns]
            if slot.absmax:
                scale = slot.absmax[k].view(slot.rows, -1)[rows, blocks]
                values[moment.key] = decode_rows(stored, scale, moment.signed, dtype)
            else:
                values[moment.key] = stored.to(dtype)
        return values

    def _write(self, i: int, slot: Slot, span: tuple[slice, slice, slice]) -> None:
        rows, columns, blocks = span
        shape = (slot.rows, slot.row)
        values = self._elements(i, slot, span)
        given = call(self.batch.rule.direction, values)
        p = values["shrink"] * values["p"] - values["rate"] * given["u"]
        slot.p.view(shape)[rows, columns] = p.to(slot.p.dtype)
        new = [given[moment.key] for moment in self.batch.rule.moments]
        if slot.absmax and new:
            finite = torch.stack([x.isfinite() for x in new]).all(0)
            new = [torch.where(finite, x, 0.0) for x in new]
        for k, moment in enumerate(self.batch.rule.moments):
            stored = slot.moments[k].view(shape)[rows, columns]
            if slot.absmax:
                scale = slot.absmax[k].view(slot.rows, -1)[rows, blocks]
                encode_rows(new[k], moment.signed, stored, scale)
            else:
                stored.copy_(new[k])


def start(batch: Batch) -> TorchRun:
    """Begin a step of a batch of slots, which may differ in dtype and state width."""
    return TorchRun(batch)


def quantize(x: Tensor, signed: bool, rows: int, row: int, codes: Tensor, absmax: Tensor) -> None:
    """Quantize contiguous x of rows x row elements into codes and absmax; bad numbers give zero."""
    slot = Slot(x, x, (), (), x, rows, row, x.numel())
    for span in spans(slot):
        part = x.view(rows, row)[span[0], span[1]]
        part = part if part.dtype == torch.float64 else part.float()
        part = torch.where(part.isfinite(), part, 0.0)
        scale = absmax.view(rows, -1)[span[0], span[2]]
        encode_rows(part, signed, codes.view(rows, row)[span[0], span[1]], scale)


def dequantize(
    codes: Tensor, absmax: Tensor, signed: bool, rows: int, row: int, out: Tensor
) -> None:
    """Write the values of codes (rows x row) with scales absmax into out."""
    slot = Slot(codes, codes, (), (), codes, rows, row, codes.numel())
    work = torch.float64 if out.dtype == torch.float64 else torch.float32
    for rows_, columns, blocks in spans(slot):
        scale = absmax.view(rows, -1)[rows_, blocks]
        part = decode_rows(codes.view(rows, row)[rows_, columns], scale, signed, work)
        out.view(rows, row)[rows_, columns] = part.to(out.dtype)
