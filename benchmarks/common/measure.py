"""Measurements of a process by itself: memory, optimizer state, time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from lowbit_optim_cli.checkpoints import tensor_bytes

WARM_UP = 3  # calls before those that are timed
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of every tensor in `optimizer.state`, a shared storage counted once.

    Another library may keep tensors in objects of its own: their attributes count, too.
    """
    states = optimizer.state.values()
    owned = [
        vars(value)
        for state in states
        for value in (state.values() if isinstance(state, Mapping) else ())
        if hasattr(value, "__dict__") and not isinstance(value, torch.Tensor)
    ]
    return tensor_bytes([*states, *owned])


def share_8bit(optimizer: torch.optim.Optimizer) -> float:
    """The share of all parameters whose moments are 8-bit codes; a tensor's all are or none."""
    coded = total = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            total += param.numel()
            tensors = [t for t in optimizer.state[param].values() if isinstance(t, torch.Tensor)]
            if any(t.dtype == torch.uint8 and t.shape == param.shape for t in tensors):
                coded += param.numel()
    return coded / total


def _status(field: str) -> int | None:
    """A field of the kernel's account of this process in bytes, None where there is none."""
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None


def resident_bytes() -> int | None:
    """Bytes resident now (Linux)."""
    return _status("VmRSS")


def held_bytes(device: torch.device) -> int | None:
    """Bytes that tensors take on the GPU now, or that are resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return resident_bytes()


def reset_peak(device: torch.device) -> None:
    """Start a new maximum: the peak counts from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR_REFS.exists():
        _CLEAR_REFS.write_text("5")


def peak_bytes(device: torch.device) -> int | None:
    """Largest allocation on the GPU, or largest resident set on the CPU, since `reset_peak`.

    The resident set is VmHWM, this process's own; `ru_maxrss` would start at its parent's.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM")


def available_bytes() -> int | None:
    """Memory that a new process can use (Linux)."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Wall seconds of one call, the device's queue empty before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def spread(values: list[float]) -> dict[str, float]:
    """Median, quartiles, least and greatest, in the unit of the values."""
    low, median, high = np.percentile(values, (25, 50, 75))
    return {
        "median": float(median),
        "q25": float(low),
        "q75": float(high),
        "min": min(values),
        "max": max(values),
    }


def interleaved(
    first: Callable[[], object],
    second: Callable[[], object],
    device: torch.device,
    rounds: int,
    before: Callable[[], object] = lambda: None,
) -> tuple[list[float], list[float]]:
    """Seconds of two calls timed in turn, A B A B, so that both see the same machine.

    `before` is called before each of them, and not timed: a barrier of several processes.
    """
    for _ in range(WARM_UP):
        first()
        second()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for call, its in zip((first, second), times, strict=True):
            before()
            its.append(seconds(call, device))
    return times


def back_to_back(call: Callable[[], object], device: torch.device, rounds: int) -> list[float]:
    """Seconds of each of some calls: device events on a GPU, so that the host may run ahead."""
    if device.type != "cuda":
        return [seconds(call, device) for _ in range(rounds)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(device)
    pairs = itertools.pairwise(events)
    return [first.elapsed_time(second) / 1e3 for first, second in pairs]


def copy_gb_per_s(device: torch.device, elements: int = 1 << 24) -> float:
    """Median GB/s (bytes read plus bytes written, 1e9) of copying one fp32 tensor to another."""
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)
    for _ in range(WARM_UP):
        target.copy_(source)
    times = back_to_back(lambda: target.copy_(source), device, 15)
    return 2 * source.nbytes / float(np.median(times)) / 1e9
