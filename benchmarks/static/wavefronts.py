"""Load of the load/store unit: an optimizer step, emulated.

Bank conflicts of the look-ups depend on the codes, so the step follows others on the torch engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import lowbit_optim
from benchmarks.common import registry
from benchmarks.static import machine_code
from lowbit_optim_kernels.engines.triton.grid import NARROWEST
from lowbit_optim_kernels.engines.triton.kinds import TILE
from lowbit_optim_kernels.formats.layout import BLOCK

ELEMENTS = 4 * TILE  # about as many has a tensor of whole tiles
ROWS = TILE // NARROWEST  # of a tensor whose rows end in short blocks, which fill a tile then
WARM = 20  # steps before the one that is emulated
LANES = 32


@dataclass(frozen=True)
class Pass:
    """Cost of a pass for each 32 elements.

    Attributes:
        wavefronts: cycles of the load/store unit.
        sectors: of 32 bytes that requests of global memory touch.
        instructions: of its machine code, of which each instruction of PTX counts for as many as
            there are to one.
    """

    wavefronts: float
    sectors: float
    instructions: float


def shape_of(width: int) -> tuple[int, int]:
    """The shape of the tensor that has rows of this width."""
    return ROWS if width % BLOCK else max(1, ELEMENTS // width), width


def measure(
    row: registry.Row, bits: int, dtype: torch.dtype, arch: int, width: int = 1024,
    **options: object,
) -> dict[str, Pass]:  # fmt: skip
    """The passes of a step of an optimizer on an NVIDIA GPU that need not be there.

    Args:
        row: the optimizer.
        bits: of the class.
        dtype: of weights and gradients.
        arch: the architecture: 80, 90, ...
        width: of the tensor's rows: blocks of the state restart at each.
        options: further ones of the constructor.
    """
    from benchmarks.static.ptx.launch import emulated

    generator = torch.Generator().manual_seed(0)
    shape = shape_of(width)
    p = torch.nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(dtype))
    optimizer = row.source(bits, **options)([p], 1e-3)
    size = 1e-3 * torch.exp(torch.randn(shape, generator=generator) * 0.5)
    for _ in range(WARM):
        p.grad = (torch.randn(shape, generator=generator) * size).to(dtype)
        with lowbit_optim.use_engine("torch"):
            optimizer.step()
    with emulated(arch, counting=True) as emulation, lowbit_optim.use_engine("triton"):
        optimizer.step()
    found = {}
    for name, counters in emulation.counters.items():
        if name.startswith(("reduce", "update")):
            kernel, per = emulation.kernels[name], LANES / p.numel()
            written = len(emulation.executable(name).steps)
            found[name] = Pass(
                sum(counters.wavefronts.values()) * per,
                sum(counters.sectors.values()) * per,
                counters.instructions * per * machine_code.count(kernel, 1).listed / written,
            )
    return found
