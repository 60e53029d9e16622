"""Time the host's work on a GPU's step; needs no GPU.

`python -m benchmarks.speed.plan`: microseconds to build the tables for many small tensors, to bring
them up to date when the gradients are new, and for a whole call of `step`. The tables stay on the
CPU here, so sending them to a device is not in it; nor is the driver's part of a launch: kernels
are compiled for a GPU as they would be there, and their launches go nowhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported: kernels are compiled here

import torch
import typer
from rich.console import Console
from rich.markdown import Markdown

import lowbit_optim
from benchmarks.common import arguments, measure, registry, report, tables
from benchmarks.static import traffic
from benchmarks.static.ptx.launch import Driver, taking_cpu_tensors
from lowbit_optim_kernels import dispatch
from lowbit_optim_kernels.batch import Batch, StepTensors
from lowbit_optim_kernels.engines.triton import tables as engine_tables

OPTIMIZERS = ["AdamW8bit", "LAMB8bit", "LARS8bit-paper"]
COUNTS = [1, 161, 1000]


class _Nowhere(Driver):
    """A GPU whose launches do nothing."""

    class launcher_cls:
        def __init__(self, source: Any, metadata: Any) -> None: ...

        def __call__(self, *arguments: Any) -> None: ...

    class utils:
        @staticmethod
        def load_binary(*arguments: Any) -> tuple[int, ...]:
            """Module, function, registers, spills and most threads of a kernel."""
            return 1, 1, 128, 0, 1024

        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": 2**20}


def _optimizer(name: str, tensors: int) -> torch.optim.Optimizer:
    """One of the registry's over tensors of so few elements that they are kept in 32 bits."""
    params = [torch.nn.Parameter(torch.randn(64)) for _ in range(tensors)]
    for p in params:
        p.grad = torch.randn_like(p)
    return registry.REGISTRY[name].make(params, 1e-3)


def _batch(optimizer: torch.optim.Optimizer) -> Batch:
    """The batch that its step hands to the engine."""
    seen: list[Batch] = []

    def stop(batches: Sequence[Batch], **_rest: object) -> None:
        seen.extend(batches)
        raise _Stopped  # a step that ends lets go of tensors

    stopping = patch.object(dispatch, "step", stop)
    with stopping, suppress(_Stopped):
        optimizer.step()
    (batch,) = seen
    return batch


class _Stopped(Exception):
    """What a step of which only the batch is wanted ends with."""


def times(name: str, tensors: int, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds to build a plan, to find it unchanged, to take new gradients, and of a step."""
    optimizer = _optimizer(name, tensors)
    batch = _batch(optimizer)
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
    for _ in range(measure.WARM_UP):  # kernels are compiled in the first one
        optimizer.step()
    steps = measure.back_to_back(optimizer.step, batch.device, rounds)
    found["step"] = [1e6 * seconds for seconds in steps]
    return {name: measure.spread(values) for name, values in found.items()}


def main(
    optimizer: Annotated[
        list[str], typer.Option(help="of the registry; several times")
    ] = OPTIMIZERS,
    tensors: Annotated[
        list[int], typer.Option(min=1, help="of 64 elements; several times")
    ] = COUNTS,
    rounds: Annotated[int, typer.Option(min=1)] = 15,
    out: Annotated[Path, typer.Option(help="folder for plan.json")] = report.LOCAL,
) -> None:
    """Time the host's work on a GPU's step."""
    console, load = Console(), report.load_average()
    with arguments.refusing():
        entries = registry.select(optimizer)
        registry.of_dtypes(entries, torch.float32)
        names = [entry.name for entry in entries]
        for name in names:
            if traffic.rule_of(_optimizer(name, 1)) is None:
                raise ValueError(f"{name!r} does not run on the Triton engine's passes")
    cases = []
    with taking_cpu_tensors(_Nowhere(90)), lowbit_optim.use_engine("triton"):
        for name in names:
            for count in tensors:
                spreads = times(name, count, rounds)
                cases.append({"optimizer": name, "tensors": count, "microseconds": spreads})
    console.print(Markdown(table(cases)))
    report.say_if_busy(console, load)
    given = {"optimizer": names, "tensors": tensors, "rounds": rounds}
    written = {
        **report.origin("benchmarks.speed.plan", given), "load_before": load, "cases": cases,
    }  # fmt: skip
    report.write_json(out / "plan.json", written)


def table(cases: list[dict]) -> str:
    """Markdown: the medians of each case."""
    columns = list(cases[0]["microseconds"])
    rows = [
        [
            case["optimizer"], f"{case['tensors']:,}",
            *(f"{case['microseconds'][column]['median']:,.0f}" for column in columns),
        ]
        for case in cases
    ]  # fmt: skip
    return tables.markdown(["us", "tensors", *columns], rows)


if __name__ == "__main__":
    typer.run(main)
