"""The tables of a result: as printed, and as the pages of docs have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table

from benchmarks.common import tables

HEADS = ("optimizer", "weights", "gradients", "state", "by arithmetic", "temporary", "peak, step 1",
         "peak", "over, %")  # fmt: skip
SIZES = ("weights", "gradients", "state", "estimated_state", "temporary", "first_peak", "peak")
Row = Mapping[str, object]


def label(row: Row) -> str:
    """The optimizer with what is not its default: "AdamW8bit, 24 bits, released"."""
    bits = [] if row["bits"] is None else [f"{row['bits']} bits"]
    return ", ".join([str(row["optimizer"]), *bits, *(["released"] if row["released"] else [])])


def whole(row: Row) -> int:
    """Bytes of weights, gradients and state."""
    return sum(int(row[key]) for key in ("weights", "gradients", "state"))


def groups(written: Mapping[str, object]) -> dict[tuple[str, str], list[Row]]:
    """The rows of each network and dtype."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in written["rows"]:
        found.setdefault((row["network"], row["dtype"]), []).append(row)
    return found


def title(written: Mapping[str, object], key: tuple[str, str]) -> str:
    """Heading of a group of rows."""
    rows = groups(written)[key]
    return f"{key[0]} ({written['size']}), {rows[0]['params']:,} parameters in {key[1]}"


def _cells(row: Row) -> Iterator[str]:
    for key in SIZES:
        size = row[key]
        yield "" if size is None else f"{size / 2**20:.1f}"
    yield "" if row["peak"] is None else f"{100 * (row['peak'] / whole(row) - 1):+.1f}"


def printed(written: Mapping[str, object]) -> Iterator[Table]:
    """A table of each network and dtype, in MiB."""
    for key, rows in groups(written).items():
        grid = tables.grid(f"{title(written, key)}; MiB")
        for index, head in enumerate(HEADS):
            grid.add_column(head, justify="right" if index else "left", no_wrap=not index)
        for row in rows:
            grid.add_row(label(row), *_cells(row))
        yield grid


def markdown(written: Mapping[str, object], key: tuple[str, str]) -> str:
    """The rows of one network and dtype for a page, in MiB."""
    rows = ((f"`{label(row)}`", *_cells(row)) for row in groups(written)[key])
    return tables.markdown(HEADS, rows, numbers=True)


def panels(written: Mapping[str, object]) -> dict[str, list[Row]]:
    """The bars of each network and dtype, the smallest first."""
    return {
        title(written, key): sorted(
            ({**row, "label": label(row)} for row in rows),
            key=lambda row: row["peak"] or whole(row),
        )
        for key, rows in groups(written).items()
    }
