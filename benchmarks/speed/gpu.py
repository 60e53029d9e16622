"""Time optimizer steps on a GPU beside torch's fused optimizers and other libraries.

`python -m benchmarks.speed.gpu` (`make gpu-check` runs it after the tests): every optimizer of this
package is first held against its naive rule; if one differs, nothing is timed. Then every contender
steps the same shapes: 1 billion elements in one tensor, and the tensors of Llama-3.2-1B and of
ResNet-50, in bf16 and fp32. Bytes per second are counted from what a step has to move at least and
stand beside a copy measured before and after in the same process.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common import arguments, measure, registry, report, shapes, verify
from benchmarks.static import traffic

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LR = 1e-4
WARM_UP, LEAST_TIMED = 0.3, 0.1  # seconds of steps before those that are timed, and of these


def _llama() -> Iterator[shapes.Shape]:
    """Llama-3.2-1B, its output layer tied, as transformers builds it."""
    yield (128256, 2048)
    for _ in range(16):
        yield from ((2048, 2048), (512, 2048), (512, 2048), (2048, 2048))
        yield from ((8192, 2048), (8192, 2048), (2048, 8192), (2048,), (2048,))
    yield (2048,)


WORKLOADS: dict[str, tuple[shapes.Shape, ...]] = {
    "flat-1B": ((10**9,),),
    "llama-3.2-1b": tuple(_llama()),
    "resnet50": shapes.SHAPES["resnet50"],
}


@dataclass(frozen=True)
class Contender:
    """One optimizer that is timed.

    Attributes:
        name: as the table shows it.
        row: what it is compared with: contenders of one row and workload stand together.
        make: its factory.
    """

    name: str
    row: registry.Row
    make: registry.Source

    @property
    def ours(self) -> bool:
        """Whether it is this package's."""
        return self.make.library == "lowbit_optim"

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
        if row.gpu_peers is not None:
            yield Contender(f"{row.name}8bit", row, row.source(8, **row.gpu_options))
            for peer in row.gpu_peers:
                yield Contender(f"{peer.library} {peer.cls}", row, peer)


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
    finally:
        gc.enable()
    moved = bytes_of_step(contender, params, held)
    spread = measure.spread([1e3 * second for second in times])
    return {
        "ms": spread,
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


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    """A short table: every row beside this package's of the same family and workload."""
    table = Table("workload", "dtype", "optimizer", "ms", "q25..q75", "GB/s", "of copy", "vs ours")
    ours = {(r["workload"], r["dtype"], r["family"]): r for r in rows if r["ours"]}
    for row in rows:
        spread = row["ms"]
        own = ours.get((row["workload"], row["dtype"], row["family"]))
        ratio = f"{spread['median'] / own['ms']['median']:.2f}x" if own else ""
        table.add_row(
            row["workload"], row["dtype"], row["optimizer"], f"{spread['median']:.3f}",
            f"{spread['q25']:.3f}..{spread['q75']:.3f}", f"{row['gb_per_s']:.0f}",
            f"{100 * row['of_copy']:.0f} %", ratio,
        )  # fmt: skip
    console.print(table)


def _too_large(
    tensors: tuple[shapes.Shape, ...], dtype: torch.dtype, device: torch.device
) -> str | None:
    """What is needed for parameters, gradients and two fp32 moments, if the GPU has less."""
    if device.type != "cuda":
        return None
    needed = (2 * dtype.itemsize + 8) * shapes.elements(tensors)
    free, _ = torch.cuda.mem_get_info(device)
    return f"needs {needed / 2**30:.0f} GiB" if needed > free else None


def run(
    names: list[str],
    workloads: Mapping[str, tuple[shapes.Shape, ...]],
    dtypes: list[str],
    device: torch.device,
    rounds: int,
    console: Console,
) -> dict[str, Any]:
    """Time every combination; what cannot be run is named with the reason."""
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    on_gpu = device.type == "cuda"
    size = 1 << 30 if on_gpu else 1 << 18  # 8.6 GB moved
    copies = [measure.copy_gb_per_s(device, size)]
    for workload, tensors in workloads.items():
        for dtype in dtypes:
            for name in names:
                contender, label = CONTENDERS[name], f"{name}, {workload}, {dtype}"
                why = contender.missing() or _too_large(tensors, DTYPES[dtype], device)
                if why is not None:
                    skipped[label] = why
                    continue
                try:
                    found = time_one(contender, tensors, DTYPES[dtype], device, rounds)
                except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
                    if contender.ours:
                        raise
                    skipped[label] = f"{type(error).__name__}: {error}".splitlines()[0]
                    continue
                finally:
                    gc.collect()
                    if on_gpu:
                        torch.cuda.empty_cache()
                rows.append({
                    "workload": workload, "dtype": dtype, "optimizer": name,
                    "family": contender.row.name, "ours": contender.ours, **found,
                })  # fmt: skip
                console.print(f"{label}: {found['ms']['median']:.3f} ms")
        copies.append(measure.copy_gb_per_s(device, size))
    best = max(copies)
    for row in rows:
        row["of_copy"] = round(row["gb_per_s"] / best, 3)
    return {"copy_gb_per_s": [round(x, 1) for x in copies], "rows": rows, "skipped": skipped}


def main(
    optimizer: Annotated[list[str] | None, typer.Option(help="repeatable; all")] = None,
    workload: Annotated[list[str] | None, typer.Option(help=", ".join(WORKLOADS))] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16, fp32; repeatable")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="timed steps of each")] = 20,
    out: Annotated[Path | None, typer.Option(help="folder for gpu.json")] = None,
) -> None:
    """Check, then time, on the GPU."""
    console = Console(width=120)
    if not torch.cuda.is_available():
        console.print("no GPU: nothing is measured")
        raise typer.Exit(1)
    with arguments.refusing():
        names = arguments.known("optimizer", optimizer or CONTENDERS, CONTENDERS)
        workloads = arguments.known("workload", workload or WORKLOADS, WORKLOADS)
        dtypes = arguments.known("dtype", dtype or DTYPES, DTYPES)
    device = torch.device("cuda")
    errors = check(names, device, console)
    found = run(names, {x: WORKLOADS[x] for x in workloads}, dtypes, device, rounds, console)
    options = {"optimizer": optimizer, "workload": workload, "dtype": dtype, "rounds": rounds}
    written = {
        **report.origin("benchmarks.speed.gpu", options),
        "errors": errors,
        **found,
    }
    folder = out or Path(os.environ.get("OUT") or report.LOCAL)
    report.write_json(folder / "gpu.json", written)
    for label, why in found["skipped"].items():
        console.print(f"left out: {label}: {why}")
    console.print(f"copy: {', '.join(str(x) for x in found['copy_gb_per_s'])} GB/s")
    console.print(f"results: {folder / 'gpu.json'}", soft_wrap=True)
    show(console, found["rows"])


if __name__ == "__main__":
    typer.run(main)
