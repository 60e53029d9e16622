"""Storage of parameters: what a step reads of them and writes, beside fp32.

A bf16 weight has 8 bits of mantissa, so that updates below 2**-9 of it are lost when it is rounded
to nearest. Either it is rounded by dither, so that it moves as it should on average, or further
bits of it are kept beside it, in a `residual`. Let P be the bit pattern of the new fp32 weight w,
e = 0, 8 or 16 the further bits and d 32 random bits (`dither`, stream `WEIGHT`):

    k = (P + (d >> (16 + e))) >> (16 - e)     e = 16: k = P; nothing is added from 0x7F7F0000 on
    p = k                                     e = 0
    p = (k + 2**(e-1)) >> e                   e > 0; without the addition from 0x7F7F0000 on
    residual = min(k - (p << e), 2**(e-1) - 1)       0 where p is zero or infinite
    w = number((p << 16) + (residual << (16 - e)))   p where p is zero

NaN gives the p 0x7FC0. Adding to a pattern carries into the exponent, which is right. A weight that
p and residual can say does not move, a sign never changes, and a p that somebody else has written
is read with an error below half of its last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROOM = 0x7F7F0000  # magnitudes from here on have no larger bf16 number to be rounded to
INFINITE = 0x7F800000
NAN = 0x7FC0


@dataclass(frozen=True)
class Weights:
    """A way to store parameters.

    Attributes:
        bits: of the weight that training goes on with; None for what the parameter's dtype has.
        extra: those of them that are in the residual.
        dithered: whether they are rounded by dither; else to nearest.
        residual: the residual's dtype, if there is one.
    """

    bits: int | None
    extra: int = 0
    dithered: bool = False
    residual: torch.dtype | None = None

    def read(self, p: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The weights, in the dtype that is computed in."""
        if residual is None:
            return p.to(dtype)
        high = p.resolve_neg().view(torch.int16).to(torch.int32)
        low = torch.where((high & 0x7FFF) == 0, 0, residual.to(torch.int32))
        return ((high << 16) + (low << (16 - self.extra))).view(torch.float32)

    def write(self, w: Tensor, p: Tensor, residual: Tensor | None, random: Tensor | None) -> None:
        """Store new weights.

        Args:
            w: the weights, fp32 unless p is stored as it is.
            p: the parameter; written.
            residual: what is kept beside it; written.
            random: 32 bits for each weight, as int64; None rounds to nearest.
        """
        if self.bits is None:
            p.copy_(w)
            return
        high, low = split(w, self.extra, random)
        p.copy_(high)
        if residual is not None:
            residual.copy_(low)


def split(w: Tensor, extra: int, random: Tensor | None) -> tuple[Tensor, Tensor]:
    """The bf16 numbers of fp32 weights, and their residuals as int64.

    Args:
        w: the weights.
        extra: bits of a residual.
        random: 32 bits for each, as int64; None rounds what is kept to nearest, ties up.
    """
    pattern = w.float().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    magnitude, dropped = pattern & 0x7FFFFFFF, 16 - extra
    full = magnitude >= ROOM
    if dropped:
        added = (1 << (dropped - 1)) if random is None else random >> (32 - dropped)
        pattern = torch.where(full, pattern, pattern + added)
    kept = pattern >> dropped
    half = (1 << extra) >> 1
    high = torch.where(full, kept, kept + half) >> extra
    low = (kept - (high << extra)).clamp(max=max(half - 1, 0))
    nan = magnitude > INFINITE
    low = torch.where(nan | ((high & 0x7FFF) == 0), 0, low)
    high = torch.where(nan, NAN, high)
    signed = (high ^ 0x8000) - 0x8000
    return signed.to(torch.int16).view(torch.bfloat16), low


PLAIN = Weights(None)
# What `master_weight_bits` means for bf16 parameters.
WEIGHTS = {
    None: PLAIN,
    16: Weights(16, dithered=True),
    24: Weights(24, extra=8, dithered=True, residual=torch.int8),
    32: Weights(32, extra=16, residual=torch.int16),
}
RESIDUAL_KEY = "master_residual"


def as_integers(residual: Tensor) -> Tensor:
    """A residual that is kept as the bits of bf16 numbers, or that is integers already."""
    return residual.view(torch.int16) if residual.dtype == torch.bfloat16 else residual


def converted(residual: Tensor, dtype: torch.dtype) -> Tensor:
    """A residual of one width in the other: exact, or rounded, half up."""
    if residual.dtype == dtype:
        return residual
    if dtype == torch.int16:
        return residual.to(torch.int16) << 8
    return ((residual.to(torch.int32) + 128) >> 8).clamp(max=127).to(torch.int8)
