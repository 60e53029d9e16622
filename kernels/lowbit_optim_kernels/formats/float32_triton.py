"""The format `float32` in Triton: moments as they are computed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SEPARATE = True
RUN = 4  # 16 bytes


@triton.jit
def decode(moments, scales, tables, MOMENTS: tl.constexpr, PTX: tl.constexpr):
    return moments


@triton.jit
def encode(moments, scales, random, tables, K: tl.constexpr, MOMENTS: tl.constexpr,
           PTX: tl.constexpr):  # fmt: skip
    return moments[K]


def table(ptx: bool, device: torch.device) -> None:
    """There is nothing to look up."""
