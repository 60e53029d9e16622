"""Weigh whole training steps of a bf16 model with and without gradient release.

`python -m benchmarks.speed.memory`: the growth of the resident set over two steps on the CPU, each
configuration in a process of its own, beside the bytes of weights, gradients and state that have to
be there. What was resident before the model was made (Python, torch, compiled kernels) is not
counted, nor what a model of one layer leaves behind that was trained before it; activations are,
and a sequence of 4 bytes keeps them small.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.common import report, worker
from benchmarks.speed.memory_worker import OPTIMIZERS
from lowbit_optim._release import BUCKET_BYTES

_WORKER = "benchmarks.speed.memory_worker"
# glibc would take what is freed once from its heap the next time, whose holes stay resident. And
# threads that spin while they wait make a busy machine slow.
_ALWAYS = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "OMP_WAIT_POLICY": "PASSIVE"}
AIM = 0.03


def weigh(spec: dict[str, object]) -> dict[str, object]:
    """The figures of one configuration.

    Raises:
        RuntimeError: its state does not have the bytes that it should.
    """
    (found,) = worker.stream(_WORKER, spec, int(spec["threads"]), _ALWAYS)
    found.pop("event")
    if found["state"] != found["state_counted"]:
        raise RuntimeError(
            f"{spec['optimizer']} has {found['state_counted']:,} bytes of state, "
            f"not {found['state']:,}"
        )
    kept = {key: spec[key] for key in ("optimizer", "bits", "released")}
    over = None if found["peak"] is None else found["peak"] / found["expected"] - 1
    return {**kept, **found, "over": over}


def table(rows: list[dict], bucket_bytes: int) -> Table:
    """The result as printed, in MiB."""
    title = (
        f"{rows[0]['params']:,} bf16 parameters; MiB; released in buckets of "
        f"{bucket_bytes / 2**20:g}"
    )
    grid = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    heads = ("optimizer", "bits", "gradients", "weights", "gradi-\nents", "state", "sum",
             "mea-\nsured", "over,\n%")  # fmt: skip
    for index, head in enumerate(heads):
        grid.add_column(head, justify="right" if index > 2 else "left", no_wrap=True)
    for row in rows:
        sizes = [
            "n/a" if row[key] is None else f"{row[key] / 2**20:.1f}"
            for key in ("weights", "gradients", "state", "expected", "peak")
        ]
        over = "n/a" if row["over"] is None else f"{100 * row['over']:+.1f}"
        how = "released" if row["released"] else "whole"
        grid.add_row(row["optimizer"], str(row["bits"]), how, *sizes, over)
    return grid


def markdown(written: dict) -> str:
    """The table of a result file, in MiB."""
    head = ("optimizer", "`master_weight_bits`", "gradients", "weights + gradients + state",
            "sum", "measured", "over")  # fmt: skip
    lines = [head, ("---",) * len(head)]
    for row in written["rows"]:
        parts = " + ".join(f"{row[key] / 2**20:.1f}" for key in ("weights", "gradients", "state"))
        peak, over = row["peak"], row["over"]
        lines.append((
            f"`{row['optimizer']}`", str(row["bits"]), "released" if row["released"] else "whole",
            parts, f"{row['expected'] / 2**20:.1f}",
            "n/a" if peak is None else f"{peak / 2**20:.1f}",
            "n/a" if over is None else f"{100 * over:+.1f} %",
        ))  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(
    optimizer: Annotated[list[str] | None, typer.Option(help="repeatable")] = None,
    bits: Annotated[list[int] | None, typer.Option(help="16, 24 or 32; repeatable")] = None,
    width: Annotated[int, typer.Option(min=8, help="of the model; a multiple of 8")] = 1024,
    layers: Annotated[int, typer.Option(min=1, help="of the model")] = 8,
    bucket_bytes: Annotated[int, typer.Option(min=0, help="of gradients")] = BUCKET_BYTES,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads")] = None,
    from_file: Annotated[
        Path | None, typer.Option("--markdown", help="print this result file's table")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for memory.json")] = report.LOCAL,
) -> None:
    """Weigh whole training steps of a bf16 model with and without gradient release."""
    if from_file is not None:
        print(markdown(json.loads(from_file.read_text(encoding="utf-8"))))
        return
    console, began = Console(), time.perf_counter()
    for name in optimizer or []:
        if name not in OPTIMIZERS:
            there = ", ".join(OPTIMIZERS)
            raise typer.BadParameter(f"unknown optimizer {name!r}; there are: {there}")
    options = {"optimizer": optimizer, "bits": bits, "width": width, "layers": layers,
               "bucket_bytes": bucket_bytes, "threads": threads}  # fmt: skip
    common = {"width": width, "layers": layers, "bucket_bytes": bucket_bytes,
              "threads": threads or report.cores()}  # fmt: skip
    specs = [
        {"optimizer": name, "bits": kept, "released": released, **common}
        for name in optimizer or OPTIMIZERS
        for kept in bits or (16, 24)
        for released in (False, True)
    ]
    try:
        rows = [weigh(spec) for spec in specs]
    except RuntimeError as error:
        raise SystemExit(str(error)) from error
    console.print(table(rows, bucket_bytes))
    weighed = [row["over"] for row in rows if row["released"] and row["over"] is not None]
    missed = sum(over > AIM for over in weighed)
    console.print(
        f"released: {len(weighed) - missed} of {len(weighed)} within {AIM:.0%} of the sum"
    )
    written = {
        **report.origin("benchmarks.speed.memory", options),
        "wall_s": round(time.perf_counter() - began, 1),
        "width": width,
        "layers": layers,
        "bucket_bytes": bucket_bytes,
        "aim": AIM,
        "rows": rows,
    }
    report.write_json(out / "memory.json", written)
    console.print(f"results: {out / 'memory.json'}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
