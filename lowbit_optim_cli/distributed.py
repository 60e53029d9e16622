"""Distributed checkpoints (DCP): the metadata of a folder, read without torch's unpickler.

`.metadata` is a pickle of a few data classes, which torch reads with the unrestricted unpickler.
Here every class but those is refused.
"""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata

from .errors import Refused, sentence

METADATA = ".metadata"
MOST_BYTES = 64 << 20
CLASSES = (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
    "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
# Classes and functions that say nothing of names, dtypes and shapes.
PASSED_OVER = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *(("pathlib", name) for name in ("PosixPath", "PurePosixPath", "WindowsPath")),
    *(("pathlib._local", name) for name in ("PosixPath", "WindowsPath")),
}


class _Anything:
    """A stand-in for objects of other classes."""

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class _Unpickler(pickle.Unpickler):
    """Makes the data classes of DCP, torch's dtypes and sizes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of a name, if it is one of these."""
        if module == metadata.__name__ and name in CLASSES:
            return getattr(metadata, name)
        if (module, name) in PASSED_OVER:
            return _Anything
        if (module, name) == ("torch", "Size"):
            return torch.Size
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise Refused(f"asks for {module}.{name}")


def read(folder: Path) -> list[tuple[str, str, tuple[int, ...], int]]:
    """The last part of its name, dtype, shape and bytes of each tensor of a checkpoint.

    Raises:
        Refused: if it is no DCP folder, or its metadata asks for anything else.
    """
    path = folder / METADATA
    if not path.is_file():
        raise Refused(f"the folder {folder} has no {METADATA}; it is not a DCP checkpoint")
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise Refused(f"{path} has more than {MOST_BYTES >> 20} MiB, which are not read")
    try:
        found = _Unpickler(io.BytesIO(data)).load()
        return [
            (name.rpartition(".")[2], str(one.properties.dtype).removeprefix("torch."),
             tuple(one.size), math.prod(one.size) * one.properties.dtype.itemsize)
            for name, one in found.state_dict_metadata.items()
            if isinstance(one, metadata.TensorStorageMetadata)
        ]  # fmt: skip
    except Refused as error:
        raise Refused(f"{path} {error}; it is not executed") from None
    except Exception as error:  # noqa: BLE001  # what a damaged pickle does to its reader
        raise Refused(f"{path} is damaged: {sentence(error)}") from None
