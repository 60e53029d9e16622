"""Engine that is asked for: by `use_engine` or the environment variable LOWBIT_OPTIM_ENGINE.

A call of `use_engine` lasts, a `with` block ends. Blocks of several threads overlap in any order,
so none of them notes what to set back when it ends: every call and every block is kept as itself,
and what counts is looked up among those that are in force.
"""

from __future__ import annotations

import itertools
import os
import threading
from contextvars import ContextVar
from types import TracebackType

from .registry import ENGINES

VARIABLE = "LOWBIT_OPTIM_ENGINE"

_clock = itertools.count()


class _Call:
    """An engine that is asked for (None: nobody asks) until `instead` says what counts instead."""

    __slots__ = ("instead", "name", "when")

    def __init__(self, name: str | None) -> None:
        self.name, self.when = name, next(_clock)
        self.instead: _Call | None = None


class _Block:
    """A `with` block, or the whole process: what is asked for in it.

    Only the newest call is held. The one before it, which would count again if the newest were
    withdrawn, is held by the newest one's `use_engine` alone: nobody else can withdraw it, and
    calls that last do not pile up.
    """

    def __init__(self, owner: use_engine | None, name: str | None) -> None:
        self.owner, self.open = owner, True
        self.newest = _Call(name)

    def asked(self) -> _Call:
        """The newest call that has not been withdrawn."""
        call = self.newest
        while call.instead is not None:
            call = call.instead
        return call


class _Blocks:
    """Open blocks: `all` of them in order of time, and `mine`, of a thread or asynchronous task."""

    def __init__(self) -> None:
        self.process = _Block(None, None)
        self.all: tuple[_Block, ...] = (self.process,)
        self.mine: ContextVar[tuple[_Block, ...]] = ContextVar("lowbit_optim_blocks", default=())
        # For changes; who only looks something up finds a tuple that does not change. Reentrant,
        # because a signal's handler may ask for an engine too.
        self.lock = threading.RLock()

    def own(self) -> _Block | None:
        """The innermost block of this thread."""
        for block in reversed(self.mine.get()):
            if block.open:
                return block
        return None

    def asked(self) -> str | None:
        """The engine that this thread asks for."""
        block = self.own()
        if block is None:
            several = len(self.all) > 1
            block = max(self.all, key=lambda b: b.asked().when) if several else self.process
        return block.asked().name

    def add(self, block: _Block) -> None:
        with self.lock:
            self.all = (*self.all, block)
        self.mine.set((*self.mine.get(), block))

    def remove(self, block: _Block) -> None:
        with self.lock:
            block.open = False
            self.all = tuple(one for one in self.all if one.open)
        self.mine.set(tuple(one for one in self.mine.get() if one.open))

    def latest_of(self, owner: use_engine) -> _Block | None:
        """The block that an object has entered last: in this thread, if there is one."""
        blocks = (*self.all, *self.mine.get())
        return next((b for b in reversed(blocks) if b.owner is owner and b.open), None)

    def in_child(self) -> None:
        """End blocks of threads that a fork has left behind: nobody else would."""
        for block in set(self.all) - {self.process, *self.mine.get()}:
            self.remove(block)
        self.lock.release()


_blocks = _Blocks()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_blocks.lock.acquire,
        after_in_parent=_blocks.lock.release,
        after_in_child=_blocks.in_child,
    )


def _checked(name: str, source: str) -> str:
    if name not in ("auto", *ENGINES):
        allowed = ", ".join(("auto", *ENGINES))
        raise ValueError(f"{source} must be one of {allowed}; got {name!r}")
    return name


class use_engine:
    """Choose the engine that steps tensors: from now on, or in a `with` block.

    A plain call lasts: it holds for every thread of the process until the next one, or, when it is
    made in a `with` block, until that block ends. As a context manager the engine is chosen for the
    block alone, and an object may be entered again, later or within its own block.

    A thread in a block of its own runs what that block says, whatever other threads ask for
    meanwhile. A thread in none, such as one that was started within another's block, runs what was
    asked for last, in whichever thread. (In a Python whose threads inherit contexts, as the
    free-threaded one, such a thread is in that block.) Blocks of threads may overlap in any order:
    when a block has ended nothing of it is left. Asynchronous tasks have blocks of their own like
    threads.

    Args:
        name: "auto" (the default choice by device and dtype), "triton", "numba" or "torch".

    Raises:
        ValueError: for another name. A tensor that the chosen engine cannot run raises
            RuntimeError with the reason at the first step.

    Example:
        >>> with use_engine("torch"):
        ...     optimizer.step()
    """

    def __init__(self, name: str) -> None:
        self._name = _checked(name, "name")
        self._where = _blocks.own() or _blocks.process
        with _blocks.lock:
            self._before: _Call | None = self._where.asked()
            self._where.newest = self._call = _Call(name)

    def __enter__(self) -> use_engine:
        _blocks.add(_Block(self, self._name))
        self._withdraw()  # what was a call until now ends with the block
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        block = _blocks.latest_of(self)
        if block is not None:
            _blocks.remove(block)
        else:
            self._withdraw()

    def _withdraw(self) -> None:
        """Undo what the plain call did, once."""
        with _blocks.lock:
            if self._before is not None:
                self._call.instead, self._before = self._before, None
                self._where.newest = self._where.asked()


def request() -> tuple[str, str]:
    """The engine that is asked for, or "auto", and who asks."""
    asked = _blocks.asked()
    if asked is not None:
        return asked, "use_engine"
    # An empty variable is one that is not set, as for most programs.
    return _checked(os.environ.get(VARIABLE) or "auto", VARIABLE), VARIABLE
