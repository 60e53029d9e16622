"""The memory of one optimizer that trains one network, in a process of its own."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import math
import platform
import sys
from collections.abc import Mapping

import torch

import lowbit_optim
from benchmarks.common import measure, models, registry, verify
from benchmarks.common.worker import emit
from benchmarks.footprint import estimate, networks

LR = 1e-4
# What a library raises where it has no kernels for the device or the dtype.
_REFUSALS = (
    ImportError, OSError, AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


class Gauge:
    """The peaks of memory in the sections of a program, above what was there at first."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        if platform.libc_ver()[0] == "glibc":
            # What is free in the heap is resident, and would be used again uncounted.
            ctypes.CDLL(None).malloc_trim(0)
        self.first = measure.held_bytes(device)
        self.highest = 0
        measure.reset_peak(device)

    def section(self) -> int | None:
        """The peak since the last section, which ends here; None where the system has none."""
        peak = measure.peak_bytes(self.device)
        measure.reset_peak(self.device)
        if peak is None or self.first is None:
            return None
        self.highest = max(self.highest, peak - self.first)
        return peak - self.first

    def held(self) -> int | None:
        """Bytes that are allocated now."""
        now = measure.held_bytes(self.device)
        return None if now is None or self.first is None else now - self.first


@dataclasses.dataclass(frozen=True)
class Case:
    """A training whose memory is weighed.

    Attributes:
        network, size: names in `networks.NETWORKS`.
        optimizer: a name in `registry.weighed()`.
        dtype: of the weights.
        bits: `master_weight_bits`, None for the optimizer's default.
        released: whether gradients are, in buckets of `bucket_bytes`.
        steps: training steps.
    """

    network: str
    size: str
    optimizer: str
    dtype: str
    bits: int | None
    released: bool
    bucket_bytes: int
    steps: int

    def source(self) -> registry.Source:
        """The optimizer's factory."""
        source = registry.weighed()[self.optimizer].make
        bits = {} if self.bits is None else {"master_weight_bits": self.bits}
        return dataclasses.replace(source, options={**source.options, **bits})


def train(case: Case, device: torch.device, steps: int) -> dict[str, object]:
    """Train for some steps and weigh them.

    Returns:
        Bytes: `weights`; `gradients` and `state`, counted on the tensors (of released gradients the
        most that are there at once, by arithmetic); `estimated_state`, by arithmetic, or None;
        `first_peak` and `peak`, of the first step and of all, and `temporary`, what the last
        `step()` had above what it left (None on systems that do not say, the last with released
        gradients, too). Besides these `params`, the number of parameters, and `loss`, the last.
    """
    dtype, gauge = getattr(torch, case.dtype), Gauge(device)
    torch.manual_seed(0)
    network, source = networks.NETWORKS[case.network][case.size], case.source()
    model = network.build(dtype, device)
    optimizer = source(model.parameters(), LR)
    if case.released:
        lowbit_optim.release_gradients(optimizer, model, bucket_bytes=case.bucket_bytes)
    if hasattr(optimizer, "train"):
        optimizer.train()
    batch = network.batch(dtype, device)
    first_peak = temporary = loss = None
    gradients = 0
    for index in range(steps):
        loss = models.loss(model, *batch)
        loss.backward()
        arrived = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        gradients = max(gradients, arrived)
        gauge.section()
        optimizer.step()
        peak, left = gauge.section(), gauge.held()
        optimizer.zero_grad()
        first_peak = gauge.highest if index == 0 else first_peak
        temporary = None if case.released or peak is None else max(0, peak - left)
    params = list(model.parameters())
    if case.released:
        gradients = estimate.released_bytes(params, case.bucket_bytes)
    known = gauge.first is not None
    return {
        "params": sum(p.numel() for p in params),
        "weights": sum(p.nbytes for p in params),
        "gradients": gradients,
        "state": measure.state_bytes(optimizer),
        "estimated_state": estimate.state_bytes(source, params, case.bits),
        "temporary": temporary,
        "first_peak": first_peak if known else None,
        "peak": gauge.highest if known else None,
        "loss": loss.item(),
    }


def _check(case: Case, found: Mapping[str, object]) -> None:
    """Raise AssertionError for an infinite loss, or state of ours that is not as by arithmetic."""
    if not math.isfinite(found["loss"]):
        raise AssertionError(f"{case.optimizer}: the loss is {found['loss']}")
    ours = case.source().library == "lowbit_optim"
    if ours and found["estimated_state"] not in (None, found["state"]):
        raise AssertionError(
            f"{case.optimizer} has {found['state']:,} bytes of state, "
            f"not {found['estimated_state']:,}"
        )


def main(spec: Mapping[str, object]) -> None:
    """Hold the optimizer against its rule, load all code in one step, then weigh.

    An event says what of these went wrong: "wrong" where the optimizer does not do what its rule
    says, "left out" where another library's refuses to run here.
    """
    torch.set_num_threads(int(spec["threads"]))
    device = torch.device(str(spec["device"]))
    case = Case(**spec["case"])
    entry = registry.weighed()[case.optimizer]
    try:
        error = verify.verify(entry, entry.learning_rate("mnist"), device)
        train(case, device, 1)
        found = train(case, device, case.steps)
        _check(case, found)
    except AssertionError as wrong:
        emit("wrong", why=str(wrong))
    except _REFUSALS as refusal:
        if entry.peer in (None, "torch"):
            raise
        emit("left out", why=f"{type(refusal).__name__}: {refusal}".splitlines()[0])
    else:
        emit("weighed", error=error, **found)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
