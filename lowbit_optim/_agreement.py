"""Agreement of ranks that hold shards of the same parameters: all go on, or none does."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ._sharding import all_placed_as, is_dtensor

KINDS = ("no state", "whole tensors", "shards")  # of a saved state


@contextmanager
def agreeing(params: Sequence[Any]) -> Iterator[dict[Any, Mapping[str, Any]]]:
    """Raise on every rank if what is done inside raises on any; nothing to ask without DTensors.

    Args:
        params: all parameters, in an order that is the same on every rank.

    Yields:
        a dict for saved states by parameter: all ranks have to find one of the same kind, for
        whole tensors are asked of all ranks and shards of none; and the same entries in it.

    Raises:
        Exception: this rank's error; a ValueError with the first one's of the others.
    """
    saved: dict[Any, Mapping[str, Any]] = {}
    try:
        yield saved
    except Exception as error:  # of whatever kind, or the other ranks would wait
        _agree(error, params, {})
        raise
    _agree(None, params, saved)


def _order(mesh: Any) -> tuple[int | str, ...]:
    """A key that sorts meshes alike on all ranks: by all that can differ, as sets have no order.

    Larger ones come last: their ranks hear of what the ranks of smaller ones have found.
    """
    return mesh.size(), str(mesh.mesh.tolist()), str(mesh.mesh_dim_names), mesh.device_type


def _digest(state: Mapping[str, Any]) -> int:
    """A number of 31 bits that tells the entries of a state from others."""
    return zlib.crc32(repr(sorted(map(str, state))).encode()) >> 1


def _agree(
    error: Exception | None, params: Sequence[Any], saved: Mapping[Any, Mapping[str, Any]]
) -> None:
    dtensors = [p for p in params if is_dtensor(p)]
    for mesh in sorted({p.device_mesh for p in dtensors}, key=_order):
        if mesh.get_coordinate() is None:  # `_sharding.check` refuses its parameters
            continue
        of_mesh = [p for p in dtensors if p.device_mesh == mesh]
        kinds = [1 + all_placed_as(saved[p], p) if p in saved else 0 for p in of_mesh]
        entries = [_digest(saved.get(p, {})) for p in of_mesh]
        error, high, low = _extremes(error, mesh, [*kinds, *entries])
        differ = [k for k, (a, b) in enumerate(zip(high, low, strict=True)) if a != b]
        if error is None and differ:
            error = _difference(of_mesh, differ[0], low, high)
    if error is not None:
        raise error


def _extremes(
    error: Exception | None, mesh: Any, numbers: list[int]
) -> tuple[Exception | None, list[int], list[int]]:
    """The error of any rank of a mesh, and the largest and smallest of all ranks' numbers."""
    most = torch.tensor(
        [error is not None, *numbers, *(-number for number in numbers)],
        dtype=torch.int32, device=mesh.device_type,
    )  # fmt: skip
    for i in range(mesh.ndim):
        group = mesh.get_group(i)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        if not most[0].item():
            continue
        texts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(texts, None if error is None else str(error), group=group)
        if error is None:
            error = ValueError(next(text for text in texts if text is not None))
    _, *extremes = most.tolist()
    return error, extremes[: len(numbers)], [-x for x in extremes[len(numbers) :]]


def _difference(of_mesh: list[Any], index: int, low: list[int], high: list[int]) -> ValueError:
    """The error that ranks differ in one of the numbers that `_agree` compares."""
    shape, some = tuple(of_mesh[index % len(of_mesh)].shape), "different entries"
    if index < len(of_mesh):
        some = (
            f"{KINDS[low[index]]} on some and {KINDS[high[index]]} on others, as after a broadcast "
            "of another format; give whole state dicts to load_state_dict() on every rank instead, "
            "see docs/guides/sharded.md"
        )
    return ValueError(
        f"the ranks' state dicts differ: of a parameter of shape {shape} they have {some}"
    )
