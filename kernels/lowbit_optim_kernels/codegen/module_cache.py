"""Generated modules, and the folder that keeps them and their compiled code.

A compiled engine writes a module per rule (and dtypes), named by a hash of its own text and of
everything that compiled code depends on: a second process finds the compiled code under that name,
and a changed rule, template or version gets another one.

A module runs from the text in memory and never from a file: its file is there for readers,
debuggers and profilers. Compiled code is read only from a private folder (`private_folder`), whole,
and only with the SHA-256 of name and contents in front. Whatever is missing, damaged or not this
user's is as if it had never been there: it is made anew and written again. A step never needs the
folder; what cannot be kept costs one warning, and later processes the time to compile.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.abc
import importlib.util
import linecache
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from .private_folder import NotPrivateError, private_folder, read_private, write_private

CACHE_VARIABLE = "LOWBIT_OPTIM_CACHE_DIR"
SUFFIX = ".code"
LEFT_BEHIND = 3600.0  # seconds after which nobody is still writing a temporary file

_warned: set[str] = set()


def _warn_once(subject: str, message: str) -> None:
    """Warn, unless this process has been warned of the subject.

    Where warnings are errors the first one ends a step; the next goes on without.
    """
    if subject not in _warned:
        _warned.add(subject)
        warnings.warn(f"lowbit_optim: {message}", RuntimeWarning, stacklevel=3)


def _default_folders() -> Iterator[Path]:
    """In a home folder, then in the system's temporary one; their names may have to be made."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification wants others ignored
        yield Path(base) / "lowbit_optim"
    else:
        with contextlib.suppress(RuntimeError):  # a user without a home
            yield Path.home() / ".cache" / "lowbit_optim"
    owner = os.getuid() if hasattr(os, "getuid") else "user"
    with contextlib.suppress(FileNotFoundError):  # no temporary folder, or all of them full
        yield Path(tempfile.gettempdir()) / f"lowbit_optim_{owner}"


@functools.cache
def cache_folder() -> Path | None:
    """A private folder that compiled code is kept in, made if need be; None if there is none.

    `LOWBIT_OPTIM_CACHE_DIR`, in which `~` is the user's home, else `$XDG_CACHE_HOME/lowbit_optim`
    or `~/.cache/lowbit_optim`, else a folder in the system's temporary directory. One that cannot
    be made, or that is not private, is passed over; so is a default that cannot be written. Warns
    if that was asked for by name, if it was not private, and if nothing is left.
    """
    refused: list[str] = []
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        try:
            return private_folder(Path(named).expanduser())
        except (OSError, RuntimeError) as error:  # the latter: nobody's home
            refused.append(f"{CACHE_VARIABLE}={named} is not used ({error})")
    quiet = not refused
    chosen = None
    for folder in _default_folders():
        try:
            real = private_folder(folder)
            tempfile.TemporaryFile(dir=real).close()
        except OSError as error:
            refused.append(f"{folder} is not used ({error})")
            quiet = quiet and not isinstance(error, NotPrivateError)
        else:
            chosen = real
            break
    if chosen is None:
        refused.append("compiled code is not kept, and every process compiles its own")
        _warn_once("folder", "; ".join(refused))
    elif not quiet:
        _warn_once("folder", "; ".join([*refused, f"compiled code is kept in {chosen}"]))
    return chosen


def _stored_name(name: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / (name + SUFFIX)


def _digest(name: str, data: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + data).digest()


def load(name: str) -> bytes | None:
    """The content stored under a name, if it is there and as it was written."""
    path = _stored_name(name)
    stored = None if path is None else read_private(path)
    if stored is None:
        return None
    digest, data = stored[:32], stored[32:]
    return data if digest == _digest(name, data) else None


def store(name: str, data: bytes) -> None:
    """Keep data under a name for other processes; warns once if that is not possible."""
    path = _stored_name(name)
    if path is not None:
        _write(path, _digest(name, data) + data)


def _write(path: Path, data: bytes) -> None:
    _remove_left_behind(path.parent)
    try:
        write_private(path, data)
    except OSError as error:
        message = f"compiled code cannot be kept in {path.parent} ({error}); this process has it"
        _warn_once("write", f"{message}, later ones compile it again")


@functools.cache
def _remove_left_behind(folder: Path) -> None:
    """Remove temporary files of processes that were killed while they wrote."""
    with contextlib.suppress(OSError):
        for path in folder.glob("*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > LEFT_BEHIND:
                    path.unlink()


class _TextLoader(importlib.abc.InspectLoader):
    """Runs a module from its text; `filename` is what tracebacks and profilers call it."""

    def __init__(self, source: str, filename: str) -> None:
        self.source, self.filename = source, filename

    def get_source(self, fullname: str) -> str:
        return self.source

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.source, self.filename)


def hold_at_forks(lock: Any) -> None:
    """Have a fork wait for a lock: in the child nobody would let go of what another thread holds.

    After those that were given before. Each is to be reentrant, as its holder may fork.
    """
    _held_at_forks.append(lock)


def _hold() -> None:
    for lock in _held_at_forks:
        lock.acquire()


def _let_go() -> None:
    for lock in _held_at_forks:
        lock.release()


_held_at_forks: list[Any] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_let_go)
# The first of them: a module that is imported may have Numba begin, which takes its own lock.
_import_lock = threading.RLock()
hold_at_forks(_import_lock)


def import_source(label: str, source: str, depends: Iterable[str]) -> ModuleType:
    """Import a module of the given text.

    Args:
        label: start of the module's name, for a reader of the folder.
        source: the module's text.
        depends: further texts that compiled code depends on: versions, sources of helpers.
    """
    digest = hashlib.sha256("\0".join([source, sys.version, *depends]).encode()).hexdigest()[:24]
    name = f"lowbit_optim_generated_{label}_{digest}"
    with _import_lock:
        if name in sys.modules:
            return sys.modules[name]
        filename = _file_for_readers(name, source)
        # What inspect gives Triton to compile is this text too, whatever the file may come to hold:
        # an entry without a time is never compared with a file.
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        loader = _TextLoader(source, filename)
        spec = importlib.util.spec_from_loader(name, loader, origin=filename)
        assert spec is not None
        spec.has_location = True  # gives the module a __file__
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


def _file_for_readers(name: str, source: str) -> str:
    """The path of a file with a module's text; without a folder, a name that is no path."""
    folder = cache_folder()
    if folder is None:
        return f"<{name}>"
    path, text = folder / f"{name}.py", source.encode()
    if read_private(path) != text:
        _write(path, text)
    return str(path)
