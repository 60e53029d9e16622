"""Count machine instructions of a compiled Triton kernel, without a GPU.

A kernel of one kind of aligned tiles has no loop, so an instruction is issued once per thread:
instructions per element are those of the shortest way through the listing over the elements of a
thread. What is not on it is behind branches that only rare numbers take: infinite ones, or NaN.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Count:
    """Figures of a kernel's machine code.

    Attributes:
        instructions: per element and thread.
        registers: per thread.
        spills: instructions that move registers to memory and back.
        widest_load: bytes of the widest load from global memory.
        narrow: share of the global loads and stores that move fewer than 4 bytes.
        listed: instructions of the whole listing, functions too.
    """

    instructions: float
    registers: int
    spills: int
    widest_load: int
    narrow: float
    listed: int


def tool(name: str) -> Path:
    """A program of the CUDA toolkit that Triton's wheel carries."""
    import triton.backends.nvidia

    return Path(triton.backends.nvidia.__file__).parent / "bin" / name


def run(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [str(tool(program)), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout


def sass_opcodes(listing: str, *, functions: bool = False) -> list[str]:
    """Opcodes of a disassembly up to the last EXIT, or those of functions too, without padding."""
    lines = [line for line in listing.splitlines() if re.search(r"/\*[0-9a-f]{4,}\*/\s", line)]
    texts = [re.sub(r".*?/\*[0-9a-f]{4,}\*/\s+", "", line).strip() for line in lines]
    opcodes = [re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].rstrip(";") for text in texts]
    if not functions:
        exits = [i for i, opcode in enumerate(opcodes) if opcode == "EXIT"]
        opcodes = opcodes[: exits[-1] + 1]
    return [opcode for opcode in opcodes if opcode != "NOP"]


def shortest_way(listing: str) -> list[str]:
    """Opcodes of the way through a kernel's disassembly that has fewest, without padding.

    A loop is gone through once, and no thread leaves before the last one does.
    """
    found: list[tuple[str, str, str]] = []  # guard, opcode, operands
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(found)
        if each := re.search(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([\w.]+)([^;]*);", line):
            found.append((each[1] or "", each[2], each[3]))
    following, left = [0] * len(found), [0] * (len(found) + 1)
    for i in range(len(found) - 1, -1, -1):
        guard, opcode, operands = found[i]
        ways = [i + 1] if guard or opcode not in ("BRA", "EXIT") else []
        target = re.search(r"`\((\.L_\w+)\)", operands)
        if opcode == "BRA" and target and labels[target[1]] > i:
            ways.append(labels[target[1]])
        following[i] = min(ways, key=left.__getitem__, default=len(found))
        left[i] = left[following[i]] + (opcode != "NOP")
    way, i = [], 0
    while i < len(found):
        way.append(found[i][1])
        i = following[i]
    return [opcode for opcode in way if opcode != "NOP"]


def _sass_bytes(opcode: str) -> int:
    found = re.search(r"\.(256|128|64|U8|S8|U16|S16)\b", opcode)
    return {"256": 32, "128": 16, "64": 8, "8": 1, "16": 2}[found[1].lstrip("US")] if found else 4


def _count_sass(cubin: bytes, elements: float) -> Count:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # Dataflow analysis takes a third of the time, to tell where jumps through tables lead.
        listing = run("nvdisasm", "--print-code", "--no-dataflow", file.name)
        usage = run("cuobjdump", "-res-usage", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None
    everything = sass_opcodes(listing, functions=True)
    widths = [_sass_bytes(x) for x in everything if x.startswith(("LDG", "STG"))]
    loads = [_sass_bytes(x) for x in everything if x.startswith("LDG")]
    return Count(
        instructions=len(shortest_way(listing)) / elements,
        registers=int(registers[1]),
        spills=sum(x.startswith(("LDL", "STL")) for x in everything),
        widest_load=max(loads),
        narrow=sum(width < 4 for width in widths) / len(widths),
        listed=len(everything),
    )


_GCN_BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "ushort": 2, "short": 2}


def _gcn_bytes(opcode: str) -> int:
    return next((size for end, size in _GCN_BYTES.items() if opcode.endswith(end)), 1)


def _count_gcn(assembly: str, elements: float) -> Count:
    opcodes = re.findall(r"^\t((?:v|s|ds|global|buffer|flat|scratch)_\w+)", assembly, re.MULTILINE)
    memory = [x for x in opcodes if x.startswith(("global_", "buffer_", "flat_"))]
    loads = [_gcn_bytes(x) for x in memory if "_load_" in x]
    registers = re.search(r"\.vgpr_count:\s*(\d+)", assembly)
    assert registers is not None
    return Count(
        instructions=len(opcodes) / elements,
        registers=int(registers[1]),
        spills=sum(x.startswith("scratch_") for x in opcodes),
        widest_load=max(loads),
        narrow=sum(_gcn_bytes(x) < 4 for x in memory) / len(memory),
        listed=len(opcodes),
    )


def count(kernel: Any, elements: float) -> Count:
    """Count a CompiledKernel whose threads take `elements` elements each."""
    if "cubin" in kernel.asm:
        return _count_sass(kernel.asm["cubin"], elements)
    return _count_gcn(kernel.asm["amdgcn"], elements)
