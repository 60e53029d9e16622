"""Weigh the training of a network by every optimizer: weights, gradients, state and peaks.

`python -m benchmarks.footprint`: each optimizer of the registry, and of other libraries what is
installed and runs here, trains in a process of its own, where it is first held against its naive
rule. Memory is the growth of the resident set on CPUs (Linux) and of what torch's allocator has
handed out on GPUs, from before the network was made; what was there already (Python, torch,
compiled code) is not counted.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from benchmarks.common import arguments, plot, registry, report, worker
from benchmarks.footprint import tables
from benchmarks.footprint.networks import NETWORKS
from benchmarks.footprint.worker import Case
from lowbit_optim_cli.footprint import BUCKET_BYTES
from lowbit_optim_cli.optimizers import EAGER

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
SIZES = tuple(NETWORKS["gpt2"])
# glibc would take what is freed once from its heap the next time, whose holes stay resident. And
# threads that spin while they wait make a busy machine slow.
_ALWAYS = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "OMP_WAIT_POLICY": "PASSIVE"}


def cases(
    entries: Iterable[registry.Entry],
    networks: Iterable[str],
    dtypes: Iterable[str],
    bits: Iterable[int],
    released: bool,
    **common: object,
) -> Iterator[Case]:
    """Rows that are weighed; further bits and released gradients are of this package's alone."""
    for network in networks:
        for dtype in dtypes:
            for entry in entries:
                ours = entry.make.library == "lowbit_optim"
                kept = tuple(bits) if ours and dtype == "bf16" else ()
                releases = released and ours and not entry.make.cls.startswith(EAGER)
                for one in kept or (None,):
                    for without in (False, True) if releases else (False,):
                        yield Case(network=network, optimizer=entry.name, dtype=DTYPES[dtype],
                                   bits=one, released=without, **common)  # fmt: skip


def weigh(case: Case, device: str, threads: int) -> dict[str, object]:
    """The one event of a case's process: "weighed" with the figures, "left out" or "wrong"."""
    spec = {"case": dataclasses.asdict(case), "device": device, "threads": threads}
    try:
        (found,) = worker.stream("benchmarks.footprint.worker", spec, threads, _ALWAYS)
    except RuntimeError as error:
        return {"event": "wrong", "why": f"{tables.label(spec['case'])}: {error}"}
    return found


def weigh_all(
    chosen: list[Case], device: str, threads: int, console: Console
) -> tuple[list[dict], dict[str, str], dict[str, str]]:
    """The rows of all cases; by optimizer why it was left out, and what is wrong with it."""
    rows, left_out, wrong = [], {}, {}
    columns = (
        *Progress.get_default_columns(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("weighing", total=len(chosen), now="")
        for case in chosen:
            progress.update(task, now=f"{case.optimizer}, {case.network}")
            if case.optimizer not in left_out.keys() | wrong.keys():
                found = weigh(case, device, threads)
                event = found.pop("event")
                if event == "weighed":
                    rows.append({**dataclasses.asdict(case), **found})
                else:
                    (wrong if event == "wrong" else left_out)[case.optimizer] = found["why"]
            progress.advance(task)
    return rows, left_out, wrong


def _entries(names: list[str] | None) -> tuple[list[registry.Entry], dict[str, str]]:
    """The entries of these names, or all whose library is installed; why the rest is left out."""
    weighed = registry.weighed()
    if names:
        return registry.select(names, weighed), {}
    absent = [one for one in weighed.values() if not one.available()]
    missing = {one.name: f"{one.peer} is not installed" for one in absent}
    return [one for one in weighed.values() if one.name not in missing], missing


def show(console: Console, written: Mapping[str, object]) -> None:
    """The tables, and what is not in them."""
    for table in tables.printed(written):
        console.print(table)
    for one, why in written["left_out"].items():
        console.print(f"left out: {one}: {why}", soft_wrap=True, markup=False)
    for why in written["wrong"].values():
        console.print(f"not weighed: {why}", soft_wrap=True, markup=False)


def main(
    network: Annotated[list[str] | None, typer.Option(help=", ".join(NETWORKS))] = None,
    size: Annotated[str, typer.Option(help=", ".join(SIZES))] = "small",
    optimizer: Annotated[list[str] | None, typer.Option(help="repeatable; all that run")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="fp32 (the default), bf16")] = None,
    bits: Annotated[
        list[int] | None, typer.Option(help="of bf16 weights that are kept: 16, 24 or 32")
    ] = None,
    released: Annotated[bool, typer.Option(help="with gradient release, too")] = False,
    bucket_bytes: Annotated[int, typer.Option(min=0, help="of released ones")] = BUCKET_BYTES,
    steps: Annotated[int, typer.Option(min=1, help="of training")] = 100,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads")] = None,
    from_file: Annotated[
        Path | None, typer.Option("--markdown", help="print this result file's tables")
    ] = None,
    name: Annotated[str, typer.Option(help="of the result files")] = "footprint",
    out: Annotated[Path, typer.Option(help="folder for them")] = report.LOCAL,
) -> None:
    """Weigh the training of networks by every optimizer, each in a process of its own."""
    if from_file is not None:
        written = json.loads(from_file.read_text(encoding="utf-8"))
        for key in tables.groups(written):
            print(f"{tables.title(written, key)}; MiB:\n\n{tables.markdown(written, key)}\n")
        return
    console, began = Console(width=120), time.perf_counter()
    with arguments.refusing():
        arguments.known("size", [size], SIZES)
        networks = arguments.known("network", network or NETWORKS, NETWORKS)
        dtypes = arguments.known("dtype", dtype or ["fp32"], DTYPES)
        arguments.known("bits", bits or (), (16, 24, 32))
        used = arguments.resolve_device(device)
        entries, missing = _entries(optimizer)
    common = {"size": size, "bucket_bytes": bucket_bytes, "steps": steps}
    chosen = list(cases(entries, networks, dtypes, bits or (), released, **common))
    rows, left_out, wrong = weigh_all(chosen, used, threads or report.cores(), console)
    options = {"network": network, "optimizer": optimizer, "dtype": dtype, "bits": bits,
               "released": released, **common, "device": device, "threads": threads}  # fmt: skip
    written = {
        **report.origin("benchmarks.footprint", options),
        "wall_s": round(time.perf_counter() - began, 1),
        **common,
        "rows": rows,
        "left_out": {**missing, **left_out},
        "wrong": wrong,
    }
    show(console, written)
    if rows:
        report.write_json(out / f"{name}.json", written)
        plot.footprint(out / f"{name}.png", tables.panels(written))
        console.print(f"results: {out / name}.json, .png", soft_wrap=True)
    if wrong or not rows:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
