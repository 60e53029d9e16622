"""Tables: for a terminal, and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def grid(title: str) -> Table:
    """A table without columns yet, narrow enough for 80 characters."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]], numbers: bool = False) -> str:
    """A table; `numbers` are to the right in all columns but the first."""
    head = list(head)
    rule = ["---", *["---:" if numbers else "---"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))
