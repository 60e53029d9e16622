"""A state format that a test brings along: bytes of equal steps, and both engines' code for it.

All moments of a rule share a scale, the largest number of a block in any of them: what a format is
handed together it may code together.
"""

from dataclasses import dataclass

import torch
from numba import njit
from numpy import float32 as f32

from lowbit_optim_kernels.engines.numba.memory import read_byte, read_f32, write_byte, write_f32
from lowbit_optim_kernels.formats import Format, Part

ZERO, TOP = 128, 127  # the code of zero, and the largest distance from it


@dataclass(frozen=True)
class Toy(Format):
    name: str = "toy"
    bits: int = 8
    numba: str = __name__
    triton: str = ""
    block: int = 256

    def parts(self, moments):
        codes = [Part(f"{moment.key}_code", torch.uint8) for moment in moments]
        return (*codes, Part("scale", torch.float32, per_block=True))

    def encode(self, moments, values):
        scale = torch.stack([x.abs().amax(-1, keepdim=True) for x in values]).amax(0).float()
        unit = torch.where(scale > 0, TOP / scale, 0.0)
        return [*((x.float() * unit + (ZERO + 0.5)).floor().to(torch.uint8) for x in values), scale]

    def decode(self, moments, stored, dtype):
        *codes, scale = stored
        return [((code.float() - ZERO) * (scale / TOP)).to(dtype) for code in codes]


@njit(nogil=True, error_model="numpy")
def decode(signed, parts, numbers, n):
    step = read_f32(parts[-1]) / f32(TOP)
    for k in range(len(numbers)):
        for i in range(n):
            write_f32(numbers[k] + 4 * i, f32(read_byte(parts[k] + i) - ZERO) * step)


@njit(nogil=True, error_model="numpy")
def encode(signed, numbers, parts, n):
    scale = f32(0.0)
    for k in range(len(numbers)):
        for i in range(n):
            scale = max(scale, abs(read_f32(numbers[k] + 4 * i)))
    write_f32(parts[-1], scale)
    unit = f32(TOP) / scale if scale > 0 else f32(0.0)
    for k in range(len(numbers)):
        for i in range(n):
            write_byte(parts[k] + i, int(read_f32(numbers[k] + 4 * i) * unit + f32(ZERO + 0.5)))
