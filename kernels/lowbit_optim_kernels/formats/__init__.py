"""State formats: how the moments of a rule are stored.

A format turns the fp32 moments of some elements into a few tensors and back. It is one object, and
whatever depends on how state is stored asks it: the names, shapes and dtypes of tensors (state
dicts, checkpoints, memory footprints), how state begins, and each engine's code.

A format codes the moments of a rule *together*: it is handed all of them, so that one may be kept
relative to another, or two in one byte. 32-bit state is the format `float32`, not the lack of one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..rules import Moment
from .layout import BLOCK, Layout

Fractions = Sequence[Tensor | None]  # what moments are rounded by, numbers in [0, 1)


@dataclass(frozen=True)
class Part:
    """A tensor that holds moments.

    Attributes:
        key: its name in the state of a parameter.
        dtype: its dtype; None for the one that the parameter's step is computed in.
        per_block: whether it has a number a block (of shape `Layout.scales_shape`), not one an
            element (of the parameter's shape).
        dithered: whether it is a bf16 scale that is dithered if its moment is: by `encode` and the
            format's Numba functions, and for its Triton functions by the engine. The parts per
            block are then one a moment, in order.
    """

    key: str
    dtype: torch.dtype | None
    per_block: bool = False
    dithered: bool = False

    def shape(self, shape: torch.Size | tuple[int, ...], block: int) -> tuple[int, ...]:
        """Its shape for a parameter of this (global) shape."""
        return Layout.of(shape, block).scales_shape if self.per_block else tuple(shape)


def compute_dtype(p: Tensor) -> torch.dtype:
    """The dtype of a parameter's 32-bit state, and that its step is computed in."""
    return torch.float64 if p.dtype == torch.float64 else torch.float32


class Format(ABC):
    """A way to store moments. Subclasses are frozen dataclasses; one instance each is in `FORMATS`.

    Attributes:
        name: what `state_format=` and checkpoints call it.
        bits: of an element, which `optim_bits` says for short.
        block: elements that share a scale.
        dithers: whether `encode` and the engines' code can round by random bits.
        dithers_all: whether averages are dithered that are not slow, too: codes are that coarse.
        relative: whether a moment that has a partner is coded relative to it, so that none of the
            two is read or written without the other.
        numba, triton: modules with the engines' code, imported when an engine first needs them; see
            docs/adding_a_format.md for what they have.
    """

    name: str
    bits: int
    numba: str
    triton: str
    block: int = BLOCK
    dithers: bool = False
    dithers_all: bool = False
    relative: bool = False

    def for_moments(self, moments: Sequence[Moment]) -> Format:
        """The format that these moments of a rule are kept in where this one is asked for."""
        return self

    def refusal(self, moments: Sequence[Moment]) -> str | None:
        """Why this format cannot keep a rule's moments; None if it can."""
        return None

    @abstractmethod
    def parts(self, moments: Sequence[Moment]) -> tuple[Part, ...]:
        """The tensors that these moments are kept in, at most two a moment.

        Those with a number an element come first.
        """

    @abstractmethod
    def encode(
        self, moments: Sequence[Moment], values: Sequence[Tensor], random: Fractions = ()
    ) -> list[Tensor]:
        """Code whole blocks.

        Args:
            moments: what is coded.
            values: for each its finite numbers, of shape (..., block) and fp32 or fp64.
            random: for each numbers in [0, 1) of the same shape and dtype, by which it is rounded,
                or None to round to nearest; empty rounds all to nearest.

        Returns:
            For each of `parts` its numbers: (..., block), or (..., 1) of one that is per block.
        """

    @abstractmethod
    def decode(
        self, moments: Sequence[Moment], stored: Sequence[Tensor], dtype: torch.dtype
    ) -> list[Tensor]:
        """The numbers of each moment, in `dtype`, of what `encode` returns."""

    def neighbours(self, stored: Sequence[Tensor]) -> list[list[Tensor]]:
        """The stored tensors of a moment with every code one lower, and one higher, where possible.

        They tell how far from a number that is read the one may have been that was written.
        """
        codes, *rest = stored
        least, most = torch.iinfo(codes.dtype).min, torch.iinfo(codes.dtype).max
        return [[codes.clamp(min=least + 1) - 1, *rest], [codes.clamp(max=most - 1) + 1, *rest]]

    @property
    def exact(self) -> bool:
        """Whether moments are kept as they are computed."""
        return False


@dataclass(frozen=True)
class Unit:
    """Some moments of a rule with the format that they are kept in together.

    Attributes:
        format: the format.
        moments: the moments.
        index: where they are among the rule's.
        parts: their tensors.
    """

    format: Format
    moments: tuple[Moment, ...]
    index: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def keys(self) -> list[str]:
        """The moments' keys."""
        return [moment.key for moment in self.moments]

    def split(self, stored: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The values of the parts per element, and those of the parts per block."""
        pairs = list(zip(self.parts, stored, strict=True))
        return [x for p, x in pairs if not p.per_block], [x for p, x in pairs if p.per_block]


FORMATS: dict[str, Format] = {}
OF_BITS = {4: "ratio4", 8: "dynamic8", 32: "float32"}  # what `optim_bits` means


@cache
def units(moments: tuple[Moment, ...], format: Format) -> tuple[Unit, ...]:
    """Units of a rule's moments: those that must stay exact in `float32`, others as asked."""
    exact = FORMATS["float32"]
    made = []
    for chosen in dict.fromkeys((format, exact)):
        index = tuple(k for k, m in enumerate(moments) if (exact if m.exact else format) is chosen)
        kept = tuple(moments[k] for k in index)
        if kept:
            made.append(Unit(chosen, kept, index, chosen.parts(kept)))
    return tuple(made)


def parts_of(moments: tuple[Moment, ...], format: Format) -> list[Part]:
    """The tensors of all units of a rule's moments, in order."""
    return [part for unit in units(moments, format) for part in unit.parts]


@cache
def constant(unit: Unit, value: float) -> tuple[float, ...]:
    """The filling of each part by which all elements of all moments are this value.

    Of a few elements: on more, torch's operators may use threads, which a forked child has not.
    """
    few = min(unit.format.block, 16)
    blocks = [torch.full((1, few), value, dtype=torch.float64, device="cpu") for _ in unit.moments]
    return tuple(x.flatten()[0].item() for x in unit.format.encode(unit.moments, blocks))


def register(format: Format) -> Format:
    """Make a format known by its name."""
    FORMATS[format.name] = format
    return format


def finite_in_all(values: Sequence[Tensor]) -> list[Tensor]:
    """Moments to be coded: an element with one bad number starts again in all of them."""
    finite = torch.stack([x.isfinite() for x in values]).all(0)
    return [torch.where(finite, x, 0.0) for x in values]


# Formats register themselves, so they are imported when there is something to register with.
from . import dynamic8 as dynamic8  # noqa: E402
from . import float32 as float32  # noqa: E402
from . import ratio as ratio  # noqa: E402
