"""Checkpoints, read without executing anything that is in them.

`torch.save` writes a zip with a pickle, which says what tensors there are, and their bytes. The
pickle's names are looked at before it is read, it is read by torch's restricted reader alone, and
the tensors are mapped, so that none of them is read before it is wanted.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import pickletools
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from .errors import Refused, quiet, sentence

MOST_PICKLE = 64 << 20  # of the pickle, of which a tensor takes some 300 bytes
MOST_DEPTH = 4  # of dicts and lists in which an optimizer's state is looked for
TENSOR_CLASSES = ("torchao",)  # packages whose tensors are of classes of their own
# Classes of plain values that torch takes for code; since Python 3.13 paths have another module.
PLAIN: list[Any] = [
    (argparse.Namespace, "argparse.Namespace"),
    *(
        (getattr(pathlib, name), f"{module}.{name}")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
        for module in ("pathlib", "pathlib._local")
    ),
]
ENCRYPTED = 1  # of a zip entry's flags
ALLOCATES = {"bytearray"}  # of the names that torch takes, what fills memory by a number alone


class Skipped:
    """What stands in a checkpoint for an object that is not made; it keeps nothing of it."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass


def _dict(*_: object) -> dict[Any, Any]:
    return {}


def _list(*_: object) -> list[Any]:
    return []


# In place of containers, into which the reader puts what they hold.
CONTAINERS: dict[str, Any] = {"collections.defaultdict": _dict, "collections.deque": _list}


@dataclass(frozen=True)
class Found:
    """An optimizer's state dict in a checkpoint.

    Attributes:
        path: the keys that lead to it.
        state_dict: with `state` and `param_groups`.
    """

    path: tuple[Any, ...]
    state_dict: dict[str, Any]

    @property
    def where(self) -> str:
        """Its name for a reader."""
        return "".join(f"[{key!r}]" for key in self.path) or "the file itself"


def read(path: Path, skip: bool | None = None) -> Any:
    """Content of a file that `torch.save` wrote, its tensors mapped from it.

    Args:
        path: of the file.
        skip: whether `Skipped` takes the place of what it asks for beside tensors and plain values;
            None where a user has no choice.

    Raises:
        Refused: if it is no such file, is cut off, or asks for code to be run.
    """
    names = _names(path)
    for name in ALLOCATES & {name for _, name in names}:
        raise Refused(f"{path} makes a {name}, which no optimizer's state has; it is not read")
    for package in TENSOR_CLASSES:
        if any(module.partition(".")[0] == package for module, _ in names):
            _import(package, path)
    taken = PLAIN
    if skip:
        asked = objects(path) or ()
        taken = [*PLAIN, *((CONTAINERS.get(name, Skipped), name) for name in asked)]
    try:
        with quiet(), torch.serialization.safe_globals(taken):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError:
        raise _not_executed(path, choice=skip is False) from None
    except Exception as error:  # noqa: BLE001  # what a damaged pickle does to its reader
        raise Refused(f"{path} cannot be read: {sentence(error)}") from None


def objects(path: Path) -> list[str] | None:
    """What a checkpoint asks for beside tensors and plain values; None if that is not to be read.

    It is read by instructions that `torch.save` writes, and by no others.
    """
    try:
        asked = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except Exception:  # noqa: BLE001  # what other instructions do to a reader that knows these
        return None
    plain = {name for _, name in PLAIN}
    return sorted(name for name in asked if name not in plain)


def _not_executed(path: Path, choice: bool) -> Refused:
    """The refusal of what torch's restricted reader does not take of a checkpoint's pickle."""
    asked, more = objects(path), ""
    if asked is None:
        fault = "is damaged, or was saved with a pickle_protocol that is not torch.save's own, 2"
    elif not asked:
        fault = "is damaged"
    else:
        fault = f"asks for {', '.join(asked)}"
        more = "; --skip-objects reads the rest" if choice else ""
    return Refused(f"the pickle in {path} {fault}; it is not executed{more}")


def _names(path: Path) -> list[tuple[str, str]]:
    """The modules and names that a checkpoint's pickle refers to; nothing of it is executed."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise Refused(f"{path} has compressed parts, which torch.save does not write")
            if any(entry.flag_bits & ENCRYPTED for entry in entries):
                raise Refused(f"{path} has encrypted parts, which torch.save does not write")
            pickles = [e for e in entries if e.filename.rpartition("/")[2] == "data.pkl"]
            if len(pickles) != 1:
                raise Refused(f"{path} is a zip file, but not one that torch.save wrote")
            if pickles[0].file_size > MOST_PICKLE:
                raise Refused(
                    f"{path} has a pickle of {pickles[0].file_size:,} bytes; at most "
                    f"{MOST_PICKLE:,} are read"
                )
            text = archive.read(pickles[0])
    except Refused:
        raise
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError):
        raise Refused(
            f"{path} is no whole checkpoint: torch.save writes a zip file, and this is none, is of "
            "a torch before 1.6, or is cut off"
        ) from None
    try:
        found = [str(arg) for op, arg, _ in pickletools.genops(text) if op.name == "GLOBAL"]
    except ValueError:
        raise Refused(f"the pickle in {path} is damaged") from None
    return [(arg.partition(" ")[0], arg.partition(" ")[2]) for arg in dict.fromkeys(found)]


def _import(package: str, path: Path) -> None:
    """Import a package that tells torch which of its classes may be in a checkpoint."""
    try:
        with quiet():
            importlib.import_module(f"{package}.optim")
    except ImportError:
        raise Refused(f"{path} has tensors of {package}, which is not installed") from None


def optimizers(checkpoint: Any) -> list[Found]:
    """The optimizer state dicts in a checkpoint, wherever they are, each once."""
    return list(_optimizers(checkpoint, (), set()))


def _optimizers(value: Any, path: tuple[Any, ...], seen: set[int]) -> Iterator[Found]:
    if id(value) in seen or len(path) > MOST_DEPTH:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        if isinstance(value.get("state"), Mapping) and isinstance(value.get("param_groups"), list):
            yield Found(path, _numbered(value))
            return
        entries: Any = value.items()
    elif isinstance(value, (list, tuple)):
        entries = enumerate(value)
    else:
        return
    for key, one in entries:
        yield from _optimizers(one, (*path, key), seen)


def _numbered(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict whose state goes by the groups' numbers, of which DCP makes strings."""
    groups = [group for group in state_dict["param_groups"] if isinstance(group, Mapping)]
    params = [group["params"] for group in groups if isinstance(group.get("params"), list)]
    numbers = {str(i): i for of_group in params for i in of_group if type(i) is int}
    state = state_dict["state"]
    if not state.keys() & set(numbers.values()):
        state = {numbers.get(key, key): one for key, one in state.items()}
    return {**state_dict, "state": state}


def replace(checkpoint: Any, news: Mapping[tuple[Any, ...], Any]) -> Any:
    """Put other values in the places of some in a checkpoint, wherever these are.

    Args:
        checkpoint: its dicts and lists are changed.
        news: what takes the place of that which a path leads to.

    Returns:
        The checkpoint, or what has taken its place.
    """
    olds = [(_at(checkpoint, path), new) for path, new in news.items()]
    done = {id(old): new for old, new in olds}

    def placed(value: Any) -> Any:
        if id(value) in done:
            return done[id(value)]
        done[id(value)] = value  # which a cycle may lead to again
        if isinstance(value, dict):
            for key, one in value.items():
                value[key] = placed(one)
        elif isinstance(value, list):
            value[:] = map(placed, value)
        elif isinstance(value, tuple):
            inner = [placed(one) for one in value]
            if any(x is not y for x, y in zip(inner, value, strict=True)):
                done[id(value)] = type(value)(inner)
        return done[id(value)]

    return placed(checkpoint)


def _at(checkpoint: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        checkpoint = checkpoint[key]
    return checkpoint


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in a value, those that tensors of other classes are made of among them, once."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            inner = getattr(one, "__tensor_flatten__", None)
            if inner is None:
                yield one
            else:
                pending.extend(getattr(one, name) for name in inner()[0])
        elif isinstance(one, Mapping):
            pending.extend(one.values())
        elif isinstance(one, (list, tuple)):
            pending.extend(one)


def tensor_bytes(value: Any) -> int:
    """Bytes of the memory that the tensors in a value lie in; what several share counts once."""
    storages = (x.untyped_storage() for x in tensors(value))
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


def require_dense(value: Any, path: Path, whole: bool = False) -> None:
    """Refuse tensors without dense memory; if they are to be `whole`, with less than they say."""
    for x in tensors(value):
        dense = x.layout == torch.strided and x.device.type == "cpu"
        if not dense or (whole and x.nbytes > x.untyped_storage().nbytes()):
            raise Refused(
                f"{path} has a tensor of shape {tuple(x.shape)} that is not stored as a whole"
            )
