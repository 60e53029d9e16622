"""Time optimizer steps on a GPU beside torch's and other libraries'.

`python -m benchmarks.speed.gpu` (`make gpu-check` runs it after the tests): what this package's
steps launch is first compiled, by several processes, and every optimizer of it held against its
naive rule; if one differs, nothing is timed. Then every contender steps the same shapes in bf16
and fp32: 1 billion elements in one tensor, and the tensors of ResNet-50, GPT-2, Llama-3.1-8B and
of LoRA adapters of it. Bytes per second are counted from what a step has to move at least and
stand beside a copy measured before and after in the same process. Of a short list a step takes the
host longer than the GPU, which in training has other work meanwhile; so a captured step of this
package and of torch is replayed as well, which takes the GPU alone. (Other libraries do not say
that theirs may be captured, and after one that failed CUDA's generator of random numbers would
work no more.) The result file is written anew after every contender. `--markdown FILE` prints the
tables of one.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common import arguments, measure, registry, report, shapes, tables, verify
from benchmarks.static import traffic

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LR = 1e-4
JOBS = min(8, os.cpu_count() or 1)
SMALL = 2**28  # elements of a list that is compiled for as it is
WARM_UP, LEAST_TIMED = 0.3, 0.1  # seconds of steps before those that are timed, and of these
WORKLOADS = shapes.GPU_SHAPES
AS_WIDE = {"flashoptim": {"master_weight_bits": None}}  # bf16 weights of 16 bits, not of 24
TIMED = {"ms": "steps", "replayed_ms": "replayed"}


@dataclass(frozen=True)
class Contender:
    """One optimizer that is timed.

    Attributes:
        name: as the table shows it.
        row: whose it is, or is compared with.
        make: its factory.
    """

    name: str
    row: registry.Row
    make: registry.Source

    @property
    def ours(self) -> bool:
        """Whether it is this package's."""
        return self.make.library == "lowbit_optim"

    @property
    def captured(self) -> bool:
        """Whether its step may be captured in a CUDA graph."""
        return self.ours or self.make.library == "torch"

    def missing(self) -> str | None:
        """Why it cannot be run here, or None."""
        library, module = self.make.library, self.make.module
        if importlib.util.find_spec(library) is None:
            return f"{library} is not installed"
        try:
            found = importlib.import_module(module)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            return f"{library} cannot be imported: {type(error).__name__}: {error}".splitlines()[0]
        return None if hasattr(found, self.make.cls) else f"{module} has no {self.make.cls}"


def _contenders() -> Iterator[Contender]:
    for row in registry.ROWS:
        if row.gpu_peers is None:
            continue
        yield Contender(f"{row.name}8bit", row, row.source(8, **row.gpu_options))
        for form in row.forms:
            if form.dtype == torch.float32:
                options = {**row.gpu_options, **form.options}
                yield Contender(row.form_name(form), row, row.source(form.bits, **options))
        for form_name, source in row.of_torch().items():
            if form_name:
                yield Contender(f"torch {row.name} {form_name}", row, source)
        for peer in row.gpu_peers:
            options = {**peer.options, **AS_WIDE.get(peer.library, {})}
            yield Contender(f"{peer.library} {peer.cls}", row, replace(peer, options=options))


CONTENDERS = {contender.name: contender for contender in _contenders()}


def bytes_of_step(contender: Contender, params: list[torch.nn.Parameter], state: int) -> int:
    """Bytes that a step moves at least: p and state read and written, g read, norms read again."""
    size = sum(p.numel() * p.element_size() for p in params)
    again = {"param": size, "grad": size, "state": state}
    reads: list[str] = []
    if contender.ours:
        reads = traffic.extra_reads(contender.make([torch.nn.Parameter(torch.zeros(1))], LR))
    return 3 * size + 2 * state + sum(again[name] for name in reads)


def _parameters(
    tensors: tuple[shapes.Shape, ...], dtype: torch.dtype, device: torch.device
) -> list[torch.nn.Parameter]:
    params = []
    for shape in tensors:
        p = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02))
        p.grad = torch.empty_like(p).normal_(std=0.01)
        params.append(p)
    return params


def _warm_up(step: Callable[[], object], device: torch.device) -> None:
    """Steps for a while: an idle GPU's clock is low, and a short workload would not raise it."""
    end = time.perf_counter() + (WARM_UP if device.type == "cuda" else 0.0)
    while True:
        measure.seconds(step, device)
        if time.perf_counter() > end:
            break


def _times(step: Callable[[], object], device: torch.device, rounds: int) -> list[float]:
    """Seconds of each of some steps, more than `rounds` if they are short."""
    if device.type == "cuda":
        enough = int(LEAST_TIMED / measure.seconds(step, device))
        rounds = max(rounds, min(enough, 50 * rounds))
    return measure.back_to_back(step, device, rounds)


def capturable(optimizer: torch.optim.Optimizer) -> None:
    """Have a torch optimizer, which has stepped, go on as a capture needs it.

    Its foreach form takes more operators so, and is not timed like that otherwise.
    """
    for group in optimizer.param_groups:
        for p in group["params"] if "capturable" in group else ():
            group["capturable"], state = True, optimizer.state[p]
            state["step"] = state["step"].to(p.device)


def _replay(optimizer: torch.optim.Optimizer, device: torch.device) -> Callable[[], object]:
    """A call that replays one step of an optimizer, captured in a CUDA graph."""
    measure.seconds(optimizer.step, device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph.replay


def stand_in(tensors: tuple[shapes.Shape, ...]) -> tuple[shapes.Shape, ...]:
    """Tensors of which a step launches the same kernels, that take less memory."""
    if shapes.elements(tensors) <= SMALL:
        return tensors
    return tuple(dict.fromkeys(map(_with_fewer_rows, tensors)))


def _with_fewer_rows(shape: shapes.Shape) -> shapes.Shape:
    """A shape whose last elements fill no block or tile if those of the given one do not."""
    rows, row = shape[0], math.prod(shape[1:])
    least = max(1024, 2**26 // row // 1024 * 1024)
    return (min(rows, least + rows % least), *shape[1:])


def _compile(given: tuple[str, str, tuple[shapes.Shape, ...], str]) -> None:
    """Step as one that is timed will be."""
    name, dtype, tensors, device = given
    params = _parameters(tensors, DTYPES[dtype], torch.device(device))
    optimizer = CONTENDERS[name].make(params, LR)
    for _ in range(2):
        optimizer.step()


def compile_all(
    names: list[str], lists: list[tuple[shapes.Shape, ...]], dtypes: list[str], device: str,
    jobs: int,
) -> None:  # fmt: skip
    """Compile what steps of this package launch, by some processes, into Triton's cache."""
    ours = [name for name in names if CONTENDERS[name].ours]
    todo = [(name, "fp32", verify.SHAPES, device) for name in ours]
    todo += [
        (name, dtype, stand_in(tensors), device)
        for name, dtype, tensors in itertools.product(ours, dtypes, lists)
    ]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, todo))


def _spread_of_ms(times: list[float]) -> dict[str, float]:
    return measure.spread([1e3 * second for second in times])


def time_one(
    contender: Contender,
    tensors: tuple[shapes.Shape, ...],
    dtype: torch.dtype,
    device: torch.device,
    rounds: int,
) -> dict[str, Any]:
    """Time one contender on parameters of its own."""
    torch.manual_seed(0)
    params = _parameters(tensors, dtype, device)
    optimizer = contender.make(params, LR)
    for _ in range(3):  # state, compilation, launch tables
        optimizer.step()
    _warm_up(optimizer.step, device)
    held = measure.state_bytes(optimizer)
    measure.reset_peak(device)
    before = measure.held_bytes(device)
    optimizer.step()
    peak = measure.peak_bytes(device)
    gc.collect()
    gc.disable()
    try:
        times = _times(optimizer.step, device, rounds)
        replays: list[float] = []
        if device.type == "cuda" and contender.captured:
            if not contender.ours:
                capturable(optimizer)
            replays = _times(_replay(optimizer, device), device, rounds)
    finally:
        gc.enable()
    moved = bytes_of_step(contender, params, held)
    spread = _spread_of_ms(times)
    return {
        "ms": spread,
        "replayed_ms": _spread_of_ms(replays) if replays else None,
        "bytes": moved,
        "gb_per_s": round(moved / spread["median"] / 1e6, 1),
        "state_bytes": held,
        "temporary_bytes": None if peak is None else peak - before,
        "tensors": len(params),
        "elements": sum(p.numel() for p in params),
    }


def check(names: list[str], device: torch.device, console: Console) -> dict[str, float]:
    """Hold this package's contenders against their naive rules.

    Raises:
        AssertionError: one of them differs.
    """
    errors = {}
    for name in names:
        contender = CONTENDERS[name]
        if contender.ours:
            entry = registry.Entry(name, contender.make, sign=contender.row.sign)
            errors[name] = verify.verify(entry, 0.01, device)
            console.print(f"{name}: as its rule, error {errors[name]:.1e}")
    return errors


def cells(
    found: Mapping[str, Any], dtype: str, timed_as: str = "ms"
) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table of one dtype: an optimizer each, a workload in each column.

    A cell has the median's milliseconds per billion elements, and of the copy's bytes per second
    the share; nothing where there is no time.

    Args:
        timed_as: "ms", or "replayed_ms" for what a replay of a captured step takes.
    """
    rows = [row for row in found["rows"] if row["dtype"] == dtype]
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    copy = max(found["copy_gb_per_s"])
    timed: dict[str, dict[str, str]] = {}
    for row in rows:
        spread = row[timed_as]
        if spread is None:
            continue
        scaled = spread["median"] * 1e9 / row["elements"]
        cell = f"{scaled:.3g} ({row['bytes'] / spread['median'] / 1e6 / copy:.0%})"
        timed.setdefault(row["optimizer"], {})[row["workload"]] = cell
    return ["", *workloads], [
        [name, *(by_workload.get(workload, "") for workload in workloads)]
        for name, by_workload in timed.items()
    ]


def show(console: Console, found: Mapping[str, Any]) -> None:
    """Two tables for each dtype: of steps, and of replays."""
    for dtype, (timed_as, what) in itertools.product(DTYPES, TIMED.items()):
        head, rows = cells(found, dtype, timed_as)
        title = f"{dtype}, {what}: ms per 1e9 elements (share of a copy's bytes/s)"
        table = Table(*head, title=title)
        for row in rows:
            table.add_row(*row)
        if rows:
            console.print(table)


def run(
    names: list[str],
    workloads: Mapping[str, tuple[shapes.Shape, ...]],
    dtypes: list[str],
    device: torch.device,
    rounds: int,
    console: Console,
    keep: Callable[[Mapping[str, Any]], None],
) -> dict[str, Any]:
    """Time every combination; what cannot be run is named with the reason.

    Args:
        keep: called with all that was found so far, after everything that is timed.
    """
    on_gpu = device.type == "cuda"
    size = 1 << 30 if on_gpu else 1 << 18  # 8.6 GB moved
    copies = [measure.copy_gb_per_s(device, size)]
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    found: dict[str, Any] = {"copy_gb_per_s": copies, "rows": rows, "skipped": skipped}
    for workload, dtype, name in itertools.product(workloads, dtypes, names):
        contender, label = CONTENDERS[name], f"{name}, {workload}, {dtype}"
        tensors = workloads[workload]
        why = contender.missing()
        if why is not None:
            skipped[label] = why
            continue
        try:
            timed = time_one(contender, tensors, DTYPES[dtype], device, rounds)
        except Exception as error:  # another library may raise anything
            if contender.ours and not isinstance(error, torch.OutOfMemoryError):
                raise
            skipped[label] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        finally:
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
        rows.append({"workload": workload, "dtype": dtype, "optimizer": name, **timed})
        console.print(f"{label}: {timed['ms']['median']:.3f} ms")
        keep(found)
    copies.append(measure.copy_gb_per_s(device, size))
    keep(found)
    return found


def main(
    optimizer: Annotated[list[str] | None, typer.Option(help="repeatable; all")] = None,
    workload: Annotated[list[str] | None, typer.Option(help=", ".join(WORKLOADS))] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16, fp32; repeatable")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="timed steps of each")] = 20,
    jobs: Annotated[int, typer.Option(min=1, help="processes that compile")] = JOBS,
    out: Annotated[Path | None, typer.Option(help="folder for gpu.json")] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="print this result file's tables and time nothing")
    ] = None,
) -> None:
    """Check, then time, on the GPU."""
    if markdown is not None:
        found = json.loads(markdown.read_text(encoding="utf-8"))
        for dtype, (timed_as, what) in itertools.product(DTYPES, TIMED.items()):
            head, rows = cells(found, dtype, timed_as)
            if rows:
                print(f"{dtype}, {what}:\n\n{tables.markdown(head, rows, True)}\n")
        return
    console = Console(width=120)
    if not torch.cuda.is_available():
        console.print("no GPU: nothing is measured")
        raise typer.Exit(1)
    with arguments.refusing():
        names = arguments.known("optimizer", optimizer or CONTENDERS, CONTENDERS)
        workloads = arguments.known("workload", workload or WORKLOADS, WORKLOADS)
        dtypes = arguments.known("dtype", dtype or DTYPES, DTYPES)
    device = torch.device("cuda")
    chosen = {x: WORKLOADS[x] for x in workloads}
    compile_all(names, list(chosen.values()), dtypes, device.type, jobs)
    errors = check(names, device, console)
    options = {"optimizer": optimizer, "workload": workload, "dtype": dtype, "rounds": rounds}
    head = {**report.origin("benchmarks.speed.gpu", options), "errors": errors}
    path = (out or Path(os.environ.get("OUT") or report.LOCAL)) / "gpu.json"

    def keep(found: Mapping[str, Any]) -> None:
        report.write_json(path, {**head, **found})

    found = run(names, chosen, dtypes, device, rounds, console, keep)
    for label, why in found["skipped"].items():
        console.print(f"left out: {label}: {why}")
    copies = ", ".join(f"{x:.0f}" for x in found["copy_gb_per_s"])
    console.print(f"copy: {copies} GB/s; results: {path}", soft_wrap=True)
    show(console, found)


if __name__ == "__main__":
    typer.run(main)
