"""DTensor parameters: what a rank steps of them, and what ranks have to tell each other.

All else of the package sees plain tensors: the shard of a parameter that this rank holds, with the
format of the whole one, as if it were a parameter. State that has a number an element, or a block,
is kept as DTensors with the parameter's placements, so that checkpoints can be written and read on
any number of ranks. Blocks restart at every row, hence a shard of rows has whole blocks. In two
cases every rank steps the whole tensor, with the whole state, so that codes are those of one
process there, too: if the rule needs all rows at once, and if blocks run over the flattened tensor
and a shard would end inside a block of coded state. Weights share no scale: their random bits are
known wherever a shard begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from lowbit_optim_kernels.batch import WEIGHT_BLOCK, ProcessGroups, Slot
from lowbit_optim_kernels.formats import Format, units
from lowbit_optim_kernels.formats.layout import Layout
from lowbit_optim_kernels.reading import PLAIN_TYPES
from lowbit_optim_kernels.rules import Moment
from lowbit_optim_kernels.rules.shared import NORMS
from lowbit_optim_kernels.weights import RESIDUAL_KEY, as_integers

_LOCAL, _SPEC = attrgetter("_local_tensor"), attrgetter("_spec")


@cache
def _is_dtensor_class(cls: type) -> bool:
    """Whether a class is that of DTensors, which importing it for that would take a second."""
    return any(base.__name__ == "DTensor" for base in cls.__mro__)


def is_dtensor(x: Any) -> bool:
    """Whether a tensor is spread over a device mesh."""
    cls: type = type(x)
    return cls not in PLAIN_TYPES and _is_dtensor_class(cls)


def local(x: Any) -> Any:
    """A tensor of this rank: a DTensor's shard, else the value itself."""
    return x._local_tensor if is_dtensor(x) else x


class Locals:
    """What this rank holds of parameters, of their gradients and of their states."""

    def __init__(self, params: list[Any]) -> None:
        types = {*map(type, params)}
        self._params, self._plain = params, types <= PLAIN_TYPES
        sharded = all(map(_is_dtensor_class, types))
        self._specs = list(map(_SPEC, params)) if sharded else []
        self._placed = self._specs  # specs of gradients that were found to be placed as these

    def __call__(self, gradients: list[Any]) -> tuple[list[Any], list[Any]] | None:
        """This rank's tensors of parameters and gradients; the lists themselves if all are plain.

        None if a gradient is not a DTensor where its parameter is one, or not placed as that is.
        """
        if self._plain and PLAIN_TYPES.issuperset(map(type, gradients)):  # takes no time
            return self._params, gradients
        if self._specs:
            try:
                placed = self._are_placed(list(map(_SPEC, gradients)))
            except AttributeError:  # of one that is no DTensor
                return None
            return (
                (list(map(_LOCAL, self._params)), list(map(_LOCAL, gradients))) if placed else None
            )
        pairs = zip(gradients, self._params, strict=True)
        if all(has_placements_of(g, p) if is_dtensor(p) else not is_dtensor(g) for g, p in pairs):
            return list(map(local, self._params)), list(map(local, gradients))
        return None

    def _are_placed(self, specs: list[Any]) -> bool:
        """Whether gradients' specs say what the parameters' do: mostly they are the same objects.

        Under fully_shard they are the parameters' own, and operators return theirs every time.
        """
        if all(map(is_, specs, self._placed)):
            return True
        pairs = zip(specs, self._specs, strict=True)
        if not all(a is b or _says_the_same(a, b) for a, b in pairs):
            return False
        self._placed = specs
        return True

    wraps = staticmethod(is_dtensor)
    all_of = staticmethod(partial(map, _LOCAL))
    one = staticmethod(local)


def check(p: Any, name: str) -> None:
    """Raise a RuntimeError for a DTensor that this process cannot step shard by shard."""
    from torch.distributed.tensor import Replicate, Shard

    where = f"{name}: a parameter of shape {tuple(p.shape)} is a DTensor"
    if p.device_mesh.get_coordinate() is None:
        raise RuntimeError(
            f"{where} on {p.device_mesh}, which this process is not part of; leave the parameter "
            "out of this process's optimizer"
        )
    for placement in p.placements:
        if type(placement) not in (Replicate, Shard) or (
            isinstance(placement, Shard) and placement.dim != 0
        ):
            strided = type(placement).__name__ == "_StridedShard"
            its = f"{placement!r}, of fully_shard over tensor parallelism" if strided else placement
            raise RuntimeError(
                f"{where} with the placement {its}; Shard(0) and Replicate() can be stepped"
            )
    mesh, device = p.device_mesh.device_type, local(p).device.type
    if device not in (mesh, "cpu"):
        raise RuntimeError(f"{where} on {device}, but its mesh is of {mesh} devices")


def _says_the_same(a: Any, b: Any) -> bool:
    """Whether two specs of DTensors are of the same mesh and placements."""
    return (a.mesh, a.placements) == (b.mesh, b.placements)


def has_placements_of(x: Any, p: Any) -> bool:
    """Whether a value is a DTensor with the mesh and placements of the DTensor p."""
    return is_dtensor(x) and _says_the_same(x._spec, p._spec)


def gradient(p: Any, name: str) -> Tensor:
    """This rank's shard of a DTensor's gradient.

    Collective where that has other placements: tensor parallelism leaves an embedding's
    whole on every rank, and that of a norm as the ranks' sums.

    Raises:
        RuntimeError: if it is not on the parameter's mesh.
    """
    check(p, name)
    if not is_dtensor(p.grad) or p.grad.device_mesh != p.device_mesh:
        got = f"one on {p.grad.device_mesh}" if is_dtensor(p.grad) else "a plain tensor"
        raise RuntimeError(
            f"{name}: a parameter of shape {tuple(p.shape)} is a DTensor on {p.device_mesh}, "
            f"its gradient {got}; they must be of the same mesh"
        )
    return shard_of(p.grad, p)


def sharded_dims(p: Any) -> tuple[int, ...]:
    """The dimensions of the mesh over which a DTensor's rows are sharded."""
    return tuple(i for i, placement in enumerate(p.placements) if placement.is_shard())


def shard_groups(p: Any) -> ProcessGroups:
    """The processes that have the other shards of a DTensor; none of a plain tensor."""
    if not is_dtensor(p):
        return ()
    mesh = p.device_mesh
    dims = [i for i in sharded_dims(p) if mesh.size(i) > 1]
    return tuple((mesh.get_group(i), mesh.device_type) for i in dims)


def _cuts_blocks(p: Any, block: int) -> bool:
    """Whether a shard of a DTensor may end within a block of this size."""
    dims, layout = sharded_dims(p), Layout.of(p.shape, block)
    if not dims or layout.by_rows or not p.numel():
        return False
    ranks = math.prod(p.device_mesh.size(i) for i in dims)
    if ranks == 1:
        return False
    rows = -(-p.shape[0] // ranks)
    blocks, rest = divmod(rows * (p.numel() // p.shape[0]), block)
    return bool(rest) or len(dims) > 1 or -(-layout.blocks_per_row // ranks) != blocks


@dataclass(frozen=True)
class Share:
    """This rank's share of a DTensor: what it steps, and keeps the state of.

    Attributes:
        p: the DTensor.
        moments, format: what is kept of it.
        whole: whether every rank steps all of it, in a copy.
    """

    p: Any
    moments: tuple[Moment, ...]
    format: Format
    whole: bool

    @staticmethod
    def of(p: Any, moments: tuple[Moment, ...], format: Format, whole: bool) -> Share:
        """The share of a DTensor with moments in this format; `whole` if the rule needs it."""
        coded = any(not unit.format.exact for unit in units(moments, format))
        cut = coded and _cuts_blocks(p, format.block)
        return Share(p, moments, format, cut or (whole and bool(sharded_dims(p))))

    @property
    def placements(self) -> tuple[Any, ...]:
        """The placements of the state's DTensors."""
        from torch.distributed.tensor import Replicate

        return (Replicate(),) * self.p.device_mesh.ndim if self.whole else tuple(self.p.placements)

    def holds(self, state: Mapping[str, Any]) -> bool:
        """Whether a state has these placements."""
        placements = self.placements
        return all(tuple(x.placements) == placements for x in state.values() if is_dtensor(x))

    def without_others(self, state: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
        """A state made of one that had shards of moments besides, which settings do not keep.

        Should they be kept again, they begin anew.
        """
        own = self._shapes()
        return {k: x for k, x in state.items() if k in own or not is_dtensor(before.get(k))}

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes of the tensors that are kept as DTensors, by their keys."""
        shapes = {
            part.key: part.shape(self.p.shape, unit.format.block)
            for unit in units(self.moments, self.format)
            for part in unit.parts
        }
        return {**shapes, RESIDUAL_KEY: tuple(self.p.shape)}

    def stepped(self) -> Tensor:
        """The plain tensor that is stepped; of a whole parameter a copy."""
        tensor: Tensor = self.p.detach().full_tensor() if self.whole else local(self.p)
        return tensor

    def settings_for_shard(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """A group's settings for what is stepped of the parameter.

        Their `min_8bit_size` decides for the shard what the real one does for the whole parameter.
        """
        if self.whole:
            return group
        coded = self.p.numel() >= group["min_8bit_size"]
        return {**group, "min_8bit_size": 0 if coded else local(self.p).numel() + 1}

    @cached_property
    def _shape_and_first_row(self) -> tuple[tuple[int, ...], int]:
        """Shape of this rank's shard, and its first row."""
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        p = self.p
        shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
        return tuple(shape), offset[0] if offset else 0

    def positions_before(self, block: int) -> int:
        """The position of this rank's first element in the whole parameter; see `Layout`."""
        if self.whole:
            return 0
        (_, first), layout = self._shape_and_first_row, Layout.of(self.p.shape, block)
        return layout.positions_before(first if layout.by_rows else first * self._in_row)

    def locate(self, slot: Slot) -> None:
        """Tell the slot of this shard where it begins, and over which processes to add its sums."""
        slot.groups = () if self.whole else shard_groups(self.p)
        slot.blocks_before = self.positions_before(slot.format.block) // slot.format.block
        slot.weights_before = self.positions_before(WEIGHT_BLOCK)

    @property
    def _in_row(self) -> int:
        """Elements of a row, a slice of the first dimension."""
        return self.p.numel() // max(1, self.p.shape[0]) if self.p.ndim else 1

    def written(self, work: Tensor) -> Tensor:
        """This rank's shard of what has been stepped."""
        if not self.whole:
            return work
        shape, first = self._shape_and_first_row
        return work[first : first + shape[0]] if self.p.ndim else work

    def local_part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of a whole parameter's state."""
        shape, first = self._shape_and_first_row
        if self.whole or tuple(self.p.shape) == shape:
            return dict(state)
        rows, in_row = shape[0], self._in_row
        taken = dict(state)
        if RESIDUAL_KEY in state:
            taken[RESIDUAL_KEY] = state[RESIDUAL_KEY][first : first + rows].clone()
        for unit in units(self.moments, self.format):
            block = unit.format.block
            for part in unit.parts:
                low, high = first, first + rows
                if part.per_block and not Layout.of(self.p.shape, block).by_rows:
                    low, high = -(-low * in_row // block), -(-high * in_row // block)
                taken[part.key] = state[part.key][low:high].clone()
        return taken

    def wrapped(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state with its moments as DTensors, of the parameter's placements unless whole."""
        from torch.distributed.tensor import DTensor

        mesh, placements, shapes = self.p.device_mesh, self.placements, self._shapes()

        def wrap(x: Tensor, shape: tuple[int, ...]) -> Tensor:
            if x.dtype == torch.int16:  # which neither gloo nor NCCL can gather
                x = x.view(torch.bfloat16)
            stride = torch.empty(shape, device="meta").stride()
            return DTensor.from_local(
                x, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
            )

        return {key: wrap(x, shapes[key]) if key in shapes else x for key, x in state.items()}


def unwrapped(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with plain tensors: the shards of DTensors."""
    plain = {key: local(x) for key, x in state.items()}
    if RESIDUAL_KEY in plain:
        plain[RESIDUAL_KEY] = as_integers(plain[RESIDUAL_KEY])
    return plain


def all_placed_as(saved: Mapping[str, Any], p: Any) -> bool:
    """Whether all saved tensors but those of single numbers are DTensors placed as p is."""
    return all(
        has_placements_of(x, p)
        for key, x in saved.items()
        if isinstance(x, Tensor) and x.ndim and key != NORMS.key
    )


def gathered(x: Any) -> Any:
    """A DTensor's whole tensor, by a collective call; else the value itself."""
    return x.full_tensor() if is_dtensor(x) else x


def as_dtensor(x: Tensor, p: Any) -> Tensor:
    """A plain tensor of this rank's shard of p, as a DTensor placed as p is; if p is one."""
    if not is_dtensor(p):
        return x
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        x, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def require_mesh_of(p: Any, x: Any, what: str) -> None:
    """Raise a ValueError for a DTensor that is spread over another mesh than the DTensor p."""
    if is_dtensor(x) and is_dtensor(p) and x.device_mesh != p.device_mesh:
        raise ValueError(
            f"{what} is a DTensor on {x.device_mesh} and its parameter one on {p.device_mesh}; "
            "they must be of the same mesh"
        )


def shard_of(x: Any, p: Any) -> Tensor:
    """This rank's part of a value that is whole, or sharded over p's mesh."""
    if not is_dtensor(p):
        return gathered(x)
    from torch.distributed.tensor import DTensor, Replicate

    if not is_dtensor(x):
        replicated = [Replicate()] * p.device_mesh.ndim
        x = DTensor.from_local(x.to(local(p).device), p.device_mesh, replicated, run_check=False)
    return local(redistributed_as(x, p))


def redistributed_as(x: Any, p: Any) -> Tensor:
    """A DTensor redistributed to p's placements, or a plain tensor as it is."""
    if not is_dtensor(x) or x.placements == p.placements:
        return x
    redistributed: Tensor = x.redistribute(placements=p.placements)
    return redistributed
