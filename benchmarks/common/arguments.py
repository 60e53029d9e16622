"""Arguments that the programs have in common."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


@contextmanager
def refusing() -> Iterator[None]:
    """Say of a ValueError inside that the command line is wrong."""
    import typer

    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def known(what: str, names: Iterable[T], there: Collection[T]) -> list[T]:
    """These names, if there are all of them.

    Raises:
        ValueError: there is none of a name.
    """
    names = list(names)
    for name in names:
        if name not in there:
            raise ValueError(f"unknown {what} {name!r}; there are: {', '.join(map(str, there))}")
    return names


def resolve_device(device: str) -> str:
    """The meaning of "auto" here.

    Raises:
        ValueError: it is another word, or a GPU that torch does not see.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, not {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for and torch sees no GPU")
    return device
