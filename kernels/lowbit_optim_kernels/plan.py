"""What an engine is handed: the tensors of one optimizer group, ready to be stepped together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .rules import Rule

GNORM_HISTORY = 100  # steps of squared gradient norms that percentile clipping looks back on
STEP_DTYPE = torch.int64  # fp32 would stop counting at 2**24


@dataclass
class Slot:
    """The tensors of one parameter. All are contiguous, on one device, and local when sharded.

    Attributes:
        p: the parameter's values; written.
        g: the gradient, of p's shape, any float dtype; only read.
        moments: one tensor of p's shape per moment of the rule: fp32 (fp64 for fp64 parameters),
            or uint8 codes when `absmax` is given; written.
        absmax: fp32 scales per moment in the layout of `rows` x `row`, or () for 32-bit state.
        step: 0-d int64, the number of steps taken so far; written.
        rows, row: blocks restart every `row` elements; rows * row == p.numel().
        numel: element count of the global tensor.
        gnorm_vec: fp32 of shape (100,), squared gradient norms, when percentile clipping is on.
    """

    p: Tensor
    g: Tensor
    moments: tuple[Tensor, ...]
    absmax: tuple[Tensor, ...]
    step: Tensor
    rows: int
    row: int
    numel: int
    gnorm_vec: Tensor | None = None

    @property
    def bits(self) -> int:
        """8 or 32: the width of the stored moments."""
        return 8 if self.absmax else 32

    def addresses(self, moments: int) -> list[int]:
        """The slot's row of a compiled engine's address table, for a rule of so many moments.

        p, g, step, moments, absmax, gnorm_vec; 0 for what the slot does not have.
        """
        row = [self.p.data_ptr(), self.g.data_ptr(), self.step.data_ptr()]
        row += [x.data_ptr() for x in self.moments]
        row += [x.data_ptr() for x in self.absmax] if self.absmax else [0] * moments
        row.append(0 if self.gnorm_vec is None else self.gnorm_vec.data_ptr())
        return row


@dataclass
class Batch:
    """One group's slots of one device, the rule, and this step's run-time values.

    Attributes:
        rule: the update rule.
        slots: parameters that have a gradient in this step.
        hyper: hyperparameters by name; numbers, or 0-d tensors that stay on their device.
        maximize: True flips the gradient.
        percentile: index into the sorted norm history, 100 for no clipping.
        grad_scale, found_inf: 0-d tensors of an AMP scaler, or None.
        cache: an object that the engine may keep things in from step to step.
        again: whether the slots are those of this cache's last step, with nothing new beside the
            gradients' values and addresses, so that the engine need not look at the rest.
    """

    rule: Rule
    slots: list[Slot]
    hyper: Mapping[str, float | Tensor]
    maximize: bool = False
    percentile: int = 100
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    cache: dict = field(default_factory=dict)
    again: bool = False


class Run(Protocol):
    """One step of one batch on one engine, in the order `begin`, (`reduce`, `combine`)*, `finish`.

    Before `begin` nothing is written. An engine that compiles does so before, as far as it can.

    The sums are handed out between `reduce` and `combine` so that a caller who holds only a shard
    of each tensor can add up the shards of all of them in one all-reduce.
    """

    phases: int

    def begin(self) -> None:
        """Count the step and compute the per-tensor values that need no reduction."""

    def reduce(self, phase: int) -> Tensor:
        """Sums of the phase's terms, shape (slots, terms), on the batch's device."""

    def combine(self, phase: int, sums: Tensor) -> None:
        """Turn (global) sums into per-tensor values."""

    def finish(self) -> None:
        """Write parameters and moments."""

    def cancel(self) -> None:
        """Take the count of `begin` back: the step will not be finished."""


def clips(batch: Batch) -> bool:
    """Whether the batch's first phase is the gradient norm of percentile clipping."""
    return batch.percentile < 100


def phase_count(batch: Batch) -> int:
    """Reductions before the parameters can be written."""
    return len(batch.rule.phases) + clips(batch)
