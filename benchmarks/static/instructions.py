"""Compile every optimizer for several GPUs, none of which is needed, and count what it takes.

`python -m benchmarks.static.instructions`: instructions per element, registers, spills and load
width of every pass, bytes per element; of an emulated step (`wavefronts`) cycles of the load/store
unit and sectors; and the rates that these allow on each GPU. `--format ratio8` counts another state
format than that of the bits, `--weights 24` master weights of bf16 parameters, `--no-dither`
rounding of moments to nearest, `--row 300` rows of so many elements. `--no-emulate` leaves the
emulation out. `--peers` compiles other libraries' kernels in the same way, if they are installed.

The rates are a model's: memory, the issue of instructions (four warps a cycle and multiprocessor)
and the load/store unit (a wavefront a cycle and multiprocessor), each at its peak and alone. It
knows neither caches nor latency, and that was the limit on an H200 (docs/gpu.md).
"""

from __future__ import annotations

import math
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

from benchmarks.common import registry, report
from benchmarks.common.arguments import known, refusing
from benchmarks.static import machine_code, traffic, wavefronts
from lowbit_optim_kernels import formats, weights
from lowbit_optim_kernels.engines.triton import engine as engine_triton
from lowbit_optim_kernels.engines.triton.kinds import TILE, Kind
from lowbit_optim_kernels.formats.layout import Layout
from lowbit_optim_kernels.rules import SQUARE, Rule
from lowbit_optim_kernels.rules.shared import dithered

# In the format that is told which moments outlast their squares.
RULES = {row.name: rule for row, rule in traffic.rules(state_format="ratio8")}
ROWS = {row.name: row for row in registry.ROWS}
WEIGHTS = {str(bits or 0): one for bits, one in weights.WEIGHTS.items()}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WARPS = engine_triton.OPTIONS["num_warps"]


@dataclass(frozen=True)
class Chip:
    """A GPU's peak rates.

    Attributes:
        name: as sold.
        target: backend, architecture and warp size, as Triton names them.
        bandwidth: TB/s of its memory.
        multiprocessors: of which each has a load/store unit.
        clock: boost clock in GHz.
        lanes: that a multiprocessor issues an instruction for in a cycle.
        source: of these. Where a data sheet gives fp32 FLOP/s but no clock, that is what they are
            over two for each multiprocessor and lane with a fused multiply-add.
    """

    name: str
    target: tuple[str, int | str, int]
    bandwidth: float
    multiprocessors: int
    clock: float
    lanes: int
    source: str

    def rates(
        self, instructions: float, moved: float, wavefronts: float | None
    ) -> dict[str, float]:
        """G elements/s that memory, issue and, if wavefronts were counted, load/store allow.

        Args:
            instructions: per element.
            moved: bytes per element.
            wavefronts: per 32 elements.
        """
        cycles = self.multiprocessors * self.clock
        found = {
            "memory": self.bandwidth * 1e3 / moved,
            "issue": cycles * self.lanes / instructions,
        }
        if wavefronts is not None:
            found["load/store"] = cycles * 32 / wavefronts
        return found


CHIPS = {
    "sm_80": Chip("A100 80GB SXM", ("cuda", 80, 32), 2.039, 108, 1.41, 128,
                  "NVIDIA A100 data sheet and white paper"),
    "sm_90": Chip("H200 SXM", ("cuda", 90, 32), 4.8, 132, 1.98, 128,
                  "NVIDIA H200 data sheet: 67 TFLOP/s; multiprocessors: H100 white paper"),
    "sm_100": Chip("B200 SXM", ("cuda", 100, 32), 8.0, 148, 1.98, 128,
                   "NVIDIA HGX B200 data sheet: 75 TFLOP/s; multiprocessors: CUDA's count"),
    "gfx942": Chip("MI300X", ("hip", "gfx942", 64), 5.3, 304, 2.1, 64, "AMD MI300X data sheet"),
}  # fmt: skip
# Others that run the same code.
ALIKE = {
    "sm_90": Chip("H100 SXM", ("cuda", 90, 32), 3.35, 132, 1.98, 128,
                  "NVIDIA H100 data sheet: 67 TFLOP/s; white paper"),
}  # fmt: skip


def chips_of(target: str) -> list[Chip]:
    """The chips that run the code of a target, the one that its rows are about first."""
    return [CHIPS[target], *([ALIKE[target]] if target in ALIKE else [])]


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


def measure(
    name: str, dtype: str, bits: int, target: str, whole: bool = True, format: str | None = None,
    weights: str = "0", dither: bool = True, emulate: bool = False, row: int = 1024,
) -> dict[str, Any]:  # fmt: skip
    """Compile all passes of one optimizer for one target and count them."""
    from triton.backends.compiler import GPUTarget

    rule, (backend, arch, lanes) = RULES[name], CHIPS[target].target
    width = bits if rule.moments else 32
    asked = formats.FORMATS[format if format and rule.moments else formats.OF_BITS[width]]
    chosen = asked.for_moments(rule.moments)
    stored = WEIGHTS[weights if dtype == "bf16" else "0"]
    kind = Kind(DTYPES[dtype], DTYPES[dtype], chosen, whole, 16, stored, spanned=whole)
    rule = rounded(rule, asked, dither)
    emulated = {}
    if emulate and backend == "cuda" and (asked.name != "ratio4" or ROWS[name].four):
        options = {"dither": dither, "master_weight_bits": stored.bits}
        options |= {"min_8bit_size": 1} if asked.bits < 32 else {}
        options |= {"state_format": asked.name} if asked.bits == 8 else {}
        emulated = wavefronts.measure(ROWS[name], asked.bits, kind.p, arch, row, **options)
    shape = wavefronts.shape_of(row)
    scales = math.prod(Layout.of(shape, chosen.block).scales_shape)
    passes, moved = [], 0.0
    for kernel in engine_triton.passes(rule):
        compiled = engine_triton.compile_for(GPUTarget(backend, arch, lanes), rule, kernel, kind)
        counted = machine_code.count(compiled, TILE / (lanes * WARPS))
        moved += traffic.bytes_of(
            rule, kernel, kind.p.itemsize, kind.g.itemsize, kind.format, kind.weights,
            math.prod(shape) / scales,
        )  # fmt: skip
        seen = emulated.get(kernel)
        in_rows = seen is not None and row % chosen.block > 0
        passes.append({
            "pass": kernel,
            "instructions": round(seen.instructions if in_rows else counted.instructions, 1),
            "registers": counted.registers,
            "spills": counted.spills,
            "widest_load": counted.widest_load,
            "narrow": round(counted.narrow, 3),
            "wavefronts": round(seen.wavefronts, 2) if seen else None,
            "sectors": round(seen.sectors, 2) if seen else None,
        })  # fmt: skip

    def total(what: str) -> Any:
        found = [each[what] for each in passes]
        return None if None in found else round(sum(found), 2)

    costs = total("instructions"), moved, total("wavefronts")
    rates = {chip.name: chip.rates(*costs) for chip in chips_of(target)}
    own = rates[CHIPS[target].name]
    bound = min(own, key=own.__getitem__)
    return {
        "optimizer": f"{name}{bits}bit", "dtype": dtype, "target": target, "format": chosen.name,
        "weights": stored.bits, "dither": dither, "row": row, "passes": passes,
        "instructions": round(costs[0], 1), "bytes": round(moved, 3),
        "wavefronts": costs[2], "sectors": total("sectors"),
        "g_elements_per_s": round(own[bound]), "bound": bound,
        "rates": {chip: {x: round(y) for x, y in of.items()} for chip, of in rates.items()},
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
        str(min(each["widest_load"] for each in passes)), f"{found['bytes']:.2f}",
        *("" if found[x] is None else f"{found[x]:.1f}" for x in ("wavefronts", "sectors")),
    ]  # fmt: skip


def _rates(found: Mapping[str, Any]) -> Iterator[list[str]]:
    """A row for each chip: what memory, issue and load/store allow, and which is least."""
    for chip, rates in found["rates"].items():
        least = min(rates, key=rates.__getitem__)
        each = (str(rates.get(x, "")) for x in ("memory", "issue", "load/store"))
        share = f"{rates[least] / rates['memory']:.2f}"
        yield [found["optimizer"], found["format"], found["dtype"], chip, *each, least, share]


def show(console: Console, rows: list[dict[str, Any]], targets: list[str]) -> None:
    """Print what was counted, the rates that it allows, and what they assume."""
    counted = Table(
        "optimizer", "format", "weights", "dtype", "target", "instr/elem", "by pass", "regs",
        "spills", "load B", "B/elem", "wavefronts/32", "sectors/32",
    )  # fmt: skip
    rates = Table("optimizer", "format", "dtype", "chip", "by memory", "by issue", "by load/store",
                  "bound", "of memory's")  # fmt: skip
    for found in rows:
        counted.add_row(*_row(found))
        for each in _rates(found):
            rates.add_row(*each)
    console.print(counted)
    console.print(rates)
    for chip in (chip for target in targets for chip in chips_of(target)):
        console.print(
            f"{chip.name}: {chip.bandwidth} TB/s, {chip.multiprocessors} multiprocessors at "
            f"{chip.clock} GHz ({chip.source})"
        )
    console.print(
        "Rates: G elements/s, each at its peak and alone: memory; 4 warp instructions and 1 "
        "wavefront a cycle and multiprocessor. It knows no latency, the limit on an H200."
    )


def main(
    optimizer: Annotated[list[str] | None, typer.Option(help="repeatable; all")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16, fp16, fp32; repeatable")] = None,
    bits: Annotated[list[int] | None, typer.Option(help="8 or 32; repeatable; 8")] = None,
    target: Annotated[list[str] | None, typer.Option(help="sm_80, sm_90, ...; repeatable")] = None,
    state_format: Annotated[str | None, typer.Option("--format", help="that of the bits")] = None,
    weights: Annotated[str, typer.Option(help="bits of bf16 weights: 0, 16, 24 or 32")] = "0",
    dither: Annotated[bool, typer.Option(help="round squares and slow averages by dither")] = True,
    row: Annotated[
        int, typer.Option(min=1, help="elements in a row of the emulated tensor")
    ] = 1024,
    emulate: Annotated[bool, typer.Option(help="emulate a step, for wavefronts")] = True,
    peers: Annotated[bool, typer.Option("--peers", help="count other libraries too")] = False,
    out: Annotated[Path, typer.Option(help="folder for instructions.json")] = report.LOCAL,
) -> None:
    """Count the instructions of the GPU kernels."""
    with refusing():
        names = known("optimizer", optimizer or RULES, RULES)
        dtypes = known("dtype", dtype or ["bf16", "fp32"], DTYPES)
        targets = known("target", target or CHIPS, CHIPS)
        known("format", [state_format] if state_format else [], formats.FORMATS)
        known("weights", [weights], WEIGHTS)
        widths = known("bits", bits or [8], (8, 32))
    console, rows = Console(width=150), []
    with console.status("compiling") as status:
        more = {"format": state_format, "weights": weights, "dither": dither, "emulate": emulate}
        more["row"] = row
        for found in everything(names, dtypes, widths, targets, **more):
            rows.append(found)
            status.update(f"{found['optimizer']} {found['dtype']} {found['target']}")
    show(console, rows, targets)
    others = []
    if peers:
        from benchmarks.static import peer_instructions

        others = peer_instructions.count_all(console)
    options = {
        "optimizer": optimizer, "dtype": dtype, "bits": bits, "target": target,
        "format": state_format, "weights": weights, "no-dither": not dither, "row": row,
        "no-emulate": not emulate, "peers": peers,
    }  # fmt: skip
    written = {
        **report.origin("benchmarks.static.instructions", options),
        "chips": {name: [vars(chip) for chip in chips_of(name)] for name in targets},
        "rows": rows,
        "peers": others,
    }
    report.write_json(out / "instructions.json", written)
    console.print(f"results: {out / 'instructions.json'}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
