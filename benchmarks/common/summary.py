"""Mean and spread over seeds, the verdict on each 8-bit run, and the table of a comparison."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from rich.table import Table

from benchmarks.common import tables


def mean_sd(values: list[float | None]) -> dict[str, object]:
    """Mean and sample standard deviation; both None if a run diverged, sd 0 for a single run."""
    if any(value is None for value in values):
        return {"values": values, "mean": None, "sd": None}
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"values": values, "mean": statistics.fmean(values), "sd": sd}


def verdict(
    name: str,
    quality: Mapping[str, object],
    twin: str,
    twin_quality: Mapping[str, object],
    higher_is_better: bool,
) -> dict[str, object]:
    """Whether the 8-bit mean lies within one standard deviation over seeds of its 32-bit twin.

    The standard deviation is the twin's. `paired` holds the mean and the standard deviation of the
    difference seed by seed, which shares weights and batches.

    Returns:
        the figures, `within` (bool) and `text` (the line that is printed).
    """
    head = f"{name} against {twin}: within one standard deviation: "
    if quality["mean"] is None or twin_quality["mean"] is None:
        return {"optimizer": name, "twin": twin, "within": False, "text": head + "no (diverged)"}
    difference = quality["mean"] - twin_quality["mean"]
    pairs = zip(quality["values"], twin_quality["values"], strict=True)
    paired = mean_sd([ours - theirs for ours, theirs in pairs])
    within = abs(difference) <= twin_quality["sd"]
    better = difference == 0 or (difference > 0) == higher_is_better
    answer = "yes" if within else ("no, better" if better else "no, worse")
    text = (
        f"{head}{answer} ({quality['mean']:.4f} against {twin_quality['mean']:.4f} ± "
        f"{twin_quality['sd']:.4f}; seed by seed {paired['mean']:+.4f} ± {paired['sd']:.4f})"
    )
    return {
        "optimizer": name,
        "twin": twin,
        "within": within,
        "difference": difference,
        "twin_sd": twin_quality["sd"],
        "paired_mean": paired["mean"],
        "paired_sd": paired["sd"],
        "text": text,
    }


def _number(value: float | None, digits: int) -> str:
    return "n/a" if value is None else f"{value:,.{digits}f}"


def table(result: Mapping[str, object]) -> Table:
    """The comparison of one task, in 80 columns."""
    title = f"{result['what']}\n{result['params']:,} parameters, {result['steps']} steps a run"
    grid = tables.grid(title)
    grid.add_column("optimizer", no_wrap=True)
    metric = result["metric"].replace(" (", "\n(").replace("held-out ", "held-out\n")
    columns = ("lr", metric, "state\nbytes", "bytes/\nparam", "peak\nMiB", "ms/\nstep")
    for column in columns:
        grid.add_column(column, justify="right", no_wrap=True)
    digits = 2 if result["higher_is_better"] else 4
    for name, row in result["optimizers"].items():
        quality = row["quality"]
        shown = "diverged"
        if quality["mean"] is not None:
            shown = f"{quality['mean']:.{digits}f} ± {quality['sd']:.{digits}f}"
        grid.add_row(
            name,
            f"{row['lr']:g}",
            shown,
            f"{row['state_bytes']:,}",
            f"{row['bytes_per_param']:.3f}",
            _number(row["peak_mib"], 0),
            f"{row['ms_per_step']['median']:.2f}",
        )
    return grid


def first_steps(result: Mapping[str, object]) -> str:
    """One-time cost of each optimizer's first step: seconds and resident memory."""
    costs = (
        f"{name} {row['first_step_s']:.2f} s {_number(row['engine_mib'], 0)} MiB"
        for name, row in result["optimizers"].items()
    )
    return "first step, once a process: " + ", ".join(costs)


def notes(device: str) -> str:
    """Heads of the columns."""
    if device == "cuda":
        peak = "peak MiB: largest CUDA allocation while training, weights and activations included"
    else:
        peak = (
            "peak MiB: largest resident set (VmHWM) of the optimizer's own process while training;"
            " Python, torch, data, weights, activations and compiled kernels included"
        )
    return (
        "quality: mean ± standard deviation over seeds. "
        f"{peak}. ms/step: median over every optimizer.step(); the optimizers run one after"
        " another here, and benchmarks.speed.cpu times them in turn. first step: seconds, and"
        " growth of the resident set, of a throw-away optimizer's first step, which compiles the"
        " kernels or loads them from the cache: Numba and LLVM, the same for a model of any size."
    )
