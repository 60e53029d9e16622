"""Calls that Ctrl-C does not break off: what is half done of them is never mended.

Where an import of Numba or Triton breaks off, the next one finds some of its modules without the
others; within the generators that Numba reads its registries by, an exception ends them, and no
later function compiles.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def uninterrupted(call: Callable[_P, _R], *args: _P.args, **options: _P.kwargs) -> _R:
    """What a call gives or raises, in a thread of its own: handlers of signals run in the main one.

    An exception that a handler raises ends the wait, and the call goes on to its end. The calling
    thread holds no lock that the call takes.
    """
    # No exception in the wait leaves its lock taken, as it might an event's or a condition's.
    ends: queue.SimpleQueue[None] = queue.SimpleQueue()
    results: list[_R] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call(*args, **options))
        except BaseException as error:  # noqa: BLE001  # the caller raises it
            errors.append(error)
        ends.put(None)

    try:
        threading.Thread(target=run, name="lowbit_optim").start()
    except RuntimeError:  # the interpreter shuts down, or there are too many threads
        run()
    ends.get()
    if errors:
        raise errors.pop()
    return results.pop()
