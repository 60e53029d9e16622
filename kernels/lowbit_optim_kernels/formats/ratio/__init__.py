"""The formats `ratio8` and `ratio4`: moments relative to what they are divided by.

An update is m / sqrt(v): what counts is the error of that. So with s = sqrt(v) a first moment is
coded as the ratio m / s, which is of size one whatever the gradients' scale is, and s itself by a
square law, in blocks of 64 elements:

    square   S = max s / L^2 (fp32)       c = floor(sqrt(s / S) + u), 1..L    s = c^2 S
    ratio    A = max |m / s| / L (bf16)   c = round((m / s) / A), -L..L       m = c A s
    signed   A = max |m| (bf16)           |c| = round(254 |m| / (A + |m|))    m = c A / (254 - |c|)

with L = 255 (square) and 127 (ratio) in 8 bits, 15 and 7 in `ratio4`, which has both codes in one
byte. u is dither, or 1/2 for rounding to nearest. A positive square never becomes zero, a ratio is
of the *exact* s, so that an error of v cancels in the update, and a number that is no average of
gradients relative to a square (`signed`) has the softsign. A moment whose sign alone counts stays
in `dynamic8`.

What is less than S is decoded as S, which has the code 1. So where gradients of an element stop and
those of its block go on, m, a ratio to less than S, becomes beta / sqrt(beta2) times as large in a
step: smaller, unless m outlasts v, as beta^2 >= beta2. It would run away then, and its ratio is

    m / max(s, S)

which is the same for larger s, and from which m is decoded as it is for smaller ones.

A is rounded to nearest, but of a slow average in `ratio8` it is dithered as its codes are, and they
are relative to the exact A. Else an average that grows by less than half of bf16's last bit in a
step would stay where it is, and the last code would cut one that shrinks again and again.

This file has the torch form (any device; fp64 for fp64 parameters).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...dither import dithered_scale
from ...rules import RATIO, SIGN, SQUARE, Moment
from .. import Format, Fractions, Part, register
from ..dynamic8 import DYNAMIC8

BLOCK = 64
SQUARE_LEVELS = {8: 255, 4: 15}
RATIO_LEVELS = {8: 127, 4: 7}
SOFT = 254.0  # |c| / (SOFT - |c|) is the softsign of 8 bits: 1 at 127
ZERO = 128  # the code of zero of what has a sign
LEAST_SCALE = 2.0**-126
LARGEST = torch.finfo(torch.bfloat16).max


def _largest(x: Tensor) -> Tensor:
    return x.amax(-1, keepdim=True)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, 1.0 / scale, 0.0)


def square_scale(root: Tensor, levels: int) -> Tensor:
    """Fp32 scales of roots of squares, which are the roots that code 1 decodes to."""
    return (_largest(root) / float(levels * levels)).float()


def encode_square(root: Tensor, levels: int, random: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes 0..levels, as numbers, of roots of squares, and their scales."""
    scale = square_scale(root, levels)
    y = (root * _inverse(scale.to(root.dtype))).sqrt()
    code = (y + (0.5 if random is None else random)).floor().clamp(1, levels)
    return torch.where(root > 0, code, 0.0), scale


def decode_root(code: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The root of a square."""
    c = code.to(dtype)
    return (c * c) * scale.to(dtype)


def encode_ratio(
    ratio: Tensor, levels: int, random: Tensor | None, dithered: bool = False
) -> tuple[Tensor, Tensor]:
    """Codes -levels..levels, as numbers, and their scales; `dithered` says whether these are."""
    ratio = torch.where(ratio.isfinite(), ratio, 0.0)
    scale = (_largest(ratio.abs()) / float(levels)).float()
    scale = scale if dithered else scale.to(torch.bfloat16)
    usable = (scale >= LEAST_SCALE) & (scale <= LARGEST)
    scale = torch.where(usable, scale, 0.0)
    y = ratio * _inverse(scale.to(ratio.dtype))
    code = y.round() if random is None else (y + random).floor()
    code = torch.where(ratio != 0, code.clamp(-levels, levels), 0.0)
    return code, _kept(scale, random if dithered else None)


def encode_soft(x: Tensor, random: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes -127..127, as numbers, by the softsign, and their scales."""
    a = x.abs()
    scale = _largest(a).float()
    scale = (scale.to(torch.bfloat16) if random is None else scale).clamp(max=LARGEST)
    wide = scale.to(x.dtype)
    y = torch.where(wide > 0, (SOFT * a) / (wide + a), 0.0)
    code = y.round() if random is None else (y + random).floor()
    code = torch.where(a > 0, code.nan_to_num(nan=127.0).clamp(max=127) * x.sign(), 0.0)
    return code, _kept(scale, random)


def _kept(scale: Tensor, random: Tensor | None) -> Tensor:
    """Scales in bf16: those that are not dithered are such numbers."""
    return scale if random is None else dithered_scale(scale, random[..., :1])


def ratio_of(moment: Moment, x: Tensor, root: Tensor, levels: int) -> Tensor:
    """The ratio m / sqrt(v), 0 where v is; `levels` are those of the square."""
    divisor = root
    if moment.outlasts:
        divisor = torch.maximum(root, square_scale(root, levels).to(root.dtype))
    return torch.where(root > 0, x / divisor, 0.0)


def _roots(moments: Sequence[Moment], values: Sequence[Tensor]) -> dict[str, Tensor]:
    return {
        m.key: x.clamp(min=0.0).sqrt()
        for m, x in zip(moments, values, strict=True)
        if m.role == SQUARE
    }


@dataclass(frozen=True)
class Ratio8(Format):
    """A byte an element in `<key>` and a scale a block in `<key>_scale`, for any roles."""

    name: str = "ratio8"
    bits: int = 8
    block: int = BLOCK
    dithers: bool = True
    relative: bool = True
    numba: str = "lowbit_optim_kernels.formats.ratio.numba"
    triton: str = "lowbit_optim_kernels.formats.ratio.triton"

    def for_moments(self, moments: Sequence[Moment]) -> Format:
        coded = [moment for moment in moments if not moment.exact]
        return DYNAMIC8 if coded and all(m.role == SIGN for m in coded) else self

    def parts(self, moments: Sequence[Moment]) -> tuple[Part, ...]:
        codes = [Part(moment.key, torch.uint8) for moment in moments]
        scales = [
            Part(f"{m.key}_scale", torch.float32, per_block=True)
            if m.role == SQUARE
            else Part(f"{m.key}_scale", torch.bfloat16, per_block=True, dithered=True)
            for m in moments
        ]
        return (*codes, *scales)

    def encode(
        self, moments: Sequence[Moment], values: Sequence[Tensor], random: Fractions = ()
    ) -> list[Tensor]:
        roots, codes, scales = _roots(moments, values), [], []
        for moment, x, u in zip(moments, values, random or [None] * len(moments), strict=True):
            if moment.role == SQUARE:
                code, scale = encode_square(roots[moment.key], SQUARE_LEVELS[8], u)
            else:
                if moment.role == RATIO:
                    ratio = ratio_of(moment, x, roots[str(moment.partner)], SQUARE_LEVELS[8])
                    code, scale = encode_ratio(ratio, RATIO_LEVELS[8], u, dithered=u is not None)
                else:
                    code, scale = encode_soft(x, u)
                code = code + ZERO
            codes.append(code.to(torch.uint8))
            scales.append(scale)
        return [*codes, *scales]

    def decode(
        self, moments: Sequence[Moment], stored: Sequence[Tensor], dtype: torch.dtype
    ) -> list[Tensor]:
        codes, scales = stored[: len(moments)], stored[len(moments) :]
        coded = {m.key: (c, a) for m, c, a in zip(moments, codes, scales, strict=True)}
        roots = {m.key: decode_root(*coded[m.key], dtype) for m in moments if m.role == SQUARE}
        values = []
        for moment in moments:
            code, scale = coded[moment.key]
            c, a = code.to(dtype) - ZERO, scale.to(dtype)
            if moment.role == SQUARE:
                values.append(roots[moment.key] * roots[moment.key])
            elif moment.role == RATIO:
                values.append((c * a) * roots[str(moment.partner)])
            else:
                values.append((c * a) / (SOFT - c.abs()))
        return values


@dataclass(frozen=True)
class Ratio4(Format):
    """A ratio and its square in the two halves of one byte, each with a scale a block."""

    name: str = "ratio4"
    bits: int = 4
    block: int = BLOCK
    dithers: bool = True
    relative: bool = True
    dithers_all: bool = True
    numba: str = "lowbit_optim_kernels.formats.ratio.numba"
    triton: str = "lowbit_optim_kernels.formats.ratio.triton4"

    def refusal(self, moments: Sequence[Moment]) -> str | None:
        if sorted(m.role for m in moments if not m.exact) == [RATIO, SQUARE]:
            return None
        return "ratio4 stores exactly one moment with the one square whose root divides it"

    def parts(self, moments: Sequence[Moment]) -> tuple[Part, ...]:
        ratio, square = sorted(moments, key=lambda moment: moment.role)
        return (
            Part(f"{ratio.key}_and_sq", torch.uint8),
            Part(f"{ratio.key}_scale", torch.bfloat16, True),
            Part(f"{square.key}_scale", torch.float32, True),
        )

    def encode(
        self, moments: Sequence[Moment], values: Sequence[Tensor], random: Fractions = ()
    ) -> list[Tensor]:
        m, v, u, w = _ratio_first(moments, [*values, *(random or (None, None))])
        root = v.clamp(min=0.0).sqrt()
        averaged = next(moment for moment in moments if moment.role == RATIO)
        ratio = ratio_of(averaged, m, root, SQUARE_LEVELS[4])
        low, ratio_scale = encode_ratio(ratio, RATIO_LEVELS[4], u)
        high, square_scale = encode_square(root, SQUARE_LEVELS[4], w)
        both = (low.to(torch.int32) + 8) | (high.to(torch.int32) << 4)
        return [both.to(torch.uint8), ratio_scale, square_scale]

    def decode(
        self, moments: Sequence[Moment], stored: Sequence[Tensor], dtype: torch.dtype
    ) -> list[Tensor]:
        codes, ratio_scale, square_scale = stored
        root = decode_root(codes >> 4, square_scale, dtype)
        m = ((codes & 15).to(dtype) - 8.0) * ratio_scale.to(dtype) * root
        return _ratio_first(moments, [m, root * root])


def _ratio_first(moments: Sequence[Moment], values: list) -> list:
    """Pairs of what belongs to two moments, the ratio's first, or back in the moments' order."""
    if moments[0].role == RATIO:
        return values
    return [x for k in range(0, len(values), 2) for x in (values[k + 1], values[k])]


RATIO8 = register(Ratio8())
RATIO4 = register(Ratio4())
