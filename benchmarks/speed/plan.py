"""Time the host's work on a GPU step's launch plan; needs no GPU.

`python -m benchmarks.speed.plan`: microseconds to build the tables for many small tensors, and to
bring them up to date when the gradients are new. The tables stay on the CPU here, so sending them
to a device is not in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

os.environ.setdefault("TRITON_INTERPRET", "1")  # so that Triton takes CPU tensors

import torch
import typer
from rich.console import Console

import lowbit_optim
from benchmarks.common import measure, report
from lowbit_optim_kernels import dispatch
from lowbit_optim_kernels.batch import Batch, StepTensors
from lowbit_optim_kernels.engines.triton import tables as engine_tables


def _batch(tensors: int) -> Batch:
    """The batch that a step of AdamW8bit hands to the engine."""
    params = [torch.nn.Parameter(torch.randn(64)) for _ in range(tensors)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = lowbit_optim.AdamW8bit(params, min_8bit_size=1)
    seen: list[Batch] = []

    def stop(batches: Sequence[Batch], **_rest: object) -> None:
        seen.extend(batches)
        raise _Stopped  # a step that ends lets go of tensors

    stopping = patch.object(dispatch, "step", stop)
    with lowbit_optim.use_engine("triton"), stopping, suppress(_Stopped):
        optimizer.step()
    (batch,) = seen
    return batch


class _Stopped(Exception):
    """What a step of which only the batch is wanted ends with."""


def times(tensors: int, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds to build a plan, to find it unchanged, and to take new gradients."""
    batch = _batch(tensors)
    found: dict[str, list[float]] = {"build": [], "same gradients": [], "new gradients": []}

    def build() -> None:
        batch.tables, batch.reused = None, False
        batch.note_addresses()
        engine_tables.tables_for(batch)

    params = [slot.p for slot in batch.slots]

    def go_on(gradients: list[torch.Tensor]) -> None:
        tensors = StepTensors(params, gradients, [], torch.Tensor.detach)
        batch.take_gradients(tensors, [g.data_ptr() for g in gradients])
        engine_tables.tables_for(batch)

    def microseconds(call: Callable[[], object]) -> float:
        return 1e6 * measure.seconds(call, batch.device)

    for _ in range(rounds):
        found["build"].append(microseconds(build))
        same = [slot.g for slot in batch.slots]
        found["same gradients"].append(microseconds(partial(go_on, same)))
        new = [torch.randn_like(g) for g in same]
        found["new gradients"].append(microseconds(partial(go_on, new)))
    return {name: measure.spread(values) for name, values in found.items()}


def main(
    tensors: Annotated[int, typer.Option(min=1, help="of 64 elements")] = 1000,
    rounds: Annotated[int, typer.Option(min=1)] = 15,
    out: Annotated[Path, typer.Option(help="folder for plan.json")] = report.LOCAL,
) -> None:
    """Time the host's work on a GPU step's launch plan."""
    console, load = Console(), report.load_average()
    result = times(tensors, rounds)
    for name, spread in result.items():
        console.print(
            f"{name}: {spread['median']:.0f} us ({spread['q25']:.0f} {spread['q75']:.0f}) for "
            f"{tensors} tensors",
            highlight=False,
        )
    report.say_if_busy(console, load)
    written = {
        **report.origin("benchmarks.speed.plan", {"tensors": tensors, "rounds": rounds}),
        "load_before": load, "microseconds": result,
    }  # fmt: skip
    report.write_json(out / "plan.json", written)


if __name__ == "__main__":
    typer.run(main)
