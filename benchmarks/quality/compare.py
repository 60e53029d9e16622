"""Train one model with several optimizers and compare quality, memory and time.

`python -m benchmarks.quality.compare`: real data, the same initial weights and batches for all
optimizers of a seed, every optimizer in a process of its own.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from benchmarks.common import (
    arguments,
    measure,
    models,
    plot,
    registry,
    report,
    summary,
    worker,
    workloads,
)

_WORKER = "benchmarks.quality.compare_worker"
# Threads that spin while they wait make a run on a busy machine five times slower.
_WAIT = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}

CAST = (
    "Weights in bf16 are cast to fp32 for the model's arithmetic: this CPU has no instructions for"
    " bf16."
)


def notes(entries: Iterable[registry.Entry], device: str) -> str:
    """What columns are, and whether weights are cast."""
    used = torch.device(device)
    cast = any(models.arithmetic(entry.dtype, used) != entry.dtype for entry in entries)
    return f"{summary.notes(device)} {CAST}" if cast else summary.notes(device)


def train_all(
    task: workloads.Task, entry: registry.Entry, spec: Mapping[str, object], progress: Progress
) -> dict[str, object]:
    """All seeds of one optimizer on one task, in a fresh process; the bar moves as it reports."""
    steps = int(spec["steps"])
    lr = entry.learning_rate(task.name) if spec["lr"] is None else spec["lr"]
    given = {**spec, "task": task.name, "optimizer": entry.name, "lr": lr}
    total = steps * int(spec["seeds"])
    bar = progress.add_task(f"{task.name} {entry.name}", total=total, loss="starting")
    runs: list[dict] = []
    memory: dict = {}
    for event in worker.stream(_WORKER, given, int(spec["threads"]), _WAIT):
        kind = event.pop("event")
        if kind == "step":
            done = event["seed"] * steps + event["step"]
            progress.update(bar, completed=done, loss=f"loss {event['loss']:.3f}")
        elif kind == "run":
            runs.append(event)
        else:
            memory = event
    quality = summary.mean_sd([run["quality"] for run in runs])
    mean = "diverged" if quality["mean"] is None else f"{quality['mean']:.4f}"
    progress.update(bar, completed=total, loss=mean)
    if not progress.console.is_terminal:
        progress.console.print(f"{task.name} {entry.name}: {mean}", highlight=False)
    times = [ms for run in runs for ms in run["step_ms"]]
    return {
        "lr": lr,
        "quality": quality,
        "state_bytes": runs[0]["state_bytes"],
        "bytes_per_param": runs[0]["state_bytes"] / runs[0]["params"],
        "share_8bit": min(run["share_8bit"] for run in runs),
        "ms_per_step": measure.spread(times),
        **memory,
        "params": runs[0]["params"],
        "weights": [run["weights"] for run in runs],
        "losses": [run["losses"] for run in runs],
    }


def compare_task(
    task: workloads.Task,
    entries: list[registry.Entry],
    spec: Mapping[str, object],
    progress: Progress,
    folder: Path,
) -> dict[str, object]:
    """Every optimizer on one task, with the verdict on each 8-bit one whose twin ran too."""
    data = task.load()
    torch.save(data, folder / f"{task.name}.pt")
    spec = {**spec, "steps": spec["steps"] or task.steps, "data": str(folder / f"{task.name}.pt")}
    rows = {entry.name: train_all(task, entry, spec, progress) for entry in entries}
    starts = {tuple(row.pop("weights")) for row in rows.values()}
    if len(starts) != 1:
        raise RuntimeError(f"{task.name}: the optimizers did not start from the same weights")
    params = {row.pop("params") for row in rows.values()}.pop()
    verdicts = [
        summary.verdict(
            entry.name,
            rows[entry.name]["quality"],
            entry.twin,
            rows[entry.twin]["quality"],
            task.higher_is_better,
        )
        for entry in entries
        if entry.twin in rows
    ]
    return {
        "what": task.what,
        "metric": task.metric,
        "higher_is_better": task.higher_is_better,
        "params": params,
        "steps": spec["steps"],
        "data": {key: list(tensor.shape) for key, tensor in data.items()},
        "optimizers": rows,
        "verdicts": verdicts,
    }


def bars(console: Console) -> Progress:
    """A bar an optimizer; a few refreshes a second, because the cores are busy training.

    In a pipe or a log there is a line for each finished optimizer instead.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        refresh_per_second=4,
        disable=not console.is_terminal,
    )


def _plan(tasks: list[str], optimizers: list[str]) -> Iterator[tuple]:
    """Each task with its optimizers: those asked for, or the task's own beside torch's."""
    for task in workloads.select(tasks):
        own = [
            name
            for row in registry.default_of(task.name)
            for name in (
                f"torch.optim.{row.beside}",
                *map(row.entry_name, ("32bit", "8bit")),
                *map(row.form_name, row.forms),
            )
        ]
        yield task, registry.select(optimizers or own)


def main(
    task: Annotated[list[str] | None, typer.Option(help="gpt, mnist, digits; repeatable")] = None,
    optimizer: Annotated[
        list[str] | None, typer.Option(help="a name of the registry; repeatable")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="runs per optimizer")] = 3,
    steps: Annotated[int | None, typer.Option(min=1, help="steps per run")] = None,
    lr: Annotated[float | None, typer.Option(min=0.0, help="instead of the tuned ones")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of every run")] = None,
    out: Annotated[Path, typer.Option(help="folder for compare.json and .png")] = report.LOCAL,
) -> None:
    """Train with 32-bit and 8-bit optimizers and compare quality, memory and time."""
    console, start, load = Console(), time.perf_counter(), report.load_average()
    options = {"task": task, "optimizer": optimizer, "seeds": seeds, "steps": steps, "lr": lr,
               "device": device, "threads": threads}  # fmt: skip
    with arguments.refusing():
        used = arguments.resolve_device(device)
        plan = list(_plan(task or ["gpt", "mnist"], optimizer or []))
    spec = {"seeds": seeds, "steps": steps, "lr": lr, "device": used,
            "threads": threads or report.cores()}  # fmt: skip
    results = {}
    try:
        with tempfile.TemporaryDirectory() as folder, bars(console) as progress:
            for one, entries in plan:
                results[one.name] = compare_task(one, entries, spec, progress, Path(folder))
    except RuntimeError as error:
        raise SystemExit(str(error)) from error
    for result in results.values():
        console.print(summary.table(result))
        for line in (*(line["text"] for line in result["verdicts"]), summary.first_steps(result)):
            console.print(line, highlight=False)
        console.print()
    told = notes((entry for _, entries in plan for entry in entries), used)
    console.print(told, highlight=False)
    written = {
        **report.origin("benchmarks.quality.compare", options),
        "device": used,
        "threads": spec["threads"],
        "seeds": seeds,
        "load_before": load,
        "wall_s": round(time.perf_counter() - start, 1),
        "notes": told,
        "tasks": results,
    }
    report.say_if_busy(console, load)
    report.write_json(out / "compare.json", written)
    plot.loss_curves(out / "compare.png", results)
    console.print(f"{written['wall_s']:.0f} s, {spec['threads']} threads")
    console.print(
        f"results: {out / 'compare.json'}\ncurves:  {out / 'compare.png'}", soft_wrap=True
    )


if __name__ == "__main__":
    typer.run(main)
