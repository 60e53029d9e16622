"""Time optimizer steps beside torch's own, in turn and in the same run.

`python -m benchmarks.speed.cpu`: every optimizer is first run against its naive rule; if one
differs, nothing is timed.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.common import arguments, registry, report, shapes, tables, worker

AIMED_CASES = ("one", "split64", "resnet50", "gpt2")
NOTHING: dict[str, Any] = {"sections": [], "first_step": {}}  # of a file that is not there
_WORKER = "benchmarks.speed.cpu_worker"


def default() -> list[str]:
    """Rows that are timed unless told otherwise: all that have an aim, and a few in 32 bits."""
    wide = [row.entry_name("32bit") for row in registry.default_of("32-bit step")]
    return registry.aimed() + wide


def run_section(spec: dict[str, object], progress: Progress) -> dict[str, object]:
    """All cases on one device at one thread count, in a process of its own."""
    section: dict[str, object] = {"device": spec["device"], "threads": spec["threads"]}
    section.update(verified={}, pairs=[], skipped={})
    label = f"{spec['device']}, {spec['threads']} threads"
    line = progress.add_task(f"{label}: verifying against the naive rules", total=None)
    for event in worker.stream(_WORKER, spec, int(spec["threads"])):
        kind = event.pop("event")
        if kind == "verified":
            section["verified"][event["optimizer"]] = event["error"]
        elif kind == "copy":
            section["copy_gb_per_s"] = round(event.pop("gb_per_s"), 2)
            section.update(event)  # the sets of instructions
        elif kind == "skipped":
            section["skipped"][event["case"]] = event["why"]
        elif kind == "pair":
            section["pairs"].append(event)
        else:
            progress.update(line, description=f"{label}: {event['case']} {event['optimizer']}")
    progress.update(line, description=f"{label}: done", total=1, completed=1)
    return section


def time_all(
    spec: dict[str, object], names: list[str], runs: list[tuple[str, int]], progress: Progress
) -> list[dict[str, object]]:
    """A section for every device and thread count; a device's first one verifies."""
    sections: list[dict[str, object]] = []
    for device, count in runs:
        verify = [] if any(one["device"] == device for one in sections) else names
        one = {**spec, "device": device, "threads": count, "verify": verify}
        sections.append(run_section(one, progress))
    return sections


def first_steps(names: list[str], device: str, threads: int) -> dict[str, object]:
    """Seconds of the first step in a process with an empty kernel cache, then in a second one."""
    results = {}
    for name in names:
        with tempfile.TemporaryDirectory() as cache:
            runs = []
            for _ in range(2):
                extra = {"LOWBIT_OPTIM_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache}
                spec = {"first_step": name, "device": device, "threads": threads}
                runs += list(worker.stream(_WORKER, spec, threads, extra))
            results[name] = {"first_process": runs[0], "second_process": runs[1]}
    for runs in results.values():
        for run in runs.values():
            del run["event"]
    return results


def aim(pair: dict, section: dict, busy: bool) -> str:
    """Whether a pair meets its aim; empty where none is set, no answer from a busy machine."""
    limit = registry.REGISTRY[pair["optimizer"]].aim
    if limit is None or pair["case"] not in AIMED_CASES:
        return ""
    if (section["device"], section["threads"]) != ("cpu", 2):
        return ""
    if busy:
        return f"{limit:g} ?"
    return f"{limit:g} {'met' if pair['ratio']['median'] <= limit else 'MISSED'}"


def _instructions(section: dict) -> str:
    if section["device"] != "cpu":
        return ""
    return f", {section['instruction_set']} (torch: {section['torch_instruction_set']})"


def step_table(section: dict, busy: bool) -> Table:
    """Milliseconds a step, ratio to torch's fused optimizer and GB/s."""
    title = (
        f"{section['device']}, {section['threads']} threads{_instructions(section)}\n"
        f"copying fp32 runs at {section['copy_gb_per_s']:.1f} GB/s\n"
        "ms a step and torch's fused, both medians; their ratio round by round, median and "
        "quartiles;\nbytes an element; bandwidth of the copy's"
    )
    grid = tables.grid(title)
    for column in ("case", "optimizer"):
        grid.add_column(column, no_wrap=True)
    for column in ("ms (torch)", "ratio", "B", "of copy", "aim"):
        grid.add_column(column, justify="right", no_wrap=True)
    for pair in section["pairs"]:
        if pair["case"].startswith("small"):
            continue
        ratio = pair["ratio"]
        grid.add_row(
            pair["case"],
            pair["optimizer"],
            f"{pair['ms']['median']:.4g} ({pair['baseline_ms']['median']:.4g})",
            f"{ratio['median']:.2f} ({ratio['q25']:.2f} {ratio['q75']:.2f})",
            f"{pair['bytes_per_element']:.1f}",
            f"{pair['gb_per_s'] / section['copy_gb_per_s']:.0%}",
            aim(pair, section, busy),
        )
    return grid


def overhead_table(section: dict) -> Table:
    """Microseconds a step over 1,000 tensors of 64 elements, beside torch's foreach form."""
    title = f"{section['device']}, {section['threads']} threads: 1,000 tensors of 64 elements"
    grid = tables.grid(title)
    for column in ("optimizer", "us a step", "torch foreach", "us a tensor", "ratio"):
        grid.add_column(column, justify="left" if column == "optimizer" else "right")
    for pair in section["pairs"]:
        if not pair["case"].startswith("small"):
            continue
        ours, theirs = 1e3 * pair["ms"]["median"], 1e3 * pair["baseline_ms"]["median"]
        count = len(shapes.SHAPES[pair["case"]])
        grid.add_row(
            pair["optimizer"],
            f"{ours:,.0f}",
            f"{theirs:,.0f}",
            f"{ours / count:.2f}",
            f"{pair['ratio']['median']:.2f}",
        )
    return grid


def show(console: Console, sections: list[dict], first: dict, busy: bool) -> None:
    """Print the tables; the aims are for fp32 on the CPU."""
    for section in sections:
        console.print(step_table(section, busy))
        console.print(overhead_table(section))
        for case, why in section["skipped"].items():
            console.print(f"{case} skipped: {why}")
    for name, runs in first.items():
        cold, warm = runs["first_process"], runs["second_process"]
        console.print(
            f"first step of {name}: {cold['first_step_s']:.2f} s "
            f"({cold['first_step_cpu_s']:.2f} of a processor) with an empty kernel cache, "
            f"{warm['first_step_s']:.2f} s ({warm['first_step_cpu_s']:.2f}) in a second process",
            highlight=False,
        )


def _chosen(optimizer: list[str] | None, peers: bool, console: Console) -> list[str]:
    """Names of the optimizers to time; `peers` adds the other libraries that are installed."""
    names = [entry.name for entry in registry.select(optimizer or default())]
    for entry in registry.REGISTRY.values():
        if peers and entry.peer is not None and entry.name not in names:
            if entry.available():
                names.append(entry.name)
            else:
                console.print(f"{entry.name} left out: {entry.peer} is not installed")
    for name in names:
        if registry.REGISTRY[name].fused is None:
            raise ValueError(f"optimizer {name!r} has no torch optimizer to be timed beside")
    registry.of_dtypes((registry.REGISTRY[name] for name in names), torch.float32)
    return names


def earlier(path: Path, origin: Mapping[str, object]) -> dict[str, Any]:
    """The sections and first steps that a file has, none if there is no file.

    Raises:
        typer.BadParameter: they are of another machine, or of other versions.
    """
    if not path.exists():
        return NOTHING
    before = json.loads(path.read_text(encoding="utf-8"))
    for what in ("hardware", "versions"):
        if before[what] != origin[what]:
            raise typer.BadParameter(f"{path} is of other {what}: {before[what]}")
    return before


def main(
    optimizer: Annotated[
        list[str] | None, typer.Option(help="a name of the registry; repeatable")
    ] = None,
    case: Annotated[list[str] | None, typer.Option(help=", ".join(shapes.SHAPES))] = None,
    threads: Annotated[list[int] | None, typer.Option(min=1, help="repeatable; 1 and 2")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="timed steps of each of a pair")] = 15,
    peers: Annotated[bool, typer.Option("--peers", help="time other libraries too")] = False,
    apart: Annotated[bool, typer.Option("--apart", help="a group for each tensor")] = False,
    first: Annotated[bool, typer.Option(help="time the first step of two processes")] = True,
    out: Annotated[Path, typer.Option(help="folder for speed.json")] = report.LOCAL,
    append: Annotated[bool, typer.Option("--append", help="keep the runs in speed.json")] = False,
) -> None:
    """Time optimizer steps beside torch's fused and foreach optimizers."""
    console, start, load = Console(), time.perf_counter(), report.load_average()
    counts = threads or [1, 2]
    with arguments.refusing():
        cases = arguments.known("case", case or shapes.SHAPES, shapes.SHAPES)
        names = _chosen(optimizer, peers, console)
    spec = {"optimizers": names, "cases": cases, "rounds": rounds, "apart": apart}
    options = {"optimizer": optimizer, "case": case, "threads": threads, "rounds": rounds,
               "peers": peers, "apart": apart, "no-first": not first, "append": append}  # fmt: skip
    path, origin = out / "speed.json", report.origin("benchmarks.speed.cpu", options)
    before = earlier(path, origin) if append else NOTHING
    runs = [("cpu", count) for count in counts]
    if torch.cuda.is_available():
        runs.append(("cuda", max(counts)))
    try:
        with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
                      console=console) as progress:  # fmt: skip
            sections = time_all(spec, names, runs, progress)
        timed = [row.entry_name("8bit") for row in registry.default_of("first step") if first]
        firsts = first_steps([name for name in timed if name in names], "cpu", max(counts))
    except RuntimeError as error:
        raise SystemExit(str(error)) from error
    show(console, sections, firsts, report.busy_note(load) is not None)
    for section in sections:
        section.update(command=origin["command"], date=origin["date"], load_before=load)
    written = {
        **origin,
        "wall_s": round(time.perf_counter() - start, 1),
        "sections": [*before["sections"], *sections],
        "first_step": {**before["first_step"], **firsts},
    }
    report.say_if_busy(console, load)
    report.write_json(path, written)
    console.print(f"{written['wall_s']:.0f} s\nresults: {path}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
