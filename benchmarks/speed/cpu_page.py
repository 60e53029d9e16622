"""The tables of docs/cpu.md, from the result files.

`python -m benchmarks.speed.cpu_page` prints them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator

from benchmarks.common import report

CASES = ("one", "split64", "resnet50", "gpt2")
SMALL = "small1000"
THREADS = {1: "One thread", 2: "Two threads"}
INSTRUCTION_SETS = "", "_avx2"  # how the names of result files end


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _pairs(section: dict) -> dict[str, dict[str, dict]]:
    """By optimizer, then by case."""
    pairs: dict[str, dict[str, dict]] = {}
    for pair in section["pairs"]:
        pairs.setdefault(pair["optimizer"], {})[pair["case"]] = pair
    return pairs


def ratios(section: dict) -> str:
    """Time over torch's fused optimizer, and the bandwidth on one tensor of the copy's."""
    rows = []
    for name, cases in _pairs(section).items():
        cells = []
        for case in CASES:
            ratio = cases[case]["ratio"]
            cells.append(f"{ratio['median']:.2f} ({ratio['q25']:.2f}, {ratio['q75']:.2f})")
        share = cases["one"]["gb_per_s"] / section["copy_gb_per_s"]
        beside = cases["one"]["baseline"].removeprefix("torch.optim.").removesuffix("-fused")
        rows.append([name, beside, *cells, f"{share:.0%}"])
    return _table(["", "beside", *CASES, "of copy"], rows)


def overhead(section: dict) -> str:
    """Microseconds a step over 1,000 tensors."""
    rows = []
    for name, cases in _pairs(section).items():
        pair = cases[SMALL]
        ours, theirs = 1e3 * pair["ms"]["median"], 1e3 * pair["baseline_ms"]["median"]
        rows.append([name, f"{ours:,.0f}", f"{theirs:,.0f}"])
    return _table(["", "µs a step", "torch's foreach"], rows)


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
    return _table(head, rows)


def tables() -> Iterator[str]:
    """All of them, in the page's order; those of ratios with the number of threads above."""
    for name in INSTRUCTION_SETS:
        for section in sorted(_written("speed", name)["sections"], key=lambda x: -x["threads"]):
            head = f"{THREADS[section['threads']]}, {section['instruction_set']}"
            yield f"{head}:\n\n{ratios(section)}"
    (two,) = (one for one in _written("speed", "")["sections"] if one["threads"] == 2)
    yield overhead(two)
    for name in INSTRUCTION_SETS:
        yield passes(_written("passes", name))


def _written(program: str, instruction_set: str) -> dict:
    path = report.RESULTS / f"{program}{instruction_set}.json"
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print("\n\n".join(tables()))
