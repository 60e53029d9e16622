"""Fine-tune a bf16 model with each way to store its weights, beside fp32 ones.

`python -m benchmarks.quality.weights`: a byte-level GPT is trained briefly in fp32 on most of
Python's standard library, rounded to bf16, and fine-tuned on the rest at small learning rates. All
runs of a seed see the same batches; held-out loss is that of the weights that the network has.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import lowbit_optim
from benchmarks.common import arguments, models, plot, report, summary, tables, workloads
from benchmarks.quality import compare
from benchmarks.quality.compare_worker import schedule

TASK = workloads.StdlibGPT()  # but for the files and the model's size
WIDTH = 128
CPU = torch.device("cpu")
PRETRAIN_LR = 2e-3
# `master_weight_bits` of each run with bf16 weights, by what a table calls it; "fp32" has no bf16.
BITS: dict[str, int | str | None] = {"None": None, "auto": "auto", "24": 24, "32": 32}
MASTERS = "32"  # fp32 masters beside the bf16 weights: what the others are judged against
VARIANTS = ("fp32", MASTERS, "24", "auto", "None")


@dataclass(frozen=True)
class Text:
    """Bytes of Python source: what is pretrained on, fine-tuned on and held out of the latter."""

    pretrain: Tensor
    train: Tensor
    held_out: Tensor


def load(folder: str) -> Text:
    """The source of the standard library, its files in `folder` apart.

    Raises:
        ValueError: there are no such files to train on and to hold out.
    """
    root, train, held_out = workloads.stdlib_files()
    inside, held_out_inside = (
        [name for name in names if name.startswith(f"{folder}/")] for names in (train, held_out)
    )
    if not inside or not held_out_inside:
        raise ValueError(f"the standard library has no folder {folder!r} with held-out files")
    rest = [name for name in train if name not in inside]
    return Text(*(workloads.joined(root, names) for names in (rest, inside, held_out_inside)))


@torch.no_grad()
def quality(model: nn.Module, text: Tensor) -> float:
    """Held-out bits per byte of the network's weights, in fp32 arithmetic for all alike."""
    wide = copy.deepcopy(model).float()
    return TASK.quality(wide, {"held_out": text}, CPU)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    text: Tensor,
    seed: int,
    steps: int,
    rate: Callable[[int], float],
    done: Callable[[], object],
) -> list[float]:
    """Steps over windows that the seed draws; the training loss of each."""
    drawn = torch.Generator().manual_seed(seed)
    arithmetic = models.arithmetic(next(model.parameters()).dtype, CPU)
    schedules = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses = []
    for _ in range(steps):
        loss = models.loss(model, *TASK.batch({"train": text}, drawn), arithmetic)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedules.step()
        losses.append(round(loss.item(), 4))
        done()
    return losses


def pretrained(text: Text, width: int, steps: int, done: Callable[[], object]) -> models.ByteGPT:
    """A model that was trained in fp32, and whose weights bf16 can say."""
    torch.manual_seed(0)
    model = models.ByteGPT(TASK.context, width=width)
    optimizer = lowbit_optim.AdamW32bit(model.parameters(), lr=PRETRAIN_LR)
    train(model, optimizer, text.pretrain, 0, steps, lambda step: schedule(step, steps), done)
    return model.bfloat16().float()


def fine_tuned(
    start: nn.Module, variant: str, text: Text, seed: int, lr: float, steps: int,
    done: Callable[[], object],
) -> tuple[dict[str, object], list[Tensor]]:  # fmt: skip
    """One run: its figures, and by how much each weight has moved, with all bits that are kept."""
    model = copy.deepcopy(start)
    options: dict[str, object] = {}
    if variant != "fp32":
        model = model.bfloat16()
        options["master_weight_bits"] = BITS[variant]
    optimizer = lowbit_optim.AdamW8bit(model.parameters(), lr=lr, seed=seed, **options)
    warmup = max(1, steps // 20)

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / warmup)

    losses = train(model, optimizer, text.train, seed, steps, rate, done)
    weights = (w.double() for _, w in lowbit_optim.master_weights(optimizer))
    moved = [w - p.double() for w, p in zip(weights, start.parameters(), strict=True)]
    return {"seed": seed, "quality": quality(model, text.held_out), "losses": losses}, moved


def _squares(tensors: list[Tensor]) -> float:
    return sum(float(x.detach().square().sum()) for x in tensors)


def nmse(moved: list[Tensor], wanted: list[Tensor]) -> float:
    """Squared error of displacements over the square of those that are wanted."""
    error = [a.detach() - b.detach() for a, b in zip(moved, wanted, strict=True)]
    return _squares(error) / _squares(wanted)


def against(ours: list[float], theirs: list[float], name: str) -> dict[str, object]:
    """Held-out losses minus others seed by seed, and whether their mean is within one sd of them.

    The standard deviation is that of the others over seeds.
    """
    difference = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean, other = summary.mean_sd(ours)["mean"], summary.mean_sd(theirs)
    return {
        f"minus_{name}": summary.mean_sd(difference),
        f"within_one_sd_of_{name}": abs(mean - other["mean"]) <= other["sd"],
    }


def judged(runs: dict[str, list[dict]], variant: str) -> dict[str, object]:
    """The figures of one way to store weights, over seeds."""
    qualities = {name: [run["quality"] for run in of] for name, of in runs.items()}
    return {
        "held_out": summary.mean_sd(qualities[variant]),
        **against(qualities[variant], qualities[MASTERS], "fp32_masters"),
        **against(qualities[variant], qualities["fp32"], "fp32"),
        "nmse_of_fp32_masters": summary.mean_sd([run["nmse_masters"] for run in runs[variant]]),
        "nmse_of_fp32": summary.mean_sd([run["nmse_fp32"] for run in runs[variant]]),
        "motion": summary.mean_sd([run["motion"] for run in runs[variant]]),
        "losses": [run["losses"] for run in runs[variant]],
    }


def all_of(
    start: nn.Module, text: Text, lr: float, seeds: int, steps: int, done: Callable[[], object]
) -> dict[str, object]:
    """Every way to store weights at one learning rate."""
    runs: dict[str, list[dict]] = {variant: [] for variant in VARIANTS}
    for seed in range(seeds):
        moves = {}
        for variant in VARIANTS:
            run, moves[variant] = fine_tuned(start, variant, text, seed, lr, steps, done)
            runs[variant].append(run)
        for variant, moved in moves.items():
            figures = runs[variant][-1]
            figures["nmse_masters"] = nmse(moved, moves[MASTERS])
            figures["nmse_fp32"] = nmse(moved, moves["fp32"])
            figures["motion"] = math.sqrt(_squares(moved) / _squares(moves[MASTERS]))
    return {variant: judged(runs, variant) for variant in VARIANTS}


def _inside(row: dict, name: str) -> str:
    return "in" if row[f"within_one_sd_of_{name}"] else "out"


def table(written: dict) -> Table:
    """The result as printed."""
    title = (
        f"{written['what']}\n{written['params']:,} parameters, {written['steps']} steps, "
        f"{written['seeds']} seeds; before it {written['before']:.4f} bits per byte"
    )
    grid = tables.grid(title)
    heads = ("lr", "bits", "held-out bits\nper byte", "minus fp32\nmasters", "sd", "minus fp32",
             "sd", "nmse to\nmasters", "motion")  # fmt: skip
    for index, head in enumerate(heads):
        grid.add_column(head, justify="right" if index > 1 else "left", no_wrap=True)
    for lr, rows in written["learning_rates"].items():
        for variant, row in rows.items():
            mean = row["held_out"]
            apart = [
                cell
                for name in ("fp32_masters", "fp32")
                for cell in (f"{row[f'minus_{name}']['mean']:+.4f}", _inside(row, name))
            ]
            grid.add_row(
                lr, variant, f"{mean['mean']:.4f} ± {mean['sd']:.4f}", *apart,
                f"{row['nmse_of_fp32_masters']['mean']:.1e}", f"{row['motion']['mean']:.3f}",
            )  # fmt: skip
    return grid


def markdown(written: dict) -> str:
    """The table of a result file."""
    head = ("learning rate", "weights", "held-out bits per byte", "minus fp32 masters",
            "minus fp32", "nmse to fp32 masters", "nmse to fp32", "motion")  # fmt: skip
    lines = []
    for rate, rows in written["learning_rates"].items():
        for name, row in rows.items():
            mean = row["held_out"]
            apart = [
                f"{row[f'minus_{of}']['mean']:+.4f} ± {row[f'minus_{of}']['sd']:.4f}, "
                f"{_inside(row, of)}"
                for of in ("fp32_masters", "fp32")
            ]
            errors = [row[f"nmse_of_{of}"]["mean"] for of in ("fp32_masters", "fp32")]
            lines.append((
                rate, name if name == "fp32" else f"bf16, `{name}`",
                f"{mean['mean']:.4f} ± {mean['sd']:.4f}", *apart,
                *(f"{error:.1e}" if error else "0" for error in errors),
                f"{row['motion']['mean']:.3f}",
            ))  # fmt: skip
    return tables.markdown(head, lines)


def main(
    lr: Annotated[list[float] | None, typer.Option(min=0.0, help="repeatable")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each kind")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="of fine-tuning")] = 300,
    pretrain: Annotated[int, typer.Option(min=1, help="steps before it, in fp32")] = 1000,
    width: Annotated[int, typer.Option(min=8, help="of the model; a multiple of 8")] = WIDTH,
    folder: Annotated[
        str, typer.Option(help="of the standard library, that is fine-tuned on")
    ] = "encodings",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads")] = None,
    from_file: Annotated[
        Path | None, typer.Option("--markdown", help="print this result file's table")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for weights.json and .png")] = report.LOCAL,
) -> None:
    """Fine-tune a bf16 model with each way to store its weights, beside fp32 ones."""
    if from_file is not None:
        print(markdown(json.loads(from_file.read_text(encoding="utf-8"))))
        return
    console, began, load_before = Console(), time.perf_counter(), report.load_average()
    options = {"lr": lr, "seeds": seeds, "steps": steps, "pretrain": pretrain, "width": width,
               "folder": folder, "threads": threads}  # fmt: skip
    torch.set_num_threads(threads or report.cores())
    with arguments.refusing():
        text = load(folder)
    rates, found = lr or [1e-5, 1e-6], {}
    arithmetic = models.arithmetic(torch.bfloat16, CPU)
    with compare.bars(console) as progress:
        start = pretrained(text, width, pretrain, _bar(progress, "pretraining", pretrain))
        before = quality(start, text.held_out)
        for rate in rates:
            done = _bar(progress, f"lr {rate:g}", len(VARIANTS) * seeds * steps)
            found[f"{rate:g}"] = all_of(start, text, rate, seeds, steps, done)
    written = {
        **report.origin("benchmarks.quality.weights", options),
        "what": f"byte-level GPT, fine-tuned on {folder}/ of Python's standard library",
        "optimizer": "AdamW8bit",
        "arithmetic": str(arithmetic).removeprefix("torch."),  # of bf16 weights
        "params": sum(p.numel() for p in start.parameters()),
        "steps": steps,
        "seeds": seeds,
        "pretrain_steps": pretrain,
        "bytes": {name: x.numel() for name, x in vars(text).items()},
        "before": before,
        "load_before": load_before,
        "wall_s": round(time.perf_counter() - began, 1),
        "learning_rates": found,
    }
    console.print(table(written))
    if arithmetic != torch.bfloat16:
        console.print(compare.CAST)
    report.write_json(out / "weights.json", written)
    plot.fine_tuning(out / "weights.png", written)
    console.print(f"{written['wall_s']:.0f} s\nresults: {out / 'weights.json'}", soft_wrap=True)


def _bar(progress: Progress, what: str, total: int) -> Callable[[], object]:
    task = progress.add_task(what, total=total, loss="")
    return lambda: progress.advance(task)


if __name__ == "__main__":
    typer.run(main)
