"""Test that every optimizer reaches the same accuracy with 8-bit as with 32-bit state.

`python -m benchmarks.quality.equivalence`: both of a pair start from the same weights and see the
same batches in every seed, and every moment is in 8 bits. The exit status is 1 if a pair is not
equivalent. `--markdown FILE` prints the table of a result file and trains nothing. `--control N`
keeps every Nth 8-bit code only, to see that the test can fail.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.common import intervals, plot, registry, report, workloads
from benchmarks.quality import compare

MARGIN = 0.5  # percentage points
CONFIDENCE = 0.95
# Every tensor's moments are in 8 bits; the optimizers' default would leave out the biases.
MIN_8BIT_SIZE = 1


def all_pairs() -> list[str]:
    """Names of this package's 8-bit rows, as `optim_bits=8` stores them."""
    entries = registry.REGISTRY.values()
    return [one.name for one in entries if one.twin and not one.peer and one.form is None]


def judge(entries: list[registry.Entry], result: dict, margin: float) -> list[dict[str, object]]:
    """The figures of every pair of a comparison.

    Raises:
        RuntimeError: an 8-bit row had a moment in 32 bits, or a twin one in 8.
    """
    pairs = []
    for entry in entries:
        ours, theirs = (result["optimizers"][name] for name in (entry.name, entry.twin))
        shares = ours["share_8bit"], theirs["share_8bit"]
        if shares != (1.0, 0.0):
            raise RuntimeError(f"{entry.name}: 8-bit shares {shares} of the parameters, not (1, 0)")
        curves = zip(ours["losses"], theirs["losses"], strict=True)
        qualities = ours["quality"]["values"], theirs["quality"]["values"]
        pairs.append({
            "optimizer": entry.name,
            "twin": entry.twin,
            "lr": ours["lr"],
            "share_8bit": ours["share_8bit"],
            "seeds_with_another_loss_curve": sum(one != other for one, other in curves),
            "quality_8bit": qualities[0],
            "quality_32bit": qualities[1],
            **intervals.paired(*qualities, margin, CONFIDENCE),
        })  # fmt: skip
    return pairs


def table(written: dict) -> Table:
    """The result as printed."""
    title = (
        f"{written['what']}\n{written['params']:,} parameters, {written['steps']} steps, "
        f"{written['seeds']} seeds; {written['metric']}; margin ±{written['margin']:g}"
    )
    grid = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    # All but the standard deviation, for which 80 columns have no room.
    shown = [index for index, column in enumerate(intervals.HEAD) if column != "sd"]
    for index in shown:
        heading = intervals.HEAD[index].replace("mean ", "mean\n").replace("TOST ", "TOST\n")
        grid.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for pair in written["pairs"]:
        cells = intervals.cells(pair)
        grid.add_row(*(cells[index] for index in shown))
    return grid


def _entries(optimizer: list[str] | None) -> list[registry.Entry]:
    """The 8-bit rows to test.

    Raises:
        ValueError: one is unknown, or has no 32-bit twin.
    """
    entries = registry.select(optimizer or all_pairs())
    for entry in entries:
        if entry.twin is None or entry.peer is not None:
            raise ValueError(f"optimizer {entry.name!r} has no 32-bit twin of this package")
    return entries


def record(result: dict, pairs: list[dict], spec: dict, margin: float) -> dict[str, object]:
    """What is written besides the command and the environment."""
    kept = ("what", "metric", "params", "steps", "data")
    return {
        **{name: spec[name] for name in ("device", "threads", "seeds", "min_8bit_size", "coarsen")},
        "margin": margin,
        "confidence": CONFIDENCE,
        **{name: result[name] for name in kept},
        "pairs": pairs,
    }


def main(
    optimizer: Annotated[
        list[str] | None, typer.Option(help="an 8-bit name of the registry; repeatable")
    ] = None,
    task: Annotated[str, typer.Option(help="digits or mnist")] = "digits",
    seeds: Annotated[int, typer.Option(min=2, help="runs per optimizer")] = 20,
    steps: Annotated[int | None, typer.Option(min=1, help="steps per run")] = None,
    margin: Annotated[float, typer.Option(min=0.0, help="percentage points")] = MARGIN,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of every run")] = None,
    control: Annotated[
        int | None, typer.Option(min=2, max=255, help="keep every Nth 8-bit code only")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="print this result file's table")] = None,
    out: Annotated[Path, typer.Option(help="folder of the results")] = report.LOCAL,
) -> None:
    """Test that 8-bit optimizers are as accurate as their 32-bit twins."""
    console, start = Console(), time.perf_counter()
    if markdown is not None:
        print(intervals.markdown(json.loads(markdown.read_text(encoding="utf-8"))))
        return
    options = {"optimizer": optimizer, "task": task, "seeds": seeds, "steps": steps,
               "margin": margin, "device": device, "threads": threads,
               "control": control}  # fmt: skip
    try:
        entries, (chosen,) = _entries(optimizer), workloads.select([task])
        if not isinstance(chosen, workloads.Images):
            raise ValueError(f"task {task!r} has no accuracy")
        used = compare.resolve_device(device)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    spec = {"seeds": seeds, "steps": steps, "lr": None, "device": used,
            "threads": threads or report.cores(), "min_8bit_size": MIN_8BIT_SIZE,
            "coarsen": control}  # fmt: skip
    names = [name for entry in entries for name in (entry.twin, entry.name)]
    try:
        with tempfile.TemporaryDirectory() as folder, compare.bars(console) as progress:
            rows = registry.select(names)
            result = compare.compare_task(chosen, rows, spec, progress, Path(folder))
        pairs = judge(entries, result, margin)
    except RuntimeError as error:
        raise SystemExit(str(error)) from error
    written = {
        **report.origin("benchmarks.quality.equivalence", options),
        "wall_s": round(time.perf_counter() - start, 1),
        **record(result, pairs, spec, margin),
    }
    console.print(table(written))
    path = out / ("equivalence.json" if control is None else f"equivalence_control{control}.json")
    report.write_json(path, written)
    plot.intervals(path.with_suffix(".png"), written)
    console.print(f"{written['wall_s']:.0f} s\nresults: {path}", soft_wrap=True)
    failed = [pair["optimizer"] for pair in written["pairs"] if not pair["equivalent"]]
    if failed:
        console.print(f"not equivalent: {', '.join(failed)}")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
