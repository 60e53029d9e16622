"""Test that every optimizer reaches the same accuracy with 8-bit as with 32-bit state.

`python -m benchmarks.quality.equivalence`: both of a pair start from the same weights and see the
same batches in every seed, and every moment is in 8 bits. The exit status is 1 if a pair is not
equivalent. `--markdown FILE` prints the table of a result file and trains nothing. `--control N`
keeps every Nth 8-bit code only, to see that the test can fail. `--format ratio8` and `ratio4` test
every optimizer that can have its state in that format.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common import arguments, intervals, plot, registry, report, tables, workloads
from benchmarks.quality import compare

MARGIN = 0.5  # percentage points
CONFIDENCE = 0.95
# Every tensor's moments are in 8 bits; the optimizers' default would leave out the biases.
MIN_8BIT_SIZE = 1


def all_pairs(state_format: str | None = None) -> list[str]:
    """Names of this package's rows in a format; without one, as `optim_bits=8` stores them."""
    entries = (one for one in registry.REGISTRY.values() if one.twin and not one.peer)
    if state_format is None:
        return [one.name for one in entries if one.form is None]
    return [one.name for one in entries if one.state_format == state_format]


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
    grid = tables.grid(title)
    # All but the standard deviation, for which 80 columns have no room.
    head = intervals.head(written)
    shown = [index for index, column in enumerate(head) if column != "sd"]
    for index in shown:
        heading = head[index].replace("mean ", "mean\n").replace("TOST ", "TOST\n")
        grid.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for pair in written["pairs"]:
        cells = intervals.cells(pair)
        grid.add_row(*(cells[index] for index in shown))
    return grid


def _entries(optimizer: list[str] | None, state_format: str | None) -> list[registry.Entry]:
    """The rows to test, all in this format.

    Raises:
        ValueError: one is unknown, has no 32-bit twin or another format, or no row has this one.
    """
    names = all_pairs(state_format)
    if not names:
        raise ValueError(f"no optimizer is tested in state format {state_format!r}")
    entries = registry.select(optimizer or names)
    for entry in entries:
        if entry.twin is None or entry.peer is not None:
            raise ValueError(f"optimizer {entry.name!r} has no 32-bit twin of this package")
        if entry.state_format != state_format:
            raise ValueError(f"optimizer {entry.name!r} needs --format {entry.state_format}")
    return entries


def record(result: dict, pairs: list[dict], spec: dict, margin: float) -> dict[str, object]:
    """Entries of the result file besides the command and the environment."""
    kept = ("what", "metric", "params", "steps", "data")
    given = ("device", "threads", "seeds", "min_8bit_size", "coarsen", "state_format")
    return {
        **{name: spec[name] for name in given},
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
    state_format: Annotated[
        str | None, typer.Option("--format", help="ratio8 or ratio4; else what 8 bits mean")
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
               "control": control, "format": state_format}  # fmt: skip
    with arguments.refusing():
        entries, (chosen,) = _entries(optimizer, state_format), workloads.select([task])
        if not isinstance(chosen, workloads.Images):
            raise ValueError(f"task {task!r} has no accuracy")
        if state_format and control:
            raise ValueError("--control is of the codes that 8 bits mean, not of another format")
        used = arguments.resolve_device(device)
    spec = {"seeds": seeds, "steps": steps, "lr": None, "device": used,
            "threads": threads or report.cores(), "min_8bit_size": MIN_8BIT_SIZE,
            "coarsen": control, "state_format": state_format}  # fmt: skip
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
    variant = f"_control{control}" if control else f"_{state_format}" if state_format else ""
    path = out / f"equivalence{variant}.json"
    report.write_json(path, written)
    plot.intervals(path.with_suffix(".png"), written)
    console.print(f"{written['wall_s']:.0f} s\nresults: {path}", soft_wrap=True)
    failed = [pair["optimizer"] for pair in written["pairs"] if not pair["equivalent"]]
    if failed:
        console.print(f"not equivalent: {', '.join(failed)}")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
