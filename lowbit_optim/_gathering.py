"""Whole copies of DTensors: those of all parameters in one collective call, or in a few.

A tensor's own `full_tensor()` is a call a tensor, and a model may have hundreds of vectors whose
shards end within a block of codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowbit_optim_kernels.batch import ACCESS_BYTES
from lowbit_optim_kernels.engines.registry import is_wrapper

from ._sharding import sharded_dims

# By its name in this version of torch, of which newer ones warn of the older name.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def _rows(rows: int, sizes: Sequence[int]) -> list[int]:
    """The rows of each rank, where mesh dimensions of these sizes deal them out one by one."""
    shares = [rows]
    for size in sizes:
        most = [-(-whole // size) for whole in shares]
        shares = [
            min(each, max(0, whole - k * each))
            for whole, each in zip(shares, most, strict=True)
            for k in range(size)
        ]
    return shares


def all_gathered(x: Tensor, group: Any) -> Tensor:
    """The ranks' tensors, one after the other."""
    if is_wrapper(type(x)):
        return _all_gathered_wrapper(x, group)
    received = x.new_empty(group.size() * x.numel())
    getattr(dist, ALL_GATHER)(received, x, group=group)
    return received


def _all_gathered_wrapper(x: Any, group: Any) -> Tensor:
    """The same of a vector that wraps others; `torch.distributed`'s own call waits for one of them.

    Several are sent one by one, where each is as long: of two functional calls that are under way
    at a time, gloo's threads corrupt the process's memory (torch 2.13).
    """
    names, context = x.__tensor_flatten__() if is_traceable_wrapper_subclass(x) else ([], None)
    if len(names) > 1 and all(getattr(x, name).shape == x.shape for name in names):
        received = {name: all_gathered(getattr(x, name), group) for name in names}
        length = group.size() * x.numel()
        whole: Tensor = type(x).__tensor_unflatten__(received, context, torch.Size([length]), (1,))
        return whole
    ops = torch.ops._c10d_functional
    sent = ops.all_gather_into_tensor(x, group.size(), group.group_name)
    arrived: Tensor = ops.wait_tensor(sent)
    return arrived


@dataclass
class _Alike:
    """Tensors of one shape, which are placed alike.

    Attributes:
        index: where they are in the caller's list.
        shape: of each whole tensor.
        lengths: by rank the elements of a shard.
        reused: whether they are joined in the same memory every time.
    """

    index: list[int]
    shape: torch.Size
    lengths: list[int]
    reused: bool
    _kept: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None

    def joined(self, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
        """The whole tensors, each aligned, of every rank's shards of all of them."""
        parts, wholes = self._kept or self._empty(pieces[0])
        for part, piece in zip(parts, pieces, strict=True):
            part.copy_(piece.view(part.shape))
        if self.reused:
            self._kept = parts, wholes
        return wholes

    def _empty(self, like: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Memory of the whole tensors: as a rank has it of all of them, and as each of them."""
        numel, unit = self.shape.numel(), max(1, ACCESS_BYTES // like.element_size())
        wholes = like.new_empty(len(self.index), -(-numel // unit) * unit)[:, :numel]
        each: Sequence[Tensor] = wholes.unbind()
        each = each if len(self.shape) == 1 else [x.view(self.shape) for x in each]
        return wholes.split(self.lengths, 1), each


@dataclass(frozen=True)
class _Gathering:
    """Tensors of one class, dtype and device that are placed alike, gathered in one call.

    Attributes:
        alike: the tensors by their shapes.
        index: where they are in the caller's list, in that order.
        mesh, dims: the device mesh, and its dimensions over which rows are sharded.
        lengths: by rank the elements of its shards of each shape; each rank sends as much as the
            fullest has, so the last number is that of its padding.
    """

    alike: list[_Alike]
    index: list[int]
    mesh: Any
    dims: tuple[int, ...]
    lengths: list[list[int]]

    @staticmethod
    def of(index: list[int], params: Sequence[Any], reused: int) -> _Gathering:
        """The gathering of tensors that are sharded as these parameters are.

        The first `reused` are joined in the same memory every time.
        """
        mesh = params[0].device_mesh
        dims = sharded_dims(params[0])
        sizes = [mesh.size(i) for i in dims]
        by_shape: dict[tuple[torch.Size, bool], list[int]] = {}
        for i, p in zip(index, params, strict=True):
            by_shape.setdefault((p.shape, i < reused), []).append(i)
        alike = []
        for (shape, in_same), some in by_shape.items():
            of_ranks = [rows * shape[1:].numel() for rows in _rows(shape[0], sizes)]
            alike.append(_Alike(some, shape, of_ranks, in_same))
        by_shape_and_rank = [[len(x.index) * each for each in x.lengths] for x in alike]
        by_rank = [list(each) for each in zip(*by_shape_and_rank, strict=True)]
        longest = max(map(sum, by_rank))
        lengths = [[*each, longest - sum(each)] for each in by_rank]
        return _Gathering(alike, [i for x in alike for i in x.index], mesh, dims, lengths)

    def __call__(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The whole tensors of this rank's shards, both in the order of `index`."""
        device = shards[0].device
        buffer = torch.cat([x if x.ndim == 1 else x.flatten() for x in shards])
        padding = sum(self.lengths[0]) - buffer.numel()
        buffer = torch.nn.functional.pad(buffer, (0, padding))
        if device.type != self.mesh.device_type:  # whose processes may have no backend for it
            buffer = buffer.to(self.mesh.device_type)
        for i in reversed(self.dims):
            buffer = all_gathered(buffer, self.mesh.get_group(i))
        ranks = buffer.to(device).view(len(self.lengths), -1)
        pieces = [row.split(each) for row, each in zip(ranks, self.lengths, strict=True)]
        by_shape = zip(self.alike, zip(*pieces, strict=True), strict=False)  # padding comes last
        return [whole for alike, of_ranks in by_shape for whole in alike.joined(of_ranks)]


@dataclass
class GatheredCopies:
    """Copies of the DTensors among some parameters that every rank steps whole.

    Attributes:
        params: the parameters.
        index: where those that are stepped whole are among them.
        tensors: the copies, in memory that stays from step to step.
        gradients: of the copies, in this step.
    """

    params: Sequence[Any]
    index: list[int]
    tensors: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    _gatherings: list[_Gathering] = field(default_factory=list)

    def renew(
        self, held: list[Tensor], gradients: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Bring the copies up to date.

        Collective: every rank calls it for the same parameters, in the same order.

        Args:
            held: of all parameters what this rank holds.
            gradients: the same of theirs; of the dtypes and devices of the first call.

        Returns:
            Both lists, with copies where a parameter is stepped whole.
        """
        if not self.index:
            return held, gradients
        shards = [x[i] for x in (held, gradients) for i in self.index]
        if not self._gatherings:
            self._gatherings = self._plan(shards)
        made: dict[int, Tensor] = {}
        for gather in self._gatherings:
            got = gather([shards[i] for i in gather.index])
            made.update(zip(gather.index, got, strict=True))
        copies, count = [made[i] for i in range(len(shards))], len(self.index)
        self.tensors, self.gradients = copies[:count], copies[count:]
        held, gradients = list(held), list(gradients)
        for i, tensor, g in zip(self.index, self.tensors, self.gradients, strict=True):
            held[i], gradients[i] = tensor, g
        return held, gradients

    def _plan(self, shards: Sequence[Tensor]) -> list[_Gathering]:
        """Tensors that are gathered together, of the parameters and then of their gradients."""
        wholes = [self.params[i] for i in self.index] * 2
        alike: dict[tuple[Any, ...], list[int]] = {}
        for i, (p, shard) in enumerate(zip(wholes, shards, strict=True)):
            # Joined with wrappers a plain tensor's copy would be one, too, and have no address.
            wrapper = type(shard) if is_wrapper(type(shard)) else None
            sharing = (p.device_mesh, p.placements, shard.dtype, shard.device, wrapper)
            alike.setdefault(sharing, []).append(i)
        reused = len(self.index)
        return [
            _Gathering.of(index, [wholes[i] for i in index], reused) for index in alike.values()
        ]
