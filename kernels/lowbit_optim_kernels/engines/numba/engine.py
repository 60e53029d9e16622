"""The CPU engine: the rules through Numba and LLVM, all passes over all tensors in one call.

Blocks are dealt out in chunks to threads (`threads`). Results do not depend on their number:
sums are formed per chunk and then added in a fixed order. A rule with norms takes whole tensors
window by window (`sweep`), and shards, whose sums are added up over processes in between, pass by
pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...batch import Batch
from ...codegen.analysis import hyper_names
from ...formats import Format, Unit
from ...formats.layout import Layout
from ...rules import Moment
from .. import torch as torch_engine
from . import modules, source
from . import threads as numba_threads
from .cache import c_function
from .tables import tables_for, threads_for


class NumbaRun:
    """A step of one batch; see `batch.Run`."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.tables = tables_for(batch)
        names = hyper_names(batch.rule)
        self.tables.hyper[:] = [[float(hyper[name]) for name in names] for hyper in batch.hyper]
        self.live = batch.found_inf is None or float(batch.found_inf) == 0.0
        # An earlier batch may write the parameters that a later one sums up before it does.
        whole = not batch.shards and not batch.follows
        self.sweep = self.tables.sweep(torch.get_num_threads(), whole)
        self.phases = len(self.sweep.parts) - 1
        self.wrote = False

    def begin(self) -> None:
        scale = -1.0 if self.batch.maximize else 1.0
        if self.batch.grad_scale is not None:
            # Not by Python, which refuses to divide by what many overflows have halved to 0.
            scale = float(scale / self.batch.grad_scale.cpu().double())
        self.tables.scalars[:, source.GSCALE] = scale
        self.tables.call("begin", self.live)

    def reduce(self, phase: int) -> Tensor:
        self.sweep.run(phase)
        return torch.from_numpy(self.sweep.sums[phase])

    def combine(self, phase: int, sums: Tensor) -> None:
        totals = sums.contiguous()
        self.tables.call(f"combine_{phase}", self.live, totals.data_ptr())

    def finish(self) -> None:
        if not self.live:
            return
        self.wrote = True
        self.sweep.run(-1)
        if self.batch.rule.kept():
            self.tables.call("keep", self.live)


def start(batch: Batch) -> NumbaRun:
    """Begin a step of a batch of CPU slots in fp32, bf16 or fp16."""
    return NumbaRun(batch)


def encode(unit: Unit, values: Sequence[Tensor], layout: Layout, out: Sequence[Tensor]) -> None:
    """Code contiguous tensors into the tensors `out` of a unit's parts; bad numbers give zero.

    By the format's functions for whole tensors of one moment, else by torch operators.
    """
    if not source.codes_tensors(unit.format):
        torch_engine.encode(unit, values, layout, out)
        return
    for moment, x in zip(unit.moments, values, strict=True):
        _code("encode_tensor", moment, x.float(), _stored(unit, moment, out), layout, unit.format)


def decode(unit: Unit, stored: Sequence[Tensor], layout: Layout, out: Sequence[Tensor]) -> None:
    """Write the numbers of a unit's moments into the contiguous tensors `out`; see `encode`."""
    if not source.codes_tensors(unit.format):
        torch_engine.decode(unit, stored, layout, out)
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
    share = f"{source.tensor_function(name, moment.signed)}_share"
    threads = threads_for(layout.rows * layout.row, torch.get_num_threads())
    function = c_function(modules.codec(format), share)
    work = [layout.row, *(tensor.data_ptr() for tensor in (x, *stored))]
    numba_threads.Job(function, layout.rows * layout.blocks_per_row, threads, work).run()
