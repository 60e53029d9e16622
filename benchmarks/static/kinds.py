"""Cost of a kernel of many kinds of tiles beside one of a single kind; needs no GPU.

`python -m benchmarks.static.kinds`: registers, programs that a multiprocessor's registers hold,
spills, shared memory and seconds of compiling, for whole tiles of 8-bit state and for six kinds of
one dtype: whole tiles, and full and short blocks of odd rows, of 8-bit and of 32-bit state.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common import registry, report
from benchmarks.common.arguments import known, refusing
from benchmarks.static import instructions, machine_code
from lowbit_optim_kernels import formats, weights
from lowbit_optim_kernels.engines.triton import engine as engine_triton
from lowbit_optim_kernels.engines.triton.kinds import FULL, SHORT

OF_ODD_ROWS = 1, weights.PLAIN, False  # alignment, weights, whether far
TILES = (
    (True, 16), (True, *OF_ODD_ROWS, FULL), (False, *OF_ODD_ROWS, SHORT, 64),
)  # fmt: skip
REGISTERS, MOST = 65_536, 32  # of a multiprocessor; programs that share it


def measure(name: str, dtype: str, target: str) -> list[dict[str, Any]]:
    """Compile the passes of one optimizer for one kind and for six."""
    from triton.backends.compiler import GPUTarget

    rule, chip = instructions.RULES[name], GPUTarget(*instructions.CHIPS[target].target)
    p = instructions.DTYPES[dtype]
    widths = [formats.FORMATS[formats.OF_BITS[bits]] for bits in (8, 32)]
    kinds = [(p, p, format, *tile) for tile in TILES for format in widths]
    rows = []
    for kernel in engine_triton.passes(rule):
        for chosen in (kinds[:1], kinds):
            # Else seconds may be those of reading what another run left in Triton's cache.
            with patch.dict(os.environ, TRITON_ALWAYS_COMPILE="1"):
                start = time.perf_counter()
                compiled = engine_triton.compile_for(chip, rule, kernel, *chosen)
                seconds = time.perf_counter() - start
            counted = machine_code.count(compiled, 1)
            threads = chip.warp_size * instructions.WARPS
            programs = REGISTERS // (threads * (-(-counted.registers // 8) * 8))
            rows.append({
                "optimizer": f"{name}8bit", "pass": kernel, "dtype": dtype, "target": target,
                "kinds": len(chosen), "registers": counted.registers,
                "programs": min(MOST, programs) if compiled.asm.get("cubin") else None,
                "spills": counted.spills, "shared": compiled.metadata.shared,
                "seconds": round(seconds, 2),
            })  # fmt: skip
    return rows


def main(
    optimizer: Annotated[list[str] | None, typer.Option(help="repeatable")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16, fp32; repeatable")] = None,
    target: Annotated[list[str] | None, typer.Option(help="sm_90, ...; repeatable")] = None,
    out: Annotated[Path, typer.Option(help="folder for kinds.json")] = report.LOCAL,
) -> None:
    """Compare kernels of one kind and of six."""
    console, few = Console(width=120), [row.name for row in registry.default_of("kinds")]
    with refusing():
        names = known("optimizer", optimizer or few, instructions.RULES)
        dtypes = known("dtype", dtype or ["bf16", "fp32"], instructions.DTYPES)
        targets = known("target", target or ["sm_90"], instructions.CHIPS)
    rows = [
        row
        for at in targets
        for name in names
        for each in dtypes
        for row in measure(name, each, at)
    ]
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console.print(table)
    options = {"optimizer": optimizer, "dtype": dtype, "target": target}
    written = {
        **report.origin("benchmarks.static.kinds", options), "rows": rows,
    }  # fmt: skip
    report.write_json(out / "kinds.json", written)


if __name__ == "__main__":
    typer.run(main)
