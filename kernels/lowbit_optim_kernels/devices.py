"""Capabilities of devices, and whether they capture a graph."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def has_fp64(device: torch.device) -> bool:
    """Whether a device computes in fp64, which MPS and some of Intel's GPUs do not."""
    if device.type == "xpu" and torch.xpu.is_available():
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def scalar_dtype(device: torch.device) -> torch.dtype:
    """The dtype of what is computed once a tensor: fp64 where a device has it."""
    return torch.float64 if has_fp64(device) else torch.float32


def capturing(device: torch.device) -> bool:
    """Whether what is run on a device now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device, reason: str) -> None:
    """Raise a RuntimeError while a CUDA graph is being captured that could not replay a step."""
    if capturing(device):
        raise RuntimeError(f"this optimizer step cannot be captured in a CUDA graph: {reason}")


def current_stream(device: torch.device) -> Any:
    """The stream that runs what a device is given now; None where there is one only."""
    if device.type not in ("cuda", "xpu"):
        return None
    return torch.get_device_module(device).current_stream(device)
