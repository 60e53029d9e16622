"""`Refused`: what a user is told in one sentence, with exit code 2."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


class Refused(ValueError):
    """Input that a command does not take; its text names it and says what is allowed."""


def sentence(error: BaseException) -> str:
    """The first line of an error's text, which may have come from anybody's code.

    Where that is a heading, which ends in a colon, the next line has the reason.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {said}"[:300] if said else type(error).__name__


def plural(count: int, thing: str) -> str:
    """`1 tensor`, `2 tensors`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what other packages warn of and log: what they raise is said in a sentence."""
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
