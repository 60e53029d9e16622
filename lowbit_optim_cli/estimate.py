"""`lowbit-optim estimate`: a row for each optimizer and format, with all that training keeps."""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from .errors import Refused, plural
from .footprint import Footprint, Layout, Model, footprint
from .optimizers import ROLES, layouts

CARDS = (16, 24, 48, 80)  # GB of 10^9 bytes, which no card of that name has less than
MARKS = {"whole": "yes", "released": "rel.", None: "-"}
ANY = 1000  # characters, of which no table has so many
FIRST = 10  # rows that `--gpu` prints
UNITS = {"": 1e9, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([MGT]i?B)?", re.IGNORECASE)


@dataclass(frozen=True)
class Row:
    """An optimizer in one format, and what a model takes with it.

    Attributes:
        layout: the optimizer.
        whole: of the whole model.
        rank: of the fullest rank.
    """

    layout: Layout
    whole: Footprint
    rank: Footprint

    def fits(self, size: float) -> str | None:
        """Whether a rank fits: "whole", "released" with gradients released alone, or None."""
        if self.rank.sum <= size:
            return "whole"
        released = self.rank.sum_released
        return "released" if released is not None and released <= size else None

    @property
    def least(self) -> float:
        """The fewest bytes that a rank takes."""
        return min(x for x in (self.rank.sum, self.rank.sum_released) if x is not None)

    def as_json(self) -> dict[str, Any]:
        """All numbers in bytes."""
        layout = self.layout
        return {
            "library": layout.library,
            "optimizer": layout.name,
            "family": layout.family,
            "format": layout.format,
            "master_weight_bits": layout.bits,
            "layout": "documented" if layout.documented else "measured",
            **_numbers(self.whole),
            "per_rank": _numbers(self.rank),
            "fits": {f"{card} GB": self.fits(card * 1e9) for card in CARDS},
        }


def _numbers(found: Footprint) -> dict[str, int | None]:
    return {**vars(found), "sum": found.sum, "sum_released": found.sum_released}


def rows_of(
    model: Model, chosen: Sequence[Layout], shards: int, embeddings_in_32_bits: bool
) -> list[Row]:
    """The rows of a model, in the order of the layouts."""
    return [
        Row(
            layout,
            footprint(layout, model.weights, 1, embeddings_in_32_bits),
            footprint(layout, model.weights, shards, embeddings_in_32_bits),
        )
        for layout in chosen
    ]


def choose(names: Sequence[str], bf16: bool) -> list[Layout]:
    """The layouts of these optimizers.

    Args:
        names: families ("AdamW"), classes ("AdamW8bit", "torchao.AdamW4bit"), or "all".
        bf16: whether weights are bf16.

    Raises:
        Refused: for a name that there is not, with the nearest ones.
    """
    every = layouts(bf16)
    known: dict[str, list[Layout]] = {"all": every}
    spelt = {"all": "all"}
    for layout in every:
        for name in (layout.family, layout.name, f"{layout.library}.{layout.name}"):
            known.setdefault(name.lower(), []).append(layout)
            spelt.setdefault(name.lower(), name)
    chosen: dict[int, Layout] = {}
    for name in names:
        if name.lower() not in known:
            near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
            means = " or ".join(spelt[one] for one in near)
            there = ", ".join(sorted({layout.family for layout in every}))
            hint = f"; did you mean {means}?" if near else f"; there are all, {there}"
            raise Refused(f"unknown optimizer {name!r}{hint}")
        chosen.update((id(layout), layout) for layout in known[name.lower()])
    return [layout for layout in every if id(layout) in chosen]


def size_of(text: str) -> float:
    """Bytes of a size such as "24GB" or "79.6 GiB"; a number alone is of GB.

    Raises:
        Refused: if it is none.
    """
    found = SIZE.fullmatch(text.strip())
    if found is None or float(found[1]) == 0:
        raise Refused(f"--gpu must be a size such as 24GB or 79.6GiB; got {text!r}")
    return float(found[1]) * UNITS[(found[2] or "").upper()]


def fitting(rows: Sequence[Row], size: float, text: str) -> list[Row]:
    """The first rows that fit, cheapest first.

    Raises:
        Refused: if none does.
    """
    fit = sorted((row for row in rows if row.fits(size)), key=lambda row: row.least)
    if not fit:
        least = min(rows, key=lambda row: row.least)
        needed = f"{least.least / 1e9:.2f} GB" if least.least >= 1e8 else f"{least.least:,} bytes"
        raise Refused(
            f"nothing fits {text}: the least is {least.layout.library} {least.layout.name} with "
            f"{needed}; --shards deals it out to several GPUs"
        )
    return fit[:FIRST]


def as_json(model: Model, rows: Sequence[Row], shards: int, activations: Sequence[str]) -> str:
    """Everything as JSON, in bytes."""
    largest = model.largest
    found = {
        "model": model.source,
        "parameters": model.parameters,
        "largest_gradient": {"name": largest.name, "shape": largest.shape, "bytes": largest.bytes},
        "notes": model.notes,
        "activations": list(activations),
        "shards": shards,
        "rows": [row.as_json() for row in rows],
    }
    return json.dumps(found, indent=2)


def show(
    console: Console, model: Model, rows: Sequence[Row], shards: int, activations: Sequence[str]
) -> None:
    """Print the table and what has to be known of it.

    Where not even the narrow table fits, its lines are left to the terminal to wrap: each number is
    whole.
    """
    for wide in (True, False):
        table = _table(model, rows, shards, wide)
        table.width = Measurement.get(console, console.options.update(width=ANY), table).maximum
        if table.width <= console.width:
            break
    console.print(table, crop=False)
    for line in (*legend(model, rows, shards), *activations):
        console.print(line)


def _table(model: Model, rows: Sequence[Row], shards: int, wide: bool) -> Table:
    """The table, wide with all columns.

    A narrow one leaves weights and gradients, which are the same in all rows, to its title.
    """
    unit, size = ("GB", 1e9) if max(row.whole.sum for row in rows) >= 1e9 else ("MB", 1e6)

    def cell(value: int | None) -> str:
        return "-" if value is None else f"{value / size:.3f}"

    first = rows[0].whole
    title = f"{model.source}: {plural(model.parameters, 'parameter')}, in {unit}"
    if not wide:
        title += f"; weights {cell(first.weights)}, gradients {cell(first.gradients)}"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1 if wide else 0, 0, 0))
    for column in ("optimizer", "format", "bits"):
        table.add_column(column, no_wrap=True)
    numbers = ["weights", "gradients", "released"] if wide else []
    numbers += ["state", "residual", "sum", "released"]
    numbers += ["per rank", "released"] if shards > 1 else []
    cards = [f"{card}{' ' if wide else chr(10)}GB" for card in CARDS]
    for column in (*numbers, *cards):
        table.add_column(column, justify="right", no_wrap=True)
    for library, several in itertools.groupby(rows, key=lambda row: row.layout.library):
        table.add_row(library, style="bold")
        for row in several:
            layout, cells = row.layout, map(cell, _values(row, wide, shards))
            name = f" {layout.name}{'*' if layout.documented else ''}"
            marks = (MARKS[row.fits(card * 1e9)] for card in CARDS)
            table.add_row(name, layout.format, str(layout.bits or "-"), *cells, *marks)
    return table


def _values(row: Row, wide: bool, shards: int) -> list[int | None]:
    whole, rank = row.whole, row.rank
    values = [whole.weights, whole.gradients, whole.gradients_released] if wide else []
    values += [whole.state, whole.residual, whole.sum, whole.sum_released]
    if shards > 1:
        values += [rank.sum, rank.sum_released]
    return values


def legend(model: Model, rows: Sequence[Row], shards: int) -> list[str]:
    """Notes below the table: the meaning of its words, and what it leaves out."""
    largest = model.largest
    of = f" of the fullest of {shards} ranks" if shards > 1 else ""
    lines = [
        f"Largest gradient: {largest.name} {list(largest.shape)}, {largest.bytes / 1e6:,.1f} MB.",
        *(f"{note}." for note in model.notes),
        "bits: of the weights that training goes on with (master_weight_bits); those beyond bf16 "
        "are the residual. released: gradients dropped as they are stepped (release_gradients).",
        f"yes: weights, gradients and state{of} fit; rel.: they do with gradients released. "
        "Activations, buffers, temporaries and the CUDA context come on top.",
    ]
    wholes = sorted({row.layout.family for row in rows if row.layout.whole})
    if shards > 1 and wholes:
        lines.append(f"Every rank keeps the whole state of {' and '.join(wholes)}.")
    if any(row.layout.documented for row in rows):
        lines.append("*: by its documented layout, not measured.")
    others = sorted(ROLES.keys() - {row.layout.family for row in rows})
    if others:
        lines.append(f"More with --optimizer NAME, or all: {', '.join(others)}.")
    return lines
