"""The loss curves of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np


def _smooth(losses: np.ndarray) -> np.ndarray:
    """Running mean over a twentieth of the steps; batch noise hides the curves otherwise."""
    width = max(1, losses.shape[1] // 20)
    total = np.cumsum(np.pad(losses, ((0, 0), (width, 0)), mode="edge"), axis=1)
    return (total[:, width:] - total[:, :-width]) / width


def loss_curves(path: Path, results: Mapping[str, Mapping[str, object]]) -> None:
    """Write a PNG: a panel a task, the mean over seeds a line, the range over seeds a band."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 * len(results), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for panel, result in zip(panels, results.values(), strict=True):
        for name, row in result["optimizers"].items():
            length = min(len(losses) for losses in row["losses"])
            if not length:
                continue
            losses = _smooth(np.array([losses[:length] for losses in row["losses"]]))
            steps = np.arange(1, length + 1)
            style = "--" if "8bit" in name else "-"
            line = panel.plot(steps, losses.mean(0), style, label=name, linewidth=1.3)[0]
            panel.fill_between(
                steps, losses.min(0), losses.max(0), color=line.get_color(), alpha=0.12, linewidth=0
            )
        panel.set(title=result["what"], xlabel="step", ylabel="training loss (nats)")
        low, high = panel.dataLim.intervaly
        panel.set_yscale("log" if high > 20 * low > 0 else "linear")
        panel.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
