"""Compile every optimizer for several GPUs, none of which is needed, and count instructions.

`python -m benchmarks.static.instructions`: instructions per element, registers, spills and load
width of every pass, bytes per element, and the rate that both allow on each GPU. `--format ratio8`
counts another state format than that of the bits, `--weights 24` master weights of bf16 parameters,
`--no-dither` rounding of moments to nearest. `--peers` compiles other libraries' kernels in the
same way, where they are installed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported: nothing runs here

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common import report
from benchmarks.static import machine_code, traffic
from lowbit_optim_kernels import formats, weights
from lowbit_optim_kernels.engines.triton import engine as engine_triton
from lowbit_optim_kernels.engines.triton.plan import TILE, Kind
from lowbit_optim_kernels.rules import SQUARE, Rule
from lowbit_optim_kernels.rules.shared import dithered

RULES = {row.name: rule for row, rule in traffic.rules()}
WEIGHTS = {str(bits or 0): one for bits, one in weights.OF_BITS.items()}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WARPS = engine_triton.OPTIONS["num_warps"]


@dataclass(frozen=True)
class Chip:
    """A GPU's peak rates, from its vendor's data sheet.

    Attributes:
        name: as sold.
        target: backend, architecture and warp size, as Triton names them.
        bandwidth: TB/s of its memory.
        fp32: TFLOP/s of its vector units in fp32, dense.
        slots: instructions a lane can issue per FLOP of `fp32`: 1/2 where every lane that issues
            has a fused multiply-add, 1 where half of them have, 1/4 where FLOPs count packed pairs.
        source: of the two rates.
    """

    name: str
    target: tuple[str, int | str, int]
    bandwidth: float
    fp32: float
    slots: float
    source: str

    def rate(self, instructions: float, moved: float) -> tuple[float, str]:
        """G elements/s at peak rates, and what bounds it."""
        by_memory = self.bandwidth * 1e3 / moved
        by_issue = self.fp32 * self.slots * 1e3 / instructions
        return min(by_memory, by_issue), "memory" if by_memory <= by_issue else "issue"


CHIPS = {
    "sm_80": Chip("A100 80GB SXM", ("cuda", 80, 32), 2.039, 19.5, 1.0, "NVIDIA A100 data sheet"),
    "sm_90": Chip("H200 SXM", ("cuda", 90, 32), 4.8, 67.0, 0.5, "NVIDIA H200 data sheet"),
    "sm_100": Chip("B200 SXM", ("cuda", 100, 32), 8.0, 75.0, 0.5, "NVIDIA HGX B200 data sheet"),
    "gfx942": Chip("MI300X", ("hip", "gfx942", 64), 5.3, 163.4, 0.25, "AMD MI300X data sheet"),
}


def rounded(rule: Rule, format: formats.Format, dither: bool) -> Rule:
    """A rule with the moments dithered that are so in this format, whatever was in its own."""
    slow = {m.key for m in rule.moments if m.stream and m.role != SQUARE}
    keys = {
        m.key
        for m in rule.moments
        if not (m.exact or m.maximum) and (m.role == SQUARE or format.dithers_all or m.key in slow)
    }
    plain = tuple(replace(m, stream=0) for m in rule.moments)
    return replace(rule, moments=dithered(plain, frozenset(keys if dither else ())))


def moved_by(rule: Rule, kernel: str, kind: Kind) -> float:
    """Bytes per element that a pass reads and writes."""
    (found,) = (one for one in traffic.passes(rule) if one.name == kernel)
    parts = [part for unit in formats.units(rule.moments, kind.format) for part in unit.parts]
    state = sum(
        (part.dtype or torch.float32).itemsize / (kind.format.block if part.per_block else 1)
        for part in parts
    )
    residual = kind.weights.residual.itemsize if kind.weights.residual else 0
    width = {"p": kind.p.itemsize + residual, "g": kind.g.itemsize}
    total = 0.0
    for names in (found.reads, found.writes):
        total += sum(width[name] for name in names if name in width)
        total += state if set(names) - width.keys() else 0.0
    return total


def measure(
    name: str, dtype: str, bits: int, target: str, whole: bool = True, format: str | None = None,
    weights: str = "0", dither: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Compile all passes of one optimizer for one target and count them."""
    from triton.backends.compiler import GPUTarget

    rule, (backend, arch, lanes) = RULES[name], CHIPS[target].target
    width = bits if rule.moments else 32
    asked = formats.FORMATS[format if format and rule.moments else formats.OF_BITS[width]]
    chosen = asked.of(rule.moments)
    stored = WEIGHTS[weights if dtype == "bf16" else "0"]
    kind = Kind(DTYPES[dtype], DTYPES[dtype], chosen, whole, 16, stored)
    rule = rounded(rule, asked, dither)
    passes, moved = [], 0.0
    for kernel in engine_triton.passes(rule):
        compiled = engine_triton.compile_for(GPUTarget(backend, arch, lanes), rule, kernel, kind)
        counted = machine_code.count(compiled, TILE / (lanes * WARPS))
        moved += moved_by(rule, kernel, kind)
        passes.append({
            "pass": kernel,
            "instructions": round(counted.instructions, 1),
            "registers": counted.registers,
            "spills": counted.spills,
            "widest_load": counted.widest_load,
            "narrow": round(counted.narrow, 3),
        })  # fmt: skip
    total = sum(each["instructions"] for each in passes)
    rate, bound = CHIPS[target].rate(total, moved)
    return {
        "optimizer": f"{name}{bits}bit", "dtype": dtype, "target": target, "format": chosen.name,
        "weights": stored.bits, "dither": dither, "passes": passes,
        "instructions": round(total, 1), "bytes": round(moved, 3),
        "g_elements_per_s": round(rate), "bound": bound,
    }  # fmt: skip


def everything(
    names: list[str], dtypes: list[str], bits: list[int], targets: list[str], **more: Any
) -> Iterator[dict[str, Any]]:
    """Measure every combination."""
    for target in targets:
        for width in bits:
            for name in names:
                for dtype in dtypes:
                    yield measure(name, dtype, width, target, **more)


def _row(found: Mapping[str, Any]) -> list[str]:
    passes = found["passes"]
    return [
        found["optimizer"], found["format"], str(found["weights"] or ""), found["dtype"],
        found["target"], f"{found['instructions']:.1f}",
        " + ".join(f"{each['instructions']:.1f}" for each in passes) if len(passes) > 1 else "",
        str(max(each["registers"] for each in passes)),
        str(sum(each["spills"] for each in passes)),
        str(min(each["widest_load"] for each in passes)),
        f"{found['bytes']:.2f}", str(found["g_elements_per_s"]), found["bound"],
    ]  # fmt: skip


def show(console: Console, rows: list[dict[str, Any]], targets: list[str]) -> None:
    """Print the table and the rates that it assumes."""
    columns = ("optimizer", "format", "weights", "dtype", "target", "instr/elem", "by pass", "regs",
               "spills", "load B", "B/elem", "G elem/s", "bound")  # fmt: skip
    table = Table(*columns)
    for found in rows:
        table.add_row(*_row(found))
    console.print(table)
    for target in targets:
        chip = CHIPS[target]
        console.print(
            f"{target}: {chip.name}, {chip.bandwidth} TB/s, {chip.fp32} TFLOP/s fp32, so "
            f"{chip.fp32 * chip.slots:.1f} T instructions a lane/s ({chip.source})"
        )
    console.print("G elem/s: the smaller of both peak rates; nothing was run.")


def checked(kind: str, given: list[str] | None, known: Mapping[str, object]) -> list[str]:
    unknown = [name for name in given or () if name not in known]
    if unknown:
        raise typer.BadParameter(f"unknown {kind} {unknown[0]!r}; there are: {', '.join(known)}")
    return given or list(known)


def main(
    optimizer: Annotated[list[str] | None, typer.Option(help="repeatable; all")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16, fp16, fp32; repeatable")] = None,
    bits: Annotated[list[int] | None, typer.Option(help="8 or 32; repeatable; 8")] = None,
    target: Annotated[list[str] | None, typer.Option(help="sm_80, sm_90, ...; repeatable")] = None,
    state_format: Annotated[str | None, typer.Option("--format", help="that of the bits")] = None,
    weights: Annotated[str, typer.Option(help="bits of bf16 weights: 0, 16, 24 or 32")] = "0",
    dither: Annotated[bool, typer.Option(help="round squares and slow averages by dither")] = True,
    peers: Annotated[bool, typer.Option("--peers", help="count other libraries too")] = False,
    out: Annotated[Path, typer.Option(help="folder for instructions.json")] = report.LOCAL,
) -> None:
    """Count the instructions of the GPU kernels."""
    names = checked("optimizer", optimizer, RULES)
    dtypes = checked("dtype", dtype or ["bf16", "fp32"], DTYPES)
    targets = checked("target", target, CHIPS)
    checked("format", [state_format] if state_format else None, formats.FORMATS)
    checked("weights", [weights], WEIGHTS)
    widths = bits or [8]
    console, rows = Console(width=150), []
    with console.status("compiling") as status:
        more = {"format": state_format, "weights": weights, "dither": dither}
        for found in everything(names, dtypes, widths, targets, **more):
            rows.append(found)
            status.update(f"{found['optimizer']} {found['dtype']} {found['target']}")
    show(console, rows, targets)
    others = []
    if peers:
        from benchmarks.static import peer_instructions

        others = peer_instructions.count_all(console)
    options = {"optimizer": optimizer, "dtype": dtype, "bits": bits, "target": target, **more}
    written = {
        **report.origin("benchmarks.static.instructions", {**options, "peers": peers}),
        "chips": {name: vars(CHIPS[name]) for name in targets},
        "rows": rows,
        "peers": others,
    }
    report.write_json(out / "instructions.json", written)
    console.print(f"results: {out / 'instructions.json'}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
