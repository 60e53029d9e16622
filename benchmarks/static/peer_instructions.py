"""Count other libraries' 8-bit kernels as `instructions` counts this package's, on sm_90.

A Triton kernel is compiled with the constants its library launches it with. bitsandbytes' CUDA
kernels are disassembled from the library that it ships; a thread takes one element. Their whole
listing is counted, because the shortest way through it leaves out the update, which lies behind a
branch there; some threads take less, by up to a fifth. Both counts are static: where a kernel has a
loop, as FlashOptim's over tiles, its body is counted once, which is what a tile costs, together
with what comes before it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.static import machine_code

ARCH = 90
# Names in bitsandbytes' csrc/common.h: ADAM 0, MOMENTUM 1, RMSPROP 2, LION 5; 8-bit, blockwise.
BITSANDBYTES = {
    "AdamW8bit": "kOptimizerStatic8bit2StateBlockwiseI13__nv_bfloat16Li0ELi256ELi1E",
    "SGD8bit": "kOptimizerStatic8bit1StateBlockwiseI13__nv_bfloat16Li1ELi256ELi1E",
    "Lion8bit": "kOptimizerStatic8bit1StateBlockwiseI13__nv_bfloat16Li5ELi256ELi1E",
}
# FlashOptim's launch: one tile of 1024 elements, 4 warps by Triton's default, groups of 32.
FLASHOPTIM = {
    "FlashAdamW": ("_triton_adam_kernel", {"DECOUPLED_WEIGHT_DECAY": True}),
    "FlashSGD": ("_triton_momentum_kernel", {"DO_LION": False, "NESTEROV": False}),
    "FlashLion": ("_triton_momentum_kernel", {"DO_LION": True, "NESTEROV": False}),
}
FLASHOPTIM_TILE, FLASHOPTIM_THREADS = 1024, 128


def _folder(module: str) -> Path | None:
    found = importlib.util.find_spec(module)
    return None if found is None or found.origin is None else Path(found.origin).parent


def bitsandbytes() -> dict[str, float]:
    """Instructions per element of the kernels in the newest CUDA library that it ships."""
    folder = _folder("bitsandbytes")
    libraries = sorted(folder.glob("libbitsandbytes_cuda1*.so")) if folder else []
    for library in reversed(libraries):
        counted = _from_library(library)
        if counted:
            return counted
    return {}


def _from_library(library: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as work:
        command = [str(machine_code.tool("cuobjdump")), "-xelf", f"sm_{ARCH}", str(library)]
        subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
        texts = [machine_code.run("nvdisasm", "-c", str(cubin)) for cubin in Path(work).iterdir()]
    counted = {}
    for text in texts:
        for section in text.split("\t.section\t")[1:]:
            heading = section.partition(",")[0]
            for name, kernel in BITSANDBYTES.items():
                if heading.startswith(".text.") and kernel in heading:
                    counted[name] = float(len(machine_code.sass_opcodes(section)))
    return counted


def flashoptim() -> dict[str, float]:
    """Instructions per element of its kernels for bf16 parameters without error correction."""
    if _folder("flashoptim") is None:
        return {}
    import flashoptim.optimizers as library
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    shared: dict[str, Any] = {
        "GROUP_SIZE": 32, "DECOUPLED_WEIGHT_DECAY": False, "PARAM_DTYPE": tl.bfloat16,
        "USE_ECC": False, "QUANTIZE_OPTIM_STATES": True, "SIGNED_ERROR_T": tl.int8,
        "NUM_MANTISSA_BITS": 7, "SIGNED_MAX_VAL": 0, "BLOCK_SIZE_N": FLASHOPTIM_TILE,
    }  # fmt: skip
    kinds = {
        "mom_ptr": "*i8", "var_ptr": "*u8", "scales_ptr": "*fp16", "mom_scales_f16_ptr": "*fp16",
        "var_scales_f16_ptr": "*fp16", "param_ptr": "*bf16", "grad_ptr": "*bf16",
        "ecc_ptr": "*bf16", "N": "i32", "step": "i32",
    }  # fmt: skip
    counted = {}
    for name, (kernel, constants) in FLASHOPTIM.items():
        function = getattr(library, kernel)
        given = {**shared, **constants}
        names = function.arg_names
        signature = {x: "constexpr" if x in given else kinds.get(x, "fp32") for x in names}
        aligned = [i for i, x in enumerate(names) if signature[x].startswith("*") or x == "N"]
        source = ASTSource(
            function, signature,
            constexprs={(names.index(x),): y for x, y in given.items() if x in names},
            attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
        )  # fmt: skip
        compiled = compile(
            source,
            target=GPUTarget("cuda", ARCH, 32),
            options={"num_warps": 4, "enable_fp_fusion": True},
        )
        found = machine_code.count(compiled, FLASHOPTIM_TILE / FLASHOPTIM_THREADS)
        counted[name] = round(found.instructions, 1)
    return counted


def count_all(console: Console) -> list[dict[str, Any]]:
    """Count what is installed, and print it."""
    rows: list[dict[str, Any]] = []
    for library, counting in (("bitsandbytes", bitsandbytes), ("flashoptim", flashoptim)):
        counted = counting()
        if not counted:
            console.print(f"{library}: not installed, or without code for sm_{ARCH}")
        for name, instructions in counted.items():
            version = importlib.metadata.version(library)
            row = {"library": library, "version": version, "optimizer": name, "dtype": "bf16",
                   "target": f"sm_{ARCH}", "instructions": instructions}  # fmt: skip
            rows.append(row)
    table = Table("library", "version", "optimizer", "dtype", "target", "instr/elem")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console.print(table)
    return rows
