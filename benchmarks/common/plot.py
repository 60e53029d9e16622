"""The figures of the benchmarks: curves, intervals and bars of memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.common.intervals import bits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of a bar of memory: colours that the colour-blind tell apart, the last one paler.
_PARTS = ("weights", "gradients", "state")
_COLOURS = ("#4477aa", "#66ccee", "#ee6677", "#cccccc")


def _smooth(losses: np.ndarray) -> np.ndarray:
    """Running mean over a twentieth of the steps; batch noise hides the curves otherwise."""
    width = max(1, losses.shape[1] // 20)
    total = np.cumsum(np.pad(losses, ((0, 0), (width, 0)), mode="edge"), axis=1)
    return (total[:, width:] - total[:, :-width]) / width


def _figure(width: float, height: float) -> Figure:
    """A figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _curves(panel: Axes, losses: list[list[float]], style: str, label: str) -> None:
    """The smooth mean over seeds as a line, their range as a band."""
    smooth = _smooth(np.array(losses))
    steps = np.arange(1, smooth.shape[1] + 1)
    (line,) = panel.plot(steps, smooth.mean(0), style, label=label, linewidth=1.3)
    panel.fill_between(
        steps, smooth.min(0), smooth.max(0), color=line.get_color(), alpha=0.12, linewidth=0
    )


def _style(name: str) -> str:
    """A line for weights in bf16, or else for few bits of state, or for 32."""
    if "bf16" in name:
        return ":"
    return "--" if "8bit" in name or "4bit" in name else "-"


def loss_curves(path: Path, results: Mapping[str, Mapping[str, object]]) -> None:
    """Write a PNG: a panel a task, the mean over seeds a line, the range over seeds a band."""
    figure = _figure(7 * len(results), 4.5)
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for panel, result in zip(panels, results.values(), strict=True):
        for name, row in result["optimizers"].items():
            length = min(len(losses) for losses in row["losses"])
            if length:
                losses = [losses[:length] for losses in row["losses"]]
                _curves(panel, losses, _style(name), name)
        panel.set(title=result["what"], xlabel="step", ylabel="training loss (nats)")
        low, high = panel.dataLim.intervaly
        panel.set_yscale("log" if high > 20 * low > 0 else "linear")
        panel.legend()
    _save(figure, path)


def intervals(path: Path, report: Mapping[str, object]) -> None:
    """Write a PNG of an equivalence test: a row a pair, its interval, every seed a faint dot."""
    pairs, margin = report["pairs"], report["margin"]
    figure = _figure(8, 1.4 + 0.34 * len(pairs))
    panel = figure.subplots()
    panel.axvspan(-margin, margin, color="tab:green", alpha=0.12, linewidth=0)
    panel.axvline(0, color="black", linewidth=0.6)
    for row, pair in enumerate(pairs):
        for count, difference in _counted(pair["differences"]):
            panel.plot(
                difference, row, "o", color="grey", alpha=0.3, markersize=2 + 1.2 * count**0.5
            )
        if pair["mean"] is None:
            panel.text(0, row, " diverged", va="center", color="tab:red")
            continue
        colour = "tab:blue" if pair["equivalent"] else "tab:red"
        panel.plot((pair["low"], pair["high"]), (row, row), color=colour, linewidth=2.5)
        panel.plot(pair["mean"], row, "|", color=colour, markersize=11, markeredgewidth=2)
    panel.set_yticks(range(len(pairs)), [pair["optimizer"] for pair in pairs])
    panel.invert_yaxis()
    panel.set_xlabel(
        f"{bits(report)} bits minus 32 bits, {report['metric']}: mean of {report['seeds']} seeds "
        f"and its {100 * report['confidence']:g} % interval;\nshaded: the margin of ±{margin:g}; "
        "grey: single seeds, larger where several coincide"
    )
    _save(figure, path)


def _counted(differences: list[float | None]) -> list[tuple[int, float]]:
    """Counts of each difference; a run that diverged has none."""
    finite = [difference for difference in differences if difference is not None]
    return [(finite.count(one), one) for one in sorted(set(finite))]


def formats(path: Path, report: Mapping[str, object]) -> None:
    """Write a PNG of `formats`: errors by gradient scale, by layer, and two long runs."""
    figure = _figure(15, 9)
    (scales, layers), (shrinks, spike) = figure.subplots(2, 2)
    made, recorded, long = (report[name] for name in ("synthetic", "recorded", "long"))
    for name in next(iter(made.values())):
        scales.plot(list(made), [made[key][name][0] for key in made], "o-", label=name)
        last = [recorded[key][name][-1] for key in recorded]
        layers.plot(list(recorded), last, "o", label=name)
    steps = report["steps"]
    scales.set(title=f"{steps['synthetic']} steps of normal gradients", xlabel="their scale")
    layers.set(title=f"{steps['recorded'][-1]} steps of recorded gradients", xlabel="layer")
    for panel in (scales, layers):
        panel.set(yscale="log", ylabel="error of the total update (nmse)")
    titles = {"half shrinks": "gradients of half of every block shrink 100 times",
              "spike": "one gradient of 1e4: its neighbours"}  # fmt: skip
    for panel, case in ((shrinks, "half shrinks"), (spike, "spike")):
        for name, run in long[case].items():
            width = steps["long"] / len(run["windows"])
            at = width * (0.5 + np.arange(len(run["windows"])))
            panel.plot(at, run["windows"], label=name, linewidth=1.3)
        panel.axhline(1, color="black", linewidth=0.6)
        panel.set(
            title=titles[case], xlabel="step", ylabel="size of steps beside the 32-bit twin's"
        )
        panel.set_yscale("log")
    for panel in (scales, layers, shrinks, spike):
        panel.legend(fontsize=8)
    _save(figure, path)


def fine_tuning(path: Path, report: Mapping[str, object]) -> None:
    """Write a PNG of a fine-tuning: a panel a learning rate, loss beside that of fp32 masters."""
    rates = report["learning_rates"]
    figure = _figure(6.5 * len(rates), 4.2)
    panels = figure.subplots(1, len(rates), squeeze=False)[0]
    for panel, (rate, rows) in zip(panels, rates.items(), strict=True):
        for name, row in rows.items():
            style = {"fp32": ":", "32": "-"}.get(name, "--")
            label = name if name == "fp32" else f"bf16, master_weight_bits={name}"
            _curves(panel, row["losses"], style, label)
        panel.set(title=f"learning rate {rate}", xlabel="step", ylabel="training loss (nats)")
        panel.legend()
    _save(figure, path)


def footprint(path: Path, panels: Mapping[str, list[Mapping[str, object]]]) -> None:
    """Write a PNG of memory: a panel a network, a bar an optimizer, in MiB.

    Args:
        path: of the file.
        panels: by title the bars: `label`, `weights`, `gradients`, `state` and `peak`, in bytes.
    """
    bars = max(len(rows) for rows in panels.values())
    figure = _figure(8.5 * len(panels), 1.2 + 0.24 * bars)
    for panel, (title, rows) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        places, left = range(len(rows)), np.zeros(len(rows))
        parts = {key: np.array([row[key] for row in rows]) / 2**20 for key in _PARTS}
        if all(row["peak"] is not None for row in rows):
            peaks = np.array([row["peak"] for row in rows]) / 2**20
            parts["activations and what a step needs for a moment"] = np.maximum(
                0, peaks - sum(parts.values())
            )
        for (name, sizes), colour in zip(parts.items(), _COLOURS, strict=False):
            panel.barh(places, sizes, left=left, label=name, color=colour, height=0.75)
            left = left + sizes
        panel.set_yticks(places, [row["label"] for row in rows], fontsize=8)
        panel.invert_yaxis()
        panel.margins(y=0.01)
        panel.set(title=title, xlabel="MiB")
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    _save(figure, path)
