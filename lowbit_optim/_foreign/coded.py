"""`Coded`: a moment in another library's codes, with their code book and scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit_optim_kernels.formats import units
from lowbit_optim_kernels.formats.dynamic8 import DYNAMIC8, ZERO_CODE, create_dynamic_map
from lowbit_optim_kernels.formats.layout import Layout
from lowbit_optim_kernels.rules import Moment

from .._tensor_checks import require_dense


def same_blocks(shape: torch.Size | tuple[int, ...], block: int) -> bool:
    """Whether blocks over the flattened tensor are those of the format `dynamic8`.

    Ours restart at every row of a matrix. That is the same where rows are whole blocks, where there
    is one row, and for a vector.
    """
    layout = Layout.of(shape, DYNAMIC8.block)
    flat = layout.rows == 1 or layout.row % layout.block == 0
    numel = layout.rows * layout.row
    return flat and (block == layout.block or numel <= min(block, layout.block))


def check_book(key: str, book: Any, length: int) -> None:
    """Raise a ValueError for a code book that is not this many finite numbers in ascending order.

    Two may be equal: a book that has been cast to bf16 is read, too.
    """
    if not isinstance(book, Tensor) or tuple(book.shape) != (length,):
        got = tuple(book.shape) if isinstance(book, Tensor) else book
        raise ValueError(f"{key!r} must be a tensor of {length} numbers; got {got!r}")
    require_dense(key, book)
    if not bool(book.isfinite().all() and (book.diff() >= 0).all()):
        raise ValueError(f"{key!r} must be finite numbers in ascending order")


@dataclass(frozen=True)
class Coded:
    """A moment whose element is `book[code] * scale`, `scale` that of its block.

    Attributes:
        key: what the library calls the codes, for errors.
        codes: one integer an element, of the parameter's shape; they index `book`.
        scales: (blocks,), for blocks of the flattened tensor.
        book: the code book, ascending.
        block: elements of a block.
    """

    key: str
    codes: Tensor
    scales: Tensor
    book: Tensor
    block: int

    def is_in(self, block: int, book: Tensor) -> bool:
        """Whether codes in these blocks of the flattened tensor, of this book, are the same."""
        numel = self.codes.numel()
        same = self.block == block or numel <= min(self.block, block)
        return same and torch.equal(self.book.float(), book.to(self.book.device))

    def numbers(self) -> Tensor:
        """The moment in fp32, rounded as the library itself rounds it."""
        values = self.book.float()[self.codes.flatten().int()]
        scales = self.scales.float().repeat_interleave(self.block)[: values.numel()]
        return (values * scales).reshape(self.codes.shape)

    def saved(self, moment: Moment) -> tuple[dict[str, Tensor], bool]:
        """The moment as state dicts of ours have it, and whether that is bit for bit.

        Codes and scales are taken as they are where blocks and code book are those of `dynamic8`;
        otherwise it is numbers, which the optimizer that loads them codes again.

        Raises:
            ValueError: for a negative number in a moment that is never negative.
        """
        shape = self.codes.shape
        book = create_dynamic_map(moment.signed).to(self.book.device)
        if same_blocks(shape, self.block) and torch.equal(self.book.float(), book):
            (unit,) = units((moment,), DYNAMIC8)
            codes, scales = unit.parts
            wanted = scales.shape(shape, DYNAMIC8.block)
            # A number divided by a scale of 0 has any code there; here it has that of 0.
            own = self.codes.masked_fill(~self.scales.any(), ZERO_CODE[moment.signed])
            return {codes.key: own, scales.key: self.scales.float().reshape(wanted)}, True
        numbers = self.numbers()
        if not moment.signed and bool((numbers < 0).any()):
            raise ValueError(f"{self.key!r} has codes of negative numbers, and it is a mean square")
        return {moment.key: numbers}, False
