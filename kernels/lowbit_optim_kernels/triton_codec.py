"""The codec `dynamic8` in Triton: decode and encode of tiles, and whole-tensor kernels of both.

A tile is [NB, 256]: one row is one block of the format.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dynamic8 import codebook_on, pieces
from .triton_primitives import narrow

_STRIDE = tl.constexpr(16)  # floats between the four rows of an encode table


@cache
def tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Decode tables of the signed and the unsigned map, then their encode tables."""
    encoders = []
    for signed in (True, False):
        of = pieces(signed)
        table = torch.zeros(4, 16, dtype=torch.float32)
        for row, values in enumerate((of.threshold, of.inverse_slope, of.offset, of.last)):
            table[row, : len(values)] = torch.tensor(values, dtype=torch.float32)
        encoders.append(table.to(device))
    books = [codebook_on(signed, torch.float32, device) for signed in (True, False)]
    return (*books, *encoders)


@triton.jit
def decode(codes, table):
    """Codebook values of a tile of codes; one look-up."""
    return tl.load(table + codes.to(tl.int32))


@triton.jit
def encode(x, top, table, SIGNED: tl.constexpr):
    """Codes of a tile x of finite moments whose rows have the largest magnitude `top`."""
    a = tl.abs(x) / tl.where(top > 0.0, top, 1.0)[:, None]
    piece = tl.zeros(a.shape, tl.int32)
    for e in tl.static_range(8):
        piece += (a > tl.load(table + e)).to(tl.int32)
    f = a * tl.load(table + _STRIDE + piece) + tl.load(table + 2 * _STRIDE + piece)
    last = tl.load(table + 3 * _STRIDE + piece)
    down = tl.minimum(tl.ceil(f - 0.5), last)
    if SIGNED:
        up = tl.minimum(tl.minimum(tl.floor(f + 0.5), last), 127.0)
        code = tl.where(x < 0.0, 127.0 - up, 127.0 + down)
    else:
        code = tl.where(x > 0.0, tl.maximum(down, 1.0), 0.0)
    return code.to(tl.uint8)


@triton.jit
def _tile(row, blocks, NB: tl.constexpr):
    """Offsets, masks and block numbers of a tile of a tensor whose blocks restart every `row`."""
    per_row = (row + 255) // 256
    block = tl.program_id(0).to(tl.int64) * NB + tl.arange(0, NB)
    inside = block < blocks
    line = block // per_row
    column = (block - line * per_row) * 256
    lane = tl.arange(0, 256)
    mask = (lane[None, :] < (row - column)[:, None]) & inside[:, None]
    return (line * row + column)[:, None] + lane[None, :], mask, block, inside


@triton.jit
def quantize_kernel(x, codes, absmax, table, row, blocks, SIGNED: tl.constexpr, NB: tl.constexpr):
    """x (any float, rows of `row`) -> codes (uint8), absmax (fp32, `blocks`)."""
    at, mask, block, inside = _tile(row, blocks, NB)
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    value = tl.where(tl.abs(value) < float("inf"), value, 0.0)
    top = tl.max(tl.abs(value), 1)
    tl.store(absmax + block, top, mask=inside)
    tl.store(codes + at, encode(value, top, table, SIGNED), mask=mask)


@triton.jit
def dequantize_kernel(codes, absmax, out, table, row, blocks, NB: tl.constexpr):
    """codes (uint8), absmax (fp32) -> out (any float)."""
    at, mask, block, inside = _tile(row, blocks, NB)
    scale = tl.load(absmax + block, mask=inside, other=0.0)
    value = decode(tl.load(codes + at, mask=mask, other=0), table) * scale[:, None]
    tl.store(out + at, narrow(value, out.dtype.element_ty), mask=mask)
