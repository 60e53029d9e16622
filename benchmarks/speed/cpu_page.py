"""The tables of docs/cpu.md, from the result files.

`python -m benchmarks.speed.cpu_page` prints them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from statistics import median

from benchmarks.common import report
from benchmarks.common.tables import markdown

CASES = ("one", "split64", "resnet50", "gpt2")
SMALL = "small1000"
THREADS = {2: "Two threads", 1: "One thread"}  # in the page's order
MODELS = ("resnet50", "gpt2")
MACHINES = {"": "Zen 5", "_xeon": "Emerald Rapids", "_avx2": "Zen 3"}  # by how files' names end


def _pairs(runs: Iterable[dict]) -> dict[str, dict[str, list[dict]]]:
    """Rows of all runs, by optimizer, then by case; each with the bandwidth of its run's copy."""
    pairs: dict[str, dict[str, list[dict]]] = {}
    for run in runs:
        for pair in run["pairs"]:
            of_copy = pair["gb_per_s"] / run["copy_gb_per_s"]
            cases = pairs.setdefault(pair["optimizer"], {})
            cases.setdefault(pair["case"], []).append({**pair, "of_copy": of_copy})
    return pairs


def _span(figures: list[dict]) -> str:
    """The median of the runs' medians; their lowest and highest quartile."""
    low, high = min(one["q25"] for one in figures), max(one["q75"] for one in figures)
    return f"{median(one['median'] for one in figures):.2f} ({low:.2f}, {high:.2f})"


def ratios(runs: Iterable[dict]) -> str:
    """Time over torch's fused optimizer, and the bandwidth on one tensor of the copy's."""
    rows = []
    for name, cases in _pairs(runs).items():
        cells = [_span([pair["ratio"] for pair in cases[case]]) for case in CASES]
        share = median(pair["of_copy"] for pair in cases["one"])
        beside = cases["one"][0]["baseline"].removeprefix("torch.optim.").removesuffix("-fused")
        rows.append([name, beside, *cells, f"{share:.0%}"])
    return markdown(["", "beside", *CASES, "of copy"], rows)


def overhead(runs: Iterable[dict]) -> str:
    """Microseconds a step over 1,000 tensors."""
    rows = []
    for name, cases in _pairs(runs).items():
        times = [
            1e3 * median(pair[which]["median"] for pair in cases[SMALL])
            for which in ("ms", "baseline_ms")
        ]
        rows.append([name, *(f"{time:,.0f}" for time in times)])
    return markdown(["", "µs a step", "torch's foreach"], rows)


def others(runs: Iterable[dict]) -> str:
    """Time over torch's fused optimizer, other libraries' too."""
    rows = [
        [name, *(_span([pair["ratio"] for pair in cases[case]]) for case in MODELS)]
        for name, cases in _pairs(runs).items()
    ]
    return markdown(["", *MODELS], rows)


def passes(written: dict) -> str:
    """Nanoseconds an element of each pass, and what bounds it."""
    rows = [
        [
            row["optimizer"], row["pass"], f"{row['bytes_per_element']:.1f}",
            f"{row['ns']['median']:.3f}", f"{row['ns_in_cache']['median']:.3f}",
            f"{row['of_copy']:.0%}", row["bound"],
        ]
        for row in written["passes"]
    ]  # fmt: skip
    head = ["", "pass", "bytes", "ns from memory", "ns in cache", "of copy", "bound by"]
    return markdown(head, rows)


def tables() -> Iterator[str]:
    """All of them, in the page's order; those of ratios with the number of threads above."""
    for name, machine in MACHINES.items():
        for threads, words in THREADS.items():
            runs = _runs(name, threads)
            head = f"{words}, {machine} ({runs[0]['instruction_set']}), {len(runs)} runs"
            yield f"{head}:\n\n{ratios(runs)}"
    yield overhead(_runs("_small", 2))
    yield others(_runs("_peers", 2))
    for name in MACHINES:
        yield passes(_written("passes", name))


def _runs(ending: str, threads: int) -> list[dict]:
    sections = _written("speed", ending)["sections"]
    return [section for section in sections if section["threads"] == threads]


def _written(program: str, ending: str) -> dict:
    path = report.RESULTS / f"{program}{ending}.json"
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print("\n\n".join(tables()))
