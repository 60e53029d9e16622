"""Origin of result files: command, versions, hardware, date."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rich.console import Console

RESULTS = Path(__file__).resolve().parents[1] / "results"
LOCAL = RESULTS / "local"
_DISTRIBUTIONS = (
    "lowbit_optim", "torch", "numba", "triton", "numpy", "mlxtend", "scikit-learn",
    "bitsandbytes", "torchao", "flashoptim", "torch-optimi",
)  # fmt: skip


def _cpu_model() -> str:
    """The processor's name as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_gib() -> float | None:
    """Physical memory in GiB, None where the system does not say."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def origin(module: str, options: Mapping[str, object]) -> dict[str, object]:
    """Command, date, versions and hardware; no host name, user or path."""
    hardware: dict[str, object] = {
        "cpu": _cpu_model(),
        "cores": cores(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        hardware["gpu"] = torch.cuda.get_device_name()
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "command": command(module, options),
        "date": now.isoformat(timespec="seconds"),
        "versions": _versions(),
        "hardware": hardware,
    }


def load_average() -> float | None:
    """Processes that wanted a core over the last minute, None where the system does not say."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def busy_note(load: float | None) -> str | None:
    """A warning if the machine was at work before the program began."""
    if load is None or load < 0.5 * cores():
        return None
    return (
        f"The machine was busy before (load {load:g} on {cores()} cores): quote no time from here."
    )


def say_if_busy(console: Console, load: float | None) -> None:
    """Print that warning, if there is one."""
    note = busy_note(load)
    if note is not None:
        console.print(note)


def command(module: str, options: Mapping[str, object]) -> str:
    """The command line that repeats a run; options that are None or empty are left out."""
    words = [f"python -m {module}"]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            values = value if isinstance(value, (list, tuple)) else [value]
            words += [f"{flag} {shlex.quote(str(item))}" for item in values]
    return " ".join(words)


def write_json(path: Path, report: Mapping[str, object]) -> None:
    """Write one result file, a list of numbers on one line.

    Raises:
        ValueError: a number is not finite, for which JSON has no form.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1, allow_nan=False)
    flat = re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), text)
    path.write_text(flat + "\n", encoding="utf-8")
