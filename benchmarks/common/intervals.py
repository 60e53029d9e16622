"""The statistics of an equivalence test, and its table in Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from benchmarks.common import tables


def paired(
    ours: list[float | None], theirs: list[float | None], margin: float, confidence: float = 0.95
) -> dict[str, object]:
    """Whether the mean of ours - theirs, seed by seed, lies inside ± margin.

    The interval is two-sided by Student's t. `tost_p` is the p value of two one-sided tests
    (Schuirmann, J. Pharmacokinet. Biopharm. 15, 1987) of "the mean is outside the margin". Both
    tests at 5 % are the 90 % interval: to ask for the 95 % interval inside the margin is stricter.

    Args:
        ours, theirs: the quality of each seed, in the same order; None where a run diverged.
        margin: half the width of the range of equivalence, in the unit of the quality.
        confidence: of the interval.

    Returns:
        `differences`, `mean`, `sd`, `low`, `high`, `tost_p`, `equivalent`. A run that diverged, or
        whose quality is not finite, is never left out: the pair is not equivalent then, and all
        that would be computed from that run is None.

    Raises:
        ValueError: there are fewer than two seeds, or not as many on both sides.
    """
    from scipy import stats  # comes with scikit-learn, whose digits are the data

    count = len(ours)
    if count < 2 or count != len(theirs):
        raise ValueError(f"need the same two or more seeds, got {count} and {len(theirs)}")
    differences = [
        None if a is None or b is None or not math.isfinite(a - b) else round(a - b, 9)
        for a, b in zip(ours, theirs, strict=True)
    ]
    if None in differences:
        names = ("mean", "sd", "low", "high", "tost_p")
        return {"differences": differences, **dict.fromkeys(names), "equivalent": False}
    mean, sd = statistics.fmean(differences), statistics.stdev(differences)
    error, freedom = sd / math.sqrt(count), count - 1
    half = float(stats.t.ppf(0.5 + 0.5 * confidence, freedom)) * error
    if error == 0.0:
        p = float(abs(mean) >= margin)
    else:
        p = float(max(stats.t.sf((mean + margin) / error, freedom),
                      stats.t.cdf((mean - margin) / error, freedom)))  # fmt: skip
    low, high = mean - half, mean + half
    return {
        "differences": differences,
        "mean": mean,
        "sd": sd,
        "low": low,
        "high": high,
        "tost_p": p,
        "equivalent": -margin < low and high < margin,
    }


def cells(pair: Mapping[str, object]) -> list[str]:
    """One row of the table: optimizer, both means, difference, sd, interval, p, verdict."""
    sides = [pair["quality_8bit"], pair["quality_32bit"]]
    means = ["diverged" if None in side else f"{statistics.fmean(side):.2f}" for side in sides]
    row = [str(pair["optimizer"]), *means]
    if pair["mean"] is None:
        return [*row, "n/a", "n/a", "n/a", "n/a", "no"]
    return [
        *row,
        f"{pair['mean']:+.3f}",
        f"{pair['sd']:.3f}",
        f"{pair['low']:+.3f}, {pair['high']:+.3f}",
        "<1e-6" if pair["tost_p"] < 1e-6 else f"{pair['tost_p']:.2g}",
        "yes" if pair["equivalent"] else "no",
    ]


HEAD = ("optimizer", "8 bits", "32 bits", "mean diff.", "sd", "95 % interval",
        "TOST p", "inside")  # fmt: skip


def bits(report: Mapping[str, object]) -> int:
    """Bits of the state that a result file compares with 32."""
    return 4 if report.get("state_format") == "ratio4" else 8


def head(report: Mapping[str, object]) -> tuple[str, ...]:
    """The headings of its table."""
    return (HEAD[0], f"{bits(report)} bits", *HEAD[2:])


def markdown(report: Mapping[str, object]) -> str:
    """The table of a result file."""
    return tables.markdown(head(report), map(cells, report["pairs"]))
