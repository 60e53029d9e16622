"""Sums over the shards of DTensors, added up by one collective call for each process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit_optim_kernels.batch import Batch
from lowbit_optim_kernels.reading import PLAIN_TYPES

from ._gathering import all_gathered

# Bytes of all ranks' sums, at most, that they are gathered by gloo to be added up here. Its own
# all-reduce of some kilobytes takes twice the time, and many times where a rank has one core.
MOST_GATHERED = 1 << 20


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
            _add_up_rows(group, device, found)


def _add_up_rows(group: Any, device: str, found: list[tuple[Tensor, Tensor | None]]) -> None:
    (total, index), *others = found
    if not others and index is None and total.device.type == device:
        add_up(total, group)
        return
    parts = [total if index is None else total[index] for total, index in found]
    devices = [part.device for part in parts]
    together = next((d for d in devices if d.type == device), torch.device(device))
    buffer = torch.cat([part.flatten().to(together) for part in parts])
    add_up(buffer, group)
    at = 0
    for (total, index), part in zip(found, parts, strict=True):
        piece = buffer[at : at + part.numel()].to(total.device).view(part.shape)
        at += part.numel()
        if index is None:
            total.copy_(piece)
        else:
            total[index] = piece


def add_up(x: Tensor, group: Any) -> None:
    """Add up the tensors of a group's ranks, in place."""
    gloo = x.device.type == "cpu" and "cpu:gloo" in str(dist.get_backend_config(group))
    if not gloo or group.size() * x.nbytes > MOST_GATHERED or type(x) not in PLAIN_TYPES:
        dist.all_reduce(x, group=group)
        return
    ranks = all_gathered(x.flatten(), group).view(group.size(), *x.shape)
    torch.sum(ranks, 0, out=x)
