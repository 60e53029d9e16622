"""The format `dynamic8`: blockwise 8-bit numbers with a dynamic code.

A tensor is stored as uint8 codes of its own shape and one fp32 scale (`absmax`) per block of 256
elements; an element's value is `codebook[code] * absmax`. The codebook is the dynamic map of
T. Dettmers, M. Lewis, S. Shleifer, L. Zettlemoyer, "8-bit Optimizers via Block-wise Quantization",
arXiv:2110.02861 (2021): in decade e, e = 0..6, a run of 2**e (signed) or 2**(e+1) (unsigned) values
lies at equal distances, so both directions have a closed form. With d = |code - 127| (signed) or
d = code + 1 (unsigned), d + 1/2 = f, and e the exponent of d (less one when unsigned),

    value = slope[e] f - 0.8 * 10**(e - 6)          slope[e] = 0.9 * 10**(e - 6) / n_e
    f     = (x + 0.8 * 10**(e - 6)) / slope[e]      n_e = 2**e or 2**(e + 1)

The signed codebook ends at 1.0, but at -0.99297 below. A block's scale is its largest magnitude, so
that a largest number that is negative loses 0.7 %: once in what is rounded to nearest, as in
bitsandbytes, but in every step of a slow average, which would grow to a fraction of what it should
be. So of a signed moment that is dithered a negative number counts as what it is divided by 0.99297
(`REACH` times its magnitude, in fp32): the lowest code stands for the lowest number. Decoding does
not know which of the two a scale is.

This file holds the torch form of it (any device, any float dtype) and the tables that the compiled
engines read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...rules import Moment
from .. import Format, Fractions, Part, register

ZERO_CODE = {True: 127, False: 0}
TOP_CODE = 255  # 1.0 in both maps
MOST = torch.finfo(torch.float32).max
# An fp32 number: the scale by which the lowest code, -0.99297, stands for -1.
REACH = 1.0070810317993164


@cache
def _codebook(signed: bool) -> Tensor:
    values = []
    for i in range(7):
        n = 2**i if signed else 2 ** (i + 1)
        edges = torch.linspace(0.1, 1.0, n + 1, dtype=torch.float32, device="cpu")
        means = (edges[:-1] + edges[1:]) / 2.0
        magnitudes = (10.0 ** (i - 6)) * means
        values += magnitudes.tolist()
        if signed:
            values += (-magnitudes).tolist()
    return torch.tensor(sorted([*values, 0.0, 1.0]), dtype=torch.float32, device="cpu")


def create_dynamic_map(signed: bool = True) -> Tensor:
    """The 256 values of the dynamic 8-bit code, ascending.

    Args:
        signed: True (default) for the map of first moments (zero is code 127, the largest value
            1.0 is code 255, the smallest is -0.99297); False for non-negative state (zero is code
            0).

    Returns:
        fp32 tensor of shape (256,) on the CPU, a fresh copy.

    Raises:
        TypeError: if signed is no bool.

    Reference:
        Dettmers, Lewis, Shleifer, Zettlemoyer, "8-bit Optimizers via Block-wise Quantization",
        arXiv:2110.02861 (2021). The values are bit-identical to bitsandbytes' `create_dynamic_map`.

    Example:
        >>> create_dynamic_map()[127].item(), create_dynamic_map(signed=False)[255].item()
        (0.0, 1.0)
    """
    if not isinstance(signed, bool):
        raise TypeError(f"signed must be True or False, got {signed!r}")
    return _codebook(signed).clone()


@dataclass(frozen=True)
class Pieces:
    """The piecewise-linear code of one sign mode, as tables over the pieces of [0, 1].

    Piece k holds a normalized magnitude a with threshold[k-1] < a <= threshold[k]; there
    d = min(round(a * inverse_slope[k] + offset[k]), last[k]), a tie rounding down.
    """

    threshold: tuple[float, ...]  # 8 upper ends; the last piece, d of 1.0, has none
    inverse_slope: tuple[float, ...]
    offset: tuple[float, ...]
    last: tuple[int, ...]


@cache
def pieces(signed: bool) -> Pieces:
    """Tables of the closed form; piece 0 is zero, 1..7 are the decades, 8 is exactly 1.0."""
    book = _codebook(signed).double().tolist()
    magnitude = book[127:] if signed else book  # value of d = 0, 1, ...
    shift = 0 if signed else 1  # the decades are runs of length n_e in d + shift
    threshold, inverse, offset, last = [], [0.0], [0.0], [0]
    for e in range(7):
        n = 2**e if signed else 2 ** (e + 1)
        start = n - shift
        threshold.append((magnitude[start - 1] + magnitude[start]) / 2)
        slope = 0.9 * 10.0 ** (e - 6) / n
        inverse.append(1.0 / slope)
        offset.append(0.8 * 10.0 ** (e - 6) / slope - 0.5 - shift)
        last.append(2 * n - 1 - shift)
    top = len(magnitude) - 1
    threshold.append((magnitude[top - 1] + magnitude[top]) / 2)
    return Pieces(tuple(threshold), (*inverse, 0.0), (*offset, float(top)), (*last, top))


@cache
def _tables(signed: bool, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    table = pieces(signed)
    made = [
        torch.tensor(x, dtype=dtype, device="cpu")
        for x in (table.threshold, table.inverse_slope, table.offset, table.last)
    ]
    return tuple(x.to(device) for x in made)


@cache
def codebook_on(signed: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The codebook as a tensor on a device, made once."""
    return _codebook(signed).to(device=device, dtype=dtype)


def encode(x: Tensor, absmax: Tensor, signed: bool, random: Tensor | None = None) -> Tensor:
    """Codes of finite `x` (fp32 or fp64) for scales `absmax` that broadcast over it; uint8.

    Rounded to nearest, or by numbers in [0, 1): to the code below x or, with the probability of the
    distance to it, to the one above.
    """
    thresholds, inverse, offset, last = _tables(signed, x.dtype, x.device)
    a = (x.abs() / absmax.to(x.dtype)).nan_to_num_(nan=0.0, posinf=1.0)
    # A negative tie takes the larger d, which is the lower code.
    sought = torch.where(x < 0, torch.nextafter(a, torch.ones_like(a)), a) if signed else a
    piece = torch.bucketize(sought, thresholds, out_int32=True)
    f = a.mul_(inverse[piece]).add_(offset[piece])
    if random is not None:
        return _dithered(x, f, last[piece], signed, random)
    down = torch.ceil(f - 0.5)  # a tie takes the smaller d
    if signed:
        up = torch.floor(f.add_(0.5))  # a negative tie takes the larger d: the lower code
        negative = x < 0
        d = torch.minimum(torch.where(negative, up, down), last[piece])
        code = torch.where(negative, 127 - d.clamp(max=127), 127 + d)
    else:
        d = torch.minimum(down, last[piece])
        code = torch.where(x > 0, d.clamp(min=1), 0.0)
    return code.to(torch.uint8)


def _dithered(x: Tensor, f: Tensor, last: Tensor, signed: bool, random: Tensor) -> Tensor:
    """Codes of x by dither; f is where it is on the line of its piece, in steps of d.

    Between two decades the values are 3 steps of the lower apart, or 3/5 of the upper. What is next
    to zero, below every decade, is zero: it never has the other sign.
    """
    shift = 0 if signed else 1
    first = (last + shift + 1) / 2 - shift
    z = torch.minimum(f, (f + 2 * last) / 3)
    z = torch.minimum(z, (5 * f - 2 * first) / 3).clamp_(min=0.0)
    if signed:
        code = torch.where(x < 0, -z, z).add_(random).floor_().add_(127)
        return code.clamp_(0, TOP_CODE).to(torch.uint8)
    code = z.add_(random).floor_().clamp_(1, TOP_CODE)
    return torch.where(x > 0, code, 0.0).to(torch.uint8)


def decode(codes: Tensor, absmax: Tensor, signed: bool, dtype: torch.dtype) -> Tensor:
    """Values of `codes` for scales `absmax` that broadcast over them."""
    return codebook_on(signed, dtype, codes.device)[codes.int()] * absmax.to(dtype)


def block_absmax(x: Tensor) -> Tensor:
    """Largest finite magnitude along the last dimension, kept as size 1; fp32.

    An fp64 number beyond fp32's range is coded as the largest that there is.
    """
    magnitude = x.abs()
    largest = torch.where(magnitude.isfinite(), magnitude, 0.0).amax(-1, keepdim=True)
    return largest.clamp_(max=MOST).float()


def block_reach(x: Tensor) -> Tensor:
    """`block_absmax` of a signed moment that is dithered: no number is below the lowest code."""
    number = torch.where(x.isfinite(), x, 0.0)
    highest, lowest = number.amax(-1, keepdim=True), number.amin(-1, keepdim=True)
    # (A zero may have either sign here.)
    return torch.maximum(highest, lowest * -REACH).abs_().clamp_(max=MOST).float()


@dataclass(frozen=True)
class Dynamic8(Format):
    """Codes in `<key>` and scales in `<key>_absmax`, each moment by itself."""

    name: str = "dynamic8"
    bits: int = 8
    dithers: bool = True
    numba: str = "lowbit_optim_kernels.formats.dynamic8.numba"
    triton: str = "lowbit_optim_kernels.formats.dynamic8.triton"

    def parts(self, moments: Sequence[Moment]) -> tuple[Part, ...]:
        codes = [Part(moment.key, torch.uint8) for moment in moments]
        scales = [Part(f"{moment.key}_absmax", torch.float32, True) for moment in moments]
        return (*codes, *scales)

    def encode(
        self, moments: Sequence[Moment], values: Sequence[Tensor], random: Fractions = ()
    ) -> list[Tensor]:
        each = list(zip(moments, values, random or [None] * len(moments), strict=True))
        scales = [
            block_absmax(x) if u is None or not moment.signed else block_reach(x)
            for moment, x, u in each
        ]
        codes = [
            encode(x, scale, moment.signed, u)
            for (moment, x, u), scale in zip(each, scales, strict=True)
        ]
        return [*codes, *scales]

    def decode(
        self, moments: Sequence[Moment], stored: Sequence[Tensor], dtype: torch.dtype
    ) -> list[Tensor]:
        codes, scales = stored[: len(moments)], stored[len(moments) :]
        coded = zip(moments, codes, scales, strict=True)
        return [decode(c, scale, moment.signed, dtype) for moment, c, scale in coded]


DYNAMIC8 = register(Dynamic8())
