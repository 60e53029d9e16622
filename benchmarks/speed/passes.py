"""Time every pass of the CPU engine on one thread, from memory and in cache.

`python -m benchmarks.speed.passes`: nanoseconds an element of each pass of an optimizer's step,
over a tensor that no cache holds, and over one of 16,384 elements again and again. What is nearly
as slow in cache as from memory is bound by its arithmetic; the rest waits for memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common import arguments, measure, registry, report, tables, verify
from benchmarks.static import traffic
from lowbit_optim_kernels.batch import Batch
from lowbit_optim_kernels.engines.numba import job, vector
from lowbit_optim_kernels.engines.numba import threads as numba_threads
from lowbit_optim_kernels.engines.numba.cache import CFunction

LARGE, SMALL = 1 << 24, 64 * 256  # elements
REPEATED = 64
COUNT, WORK, SHARE = job.COUNT // job.WORD, job.WORK // job.WORD, job.SHARE // job.WORD
CHUNKS, PARTIAL = (at // job.WORD - WORK for at in (job.CHUNKS, job.PARTIAL))  # of its work


@dataclass(frozen=True)
class Pass:
    """A pass of a step over one tensor: what a `numba_threads.Job` takes."""

    name: str
    share: CFunction
    count: int
    work: list[int]

    def run(self) -> float:
        """The seconds that it takes on one thread."""
        alone = numba_threads.Job(self.share, self.count, 1, self.work)
        start = time.perf_counter()
        alone.run()
        return time.perf_counter() - start


def _batch(optimizer: torch.optim.Optimizer) -> Batch:
    """The one batch of a step that has been taken."""
    ((batch,),) = (plan.batches for plan in optimizer.plans.values())
    return batch


def _passes(optimizer: torch.optim.Optimizer) -> list[Pass]:
    """Passes of a step that has been taken; they work on the optimizer's memory."""
    batch = _batch(optimizer)
    (bucket,) = batch.tables.buckets
    (rows,) = batch.tables.sweep(1, True).parts
    return [
        Pass(name, share, int(row[COUNT]), row[WORK:SHARE].tolist())
        for (name, share), row in zip(bucket.passes.items(), rows, strict=True)
    ]


def _optimizer(name: str, elements: int, dtype: torch.dtype) -> torch.optim.Optimizer:
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(elements, generator=generator).to(dtype))
    p.grad = torch.randn(elements, generator=generator).to(dtype)
    return registry.REGISTRY[name].make([p], 1e-6)


def from_memory(name: str, dtype: torch.dtype, rounds: int) -> dict[str, dict[str, float]]:
    """Nanoseconds an element of each pass over a large tensor; quartiles over steps."""
    optimizer = _optimizer(name, LARGE, dtype)
    optimizer.step()
    passes = _passes(optimizer)
    times: dict[str, list[float]] = {one.name: [] for one in passes}
    for _ in range(rounds):
        for one in passes:
            times[one.name].append(1e9 * one.run() / LARGE)
    return {name: measure.spread(values) for name, values in times.items()}


def in_cache(name: str, dtype: torch.dtype, rounds: int) -> dict[str, dict[str, float]]:
    """Likewise over a small tensor, REPEATED times a measurement."""
    optimizer = _optimizer(name, SMALL, dtype)
    optimizer.step()
    chunks = np.array([[0, 0, SMALL // 256]] * REPEATED, dtype=np.int64)
    partial = np.zeros((REPEATED, 8))
    result = {}
    for one in _passes(optimizer):
        assert one.count == 1
        work = list(one.work)
        work[CHUNKS], work[PARTIAL] = chunks.ctypes.data, partial.ctypes.data
        again = Pass(one.name, one.share, REPEATED, work)
        seconds = [again.run() for _ in range(4 * rounds)]
        result[one.name] = measure.spread([1e9 * x / REPEATED / SMALL for x in seconds])
    return result


def bound(row: Mapping[str, Any]) -> str:
    """The bound of a pass: memory, arithmetic, or both."""
    if row["of_copy"] > 0.85:
        return "memory"
    return "arithmetic" if row["ns_in_cache"]["median"] > 0.85 * row["ns"]["median"] else "both"


def rows_of(name: str, dtype: torch.dtype, rounds: int, copy: float) -> list[dict[str, object]]:
    """A row for each pass of an optimizer."""
    memory, cached = from_memory(name, dtype, rounds), in_cache(name, dtype, rounds)
    optimizer = _optimizer(name, SMALL, dtype)
    rule = traffic.rule_of(optimizer)
    optimizer.step()
    (slot,) = _batch(optimizer).slots
    rows = []
    for one, spread in memory.items():
        width = dtype.itemsize
        moved = traffic.bytes_of(rule, one, width, width, slot.format, slot.weights)
        speed = moved / spread["median"]
        rows.append({
            "optimizer": name, "pass": one, "bytes_per_element": moved, "ns": spread,
            "ns_in_cache": cached[one], "gb_per_s": speed, "of_copy": speed / copy,
        })  # fmt: skip
        rows[-1]["bound"] = bound(rows[-1])
    return rows


def table(rows: list[dict], copy: float, dtype: str) -> Table:
    """Nanoseconds an element from memory and in cache, and the bandwidth."""
    title = (
        f"1 thread, {dtype}, {vector.instruction_set()}; copying runs at {copy:.1f} GB/s\n"
        "ns an element with the tensor in memory and with a small one in cache, medians"
    )
    grid = tables.grid(title)
    for column in ("optimizer", "pass"):
        grid.add_column(column, no_wrap=True)
    for column in ("B", "memory", "cache", "GB/s", "of copy", "bound by"):
        grid.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        grid.add_row(
            row["optimizer"],
            row["pass"],
            f"{row['bytes_per_element']:.1f}",
            f"{row['ns']['median']:.3f}",
            f"{row['ns_in_cache']['median']:.3f}",
            f"{row['gb_per_s']:.1f}",
            f"{row['of_copy']:.0%}",
            row["bound"],
        )
    return grid


def main(
    optimizer: Annotated[
        list[str] | None, typer.Option(help="a name of the registry; repeatable")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    rounds: Annotated[int, typer.Option(min=1, help="timed steps")] = 15,
    out: Annotated[Path, typer.Option(help="folder for passes.json")] = report.LOCAL,
) -> None:
    """Time every pass of the CPU engine on one thread."""
    console, load = Console(), report.load_average()
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    with arguments.refusing():
        arguments.known("dtype", [dtype], kinds)
        entries = registry.select(optimizer or registry.aimed())
        registry.of_dtypes(entries, kinds[dtype])
        for entry in entries:
            if traffic.rule_of(_optimizer(entry.name, SMALL, torch.float32)) is None:
                raise ValueError(f"{entry.name!r} does not run on the Numba engine's passes")
    torch.set_num_threads(1)
    device = torch.device("cpu")
    for entry in entries:
        verify.verify(entry, entry.learning_rate("mnist"), device)
    copy = measure.copy_gb_per_s(device)
    rows = []
    for entry in entries:
        rows += rows_of(entry.name, kinds[dtype], rounds, copy)
    console.print(table(rows, copy, dtype))
    report.say_if_busy(console, load)
    options = {"optimizer": optimizer, "dtype": dtype, "rounds": rounds}
    written = {
        **report.origin("benchmarks.speed.passes", options),
        "load_before": load, "dtype": dtype, "instruction_set": vector.instruction_set(),
        "copy_gb_per_s": copy, "passes": rows,
    }  # fmt: skip
    report.write_json(out / "passes.json", written)
    console.print(f"results: {out / 'passes.json'}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
