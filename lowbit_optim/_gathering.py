"""Whole copies of DTensors: those of all parameters in one collective call, or in a few.

A tensor's own `full_tensor()` is a call a tensor, and a bf16 model has hundreds of vectors whose
shards end within a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _rows(rows: int, sizes: Sequence[int]) -> list[int]:
    """The rows of each rank, where mesh dimensions of these sizes deal them out one by one."""
    dealt = [rows]
    for size in sizes:
        most = [-(-whole // size) for whole in dealt]
        dealt = [
            min(each, max(0, whole - k * each))
            for whole, each in zip(dealt, most, strict=True)
            for k in range(size)
        ]
    return dealt


def whole(params: Sequence[Any], shards: Sequence[Tensor]) -> list[Tensor]:
    """Whole copies of tensors that are dealt out by rows, as parameters are.

    Collective: every rank calls it for the same parameters, in the same order.

    Args:
        params: DTensors.
        shards: this rank's part of a tensor of each one's shape; on any device.

    Returns:
        The tensors, each on its shard's device.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, (p, shard) in enumerate(zip(params, shards, strict=True)):
        kind = (p.device_mesh, p.placements, shard.dtype, shard.device)
        alike.setdefault(kind, []).append(i)
    found: dict[int, Tensor] = {}
    for (mesh, placements, _, _), index in alike.items():
        dims = [i for i, placement in enumerate(placements) if placement.is_shard()]
        shapes, own = [params[i].shape for i in index], [shards[i] for i in index]
        found.update(zip(index, _gathered(mesh, dims, shapes, own), strict=True))
    return [found[i] for i in range(len(params))]


def _gathered(
    mesh: Any, dims: Sequence[int], shapes: Sequence[torch.Size], shards: Sequence[Tensor]
) -> list[Tensor]:
    """Whole tensors of one dtype and device; each rank sends as much as the fullest has."""
    sizes = [mesh.size(i) for i in dims]
    lengths = [
        [rows * (shape.numel() // max(1, shape[0])) for rows in _rows(shape[0], sizes)]
        for shape in shapes
    ]
    by_rank = list(zip(*lengths, strict=True))
    longest = max(map(sum, by_rank))
    device = shards[0].device
    buffer = torch.cat([shard.flatten() for shard in shards])
    buffer = torch.nn.functional.pad(buffer, (0, longest - buffer.numel()))
    if device.type != mesh.device_type:  # whose processes may have no backend for this device
        buffer = buffer.to(mesh.device_type)
    for i, size in zip(reversed(dims), reversed(sizes), strict=True):
        received = buffer.new_empty(size * buffer.numel())
        dist.all_gather_into_tensor(received, buffer, group=mesh.get_group(i))
        buffer = received
    ranks = buffer.to(device).view(len(by_rank), longest)
    pieces = [
        row.split([*own, longest - sum(own)]) for row, own in zip(ranks, by_rank, strict=True)
    ]
    return [
        torch.cat(parts).view(shape)
        for shape, *parts in zip(shapes, *pieces, strict=False)  # without the padding
    ]
