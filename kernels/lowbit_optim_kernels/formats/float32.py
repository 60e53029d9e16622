"""The format `float32`: moments as they are computed, as torch.optim keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..rules import Moment
from . import Format, Fractions, Part, register


@dataclass(frozen=True)
class Float32(Format):
    """One number an element in the dtype that is computed in: fp32, or fp64 for fp64 parameters."""

    name: str = "float32"
    bits: int = 32
    numba: str = ""
    triton: str = "lowbit_optim_kernels.formats.float32_triton"

    @property
    def exact(self) -> bool:
        return True

    def parts(self, moments: Sequence[Moment]) -> tuple[Part, ...]:
        return tuple(Part(moment.key, None) for moment in moments)

    def encode(
        self, moments: Sequence[Moment], values: Sequence[Tensor], random: Fractions = ()
    ) -> list[Tensor]:
        return list(values)

    def decode(
        self, moments: Sequence[Moment], stored: Sequence[Tensor], dtype: torch.dtype
    ) -> list[Tensor]:
        return [x.to(dtype) for x in stored]


FLOAT32 = register(Float32())
