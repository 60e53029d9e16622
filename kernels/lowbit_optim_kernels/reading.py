"""What a kept plan compares: how tensors are read, addresses, and states of parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from operator import attrgetter, eq, is_
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .batch import ACCESS_BYTES

PLAIN_TYPES = {Tensor, torch.nn.Parameter}
_BYTES = attrgetter("nbytes")


def _guards(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that says of other tensors that they are read as these are, or nothing of them.

    What torch.compile asks of a function's inputs: types, dtypes, devices, shapes, strides, and
    bits such as that of a negative view; of a thousand tensors in a tenth of the columns' time. It
    is not public, so only versions of torch that it was tried with are asked.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 16):  # previews, too
        return _says_nothing
    try:
        from torch._C._dynamo.guards import TensorGuards

        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except (ImportError, TypeError):  # no longer there, or no longer called so
        return _says_nothing
    unchanged: Callable[..., bool] = guards.check
    return unchanged


def _says_nothing(*tensors: Tensor) -> bool:
    return False


def ids_of(objects: Collection[Any]) -> bytes:
    """The ids of objects, as an array of objects has them in memory: in a quarter of the time."""
    return np.fromiter(objects, object, len(objects)).tobytes()


def same_objects(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects; tensors are not compared by value."""
    return len(a) == len(b) and all(map(is_, a, b))


# What decides how tensors are read, but their addresses. Layouts come first, as a sparse one has
# neither strides nor an address.
COLUMNS: tuple[Callable[[Tensor], Any], ...] = (
    type,
    *map(attrgetter, ("layout", "dtype", "device", "shape")),
    Tensor.is_contiguous,
    Tensor.is_neg,
)


class ReadSignature:
    """Read signature of some tensors: all that decides how each is read but its address."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._columns = [list(map(look, tensors)) for look in COLUMNS]
        self._guards = _guards(tensors)

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        """Whether others, as many, are read in the same way."""
        if self._guards(*tensors):
            return True
        # One after the other: a thousand shapes in a list would have Python collect garbage.
        pairs = zip(COLUMNS, self._columns, strict=True)
        return all(all(map(eq, map(look, tensors), column)) for look, column in pairs)


def addresses_of(tensors: Iterable[Tensor]) -> list[int]:
    """Addresses of tensors, 0 for those without memory."""
    return list(map(Tensor.data_ptr, tensors))


def alignments_of(addresses: Iterable[int]) -> list[int]:
    """Distances of addresses from those for the widest accesses, in bytes."""
    return [address % ACCESS_BYTES for address in addresses]


class Places:
    """What addresses of tensors may not change in: their alignments, and how many have none."""

    def __init__(self, addresses: list[int]) -> None:
        self._alignments, self._empty = alignments_of(addresses), addresses.count(0)

    def are_like(self, addresses: list[int]) -> bool:
        """Whether others are aligned as these, and as many have none."""
        alike = alignments_of(addresses) == self._alignments
        return alike and addresses.count(0) == self._empty


def all_values(each: Iterable[dict[str, Any]]) -> list[Any]:
    """What all states hold, one after the other."""
    return list(chain.from_iterable(map(dict.values, each)))


class Unwrapping(Protocol):
    """How to get at the tensors of values that wrap one each, such as a rank's shards."""

    def wraps(self, value: Any) -> bool:
        """Whether a value does."""

    def all_of(self, values: Iterable[Any]) -> Iterable[Tensor]:
        """The tensors of values that do."""


class States:
    """What the states of some parameters have to be for a plan to hold.

    It refers to nothing that they hold: who moves or deletes state between steps frees memory. So
    it knows tensors by their ids. One that got the id and the address of another does as well as
    that, if it is as large, which is asked of the largest of each state: who keeps state in another
    dtype meanwhile keeps all of it so. Of tensors in wrappers, which take time to get at, the same
    holds for addresses.
    """

    def __init__(
        self, params: list[Tensor], state: Mapping[Tensor, dict[str, Any]], unwrapping: Unwrapping
    ) -> None:
        self._params, self._unwrapping = params, unwrapping
        each = [state[p] for p in params]
        values, largest = all_values(each), _are_largest(each)
        pairs = list(zip(values, largest, strict=True))
        self._ids = ids_of(values)
        self._wrapped = [large and unwrapping.wraps(x) for x, large in pairs]
        self._plain = [
            _is_strided(x) and not unwrapping.wraps(x) and (large or type(x) is Tensor)
            for x, large in pairs
        ]
        self._all_plain = all(self._plain)
        self._large = self._chosen(largest, iter)
        self._addresses, self._sizes = self._look_at(values)
        self._note(state)

    def _chosen(
        self, each: list[Any], unwrapped: Callable[[Iterable[Any]], Iterable[Any]]
    ) -> list[Any]:
        """What is looked at, one of each value: first those of wrappers."""
        if self._all_plain:
            return each
        return [*unwrapped(compress(each, self._wrapped)), *compress(each, self._plain)]

    def _look_at(self, values: list[Any]) -> tuple[list[int], list[int]]:
        """Addresses of tensors, and sizes of the largest."""
        tensors = self._chosen(values, self._unwrapping.all_of)
        return addresses_of(tensors), list(map(_BYTES, compress(tensors, self._large)))

    def _note(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Note where the parameters are in the mapping: tensors take long to hash.

        Unless most of it is of others, as all of it is looked through.
        """
        most = len(state) < 4 * len(self._params)
        self._keys, self._places = b"", list[int]()
        if most:
            places = {id(p): place for place, p in enumerate(state)}
            self._keys, self._places = ids_of(state), [places[id(p)] for p in self._params]

    def find(self, state: Mapping[Tensor, dict[str, Any]]) -> list[dict[str, Any]] | None:
        """Each parameter's state, if they hold what they held, where it was."""
        known = bool(self._keys) and ids_of(state) == self._keys
        if known:
            every = list(state.values())
            each = [every[place] for place in self._places]
        else:
            each = [state.get(p, {}) for p in self._params]
        values = all_values(each)
        if ids_of(values) != self._ids:
            return None
        try:
            if self._look_at(values) != (self._addresses, self._sizes):
                return None
        except (AttributeError, RuntimeError, TypeError):  # of another type, at an old id
            return None
        if not known:
            self._note(state)
        return each


def _is_strided(x: Any) -> bool:
    """Whether a value is a tensor with an address, as a sparse one that a user keeps has none."""
    return isinstance(x, Tensor) and x.layout == torch.strided


def _are_largest(each: Iterable[dict[str, Any]]) -> list[bool]:
    """Of all states' values which are the largest tensors of their states, or the first of them."""
    found: list[bool] = []
    for state in each:
        sizes = [x.nbytes if _is_strided(x) else -1 for x in state.values()]
        largest = sizes.index(max(sizes)) if max(sizes, default=-1) >= 0 else None
        found += [place == largest for place in range(len(sizes))]
    return found


@dataclass(frozen=True)
class Snapshot:
    """Snapshot that a later step compares before it uses a plan again.

    Attributes:
        states: of the parameters.
        held, gradients: how the parameters and their gradients are read.
        held_places, gradient_places: of their addresses, which may be others in each step.
        orders: of each batch the places of its slots' parameters.
        copied_params: strides of parameters that are stepped in a new contiguous copy each time, by
            their places.
        copied_gradients: the places of gradients that are.
    """

    states: States
    held: ReadSignature
    gradients: ReadSignature
    held_places: Places
    gradient_places: Places
    orders: list[list[int]]
    copied_params: dict[int, tuple[int, ...]]
    copied_gradients: list[int]

    def reads(self, held: list[Tensor]) -> bool:
        """Whether parameters are as they were, wherever they are."""
        # `p.data.t()` has p's address.
        if not self.held.matches(held):
            return False
        return all(held[i].stride() == stride for i, stride in self.copied_params.items())
