"""Sums over the shards of DTensors, added up by one collective call for each process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit_optim_kernels.batch import Batch


def all_reduce(batches: Sequence[Batch], sums: Sequence[Tensor]) -> None:
    """Add up the shards' sums of all batches, in one collective call for each process group."""
    shards = [batch.stepped_shards for batch in batches]
    for level in range(max((len(groups) for each in shards for groups in each), default=0)):
        rows: dict[tuple[Any, str], list[tuple[Tensor, Tensor | None]]] = {}
        for each, total in zip(shards, sums, strict=True):
            for groups, index in each.items():
                if level < len(groups):
                    rows.setdefault(groups[level], []).append((total, index))
        for (group, device), found in rows.items():
            _add_up(group, device, found)


def _add_up(group: Any, device: str, found: list[tuple[Tensor, Tensor | None]]) -> None:
    (total, index), *others = found
    if not others and index is None and total.device.type == device:
        dist.all_reduce(total, group=group)
        return
    parts = [total if index is None else total[index] for total, index in found]
    devices = [part.device for part in parts]
    together = next((d for d in devices if d.type == device), torch.device(device))
    buffer = torch.cat([part.flatten().to(together) for part in parts])
    dist.all_reduce(buffer, group=group)
    at = 0
    for (total, index), part in zip(found, parts, strict=True):
        piece = buffer[at : at + part.numel()].to(total.device).view(part.shape)
        at += part.numel()
        if index is None:
            total.copy_(piece)
        else:
            total[index] = piece
