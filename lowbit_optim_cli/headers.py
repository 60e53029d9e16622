"""Headers of safetensors files: what tensors there are, without reading them.

A file begins with the header's length in 8 bytes and the header itself, a JSON object that says of
every tensor its dtype, shape and place in the rest of the file. Nothing of it is believed: the
length is bounded before anything is read, and each tensor has to fit into the file.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import Refused

MOST_BYTES = 16 << 20  # of a header or an index; 1,000 tensors have about 0.1 MiB
MOST_SIZES = 64  # of a tensor; torch computes with no more
ITEMSIZE = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8,
    "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A tensor in a file.

    Attributes:
        name: its name.
        dtype: a key of `ITEMSIZE`.
        shape: its shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


def read_json(path: Path) -> Any:
    """A JSON file of at most `MOST_BYTES`.

    Raises:
        Refused: if it is larger, or no JSON.
    """
    with path.open("rb") as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise Refused(f"{path} has more than {MOST_BYTES >> 20} MiB, which no configuration has")
    return _parsed(text, str(path))


def read_header(path: Path) -> list[Entry]:
    """The tensors of a safetensors file.

    Raises:
        Refused: if it is no such file, or its header lies.
    """
    there = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > there - 8:
            raise Refused(
                f"{path} is no whole safetensors file: its header would have {length:,} bytes, and "
                f"the file has {there:,}"
            )
        if length > MOST_BYTES:
            raise Refused(
                f"{path} has a header of {length:,} bytes; at most {MOST_BYTES:,} are read"
            )
        header = _parsed(file.read(length), f"the header of {path}")
    if not isinstance(header, dict):
        raise Refused(f"the header of {path} must be a JSON object")
    room = there - 8 - length
    entries = [_entry(path, k, v, room) for k, v in header.items() if k != "__metadata__"]
    if sum(entry.bytes for entry in entries) > room:
        raise Refused(f"the header of {path} has tensors that overlap")
    return entries


def read_index(path: Path) -> list[Entry]:
    """The tensors of all files that a `model.safetensors.index.json` names, in its folder.

    Raises:
        Refused: if it is no such index, or a file is missing or does not have its tensors.
    """
    index = read_json(path)
    placed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(placed, dict) or not placed:
        raise Refused(f"{path} has no 'weight_map'; it is not an index of safetensors files")
    found: dict[str, Entry] = {}
    for name in dict.fromkeys(map(str, placed.values())):
        if not name or Path(name).name != name:
            raise Refused(f"{path} names the file {name!r}, which is not in its own folder")
        shard = path.with_name(name)
        if not shard.is_file():
            raise Refused(f"{path} names the file {name!r}, which is missing in its folder")
        found.update((entry.name, entry) for entry in read_header(shard))
    missing = [name for name in placed if name not in found]
    if missing:
        raise Refused(f"{path} names the tensor {missing[0]!r}, which its files do not have")
    return [found[name] for name in placed]


def _parsed(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Refused(f"{where} is not JSON") from None


def _entry(path: Path, name: str, said: Any, room: int) -> Entry:
    """A tensor of which the header says this, if it fits into the `room` behind the header."""
    where = f"the header of {path} says of the tensor {name!r}"
    if not isinstance(said, dict):
        raise Refused(f"{where} {_short(said)}, not its dtype, shape and place")
    dtype, shape, place = said.get("dtype"), said.get("shape"), said.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise Refused(f"{where} the dtype {_short(dtype)}; known are {', '.join(ITEMSIZE)}")
    sizes, ends = _numbers(shape), _numbers(place)
    if sizes is None:
        raise Refused(
            f"{where} the shape {_short(shape)}, which is no list of sizes, {MOST_SIZES} at most"
        )
    entry = Entry(name, dtype, sizes)
    if ends is None or len(ends) != 2 or ends[1] > room or ends[1] - ends[0] != entry.bytes:
        raise Refused(
            f"{where} the place {_short(place)}, where {entry.bytes:,} bytes of the {room:,} in "
            "the file are needed"
        )
    return entry


def _numbers(value: Any) -> tuple[int, ...] | None:
    """A list of sizes; None for anything else."""
    if not isinstance(value, list) or len(value) > MOST_SIZES:
        return None
    if not all(type(x) is int and 0 <= x < 1 << 63 for x in value):
        return None
    return tuple(value)


def _short(value: Any) -> str:
    text = re.sub(r"\s+", " ", repr(value))
    return text if len(text) < 60 else f"{text[:57]}..."
