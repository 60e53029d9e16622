"""Train the 32-bit optimizers of the registry at several learning rates.

`python -m benchmarks.quality.tune`: the seeds are not those of any comparison, and no 8-bit
optimizer takes part. The choice is printed; a person writes it into the registry.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common import arguments, registry, report, summary, tables, workloads
from benchmarks.quality import compare_worker

FIRST_SEED = 100
GRID = tuple(float(f"{digit}e{power}") for power in range(-6, 4) for digit in (1, 3))
REACH = 13.0  # the rates of GRID up to this factor from the registry's are tried
# What the next larger rate of the grid may lose of the quality; more is the edge of stability.
SLACK = {"gpt": 0.5, "mnist": 2.0, "digits": 2.0}


def _silent(*_: object, **__: object) -> None:
    """Progress of a run, which is not shown."""


def try_rates(
    task: workloads.Task,
    entry: registry.Entry,
    data: workloads.Data,
    rates: list[float],
    spec: dict[str, object],
) -> list[dict[str, object]]:
    """Every rate with every seed: the quality, and the mean training loss of the last tenth."""
    rows = []
    for rate in rates:
        runs = []
        for seed in range(FIRST_SEED, FIRST_SEED + int(spec["seeds"])):
            one = {**spec, "lr": rate}
            runs.append(compare_worker.train(task, entry, data, seed, one, _silent))
        tails = [run["losses"][-max(1, int(spec["steps"]) // 10) :] for run in runs]
        ends = [sum(tail) / len(tail) if tail else None for tail in tails]
        quality = summary.mean_sd([run["quality"] for run in runs])
        rows.append({"lr": rate, "quality": quality, "loss": summary.mean_sd(ends)["mean"]})
    return rows


def choose(task: workloads.Task, rows: list[dict]) -> float | None:
    """The rate of best mean quality among those whose next larger rate is stable too.

    Of equal means the lower training loss wins. None if no rate has a stable neighbour.
    """
    sign = 1.0 if task.higher_is_better else -1.0
    best = None
    for row, larger in pairwise(rows):
        mean, beyond = row["quality"]["mean"], larger["quality"]["mean"]
        if mean is None or beyond is None or sign * (mean - beyond) > SLACK[task.name]:
            continue
        key = (sign * mean, -row["loss"])
        if best is None or key > best[0]:
            best = key, row["lr"]
    return None if best is None else best[1]


def table(task: workloads.Task, name: str, rows: list[dict]) -> Table:
    """A row for each rate of one optimizer; the chosen one has an asterisk."""
    grid = tables.grid(task.what)
    grid.add_column("optimizer", no_wrap=True)
    for column in ("lr", task.metric, "training loss"):
        grid.add_column(column, justify="right")
    for row in rows:
        quality, mark = row["quality"], "*" if row["lr"] == choose(task, rows) else " "
        shown = "diverged"
        if quality["mean"] is not None:
            shown = f"{quality['mean']:.3f} ± {quality['sd']:.3f}"
        loss = "n/a" if row["loss"] is None else f"{row['loss']:.4f}"
        grid.add_row(name, f"{row['lr']:g}{mark}", shown, loss)
    return grid


def main(
    task: Annotated[str, typer.Option(help="gpt, mnist or digits")] = "digits",
    optimizer: Annotated[
        list[str] | None, typer.Option(help="a name of the registry; repeatable")
    ] = None,
    lr: Annotated[
        list[float] | None,
        typer.Option(min=0.0, help="repeatable; else those of a grid near the registry's"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help=f"runs, from seed {FIRST_SEED} on")] = 3,
    steps: Annotated[int | None, typer.Option(min=1, help="steps per run")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads")] = None,
    out: Annotated[Path, typer.Option(help="folder for tune_TASK.json")] = report.LOCAL,
) -> None:
    """Train 32-bit optimizers at several learning rates and print the held-out quality."""
    console = Console()
    twins = [entry.name for entry in registry.REGISTRY.values() if "32bit" in entry.name]
    with arguments.refusing():
        (chosen,) = workloads.select([task])
        entries = registry.select(optimizer or twins)
    torch.set_num_threads(threads or report.cores())
    data, tried = chosen.load(), {}
    spec = {"seeds": seeds, "steps": steps or chosen.steps, "device": "cpu"}
    for entry in entries:
        rate = entry.learning_rate(chosen.name)
        rates = sorted(lr or (one for one in GRID if rate / REACH < one < rate * REACH))
        rows = try_rates(chosen, entry, data, rates, spec)
        tried[entry.name] = {"chosen": choose(chosen, rows), "rates": rows}
        console.print(table(chosen, entry.name, rows))
    options = {"task": task, "optimizer": optimizer, "lr": lr, "seeds": seeds, "steps": steps,
               "threads": threads}  # fmt: skip
    written = report.origin("benchmarks.quality.tune", options)
    written.update(seeds=[FIRST_SEED + k for k in range(seeds)], steps=spec["steps"], tried=tried)
    report.write_json(out / f"tune_{chosen.name}.json", written)


if __name__ == "__main__":
    typer.run(main)
