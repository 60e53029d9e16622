"""Time every pass of the CPU engine on one thread, from memory and in cache.

`python -m benchmarks.speed.passes`: nanoseconds an element of each pass of an optimizer's step,
over a tensor that no cache holds, and over one of 16,384 elements again and again. What is nearly
as slow in cache as from memory is bound by its arithmetic; the rest waits for memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
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
from lowbit_optim_kernels.engines.numba import plan as numba_plan
from lowbit_optim_kernels.engines.numba import threads as numba_threads
from lowbit_optim_kernels.engines.numba import vector

LARGE, SMALL = 1 << 24, 64 * 256  # elements
REPEATED = 64
CHUNKS, PARTIAL = 2, 5  # words of a job's work: addresses of its chunks and of its partial sums


@dataclass(frozen=True)
class Job:
    """What `numba_threads.run` was given, and how long it took."""

    share: object
    count: int
    work: list[int]
    seconds: float

    @property
    def name(self) -> str:
        return self.share.__name__.removesuffix("_share")


@contextlib.contextmanager
def recorded() -> Iterator[list[Job]]:
    """The jobs that run meanwhile, a pass each, as for shards."""
    jobs: list[Job] = []
    original, sweep = numba_threads.run, numba_plan.Plan.sweep

    def run(share: object, count: int, threads: int, work: list[int]) -> None:
        start = time.perf_counter()
        original(share, count, threads, work)
        jobs.append(Job(share, count, work, time.perf_counter() - start))

    numba_threads.run, numba_plan.Plan.sweep = run, lambda *_: None
    try:
        yield jobs
    finally:
        numba_threads.run, numba_plan.Plan.sweep = original, sweep


def _optimizer(name: str, elements: int, dtype: torch.dtype) -> torch.optim.Optimizer:
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(elements, generator=generator).to(dtype))
    p.grad = torch.randn(elements, generator=generator).to(dtype)
    return registry.REGISTRY[name].make([p], 1e-6)


def from_memory(name: str, dtype: torch.dtype, rounds: int) -> dict[str, dict[str, float]]:
    """Nanoseconds an element of each pass over a large tensor; quartiles over steps."""
    optimizer = _optimizer(name, LARGE, dtype)
    optimizer.step()
    with recorded() as jobs:
        for _ in range(rounds):
            optimizer.step()
    times: dict[str, list[float]] = {}
    for job in jobs:
        times.setdefault(job.name, []).append(1e9 * job.seconds / LARGE)
    return {one: measure.spread(values) for one, values in times.items()}


def in_cache(name: str, dtype: torch.dtype, rounds: int) -> dict[str, dict[str, float]]:
    """Likewise over a small tensor, REPEATED times a measurement."""
    optimizer = _optimizer(name, SMALL, dtype)
    optimizer.step()
    with recorded() as jobs:
        optimizer.step()
    chunks = np.array([[0, 0, SMALL // 256]] * REPEATED, dtype=np.int64)
    partial = np.zeros((REPEATED, 8))
    result = {}
    for job in jobs:
        assert job.count == 1
        work = list(job.work)
        work[CHUNKS] = chunks.ctypes.data
        work[PARTIAL:] = [partial.ctypes.data] * len(work[PARTIAL:])
        with recorded() as again:
            for _ in range(4 * rounds):
                numba_threads.run(job.share, REPEATED, 1, work)
        result[job.name] = measure.spread([1e9 * one.seconds / REPEATED / SMALL for one in again])
    return result


def bound(row: Mapping[str, Any]) -> str:
    """What keeps a pass from being faster."""
    if row["of_copy"] > 0.85:
        return "memory"
    return "arithmetic" if row["ns_in_cache"]["median"] > 0.85 * row["ns"]["median"] else "both"


def rows_of(name: str, dtype: torch.dtype, rounds: int, copy: float) -> list[dict[str, object]]:
    """A row for each pass of an optimizer."""
    memory, cached = from_memory(name, dtype, rounds), in_cache(name, dtype, rounds)
    rule = traffic.rule_of(_optimizer(name, SMALL, dtype))
    rows = []
    for one, spread in memory.items():
        moved = traffic.bytes_of(rule, one, dtype, 8)
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
