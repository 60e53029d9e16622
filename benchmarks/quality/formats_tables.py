"""The tables of a result file of `formats`, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from benchmarks.common.tables import markdown

_table = partial(markdown, numbers=True)


def _power(x: float) -> str:
    return f"{x:.1e}".replace("e-0", "e-").replace("e+0", "e")


def tables(written: Mapping[str, dict]) -> Iterator[str]:
    """The tables of a result file, in Markdown: synthetic, recorded, long runs, others, time."""
    made, recorded = written["synthetic"], written["recorded"]
    names = list(next(iter(made.values())))
    yield _table(
        ("state", *made),
        ([name, *(_power(made[key][name][0]) for key in made)] for name in names),
    )
    yield _table(
        ("state", *recorded),
        (
            [name, *(" / ".join(map(_power, recorded[key][name])) for key in recorded)]
            for name in names
        ),
    )
    runs, rules = written["long"], written["rules"]
    yield _table(
        ("state", *runs),
        (
            [name, *("{size:.3f} / {along:.3f}".format(**runs[key][name]) for key in runs)]
            for name in next(iter(runs.values()))
        ),
    )
    yield _table(
        ("optimizer", *next(iter(rules.values()))),
        ([label, *map(_power, row.values())] for label, row in rules.items()),
    )
    if written["time"]:
        yield _table(
            ("state", "bytes a parameter", "ms", "quartiles", "times torch's fused"),
            (
                [
                    name,
                    f"{row['state_bytes']:.3f}",
                    f"{row['ms']['median']:.1f}",
                    f"{row['ms']['q25']:.1f}, {row['ms']['q75']:.1f}",
                    f"{row['ratio']['median']:.2f}",
                ]
                for name, row in written["time"].items()
            ),
        )
