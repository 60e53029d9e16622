"""`lowbit-optim doctor`: what is installed, and which engine steps what."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lowbit_optim import engine_for
from lowbit_optim_kernels.codegen import module_cache
from lowbit_optim_kernels.engines.registry import ENGINES
from lowbit_optim_kernels.engines.request import VARIABLE

PACKAGES = (
    "lowbit_optim", "torch", "numpy", "numba", "llvmlite", "triton", "transformers",
    "bitsandbytes", "torchao", "flashoptim",
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def report() -> dict[str, Any]:
    """All of it, as JSON has it."""
    return {
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "devices": list(_devices()),
        "asked": os.environ.get(VARIABLE) or "auto",
        "engines": list(_choices()),
        "refusals": list(_refusals()),
        "cache": _cache(),
    }


def _versions() -> Iterator[tuple[str, str | None]]:
    for name in PACKAGES:
        try:
            found = importlib.metadata.version(name)
            yield name, torch.__version__ if name == "torch" else found  # which names its build
        except importlib.metadata.PackageNotFoundError:
            yield name, None


def _processor() -> str:
    """The instruction set that the Numba engine compiles for."""
    refusal = ENGINES["numba"].refusal(torch.device("cpu"), torch.float32)
    if refusal is not None:
        return f"not known: {refusal.reason}"
    from lowbit_optim_kernels.engines.numba import vector

    return f"{vector.instruction_set()}, {torch.get_num_threads()} threads"


def _devices() -> Iterator[str]:
    yield "cpu"
    for kind in ("cuda", "xpu", "mps"):
        if getattr(torch, kind).is_available():
            yield kind


def _choices() -> Iterator[dict[str, str]]:
    """The engine of each device and dtype, and why."""
    for device in _devices():
        for dtype in DTYPES:
            if device == "mps" and dtype == torch.float64:  # which it has not
                continue
            row = {"device": device, "dtype": str(dtype).removeprefix("torch.")}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the reason is in the table
                try:
                    choice = engine_for(torch.empty(0, dtype=dtype, device=device))
                except (RuntimeError, ValueError) as error:
                    yield {**row, "engine": "none", "reason": str(error)}
                else:
                    yield {**row, "engine": choice.name, "reason": choice.reason}


def _refusals() -> Iterator[dict[str, str]]:
    """Why an engine that is the default for a kind of device would not run it here."""
    for engine in ENGINES.values():
        for device in sorted(engine.devices):
            refusal = engine.refusal(torch.device(device), torch.float32)
            if refusal is not None:
                yield {"engine": engine.name, "device": device, "reason": refusal.reason}


def _cache() -> dict[str, Any]:
    """The folder of compiled code, and whether it can be written."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder = module_cache.cache_folder()
    said = "; ".join(str(warning.message) for warning in caught)
    files = [path for path in folder.iterdir() if path.is_file()] if folder else []
    return {
        "folder": folder and str(folder),
        "writable": folder is not None and _writable(folder),
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
        "warning": said,
    }


def _writable(folder: Path) -> bool:
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def as_json(found: dict[str, Any]) -> str:
    """The report as JSON."""
    return json.dumps(found, indent=2)


def show(console: Console, found: dict[str, Any]) -> None:
    """Print the report."""
    versions = (f"{k} {v or '(not installed)'}" for k, v in found["versions"].items())
    console.print(", ".join(versions))
    console.print(f"{found['platform']}, {found['processor']}")
    table = Table(title=f"engines ({VARIABLE}: {found['asked']})")
    for column in ("device", "dtype", "engine", "why"):
        table.add_column(column, overflow="fold")
    for row in found["engines"]:
        table.add_row(*row.values())
    console.print(table)
    for row in found["refusals"]:
        said = f"{row['engine']} would not run {row['device']} tensors: {row['reason']}"
        console.print(said)
    cache = found["cache"]
    if cache["folder"] is None:
        console.print(f"no cache of compiled code: {cache['warning']}")
        return
    can = "writable" if cache["writable"] else "not writable"
    console.print(
        f"compiled code: {cache['folder']} ({can}), {cache['files']} files, "
        f"{cache['bytes'] / 1e6:.1f} MB",
        soft_wrap=True,
    )
    if cache["warning"]:
        console.print(cache["warning"])
