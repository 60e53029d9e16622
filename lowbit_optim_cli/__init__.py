"""The command `lowbit-optim`, and the arithmetic of memory footprints.

A package beside `lowbit_optim`, because importing that imports torch: help, completion and
estimates from shapes alone answer before torch would be there.
"""

from __future__ import annotations

import importlib.util
import io
import sys

NEEDED = ("typer", "rich")


def main() -> None:
    """Run the command; without what it needs, say so and exit with code 2."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"lowbit-optim needs {' and '.join(missing)}: pip install {' '.join(missing)}",
            file=sys.stderr,
        )
        sys.exit(2)
    from .app import app

    if isinstance(sys.stdout, io.TextIOWrapper):  # names may have what it cannot write
        sys.stdout.reconfigure(errors="backslashreplace")
    app(prog_name="lowbit-optim")
